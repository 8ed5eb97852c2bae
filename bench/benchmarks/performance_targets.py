"""The performance targets of this package, one named row each, compared with measurements.

A row is a race between our call and a rival, which may be another peer, or our own call on another
case, thread count or instruction set. Both are verified before either is timed. Targets are for
one thread unless the row says otherwise. A target in percent of the machine's limit applies to
every machine. The possible speed-up over torch depends on the vector units that torch's products
use, so a target in multiples of torch's speed is set per class of CPU. For half-width AVX-512 and
AVX2, where torch is closer to the machine's limit, it is 85% of the limit measured there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastattn.backends.native import libraries

from ..cases import BACKWARD, BOTH, FORWARD, TRAINING, Case
from ..measure import roofline, run, timing
from ..measure.machine import AMX, FULL, HALF, NARROW
from ..measure.roofline import Limits
from ..measure.verify import Judge
from ..peers.registry import BASELINE, PEERS, SUBJECT, chosen
from . import peak_memory, tiny_call, whole_module

Record = dict[str, Any]
Bound = float | Mapping[str, float]  # one for every class of CPU, or a mapping by class
RATIO, PEAK, READ, MB = "x", "% of peak", "% of read", "MB"
RIVAL = "rival"
SECONDS = 0.5


@dataclass(frozen=True)
class Target:
    """`measure` returns {"measured", "ratio", "percent", "limit", "failed", "reason"}. `measured`
    is in the target's unit, or None, with a reason, if nothing was measured. `failed` means that
    our call gave wrong results. `percent` is our speed relative to `limit`, the machine's nearest
    limit: PEAK or READ."""

    name: str
    bound: Bound
    unit: str
    measure: Callable[[Limits], Record]

    def bound_on(self, kind: str) -> float | None:
        """The aim on this class of CPU, if there is one."""
        if isinstance(self.bound, Mapping):
            return self.bound.get(kind, self.bound.get(HALF) if kind == NARROW else None)
        return self.bound

    @property
    def rule(self) -> str:
        return "at most" if self.unit == MB else "at least"

    def judge(self, limits: Limits, kind: str) -> Record:
        bound = self.bound_on(kind)
        assert bound is not None, (self.name, kind)
        blank = dict.fromkeys(("measured", "ratio", "percent", "limit"))
        found = blank | {"failed": False} | self.measure(limits)
        value = found["measured"]
        sign = -1 if self.rule == "at most" else 1
        met = None if value is None else sign * value >= sign * bound
        row = {"name": self.name, "rule": self.rule, "target": bound, "unit": self.unit}
        return row | found | {"met": met}


def selected(kind: str, names: Sequence[str] = ()) -> list[Target]:
    """Targets of this class of CPU: those with one of `names` in their names, or all."""
    found = [t for t in TARGETS if t.bound_on(kind) is not None]
    return [t for t in found if not names or any(name in t.name for name in names)]


# --------------------------------------------------------------------------------- ways to measure


@dataclass(frozen=True)
class Race:
    """Pass `what` of our call on `case`, against `rival` on `rival_case` (default: `case`)."""

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
        seconds = run.totals(heat.laps[0].samples, self.what)
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
    """The speed-up of two threads over one, by the wall clock."""

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
        seconds = run.totals(heat.laps[0].samples, self.what)
        ratio = run.ratio(seconds[RIVAL], seconds[SUBJECT])["median"]
        return {"measured": ratio, "ratio": ratio, "reason": ""}


def race(contenders: dict[str, run.Contender], what: str, clocks: Any) -> run.Heat:
    cases = dict.fromkeys(contender.case for contender in contenders.values())
    judges = {case: Judge(case, gradients=what != FORWARD) for case in cases}
    return run.race(contenders, what, clocks, SECONDS, judges)


def module(mode: str) -> Callable[[Limits], Record]:
    def measure(limits: Limits) -> Record:
        (found,) = whole_module.measure("cpu", (mode,), threads=(1,))
        if not found["timings"] or BASELINE not in found["timings"][0]["peers"]:
            reason = "; ".join(filter(None, found["reasons"].values()))
            return {"failed": found["status"] != "ok", "reason": reason}
        peers = found["timings"][0]["peers"]
        ratio = peers[BASELINE]["speedup"]["median"]
        peak = limits.gflops("float32", 1)
        gflops = whole_module.flops(mode) / peers[SUBJECT]["median_ms"] / 1e6
        percent = 100 * gflops / peak if peak else None
        return {"measured": ratio, "ratio": ratio, "percent": percent, "limit": PEAK, "reason": ""}

    return measure


def extra_megabytes(limits: Limits) -> Record:
    ours, theirs = peak_memory.measure("cpu")
    if ours["extra_bytes"] is None:
        return {"failed": True, "reason": ours["error"]}
    ratio = theirs["extra_bytes"] and theirs["extra_bytes"] / ours["extra_bytes"]
    return {"measured": ours["extra_bytes"] / 1e6, "ratio": ratio, "reason": ""}


def tiny(what: str) -> Callable[[Limits], Record]:
    def measure(limits: Limits) -> Record:
        found = tiny_call.measure("cpu", chosen("cpu"), (1,))
        peers = next(row["peers"] for row in found["timings"] if row["pass"] == what)
        if SUBJECT not in peers:
            return {"failed": True, "reason": found["errors"][SUBJECT]}
        if BASELINE not in peers:
            return {"reason": found["errors"][BASELINE]}
        ratio = peers[SUBJECT]["speedup"]["median"]
        return {
            "measured": ratio,
            "ratio": ratio,
            "reason": f"{peers[SUBJECT]['median_us']:.1f} us",
        }

    return measure


@contextlib.contextmanager
def instruction_set(name: str) -> Generator[None, None, None]:
    """Use our kernels of one instruction set inside the block; "" changes nothing."""
    if not name:
        yield
        return
    before = libraries.cpu_isa()
    libraries.select_cpu_isa(name)
    try:
        yield
    finally:
        libraries.select_cpu_isa(before)


def isas() -> list[str]:
    return [] if libraries.cpu_unavailable() else libraries.cpu_isas()


def _remeasured(limits: Limits, dtype: str) -> Limits:
    return limits._replace(compute={dtype: {"register_gflops": roofline.register_gflops(dtype)}})


# --------------------------------------------------------------------------------------- the table


def square(dtype: str, mask: str, n: int, d: int = 64, **others: Any) -> Case:
    sizes: dict[str, Any] = {"B": 1, "H": 4 if n <= 1024 else 2} | others
    return Case("cpu", dtype, mask, N=n, D=d, **sizes)


def aim(full: float | None = None, half: float | None = None, amx: float | None = None) -> Bound:
    """Target ratios to torch, by class of CPU."""
    of = {FULL: full, HALF: half, AMX: amx}
    return {kind: least for kind, least in of.items() if least is not None}


def _forward() -> Iterator[Target]:
    for n in (512, 2048):
        for d in (64, 128):
            yield _row(82, PEAK, square("float32", "full", n, d))
            yield _row(75 if n >= 2048 else 60, PEAK, square("float32", "causal", n, d))
        for mask in ("full", "causal"):
            yield _row(72, PEAK, square("bfloat16", mask, n))
    half, single = square("float16", "full", 1024), square("float32", "full", 1024)
    yield _row(aim(full=2.6, half=2.0), RATIO, half)
    yield _row(0.9, RATIO, half, rival=SUBJECT, rival_case=single, note="against float32")
    for d, least in ((24, 1.7), (40, 1.4), (72, 1.25), (80, 1.2)):
        yield _row(aim(full=2.2, half=least), RATIO, square("float32", "full", 1024, d))
    for dtype in BOTH:
        for n, wide, tiles in ((1, 0.67, 0.67), (16, 1.5, 1.0), (64, 1.5, 1.0)):
            case = square(dtype, "full", n, B=2, H=8)
            yield _row(aim(full=wide, half=wide, amx=tiles), RATIO, case)


def _backward() -> Iterator[Target]:
    for n in (512, 2048):
        for mask in ("full", "causal"):
            yield _row(70, PEAK, square("float32", mask, n), BACKWARD)
    yield _row(aim(full=2.5, half=2.1), RATIO, square("bfloat16", "full", 1024), BACKWARD)
    yield _row(aim(full=3.0, half=3.0), RATIO, square("bfloat16", "causal", 1024), BACKWARD)


def _masks() -> Iterator[Target]:
    full, padded, given = (
        square("float32", mask, 2048) for mask in ("full", "padding", "padding mask")
    )
    yield _row(aim(full=3.3, half=1.7), RATIO, padded)
    yield _row(1.3, RATIO, padded, rival=SUBJECT, rival_case=full, note="against full")
    yield _row(0.9, RATIO, given, rival=SUBJECT, rival_case=padded, note="against key_lengths")
    for dense, plain, least in (("full, bool", "full", 0.95), ("causal, float", "causal", 0.8)):
        for dtype, what in itertools.product(BOTH, (FORWARD, TRAINING)):
            given, as_argument = (square(dtype, mask, 2048, H=8) for mask in (dense, plain))
            note = f"against {plain}"
            yield _row(least, RATIO, given, what, note, rival=SUBJECT, rival_case=as_argument)
    for dtype, least in (("float32", 2.8), ("bfloat16", 6.0)):
        yield _row(least, RATIO, square(dtype, "window", 4096), rival="flex")
    yield _row(aim(full=3.0, half=1.4), RATIO, square("float32", "bias", 1024))
    yield _row(aim(full=3.0, half=1.9), RATIO, square("float32", "learned bias", 1024), TRAINING)
    yield _row(aim(full=3.0, half=2.5), RATIO, square("float32", "dropout", 1024), TRAINING)
    yield _row(aim(full=3.0, half=1.2), RATIO, square("float32", "full", 1024, H=8, Hk=2))


def _decode() -> Iterator[Target]:
    for n in (4096, 16384):
        for dtype, heads, least in (
            ("float32", {"H": 8}, 1.8),
            ("bfloat16", {"H": 8}, 8.0),
            ("bfloat16", {"H": 32, "Hk": 8}, 19.0),
        ):
            case = square(dtype, "full", n, 128, M=1, **heads)
            yield _row(aim(full=least, half=least), RATIO, case)
            yield _row(85, READ, case)


def _tiles() -> Iterator[Target]:
    """Targets for CPUs on which torch's products run on AMX tiles."""
    for d, n, full, causal in ((64, 2048, 2.5, 3.0), (128, 2048, 2.0, 2.4), (128, 4096, 1.7, 2.0)):
        yield _row(aim(amx=full), RATIO, square("bfloat16", "full", n, d))
        yield _row(aim(amx=causal), RATIO, square("bfloat16", "causal", n, d))
    for d, full, causal in ((64, 2.0, 2.3), (128, 1.75, 1.9)):
        yield _row(aim(amx=full), RATIO, square("float32", "full", 2048, d))
        yield _row(aim(amx=causal), RATIO, square("float32", "causal", 2048, d))
        for mask in ("full", "causal"):
            yield _row(aim(amx=3.3), RATIO, square("float16", mask, 2048, d))
    for dtype, d, least in (("bfloat16", 64, 4.0), ("bfloat16", 128, 3.0), ("float32", 64, 1.6)):
        yield _row(aim(amx=least), RATIO, square(dtype, "full", 2048, d), BACKWARD)
    yield _row(aim(amx=4.0), RATIO, square("float16", "full", 2048), BACKWARD)
    for mask, what, least in (
        ("padding", FORWARD, 2.5),
        ("bias", FORWARD, 1.5),
        ("dropout", TRAINING, 4.0),
        ("window", FORWARD, 6.0),
    ):
        yield _row(aim(amx=least), RATIO, square("bfloat16", mask, 2048), what)
    for m in (4, 16):
        for heads, least in (({"H": 8}, 1.3), ({"H": 32, "Hk": 8}, 2.0)):
            case = square("bfloat16", "full", 4096, 128, M=m, **heads)
            yield _row(aim(amx=least), RATIO, case)


def _elsewhere() -> Iterator[Target]:
    strided, packed = (square("float32", "full", 1024, strided=x) for x in (True, False))
    yield _row(0.95, RATIO, strided, rival=SUBJECT, rival_case=packed, note="against contiguous")
    for d, least in ((64, 1.1), (128, 1.0)):
        case = square("float32", "full", 2048, d)
        yield _row(aim(full=least, half=least), RATIO, case, isa="avx2")
    case = square("float32", "causal", 2048)
    yield _row(aim(full=1.6, half=1.5), RATIO, case, isa="avx2")
    yield _row(82, PEAK, square("float32", "full", 2048), isa="avx2")
    for h in (4, 1):
        for what in (FORWARD, BACKWARD):
            case = square("float32", "full", 2048, H=h)
            yield Target(f"two threads: {case} {what}", 1.9, RATIO, Scaling(case, what))
    for mode, full, half in (
        ("train", 1.8, 1.25),
        ("eval", 2.4, 1.8),
        ("eval + padding", 4.5, 3.9),
        ("eval + weights", 2.0, 1.8),
    ):
        name = f"nn.MultiheadAttention E512 H8 N2048 {mode}"
        yield Target(name, aim(full=full, half=half), RATIO, module(mode))
    yield Target("extra memory: dropout N4096, forward+backward", 20.0, MB, extra_megabytes)
    for what in (FORWARD, TRAINING):  # at most 1.5 times torch's time
        yield Target(f"a tiny call: B1 H2 N8 D16 float32 {what}", 0.667, RATIO, tiny(what))


def _row(
    bound: Bound, unit: str, case: Case, what: str = FORWARD, note: str = "", **rest: Any
) -> Target:
    against = note or (f"against {rest['rival']}" if "rival" in rest else "")
    words = [str(case), what, against, rest.get("isa", "")]
    return Target(
        " ".join(filter(None, words)) + f" [{unit}]",
        bound,
        unit,
        Race(case, unit, what, **rest),
    )


TARGETS = [*_forward(), *_backward(), *_masks(), *_decode(), *_tiles(), *_elsewhere()]
