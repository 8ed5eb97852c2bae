"""Replace fields of a named tuple, in compiled code, too."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .spec import Options, Tensors

Fields = TypeVar("Fields", Tensors, Options)

_is_compiling = torch.compiler.is_compiling


def changed(x: Fields, **values: Any) -> Fields:
    """x with other values of the fields that are named, as `x._replace(**values)`.

    torch.compile traces `_replace` from torch 2.9 on, and the code below before that, too.
    """
    if not _is_compiling():
        return x._replace(**values)  # ty: ignore
    kind = type(x)
    return kind(*[values.get(name, old) for name, old in zip(kind._fields, x)])
