"""Attention over ranks of this machine: processes of one thread each, over gloo.

A row measures a strategy: forward and backward of a causal call in zigzag layout, timed against the
whole call on one rank while the others wait, in interleaved rounds. It also has the bytes sent by
the rank that sent most, the cost model's prediction of bytes and time, and for a ring the share of
its transfers that computing hides. A strategy is verified against one rank before it is timed.
Memory is the peak of a rank, out and gradients included, at N and 2 N: memory that falls as 1 / P
is the same if both N and P double.
"""

from __future__ import annotations

import datetime
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fastattn
from fastattn import distributed
from fastattn.distributed import p2p
from fastattn.distributed.attention_call import Strategy
from fastattn.distributed.consistency import need_team
from fastattn.examples.memory import peak_bytes, release, reset_peak

from ..cases import TRAINING
from ..measure.run import ratio
from ..measure.timing import ROUNDS, quartiles

Record = dict[str, Any]
RANKS, LENGTHS, SECONDS = (2, 4), (2048, 4096), 4.0
HEADS, KEY_HEADS, DIM, LAYOUT = 8, 4, 64, "zigzag"
TIMEOUT = 120  # seconds that a rank waits for another
TOLERANCE = 1e-5  # of the largest value, float32
GROWTH = 1.25  # highest ok growth of memory if N and P double


def measure(ranks: int, lengths: Sequence[int], seconds: float) -> list[list[Record]]:
    """(a row per strategy at the first length, memory records at each length)"""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe()
        given = ranks, str(Path(folder) / "store"), tuple(lengths), seconds
        args = [(rank, *given, there if rank == 0 else None) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=x, daemon=True) for x in args]
        try:
            for x in processes:
                x.start()
            there.close()
            found = here.recv()
        except EOFError:
            raise OSError("got no figures from the ranks: one of them died") from None
        finally:
            for x in processes:
                x.join(5)
                x.kill()
    if isinstance(found, Exception):
        raise found
    return found


# -- what each rank does ---------------------------------------------------------------------------


def _rank(
    rank: int, ranks: int, store: str, lengths: Sequence[int], seconds: float, to: Connection | None
) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=TIMEOUT)
    at = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=at, rank=rank, world_size=ranks, timeout=wait)
    try:
        rows = [_row(name, group, lengths[0], seconds) for name, group in _strategies(ranks)]
        found: Any = rows, list(_memory(ranks, lengths))
    except Exception as error:
        found = error
    if to:
        to.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _strategies(ranks: int) -> Iterator[tuple[Strategy, Any]]:
    yield "gather", None
    yield "ring", None
    if HEADS % ranks == 0:
        yield "ulysses", None
    if ranks % 2 == 0 and ranks > 2:
        yield "usp", init_device_mesh("cpu", (ranks // 2, 2))


class Given:
    """The whole call's q, k, v and dout, the same on every rank, and this rank's shards."""

    def __init__(self, N: int, strategy: Strategy, group: Any):
        draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
        heads = HEADS, KEY_HEADS, KEY_HEADS, HEADS
        self.whole = [draw(1, h, N, DIM) for h in heads]
        self.how: dict[str, Any] = dict(group=group, layout=LAYOUT)
        self.own = [distributed.shard(x, **self.how).clone() for x in self.whole]
        for x in (*self.whole[:3], *self.own[:3]):
            x.requires_grad_()
        self.ours = functools.partial(distributed.attention, strategy=strategy, **self.how)

    def alone(self) -> list[Tensor]:
        return both(fastattn.attention, *self.whole)

    def together(self) -> list[Tensor]:
        return both(self.ours, *self.own)


def both(attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor):
    out = attention(q, k, v, causal=True)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def _row(strategy: Strategy, group: Any, N: int, seconds: float) -> Record:
    given, ranks = Given(N, strategy, group), dist.get_world_size()
    about = distributed.explain(*given.own[:3], strategy=strategy, causal=True, **given.how)
    row: Record = {"what": f"{strategy}, {ranks} ranks", "strategy": strategy, "ranks": ranks}
    row |= {"N": N, "H": HEADS, "Hk": KEY_HEADS, "D": DIM, "dtype": "float32", "pass": TRAINING}
    row |= {"layout": LAYOUT, "said_bytes": about.costs[strategy].sent}
    row |= {"said_ms": 1e3 * about.costs[strategy].seconds, "overlap": None}
    if reason := disagreement(given):
        return row | {"status": "failed", "reason": reason, "ms": {}, "ratio": None, "bytes": 0}
    with Counted() as counted:
        given.together()
    if strategy == "ring":
        row["overlap"] = overlap(given)
    laps = _laps(given, seconds)
    ms = {name: 1e3 * quartiles(x)["median"] for name, x in laps.items()}
    row |= {"status": "ok", "reason": "", "ms": ms, "bytes": _most(counted.sent)}
    return row | {"ratio": ratio(laps["one rank"], laps["ranks"])}


def disagreement(given: Given) -> str:
    """Why out and gradients differ from those of one rank, or ""; the same on every rank."""
    worst = 0.0
    for actual, expected in zip(given.together(), given.alone(), strict=True):
        actual, expected = actual.detach(), expected.detach()
        apart = (actual - distributed.shard(expected, **given.how)).abs().max()
        worst = max(worst, float(apart / expected.abs().max()))
    worst = _most(worst)
    return f"an error of {worst:.2g} of the largest value" if not worst <= TOLERANCE else ""


def _laps(given: Given, seconds: float) -> dict[str, list[float]]:
    """Wall times of the slowest rank. Every rank runs the same number of rounds."""
    sides = {"one rank": given.alone if dist.get_rank() == 0 else list, "ranks": given.together}
    once = sum(_lap(f) for f in sides.values())
    rounds = int(min(ROUNDS[1], max(ROUNDS[0], seconds / once)))
    laps: dict[str, list[float]] = {name: [] for name in sides}
    for at in range(rounds):
        for name in sorted(sides, reverse=at % 2 == 1):
            laps[name].append(_lap(sides[name]))
    return laps


def _lap(f: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    f()
    return _most(time.perf_counter() - start)


def _most(x: float) -> float:
    """The maximum over all ranks, on every rank."""
    found = torch.tensor([float(x)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


class Counted:
    """Count the bytes that this rank sends with torch.distributed inside the block, except int64
    tensors, which belong to the exchange before a call."""

    def __enter__(self) -> Counted:
        self.sent = 0
        self.were = dist.all_to_all_single, dist.batch_isend_irecv
        self._put(self.exchange, self.post)
        return self

    def __exit__(self, *_: Any) -> None:
        self._put(*self.were)

    def _put(self, *functions: Callable[..., Any]) -> None:
        for name, function in zip(("all_to_all_single", "batch_isend_irecv"), functions):
            setattr(dist, name, function)

    def exchange(self, received, sent, coming, going, group=None):
        self._add(sent, sum(going) - going[dist.get_rank(group)])
        return self.were[0](received, sent, coming, going, group=group)

    def post(self, posted):
        for x in posted:
            self._add(x.tensor, x.tensor.numel() if x.op is dist.isend else 0)
        return self.were[1](posted)

    def _add(self, x: Tensor, numbers: int) -> None:
        self.sent += numbers * x.element_size() if x.dtype != torch.int64 else 0


def overlap(given: Given) -> float:
    """The share of a ring's forward transfers that computing hides: 1 - (time that it waits for
    them) / (time that they take without computing). The median of a few rounds."""
    q, k, v, _ = given.own
    (group,) = need_team(None).groups
    arrived = p2p.Hop.arrived
    waited = 0.0

    def waiting(self):
        nonlocal waited
        start = time.perf_counter()
        found = arrived(self)
        waited += time.perf_counter() - start
        return found

    def alone() -> None:
        for _ in range(dist.get_world_size() - 1):
            p2p.Hop((k, v), [tuple(x.shape) for x in (k, v)], group, "keys").arrived()

    shares = []
    for _ in range(ROUNDS[0]):
        taken = _lap(torch.no_grad()(alone))
        waited = 0.0
        with mock.patch.object(p2p.Hop, "arrived", waiting), torch.no_grad():
            given.ours(q, k, v, causal=True)
        shares.append(max(0.0, 1 - _most(waited) / taken))
    return quartiles(shares)["median"]


def _memory(ranks: int, lengths: Sequence[int]) -> Iterator[Record]:
    """Records as in `peak_memory`; the mask names the ranks, the peer is the strategy."""
    release()
    for strategy, group in _strategies(ranks):
        for N in lengths:
            given = Given(N, strategy, group)
            given.together()
            del given.whole
            before = reset_peak()
            results = given.together()
            found = int(_most(max(0, peak_bytes() - before)))
            del results
            row: Record = {"mask": f"causal, {ranks} ranks", "N": N, "dtype": "float32"}
            row |= {"pass": TRAINING, "B": 1, "H": HEADS, "D": DIM, "ranks": ranks}
            yield row | {"peer": strategy, "extra_bytes": found, "error": ""}


# -- the printed lines -----------------------------------------------------------------------------


def line(row: Record) -> str:
    if row["status"] != "ok":
        return f"FAILED: {row['what']}, not timed: {row['reason']}"
    found, ms = row["ratio"], row["ms"]
    hidden = (
        "" if row["overlap"] is None else f"; computing hides {row['overlap']:.0%} of transfers"
    )
    return (
        f"{row['what']}, N = {row['N']}: {found['median']:.2f} [{found['q1']:.2f} "
        f"{found['q3']:.2f}] times as fast as one rank, {ms['ranks']:.1f} and "
        f"{ms['one rank']:.1f} ms (predicted {row['said_ms']:.1f}); "
        f"sends {row['bytes'] / 1e6:.2f} MB (predicted {row['said_bytes'] / 1e6:.2f}){hidden}"
    )


def growth(rows: Sequence[Record]) -> Iterator[str]:
    """Memory with N and P doubled, over memory before: 1 if it falls as 1 / P."""
    found = {(x["peer"], x["N"], x["ranks"]): x["extra_bytes"] for x in rows}
    for (name, N, ranks), small in found.items():
        large = found.get((name, 2 * N, 2 * ranks))
        if large is None or name == "gather":
            continue
        by = large / max(1, small)
        met = "met" if by <= GROWTH else "MISSED"
        yield (
            f"{name}, N = {N} on {ranks} ranks to {2 * N} on {2 * ranks}: {by:.2f} times the "
            f"memory, at most {GROWTH:g}: {met}"
        )
