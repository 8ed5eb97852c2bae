"""Signatures and docstrings of functions that take `**arguments`, from the table in spec.py."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .argument_hints import unknown_argument
from .spec import DEFAULTS, DIFFERENTIABLE, PUBLIC, Arguments

Function = TypeVar("Function", bound=Callable[..., Any])


def with_arguments(function: Function, kind: Any = Arguments, **defaults: Any) -> Function:
    """Give `function` a signature that lists each argument of the TypedDict `kind`, for help() and
    editors, before its own keywords; and their texts in place of {arguments}, {sentences} (the
    first sentence of each) and {shapes} in its docstring.

    defaults: of the arguments that differ from those of `PUBLIC`.
    """
    hints = {name: x.__forward_arg__ for name, x in kind.__annotations__.items()}
    public = [name for name in PUBLIC if name in hints and name not in defaults]
    names = [*public, *(name for name in hints if name not in public)]
    signature = inspect.signature(function)
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    own = [p for p in signature.parameters.values() if p.kind not in variable]
    own = [p for p in own if p.name not in names]
    keyword, of_names = inspect.Parameter.KEYWORD_ONLY, DEFAULTS | defaults
    shared = [
        inspect.Parameter(name, keyword, default=of_names.get(name), annotation=hints[name])
        for name in names
    ]
    first = [p for p in own if p.kind is not keyword]
    made = signature.replace(parameters=first + shared + own[len(first) :])
    function.__signature__ = made  # ty: ignore
    for mark, texts in (
        ("arguments", {name: PUBLIC[name].text for name in public}),
        ("sentences", {name: first_sentence(name) for name in public}),
        ("shapes", {name: PUBLIC[name].shape for name in public if PUBLIC[name].shape}),
    ):
        doc = function.__doc__ or ""  # None with python -OO
        function.__doc__ = doc.replace(f"        {{{mark}}}\n", _entries(texts))
    return function


def refuse_unknown(function: str, arguments: Any, kind: Any = Arguments) -> None:
    """Raise TypeError, naming `function`, for an argument that the TypedDict `kind` lacks."""
    known = sorted(kind.__annotations__, key=[*PUBLIC, *kind.__annotations__].index)
    if unknown := arguments.keys() - set(known):
        raise TypeError(f"{function}() {unknown_argument(min(unknown), known)}")


def first_sentence(name: str) -> str:
    """What a table says of an argument."""
    return PUBLIC[name].text.split(". ")[0].rstrip(".") + "."


def tangents_among(arguments: Any) -> dict[str, Any]:
    """Take the tangents of optional tensors, such as mask_t, out of the arguments of a call."""
    names = [name for name in DIFFERENTIABLE if name in PUBLIC]
    return {name: arguments.pop(f"{name}_t", None) for name in names}


def _entries(texts: Mapping[str, str]) -> str:
    """Lines of a docstring's section, in the form of those around them."""
    wrapped = (
        textwrap.fill(
            f"{name}: {text}",
            100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        for name, text in texts.items()
    )
    return "".join(f"{x}\n" for x in wrapped)
