"""How tensors are passed to the native kernels: the kind of a call's tensors, and packed FaCalls.

    kind      a key of the tensors: calls with equal keys share a plan; None if a tensor is not
              plain memory, so that the call must go through the operator
    pack      FaCall as bytes: a template, with each tensor written at its place
    launch    pack, then call a function of the CPU library with the result
    launch_on the same for the CUDA library, with a workspace; None if only Python packs
    laid      a key of a kernel's arguments with at least what Triton specialises on: dtypes,
              strides, addresses modulo 16, and the numbers themselves

csrc/python/marshalling.cpp implements these for CPython's stable ABI. The Python versions below are
used if set-up did not build it, or if FASTATTN_EXTENSION=off.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.spec import ARGUMENTS
from ..base import broadcast_strides
from . import libraries
from .libraries import DTYPE, EXTENT, POINTER, TENSOR

Kind = bytes | tuple[Any, ...]  # hashable; comparable with kinds of the same implementation
Laid = bytes | tuple[Any, ...]  # likewise

# Not the subclasses that override dispatch.
PLAIN: frozenset[type[Tensor]] = frozenset({Tensor, torch.nn.Parameter})

# ----------------------------- `Argument.crosses`: strides (in elements) and sizes of each FaTensor


class Four(NamedTuple):
    """How to present a tensor in the four dimensions that kernels read."""

    strides: Callable[[Tensor], tuple[int, ...]]
    sizes: Callable[[Tensor], tuple[int, ...]]  # 1 for a missing dimension


def _as_column(of: Sequence[int], lacking: int) -> tuple[int, ...]:
    """Strides or sizes of (H,), (B,H) or (B,H,M), padded to four dimensions (B,H,M,1)."""
    return (*(lacking,) * (len(of) == 1), *of, *(lacking,) * 3)[:4]


def _as_pair(of: Sequence[int]) -> tuple[int, ...]:
    """Strides or sizes of a normaliser (2,B,H,M), permuted to the kernels' (B,H,M,2)."""
    two, b, h, m = of
    return b, h, m, two


PASSED_AS: dict[str, Four | None] = {  # enum Crosses
    "strided": Four(Tensor.stride, lambda x: x.shape),  # a 4-D tensor, read in place
    # Broadcast to (B,H,M,N), aligned to the right; a broadcast dimension has stride 0.
    "broadcast": Four(broadcast_strides, lambda x: (*(1,) * (4 - x.ndim), *x.shape)),
    "column": Four(lambda x: _as_column(x.stride(), 0), lambda x: _as_column(x.shape, 1)),
    "pair": Four(lambda x: _as_pair(x.stride()), lambda x: _as_pair(x.shape)),
    "pointer": None,  # only the address
}
_PLACE = struct.Struct("=iii")  # offset in FaCall, index in `PASSED_AS`, offset of the sizes or -1


def places(after: Mapping[str, str]) -> bytes:
    """The places in FaCall of a call's tensors, then of `after`: fields and their `PASSED_AS`."""
    fields = [(a.field, a.passed_as) for a in ARGUMENTS.values()]
    return b"".join(_place(*x) for x in (*fields, *after.items()))


def _place(field: str, passed_as: str) -> bytes:
    sizes = libraries.offset(f"{field}_size") if field in libraries.WRITTEN else -1
    return _PLACE.pack(libraries.offset(field), list(PASSED_AS).index(passed_as), sizes)


# ------------------------------------------------------------- the extension's functions, in Python


def _kind(tensors: Sequence[Tensor | None]) -> Kind | None:
    found: list[Any] = []
    for x in tensors:
        if x is None:
            found.append(None)
            continue
        if type(x) not in PLAIN or x.is_neg():
            return None
        try:
            if not x.data_ptr() and (x.is_meta or x.numel()):  # meta, or an _efficientzerotensor
                return None
            found.append((x.shape, x.dtype, x.device))
        except RuntimeError:  # it has no storage, or no shape
            return None
    return tuple(found)


@functools.cache
def _read(places: bytes) -> list[tuple[int, Four | None, int]]:
    functions = list(PASSED_AS.values())
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
    POINTER.pack_into(params, libraries.THREADS, threads)
    return bytes(params)


def _launch(
    entry: int, which: int, brief: bool, form: bytes, places: bytes, tensors: Sequence, threads: int
) -> int:
    """entry: the address of fa_cpu_run. brief: the kernel is too short to release the GIL for."""
    return libraries.cpu().run(_pack(form, places, tensors, threads), which)


def _laid(args: tuple) -> Laid:
    found: list[Any] = []
    for x in args:
        if isinstance(x, tuple):  # (tensor, its strides)
            x = x[0]
        if isinstance(x, Tensor):
            found += x.dtype, x.stride(), x.data_ptr() % 16
        else:  # a number, or None
            found.append(x)
    return tuple(found)


extension: Any = libraries.extension()
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
    return _laid(args) if found is None else found  # for example meta tensors, as in make aot
