"""Packed sequences of different lengths, and paged caches.

A row is a race between a call of ours and another way to the same numbers: the same work padded,
torch's function on padded or jagged tensors, or contiguous keys. Both results are compared before
either is timed; tests compare ours with the oracle. Lengths go from N / 8 to N.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn

from ..cases import BOTH, DTYPES, FORWARD, TRAINING
from ..measure import timing
from ..measure.run import ratio
from ..reporting.console import busy, spread

Record = dict[str, Any]
N, HEADS, DIM = 1024, 8, 64  # of packed batches: eight sequences
KEYS, BATCH, KEY_HEADS, DECODED = 4096, 32, 8, 128  # of decoding: keys, sequences, heads, head dim
PAGES = (16, 64, 256)
SECONDS = 0.5
NOTHING: Record = {"ms": {}, "ratio": None, "met": None}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


class Race(NamedTuple):
    """`ours` and `other` return the same tensors if `same`; else `other` only measures work. `aim`
    is the least other / ours ("at least"), or the most ours / (`share` * other) ("at most").
    `share` is our work over the other's."""

    name: str
    dtype: str
    what: str
    ours: Callable[[], Sequence[Tensor]]
    other: Callable[[], Sequence[Tensor]]
    rule: str = "at least"
    aim: float = 1.5
    share: float = 1.0
    same: bool = True


def races(dtypes: Sequence[str] = BOTH, scale: float = 1.0) -> Iterator[Race]:
    """`scale` multiplies all lengths, for tests."""
    for dtype in dtypes:
        for what in (FORWARD, TRAINING):
            yield from packed(dtype, what, int(N * scale))
        yield from paged(dtype, int(KEYS * scale))


def packed(dtype: str, what: str, n: int) -> Iterator[Race]:
    lengths = [n * (x + 1) // 8 for x in range(8)]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    grad = what == TRAINING
    size: dict[str, Any] = dict(dtype=DTYPES[dtype], requires_grad=grad)
    rows = [torch.randn(int(cu[-1]), HEADS, DIM, **size) for _ in range(3)]
    dout = torch.randn(int(cu[-1]), HEADS, DIM, dtype=DTYPES[dtype])
    # The others' inputs are padded in advance: the time of padding is not measured.
    padded = [_padded(x.detach(), lengths).requires_grad_(grad) for x in rows]
    padded_dout = _padded(dout, lengths)
    seen = torch.arange(n) < torch.tensor(lengths)[:, None]

    def of_rows(out: Any, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(out, leaves, dout) if grad else []
        return [out, *grads]

    def of_padded(out: Tensor) -> list[Tensor]:
        found = of_rows(out, padded, padded_dout)
        return [x.transpose(1, 2)[seen] for x in found]

    def ours() -> list[Tensor]:
        out = fastattn.attention_packed(*rows, cu, cu, max_q=n, max_k=n)
        return of_rows(out, rows, dout)

    def ours_padded() -> list[Tensor]:
        out = fastattn.attention(*padded)
        return of_rows(out, padded, padded_dout)

    def torchs_padded() -> list[Tensor]:
        return of_padded(torchs(*padded, attn_mask=seen[:, None, None]))

    jagged = functools.partial(_jagged, cu=cu)

    def torchs_jagged() -> list[Tensor]:
        out: Any = torchs(jagged(rows[0]), jagged(rows[1]), jagged(rows[2]))
        return of_rows(out.transpose(1, 2).values(), rows, dout)

    share = sum(x * x for x in lengths) / (8 * n * n)
    every = "packed over the same padded, to visible scores"
    yield Race(every, dtype, what, ours, ours_padded, "at most", 1.15, share, same=False)
    yield Race("torch padded, masked, over packed", dtype, what, ours, torchs_padded)
    yield Race("torch jagged over packed", dtype, what, ours, torchs_jagged)


def paged(dtype: str, n: int) -> Iterator[Race]:
    kind = DTYPES[dtype]
    q = torch.randn(BATCH, HEADS * 4, 1, DECODED, dtype=kind)
    k, v = (torch.randn(BATCH, n, KEY_HEADS, DECODED, dtype=kind) for _ in range(2))
    cu_q, lengths = torch.arange(BATCH + 1), torch.full((BATCH,), n)

    def contiguous() -> list[Any]:
        return [fastattn.attention(q, k.transpose(1, 2), v.transpose(1, 2))]

    def read() -> list[Tensor]:
        return [k.sum(), v.sum()]

    for page in PAGES:
        blocks = -(-n // page)
        order = torch.randperm(BATCH * blocks)
        pools = [_in_pages(x, page, order) for x in (k, v)]
        table = order.view(BATCH, blocks)

        def ours(pools=pools, table=table) -> list[Any]:
            given: Any = dict(block_table=table, key_lengths=lengths, max_q=1)
            out: Any = fastattn.attention_packed(q[:, :, 0], *pools, cu_q, **given)
            return [out[:, :, None]]

        name = f"pages of {page} over contiguous keys"
        yield Race(name, dtype, FORWARD, ours, contiguous, "at most", 1.15)
    yield Race("torch.sum over decoding", dtype, FORWARD, contiguous, read, aim=0.8, same=False)


def measure(race: Race, seconds: float = SECONDS, threads: int | None = None) -> Record:
    row: Record = {"what": race.name, "dtype": race.dtype, "pass": race.what}
    row |= {"threads": threads or torch.get_num_threads(), "rule": race.rule, "aim": race.aim}
    with timing.torch_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about jagged tensors
        if reason := disagreement(race):
            return row | {"status": "failed", "reason": reason} | NOTHING
        sides = {"ours": race.ours, "other": race.other}
        programs = {name: (lambda _, f=f: f(),) for name, f in sides.items()}
        clock = timing.THREAD_TIME if threads == 1 else timing.WALL_TIME
        samples = timing.interleaved(programs, clock, seconds)
    row["others"] = clock.others
    laps = {name: [x[0] for x in rounds] for name, rounds in samples.items()}
    ms = {name: 1e3 * timing.quartiles(x)["median"] for name, x in laps.items()}
    if race.rule == "at most":
        found = ratio(laps["ours"], [x * race.share for x in laps["other"]])
        met = found["median"] <= race.aim
    else:
        found = ratio(laps["other"], laps["ours"])
        met = found["median"] >= race.aim
    return row | {"status": "ok", "reason": "", "ms": ms, "ratio": found, "met": met}


def disagreement(race: Race) -> str:
    """Why the two results differ, or ""."""
    if not race.same:
        return ""
    actual, expected = race.ours(), race.other()
    for x, y in zip(actual, expected, strict=True):
        error = (x.float() - y.float()).abs().max() / y.float().abs().max().clamp(min=1e-9)
        if not error <= TOLERANCE[race.dtype]:
            return f"an error of {float(error):.2g} of the largest value"
    return ""


def raced_name(row: Record) -> str:
    threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
    return f"{row['what']}, {row['dtype']} {row['pass']}, {threads}"


def line(row: Record) -> str:
    name = raced_name(row)
    if row["status"] != "ok":
        return f"FAILED: {name}, not timed: {row['reason']}"
    found, ms = row["ratio"], row["ms"]
    aim = f"{row['rule']} {row['aim']:g}: {'met' if row['met'] else 'MISSED'}"
    aim = "busy" if busy(row) else f"{spread(found)}, {aim}"
    return f"{name}: {aim}; {ms['ours']:.2f} and {ms['other']:.2f} ms"


def _padded(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """(T,H,D) as (B,H,N,D)."""
    n = max(lengths)
    each = [pad(part, (0, 0, 0, 0, 0, n - len(part))) for part in x.split(list(lengths))]
    return torch.stack(each).transpose(1, 2).contiguous()


def _jagged(x: Tensor, cu: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, cu).transpose(1, 2)


def _in_pages(x: Tensor, page: int, order: Tensor) -> Tensor:
    _, n, heads, dim = x.shape
    x = pad(x, (0, 0, 0, 0, 0, -n % page))
    pool = torch.empty(len(order), page, heads, dim, dtype=x.dtype)
    pool[order] = x.reshape(-1, page, heads, dim)
    return pool
