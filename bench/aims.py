"""What this package aims at, one named row a target, held against what is measured now.

A row is a race between our call and a rival, which may be another peer, or our own call on another
case, thread count or instruction set. Both are verified before either is timed. Targets are for
one thread of a CPU with AVX-512 unless the row says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastattn import native

from . import ceilings, modules, peak_memory, run, timing, tiny_call
from .cases import BACKWARD, BOTH, FORWARD, TRAINING, Case
from .ceilings import Limits
from .peers import BASELINE, PEERS, SUBJECT, chosen
from .verify import Judge

Record = dict[str, Any]
RATIO, PEAK, READ, MB, US = "x", "% of peak", "% of read", "MB", "us"
RIVAL = "rival"
SECONDS = 0.5


@dataclass(frozen=True)
class Target:
    """measure returns {"measured", "ratio", "percent", "limit", "failed", "reason"}: measured is in
    the target's unit, None with a reason where nothing was measured, which is a failure where our
    call was wrong. Beside it stand the ratio, and how much that is of the nearest limit of the
    machine, PEAK or READ."""

    name: str
    bound: float
    unit: str
    measure: Callable[[Limits], Record]

    @property
    def rule(self) -> str:
        return "at most" if self.unit in (MB, US) else "at least"

    def judge(self, limits: Limits) -> Record:
        blank = dict.fromkeys(("measured", "ratio", "percent", "limit"))
        found = blank | {"failed": False} | self.measure(limits)
        value = found["measured"]
        sign = -1 if self.rule == "at most" else 1
        met = None if value is None else sign * value >= sign * self.bound
        row = {"name": self.name, "rule": self.rule, "target": self.bound, "unit": self.unit}
        return row | found | {"met": met}


def selected(names: Sequence[str] = ()) -> list[Target]:
    """Every target whose name contains one of `names`, or all."""
    return [t for t in TARGETS if not names or any(name in t.name for name in names)]


# --------------------------------------------------------------------------------- ways to measure


@dataclass(frozen=True)
class Race:
    """Our call of `what` on `case` against `rival` on `rival_case` (the same by default)."""

    case: Case
    unit: str
    what: str = FORWARD
    rival: str = BASELINE
    rival_case: Case | None = None
    isa: str = ""

    def __call__(self, limits: Limits) -> Record:
        if self.isa and self.isa not in isas():
            return {"reason": f"this machine has no {self.isa} kernels"}
        around = functools.partial(instruction_set, self.isa)
        rival_case = self.rival_case or self.case
        contenders = {
            SUBJECT: run.Contender(PEERS[SUBJECT], self.case, around),
            RIVAL: run.Contender(PEERS[self.rival], rival_case),
        }
        heat = race(contenders, self.what, [(1, timing.THREAD_TIME)])
        if not heat.laps:
            return {"failed": True, "reason": heat.verdicts[SUBJECT].reason}
        with around():
            limits = limits if not self.isa else _remeasured(limits, self.case.dtype)
        seconds = run.totals(heat.laps[0][2], self.what)
        figures = run.figures(self.case, self.what, 1, seconds[SUBJECT], limits)
        percents = {PEAK: figures["percent_of_peak"], READ: figures["percent_of_read"]}
        nearest = max(percents, key=lambda limit: percents[limit] or 0)
        limit = self.unit if self.unit in percents else nearest
        ratio = None
        if RIVAL in seconds:
            ratio = run.ratio(seconds[RIVAL], seconds[SUBJECT])["median"]
        measured = ratio if self.unit == RATIO else percents[limit]
        reason = "" if measured is not None else heat.verdicts[RIVAL].reason or "no limit measured"
        found = {"measured": measured, "ratio": ratio, "reason": reason}
        if self.rival == SUBJECT:  # the same limits hold for both
            return found
        return found | {"percent": percents[limit], "limit": limit}


@dataclass(frozen=True)
class Scaling:
    """How many times as fast all threads are as one, by the wall clock."""

    case: Case
    what: str = FORWARD

    def __call__(self, limits: Limits) -> Record:
        if torch.get_num_threads() < 2:
            return {"reason": "this machine has one thread"}
        contenders = {
            name: run.Contender(
                PEERS[SUBJECT], self.case, functools.partial(timing.torch_threads, count)
            )
            for name, count in ((SUBJECT, 2), (RIVAL, 1))
        }
        heat = race(contenders, self.what, [(None, timing.WALL_TIME)])
        if wrong := next((x.reason for x in heat.verdicts.values() if x.reason), ""):
            return {"failed": True, "reason": wrong}
        seconds = run.totals(heat.laps[0][2], self.what)
        ratio = run.ratio(seconds[RIVAL], seconds[SUBJECT])["median"]
        return {"measured": ratio, "ratio": ratio, "reason": ""}


def race(contenders: dict[str, run.Contender], what: str, clocks: Any) -> run.Heat:
    cases = dict.fromkeys(contender.case for contender in contenders.values())
    judges = {case: Judge(case, gradients=what != FORWARD) for case in cases}
    return run.race(contenders, what, clocks, SECONDS, judges)


def module(mode: str) -> Callable[[Limits], Record]:
    def measure(limits: Limits) -> Record:
        (found,) = modules.measure("cpu", (mode,), threads=(1,))
        if not found["timings"] or BASELINE not in found["timings"][0]["peers"]:
            reason = "; ".join(filter(None, found["reasons"].values()))
            return {"failed": found["status"] != "ok", "reason": reason}
        peers = found["timings"][0]["peers"]
        ratio = peers[BASELINE]["speedup"]["median"]
        peak = limits.gflops("float32", 1)
        gflops = modules.flops(mode) / peers[SUBJECT]["median_ms"] / 1e6
        percent = 100 * gflops / peak if peak else None
        return {"measured": ratio, "ratio": ratio, "percent": percent, "limit": PEAK, "reason": ""}

    return measure


def extra_megabytes(limits: Limits) -> Record:
    ours, theirs = peak_memory.measure("cpu")
    if ours["extra_bytes"] is None:
        return {"failed": True, "reason": ours["error"]}
    ratio = theirs["extra_bytes"] and theirs["extra_bytes"] / ours["extra_bytes"]
    return {"measured": ours["extra_bytes"] / 1e6, "ratio": ratio, "reason": ""}


def call_microseconds(limits: Limits) -> Record:
    found = tiny_call.measure("cpu", chosen("cpu"))
    us = {name: row["median_us"] for name, row in found["timings"][0]["peers"].items()}
    if SUBJECT not in us:
        return {"failed": True, "reason": found["errors"][SUBJECT]}
    ratio = us[BASELINE] / us[SUBJECT] if BASELINE in us else None
    return {"measured": us[SUBJECT], "ratio": ratio, "reason": ""}


@contextlib.contextmanager
def instruction_set(name: str) -> Generator[None, None, None]:
    """Our kernels of one instruction set inside the block; "" leaves them."""
    if not name:
        yield
        return
    before = native.cpu_isa()
    native.select_cpu_isa(name)
    try:
        yield
    finally:
        native.select_cpu_isa(before)


def isas() -> list[str]:
    return [] if native.cpu_unavailable() else native.cpu_isas()


def _remeasured(limits: Limits, dtype: str) -> Limits:
    return limits._replace(compute={dtype: {"register_gflops": ceilings.register_gflops(dtype)}})


# --------------------------------------------------------------------------------------- the table


def square(dtype: str, mask: str, n: int, d: int = 64, **others: Any) -> Case:
    sizes: dict[str, Any] = {"B": 1, "H": 4 if n <= 1024 else 2} | others
    return Case("cpu", dtype, mask, N=n, D=d, **sizes)


def _forward() -> Iterator[Target]:
    for n in (512, 2048):
        for d in (64, 128):
            yield _row(82, PEAK, square("float32", "full", n, d))
            yield _row(75 if n >= 2048 else 60, PEAK, square("float32", "causal", n, d))
        for mask in ("full", "causal"):
            yield _row(72, PEAK, square("bfloat16", mask, n))
    half, single = square("float16", "full", 1024), square("float32", "full", 1024)
    yield _row(2.6, RATIO, half)
    yield _row(0.9, RATIO, half, rival=SUBJECT, rival_case=single, note="against float32")
    for d in (24, 40, 72, 80):
        yield _row(2.2, RATIO, square("float32", "full", 1024, d))
    for dtype in BOTH:
        for n in (1, 16, 64):
            yield _row(1.5, RATIO, square(dtype, "full", n, B=2, H=8))


def _backward() -> Iterator[Target]:
    for n in (512, 2048):
        for mask in ("full", "causal"):
            yield _row(70, PEAK, square("float32", mask, n), BACKWARD)
    yield _row(2.5, RATIO, square("bfloat16", "full", 1024), BACKWARD)
    yield _row(3.0, RATIO, square("bfloat16", "causal", 1024), BACKWARD)


def _masks() -> Iterator[Target]:
    full, padded, given = (
        square("float32", mask, 2048) for mask in ("full", "padding", "padding mask")
    )
    yield _row(3.3, RATIO, padded)
    yield _row(1.3, RATIO, padded, rival=SUBJECT, rival_case=full, note="against full")
    yield _row(0.9, RATIO, given, rival=SUBJECT, rival_case=padded, note="against key_lengths")
    for dtype, least in (("float32", 2.8), ("bfloat16", 6.0)):
        yield _row(least, RATIO, square(dtype, "window", 4096), rival="flex")
    yield _row(3.0, RATIO, square("float32", "bias", 1024))
    yield _row(3.0, RATIO, square("float32", "learned bias", 1024), TRAINING)
    yield _row(3.0, RATIO, square("float32", "dropout", 1024), TRAINING)
    yield _row(3.0, RATIO, square("float32", "full", 1024, H=8, Hk=2))


def _decode() -> Iterator[Target]:
    for n in (4096, 16384):
        for dtype, heads, least in (
            ("float32", {"H": 8}, 1.8),
            ("bfloat16", {"H": 8}, 8.0),
            ("bfloat16", {"H": 32, "Hk": 8}, 19.0),
        ):
            case = square(dtype, "full", n, 128, M=1, **heads)
            yield _row(least, RATIO, case)
            yield _row(85, READ, case)


def _elsewhere() -> Iterator[Target]:
    strided, packed = (square("float32", "full", 1024, strided=x) for x in (True, False))
    yield _row(0.95, RATIO, strided, rival=SUBJECT, rival_case=packed, note="against contiguous")
    for d, least in ((64, 1.1), (128, 1.0)):
        yield _row(least, RATIO, square("float32", "full", 2048, d), isa="avx2")
    yield _row(1.6, RATIO, square("float32", "causal", 2048), isa="avx2")
    yield _row(82, PEAK, square("float32", "full", 2048), isa="avx2")
    for h in (4, 1):
        for what in (FORWARD, BACKWARD):
            case = square("float32", "full", 2048, H=h)
            yield Target(f"two threads: {case} {what}", 1.9, RATIO, Scaling(case, what))
    for mode, least in (
        ("train", 1.8),
        ("eval", 2.4),
        ("eval + padding", 4.5),
        ("eval + weights", 2.0),
    ):
        yield Target(f"nn.MultiheadAttention E512 H8 N2048 {mode}", least, RATIO, module(mode))
    yield Target("extra memory: dropout N4096, forward+backward", 20.0, MB, extra_megabytes)
    yield Target("overhead of a tiny call", 12.0, US, call_microseconds)


def _row(
    bound: float, unit: str, case: Case, what: str = FORWARD, note: str = "", **rest: Any
) -> Target:
    against = note or (f"against {rest['rival']}" if "rival" in rest else "")
    words = [str(case), what, against, rest.get("isa", "")]
    return Target(
        " ".join(filter(None, words)) + f" [{unit}]",
        bound,
        unit,
        Race(case, unit, what, **rest),
    )


TARGETS = [*_forward(), *_backward(), *_masks(), *_decode(), *_elsewhere()]
