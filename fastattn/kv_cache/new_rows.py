"""How new rows of a cache come into its pages: by one function of the CPU library, or by torch.

The library's function finds the place of each row, and quantises it with the bits of `quantised`
and `quantised_int4`. It writes rows of plain memory on the CPU while nothing in torch sees or
transforms operations. All others are written by torch's operations.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..backends.native import libraries
from ..backends.native.libraries import DTYPE, get_num_threads
from ..backends.native.marshalling import kind
from ..call.quantisation import STORAGE
from ..dispatch import fast_path
from ..dispatch.torch_function import SUBSYSTEMS, is_compiling
from .block_pool import Pool, write

# (the pool's tensors, table, lengths with the new rows) -> None: writes the last rows of each item.
Put = Callable[[dict[str, Tensor], Tensor, Tensor], None]
# FaAppend: data, stride[4] and dtype of x; pages, their dtype and stride[3]; scales and theirs;
# table, lengths, offsets; B, n, Hk, D, P, page, blocks, threads; what is subtracted.
_APPEND = struct.Struct("=Q5qQ4qQ3q3Q8qQ")
_PATH = fast_path.path(lambda *arguments: None)  # for what acts on calls
_SEES_OPERATIONS = [x for x in SUBSYSTEMS if x[0] is not torch._C._is_any_autocast_enabled]


def put(pool: Pool, given: dict[str, Tensor], offsets: Tensor | None = None) -> Put:
    """given: the new rows of "k", and of "v": (B,Hk,n,D); with offsets (B+1,) (T,Hk,D).

    Rows that may be views of pages are read now, before pages are written.
    """
    if _is_direct(pool.kept, given):
        return partial(_append, given, offsets, pool.offset)
    if offsets is not None:
        return put_stored(pool.rows(**given), offsets.diff())
    n, rows = given["k"].shape[2], {name: x.transpose(1, 2) for name, x in given.items()}
    return partial(_put_equally_many, n, pool.rows(**rows))


def put_stored(rows: dict[str, Tensor], counts: Tensor) -> Put:
    """rows: as `Pool.rows` makes them, `counts` of each item."""

    def put(kept: dict[str, Tensor], table: Tensor, lengths: Tensor) -> None:
        item = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - lengths, counts)
        _write(kept, table, item, torch.arange(len(item), device="cpu") - first, rows)

    return put


def _put_equally_many(
    n: int, rows: dict[str, Tensor], kept: dict[str, Tensor], table: Tensor, lengths: Tensor
) -> None:
    key = lengths[:, None] + torch.arange(-n, 0, device="cpu")
    item = torch.arange(len(lengths), device="cpu")[:, None]
    _write(kept, table, item, key, rows)


def _write(
    kept: dict[str, Tensor], table: Tensor, item: Tensor, key: Tensor, rows: dict[str, Tensor]
) -> None:
    device, page = kept["k"].device, kept["k"].shape[1]
    write(kept, (table[item, key // page].to(device), (key % page).to(device)), rows)


def _is_direct(kept: dict[str, Tensor], given: dict[str, Tensor]) -> bool:
    """True if the library may read `given` while it writes `kept`."""
    if is_compiling() or any(function() != inactive for function, inactive in _SEES_OPERATIONS):
        return False
    if kept["k"].device.type != "cpu" or libraries.cpu_unavailable() is not None:
        return False
    if kind((*given.values(), *kept.values())) is None:
        return False
    pages = [(x.data_ptr(), x.nbytes) for x in kept.values()]
    return all(
        x.numel()
        and (x.stride(-1) == 1 or x.shape[-1] == 1)
        and all(not 0 <= x.data_ptr() - first < size for first, size in pages)
        for x in given.values()
    )


def _append(
    given: dict[str, Tensor],
    offsets: Tensor | None,
    subtracted: Tensor | None,
    kept: dict[str, Tensor],
    table: Tensor,
    lengths: Tensor,
) -> None:
    first = 0 if offsets is None else offsets.data_ptr()
    bookkeeping = table.data_ptr(), lengths.data_ptr(), first
    for name, x in given.items():
        if offsets is None:
            n, D = x.shape[2:]
            item, head, row, column = x.stride()
        else:
            n, _, D = x.shape
            item, (row, head, column) = 0, x.stride()
        rows = x.data_ptr(), item, row, head, column, DTYPE[x.dtype]
        packed = _packed(name, rows, n, D, bookkeeping, subtracted, kept, table)
        status = libraries.cpu().append(packed)
        if status == libraries.NO_MEMORY:
            raise MemoryError(
                "KVCache: got no memory for a row, expected room for one on each thread"
            )
        if status != libraries.OK:
            raise RuntimeError(
                "KVCache: got a table without pages for new rows, expected a cache that one thread "
                "at a time changes"
            )
    increment_version(list(kept.values()))


def _packed(
    name: str,
    rows: tuple[int, ...],
    n: int,
    D: int,
    bookkeeping: tuple[int, int, int],
    subtracted: Tensor | None,
    kept: dict[str, Tensor],
    table: Tensor,
) -> bytes:
    """FaAppend. rows: its x; bookkeeping: the addresses of table, lengths and offsets."""
    pages = kept[name]
    scales = kept[f"{name}_scale"] if pages.dtype in STORAGE else None
    P, page, heads = pages.shape[:3]
    return _APPEND.pack(
        *rows,
        *(pages.data_ptr(), DTYPE[pages.dtype], *pages.stride()[:3]),
        *((0, 0, 0, 0) if scales is None else (scales.data_ptr(), *scales.stride())),
        *bookkeeping,
        *(table.shape[0], n, heads, D, P, page, table.shape[1], get_num_threads()),
        0 if subtracted is None or name != "k" else subtracted.data_ptr(),
    )


def step(pool: Pool, table: Tensor, lengths: Tensor) -> tuple | None:
    """The first argument of `append_rows`, for rows that go into the pages of `table`; None if the
    library does not write these. `append_rows` raises `lengths`."""
    kept = pool.kept
    if kept["k"].device.type != "cpu" or libraries.cpu_unavailable() is not None:
        return None
    changes = [*kept.values(), lengths]
    if kind((*changes, table)) is None or not table.is_contiguous():
        return None
    x, nowhere = (0, 0, 0, 0, 0, DTYPE[pool.dtype]), (0, 0, 0)
    names = [name for name in ("k", "v") if name in kept]
    sizes = dict(zip(("k", "v"), pool.head_dims))
    forms = (_packed(name, x, 0, sizes[name], nowhere, None, kept, table) for name in names)
    pages = ((kept[name], kept.get(f"{name}_scale")) for name in names)
    tensors = table, pool.offset, *itertools.chain.from_iterable(pages)
    increment = partial(increment_version, changes)
    return _PATH, libraries.cpu().append_at, b"".join(forms), tensors, lengths, increment
