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
            # typing evaluates a class's hints in the module that the class names: do it before.
            x.__annotations__ = inspect.get_annotations(x, eval_str=True)
        else:
            for overload in get_overloads(x):
                overload.__module__ = package
                typing.overload(overload)  # typing.get_overloads finds them by module and name
        x.__module__ = package
