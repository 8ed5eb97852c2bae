"""Helpers for the tests of the benchmark harness: tiny runs, on a machine with known limits."""

from __future__ import annotations

import pytest

from bench.cases import PASSES, Case
from bench.measure import roofline, run, timing
from bench.peers import registry

LIMITS = roofline.Limits(
    "cpu",
    {"float32": {"register_gflops": 100.0, "matmul_gflops": 90.0}},
    [{"threads": 1, "bytes": 1 << 19, "read_gbs": 20.0, "copy_gbs": 20.0}],
)
SECONDS = 0.002


def case(mask: str = "full", dtype: str = "float32", **sizes) -> Case:
    return Case("cpu", dtype, mask, **{"B": 1, "H": 4, "N": 40, "D": 16} | sizes)


def cells(*cases: Case, passes=PASSES, names=(registry.BASELINE,), threads=(1,)) -> list[dict]:
    plan = run.Plan(passes, registry.chosen("cpu", names), LIMITS, SECONDS, threads)
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        return list(run.cells(cases, plan))


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Take the fewest samples possible, each too short to mean anything."""
    patch.setattr(timing, "MIN_SAMPLE_S", 1e-4)
    patch.setattr(timing, "ROUNDS", (2, 2))


def know_ceilings(patch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the machine's limits, which takes seconds, by fixed numbers."""
    dtypes = ("float32", "bfloat16", "float16")
    compute = dict.fromkeys(dtypes, LIMITS.compute["float32"])
    known = LIMITS._replace(compute=compute)._asdict()
    patch.setattr(roofline, "measure", lambda device, dtypes: known)
