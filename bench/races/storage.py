"""What storing keys and values in fewer bits costs: the error of attention's outputs, for the
storages of `KVCache` beside those of ggml and KIVI, which plain torch imitates here. `KVCache`
stores keys less an offset.

Each storage maps keys and values to the values that are read back. Attention runs on both in
float64, so nothing but the storage has an error. The numbers depend on no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.call.int4 import dequantised_int4, quantised_int4
from fastattn.call.quantisation import dequantised, quantised
from fastattn.kv_cache.key_offset import offset_of

from ..measure.machine import RESULTS
from ..measure.records import markdown

FILE = "storage-error.txt"
BATCH, HEADS, KEYS, ROWS = 4, 4, 1024, 4
DIMS = (64, 128)
OUTLIERS = 2  # channels of each head
DATA = {
    "normal": "normally distributed",
    "scaled": f"{OUTLIERS} channels of K in each head times 10 to 20",
    "shifted": f"{OUTLIERS} channels of K in each head plus or minus 10 to 20",
    "offset": f"{OUTLIERS} channels of K in each head plus or minus 100",
}
Store = Callable[[Tensor], Tensor]  # (B,Hk,N,D) -> the values that are read back
Row = dict[str, Any]


def in_eight_bits(storage: torch.dtype) -> Store:
    return lambda x: dequantised(*quantised(x, storage), x.dtype)


def in_four_bits(x: Tensor) -> Tensor:
    return dequantised_int4(quantised_int4(x), x.dtype)


def less_an_offset(store: Store) -> Store:
    """As `KVCache` stores keys."""

    def stored(k: Tensor) -> Tensor:
        offset = offset_of(k)
        return store(k) if offset is None else store(k - offset[:, None]) + offset[:, None]

    return stored


def q4_0(x: Tensor) -> Tensor:
    """ggml's: 32 numbers of a row share a float16 scale; the number of the largest absolute value
    becomes -8 times it."""
    x = x.unflatten(-1, (-1, 32))
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    n = (x / scale + 8.5).floor().clamp(0, 15).nan_to_num(8.0)
    return ((n - 8) * scale.half().to(x.dtype)).flatten(-2)


def with_minimum(x: Tensor, dim: int, group: int) -> Tensor:
    """Scale and minimum in float16 for `group` numbers along dim: ggml's q4_1 along D, in groups of
    32. KIVI's V along D, and its K along the tokens, which is by channel."""
    x = x.unflatten(dim, (-1, group))
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = (most - least) / 15
    n = ((x - least) / scale).round().clamp(0, 15).nan_to_num(0.0)
    return (n * scale.half().to(x.dtype) + least.half().to(x.dtype)).flatten(dim - 1, dim)


def along_rows(group: int) -> Store:
    return lambda x: with_minimum(x, -1, group)


def along_tokens(group: int) -> Store:
    return lambda x: with_minimum(x.mT, -1, group).mT


INT8, E4M3 = in_eight_bits(torch.int8), in_eight_bits(torch.float8_e4m3fn)
# Name: bits of a number at D 128, how K is stored, how V is.
STORAGES: dict[str, tuple[float, Store, Store]] = {
    "fastattn int8": (8.25, less_an_offset(INT8), INT8),
    "fastattn float8_e4m3fn": (8.25, less_an_offset(E4M3), E4M3),
    "fastattn int4": (5, less_an_offset(in_four_bits), in_four_bits),
    "ggml q4_0": (4.5, q4_0, q4_0),
    "ggml q4_1": (5, along_rows(32), along_rows(32)),
    "KIVI, groups of 32": (5, along_tokens(32), along_rows(32)),
    "KIVI, groups of 64": (4.5, along_tokens(64), along_rows(64)),
}


def tensors(data: str, d: int, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(d)
    q = torch.randn(BATCH, HEADS, ROWS, d, generator=draw)
    k, v = torch.randn(2, BATCH, HEADS, keys, d, generator=draw)
    for h in range(HEADS):
        channels = torch.randperm(d, generator=draw)[:OUTLIERS]
        size = 10 + 10 * torch.rand(OUTLIERS, generator=draw)
        sign = torch.randint(0, 2, (OUTLIERS,), generator=draw) * 2 - 1
        if data == "scaled":
            k[:, h, :, channels] *= size
        elif data == "shifted":
            k[:, h, :, channels] += size * sign
        elif data == "offset":
            k[:, h, :, channels] += 100 * sign
    return q.double(), k.double(), v.double()


def measure(data: str, d: int, keys: int = KEYS) -> Iterator[Row]:
    """For each storage the relative error of all outputs, and of the worst row."""
    q, k, v = tensors(data, d, keys)
    exact = fastattn.reference.attention(q, k, v)
    for name, (_, of_k, of_v) in STORAGES.items():
        error = fastattn.reference.attention(q, of_k(k), of_v(v)) - exact
        worst = (error.norm(dim=-1) / exact.norm(dim=-1)).max()
        typical = error.norm() / exact.norm()
        yield dict(storage=name, data=data, D=d, typical=float(typical), worst=float(worst))


def table(rows: list[Row]) -> Iterator[str]:
    cells = {(row["storage"], row["data"], row["D"]): row for row in rows}
    columns = list(dict.fromkeys((row["data"], row["D"]) for row in rows))
    lines = []
    for name, (bits, *_) in STORAGES.items():
        found = (cells[(name, *column)] for column in columns)
        errors = (f"{_percent(x, 'typical')} ({_percent(x, 'worst')})" for x in found)
        lines.append([name, f"{bits:g}", *errors])
    return markdown(["", "bits", *(f"{data}, D {d}" for data, d in columns)], lines)


def _percent(row: Row, which: str) -> str:
    percent = 100 * row[which]
    return f"{percent:.1f}%" if percent < 10 else f"{percent:.0f}%"


def page(rows: list[Row]) -> str:
    lines = [
        "Relative errors of attention's outputs, against float64: of all outputs, and in brackets",
        f"of the worst row. {BATCH} items, {HEADS} heads, {KEYS} keys, {ROWS} rows of queries.",
        "Bits: of a number, with its share of the scales, at D 128.",
        *(f"{name}: {text}." for name, text in DATA.items()),
        "fastattn stores keys less the mean of each channel that is far from 0.",
        "ggml's and KIVI's storages are imitated in torch. KIVI does not quantise its last tokens;",
        "that is not imitated.",
        "Written by python -m bench race storage --save.",
        "",
        *table(rows),
    ]
    return "\n".join(lines) + "\n"


def lines(save: bool) -> Iterator[str]:
    text = page([row for data in DATA for d in DIMS for row in measure(data, d)])
    if save:
        (RESULTS / FILE).write_text(text)
    yield text.rstrip()
