"""How tensors cross to the native kernels: what kind they are, and FaCall packed of them.

    kind      what is the same for all calls that one plan serves; None where a tensor is no plain
              memory, and something else has to see the call
    pack      FaCall, as bytes, of a template and tensors, each at its place
    launch    the same, given to a function of the CPU's library at once
    launch_on the same for the CUDA library, with a workspace; None where only Python packs
    laid      of a kernel's arguments at least what Triton compiles it for: dtypes, strides, whether
              16 bytes divide where they lie, and numbers as they are

csrc/python/crossing.cpp has these for CPython's stable ABI. They are used where set-up built them,
and those below where it did not, or where FASTATTN_EXTENSION=off.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native
from .backend import broadcast_strides
from .native import DTYPE, EXTENT, POINTER, TENSOR
from .spec import ARGUMENTS

Kind = bytes | tuple[Any, ...]  # it hashes, and compares with those of the same maker
Laid = bytes | tuple[Any, ...]  # likewise

# No subclass with a dispatch of its own.
PLAIN: frozenset[type[Tensor]] = frozenset({Tensor, torch.nn.Parameter})

# --------------------------- `Argument.crosses`: the strides of an FaTensor, in elements, and sizes


class Four(NamedTuple):
    """How a tensor has the four dimensions that kernels see."""

    strides: Callable[[Tensor], tuple[int, ...]]
    sizes: Callable[[Tensor], tuple[int, ...]]  # 1 where it lacks a dimension


def _as_column(of: Sequence[int], lacking: int) -> tuple[int, ...]:
    """Of (H,), (B,H) or (B,H,M), which the kernels see with trailing sizes of 1."""
    return (*(lacking,) * (len(of) == 1), *of, *(lacking,) * 3)[:4]


def _as_pair(of: Sequence[int]) -> tuple[int, ...]:
    """Of a normaliser (2,B,H,M), which the kernels see as (B,H,M,2)."""
    two, b, h, m = of
    return b, h, m, two


CROSSES: dict[str, Four | None] = {  # enum Crosses
    "strided": Four(Tensor.stride, lambda x: x.shape),  # of a 4-D tensor, read where it lies
    # Aligned to the right of (B,H,M,N); what it is broadcast over has stride 0.
    "broadcast": Four(broadcast_strides, lambda x: (*(1,) * (4 - x.ndim), *x.shape)),
    "column": Four(lambda x: _as_column(x.stride(), 0), lambda x: _as_column(x.shape, 1)),
    "pair": Four(lambda x: _as_pair(x.stride()), lambda x: _as_pair(x.shape)),
    "pointer": None,  # only where it lies
}
_PLACE = struct.Struct("=iii")  # offset in FaCall, which of `CROSSES`, offset of the sizes or -1


def places(after: Mapping[str, str]) -> bytes:
    """Where the tensors of a call go, and after them those in `after`: by field, how they cross."""
    fields = [(a.field, a.crosses) for a in ARGUMENTS.values()]
    return b"".join(_place(*x) for x in (*fields, *after.items()))


def _place(field: str, crosses: str) -> bytes:
    sizes = native.offset(f"{field}_size") if field in native.WRITTEN else -1
    return _PLACE.pack(native.offset(field), list(CROSSES).index(crosses), sizes)


# ------------------------------------------------------------------------- the same, in Python


def _kind(tensors: Sequence[Tensor | None]) -> Kind | None:
    found: list[Any] = []
    for x in tensors:
        if x is None:
            found.append(None)
            continue
        if type(x) not in PLAIN or x.is_neg():
            return None
        try:
            if not x.data_ptr() and (x.is_meta or x.numel()):  # or zeros that are nowhere
                return None
            found.append((x.shape, x.dtype, x.device))
        except RuntimeError:  # it has no storage, or no shape
            return None
    return tuple(found)


@functools.cache
def _read(places: bytes) -> list[tuple[int, Four | None, int]]:
    functions = list(CROSSES.values())
    return [(at, functions[which], sizes) for at, which, sizes in _PLACE.iter_unpack(places)]


def _pack(form: bytes, places: bytes, tensors: Sequence[Tensor | None], threads: int) -> bytes:
    params = bytearray(form)
    for (at, four, sizes), x in zip(_read(places), tensors):
        if x is None:
            continue
        if four is None:
            POINTER.pack_into(params, at, x.data_ptr())
            continue
        TENSOR.pack_into(params, at, x.data_ptr(), *four.strides(x), DTYPE[x.dtype])
        if sizes >= 0:
            EXTENT.pack_into(params, sizes, *four.sizes(x))
    POINTER.pack_into(params, native.THREADS, threads)
    return bytes(params)


def _launch(
    entry: int, which: int, brief: bool, form: bytes, places: bytes, tensors: Sequence, threads: int
) -> int:
    """entry: the address of fa_cpu_run. brief: not worth letting another thread interpret."""
    return native.cpu().run(_pack(form, places, tensors, threads), which)


def _laid(args: tuple) -> Laid:
    found: list[Any] = []
    for x in args:
        if isinstance(x, tuple):  # a tensor, and its strides
            x = x[0]
        if isinstance(x, Tensor):
            found += x.dtype, x.stride(), x.data_ptr() % 16
        else:  # a number, or None
            found.append(x)
    return tuple(found)


extension: Any = native.extension()
kind: Callable[[Sequence[Tensor | None]], Kind | None]
pack: Callable[..., bytes]
launch: Callable[..., int]
kind, pack, launch = (
    (_kind, _pack, _launch)
    if extension is None
    else (extension.kind, extension.pack, extension.launch)
)
launch_on: Any = getattr(extension, "launch_on", None)
_fast_laid = getattr(extension, "laid", _laid)


def laid(args: tuple[Any, ...]) -> Laid:
    found = _fast_laid(args)
    return _laid(args) if found is None else found  # tensors that are nowhere, as when compiling
