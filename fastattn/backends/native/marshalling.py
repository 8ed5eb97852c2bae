"""How tensors are passed to the native kernels: the kind of a call's tensors, and packed FaCalls.

    kind       plan key: shapes, dtypes and devices of the tensors. Calls with equal kinds and equal
               options share a plan. None if a tensor is not plain memory: then the call must go
               through the operator.
    pack       FaCall as bytes: a template, with each tensor written at its offset
    launch     pack, then call a function of the CPU library with the result
    launch_on  the same for the CUDA library, with a workspace; None if only Python packs
    specialization_key
               a key of a kernel's arguments with at least what Triton specialises on: dtypes,
               strides, addresses modulo 16, and the numbers themselves
    attend     a whole call (dispatch/fast_path.py), or None if the general path has to run it
    gradients  its gradients, likewise
    differentiate
               the gradients of a call by the operator, likewise
    append_rows
               a decoding step's new rows into a cache (kv_cache/new_rows.py), likewise
    forget_plans
               forget the plans of `attend`

csrc/python implements these for CPython's stable ABI. The Python versions below are used if set-up
did not build it, or if FASTATTN_EXTENSION=off. In Python the last five run no call.
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
SpecializationKey = bytes | tuple[Any, ...]  # likewise

# Not the subclasses that override dispatch.
PLAIN = Tensor, torch.nn.Parameter

# --------------------------- `Argument.passed_as`: strides (in elements) and sizes of each FaTensor


class As4D(NamedTuple):
    """Functions that give a tensor's strides and sizes in four dimensions, as kernels read it."""

    strides: Callable[[Tensor], tuple[int, ...]]
    sizes: Callable[[Tensor], tuple[int, ...]]  # 1 for a missing dimension


def _as_column(of: Sequence[int], lacking: int) -> tuple[int, ...]:
    """Strides or sizes of (H,), (B,H) or (B,H,M), padded to four dimensions (B,H,M,1)."""
    return (*(lacking,) * (len(of) == 1), *of, *(lacking,) * 3)[:4]


def _as_pair(of: Sequence[int]) -> tuple[int, ...]:
    """Strides or sizes of a normaliser (2,B,H,M), permuted to the kernels' (B,H,M,2)."""
    two, b, h, m = of
    return b, h, m, two


PASSED_AS: dict[str, As4D | None] = {  # enum PassedAs in marshalling.cpp
    "strided": As4D(Tensor.stride, lambda x: x.shape),  # a 4-D tensor, read in place
    # Broadcast to (B,H,M,N), aligned to the right; a broadcast dimension has stride 0.
    "broadcast": As4D(broadcast_strides, lambda x: (*(1,) * (4 - x.ndim), *x.shape)),
    "column": As4D(lambda x: _as_column(x.stride(), 0), lambda x: _as_column(x.shape, 1)),
    "pair": As4D(lambda x: _as_pair(x.stride()), lambda x: _as_pair(x.shape)),
    "pointer": None,  # only the address
}
_FIELD = struct.Struct("=iii")  # offset in FaCall, index in `PASSED_AS`, offset of the sizes or -1


def places(after: Mapping[str, str]) -> bytes:
    """The offsets of the call's tensors in FaCall, then of the extra fields, as packed `_FIELD`s.

    after: the extra fields, which follow the call's tensors: name in FaCall -> key of `PASSED_AS`.
    """
    fields = [(a.field, a.passed_as) for a in ARGUMENTS.values()]
    return b"".join(_field(*x) for x in (*fields, *after.items()))


def _field(field: str, passed_as: str) -> bytes:
    sizes = libraries.offset(f"{field}_size") if field in libraries.WRITTEN else -1
    return _FIELD.pack(libraries.offset(field), list(PASSED_AS).index(passed_as), sizes)


# ------------------------------------------------------------- the extension's functions, in Python


def _kind(tensors: Sequence[Tensor | None]) -> Kind | None:
    """plan key: an entry for each tensor, in order, so that the kind of more tensors begins with
    the kind of the first ones. None if a tensor is not plain memory."""
    entries: list[Any] = []
    for x in tensors:
        if x is None:
            entries.append(None)
            continue
        if type(x) not in PLAIN or x.is_neg():
            return None
        try:
            if not x.data_ptr() and (x.is_meta or x.numel()):  # meta, or an _efficientzerotensor
                return None
            entries.append((x.shape, x.dtype, x.device))
        except RuntimeError:  # it has no storage, or no shape
            return None
    return tuple(entries)


@functools.cache
def _read(places: bytes) -> list[tuple[int, As4D | None, int]]:
    functions = list(PASSED_AS.values())
    return [(at, functions[index], sizes) for at, index, sizes in _FIELD.iter_unpack(places)]


def _pack(form: bytes, places: bytes, tensors: Sequence[Tensor | None], threads: int) -> bytes:
    """form: FaCall without tensors. places: the result of `places`, for these tensors in order."""
    params = bytearray(form)
    for (at, as_4d, sizes), x in zip(_read(places), tensors):
        if x is None:
            continue
        if as_4d is None:
            POINTER.pack_into(params, at, x.data_ptr())
            continue
        TENSOR.pack_into(params, at, x.data_ptr(), *as_4d.strides(x), DTYPE[x.dtype])
        if sizes >= 0:
            EXTENT.pack_into(params, sizes, *as_4d.sizes(x))
    POINTER.pack_into(params, libraries.THREADS, threads)
    return bytes(params)


def _launch(
    entry: int, which: int, brief: bool, form: bytes, places: bytes, tensors: Sequence, threads: int
) -> int:
    """Pack a call and run it. Returns the status of fa_cpu_run.

    entry: the address of fa_cpu_run. The extension calls it; this version calls it through ctypes
        and ignores the address.
    which: the pass, such as `libraries.FORWARD`.
    brief: True if the kernel is too short to release the GIL for. Else handlers of signals run
        while the kernel does, on the main thread; if one raises, so does this function.
    form, places, tensors, threads: as for `pack`.
    """
    return libraries.cpu().run(_pack(form, places, tensors, threads), which, brief)


def _specialization_key(args: tuple) -> SpecializationKey:
    key: list[Any] = []
    for x in args:
        if isinstance(x, tuple):  # (tensor, its strides)
            x = x[0]
        if isinstance(x, Tensor):
            key += x.dtype, x.stride(), x.data_ptr() % 16
        else:  # a number, or None
            key.append(x)
    return tuple(key)


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
attend: Callable[..., Any] = getattr(extension, "attend", lambda *args: None)
gradients: Callable[..., Any] = getattr(extension, "gradients", lambda *args: None)
differentiate: Callable[..., Any] = getattr(extension, "differentiate", lambda *args: None)
append_rows: Callable[..., int | None] = getattr(extension, "append_rows", lambda *args: None)
forget_plans: Callable[[], None] = getattr(extension, "forget_plans", lambda: None)
_fast_specialization_key = getattr(extension, "specialization_key", _specialization_key)


def specialization_key(args: tuple[Any, ...]) -> SpecializationKey:
    """args: tensors, tuples that begin with a tensor, numbers and None."""
    key = _fast_specialization_key(args)
    if key is None:  # for example meta tensors, as in make aot
        return _specialization_key(args)
    return key
