"""Make public names belong to the package that lists them: pickles and help() name that package, so
its inner modules may move."""

from __future__ import annotations

import inspect
import sys
import typing

get_overloads = getattr(typing, "get_overloads", lambda function: ())  # Python 3.11


def set_module(package: str) -> None:
    """Set `__module__` of the classes and functions in a package's `__all__` to the package."""
    module = sys.modules[package]
    for name in module.__all__:
        x = getattr(module, name)
        if not callable(x) or x.__module__ == package:
            continue
        if isinstance(x, type):
            # Evaluate a class's hints now: later, they are evaluated in the module that it names.
            x.__annotations__ = inspect.get_annotations(x, eval_str=True)
        overloads = [] if isinstance(x, type) else get_overloads(x)
        for y in (*overloads, x):
            y.__module__ = package
        for y in overloads:  # typing.get_overloads finds them by module and name
            typing.overload(y)
