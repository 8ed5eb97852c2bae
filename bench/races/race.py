"""A race between a call of ours and another way to the same numbers: both results are compared
before either is timed, in interleaved rounds. Tests compare ours with the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..measure import timing
from ..measure.records import Record, ratio

SECONDS = 0.5
NOTHING: Record = {"ms": {}, "ratio": None, "met": None}
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


class Race(NamedTuple):
    """`ours` and `other` return the same tensors if `same`; else `other` only measures work. `aim`
    is the least other / ours ("at least"), or the most ours / (`share` * other) ("at most").
    `share` is our work over the other's. `tokens`: how many a call makes, if that is what it is
    for."""

    name: str
    dtype: str
    what: str
    ours: Callable[[], Sequence[Tensor]]
    other: Callable[[], Sequence[Tensor]]
    rule: str = "at least"
    aim: float = 1.5
    share: float = 1.0
    same: bool = True
    inner: Callable[[], Any] | None = None  # our call without Python's part: timed if we lose
    tokens: int = 0


def measure(race: Race, seconds: float = SECONDS, threads: int | None = None) -> Record:
    row: Record = {"what": race.name, "dtype": race.dtype, "pass": race.what}
    row |= {"threads": threads or torch.get_num_threads(), "rule": race.rule, "aim": race.aim}
    row |= {"tokens": race.tokens} if race.tokens else {}
    with timing.torch_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about jagged tensors
        if reason := disagreement(race):
            return row | {"status": "failed", "reason": reason} | NOTHING
        clock = timing.THREAD_TIME if threads == 1 else timing.WALL_TIME
        laps = _laps({"ours": race.ours, "other": race.other}, clock, seconds)
        row["others"] = clock.others
        if race.inner is not None and ratio(laps["other"], laps["ours"])["median"] < 1:
            within = _laps({"inner": race.inner, "other": race.other}, clock, seconds)
            row["within"] = ratio(within["other"], within["inner"])["median"]
    ms = {name: 1e3 * timing.quartiles(x)["median"] for name, x in laps.items()}
    if race.rule == "at most":
        found = ratio(laps["ours"], [x * race.share for x in laps["other"]])
        met = found["median"] <= race.aim
    else:
        found = ratio(laps["other"], laps["ours"])
        met = found["median"] >= race.aim
    return row | {"status": "ok", "reason": "", "ms": ms, "ratio": found, "met": met}


def _laps(
    sides: dict[str, Callable[[], Any]], clock: timing.Clock, seconds: float
) -> dict[str, list[float]]:
    programs = {name: (lambda _, f=f: f(),) for name, f in sides.items()}
    samples = timing.interleaved(programs, clock, seconds)
    return {name: [x[0] for x in rounds] for name, rounds in samples.items()}


def disagreement(race: Race) -> str:
    """Why the two results differ, or ""."""
    if not race.same:
        return ""
    actual, expected = race.ours(), race.other()
    # A gradient may be nothing but rounding: of one key, those of q and k are 0.
    least = max(1e-9, *(1e-3 * float(y.double().abs().max()) for y in expected))
    for x, y in zip(actual, expected, strict=True):
        error = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=least)
        if not error <= TOLERANCE[race.dtype]:
            return f"an error of {float(error):.2g} of the largest value"
    return ""
