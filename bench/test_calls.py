"""The ten most important calls for pytest-benchmark, to compare a change with the one before.

    python -m pytest bench/test_calls.py --benchmark-autosave
    python -m pytest bench/test_calls.py --benchmark-compare --benchmark-compare-fail=median:5%

`python -m bench` compares with torch. Each call is verified first. None is part of `make test`,
because the fixtures there fill memory with NaN, which changes the time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.cases import FORWARD, TRAINING, Case
from bench.measure import run, timing
from bench.measure.verify import Judge
from bench.peers.registry import PEERS, SUBJECT

pytest.importorskip("pytest_benchmark")

SIZES = {"B": 1, "H": 4, "N": 512, "D": 64}
CALLS = {
    "float32 forward": (FORWARD, "float32", "full", {}),
    "float32 forward causal": (FORWARD, "float32", "causal", {}),
    "float32 training": (TRAINING, "float32", "full", {}),
    "float32 training causal": (TRAINING, "float32", "causal", {}),
    "bfloat16 forward": (FORWARD, "bfloat16", "full", {}),
    "bfloat16 training": (TRAINING, "bfloat16", "full", {}),
    "padding": (FORWARD, "float32", "padding", {}),
    "window": (FORWARD, "float32", "window", {}),
    "dropout training": (TRAINING, "float32", "dropout", {}),
    "decode": (FORWARD, "bfloat16", "full", {"M": 1, "H": 32, "Hk": 8, "D": 128}),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name, benchmark):
    what, dtype, mask, sizes = CALLS[name]
    shape: dict[str, Any] = SIZES | sizes
    case = Case("cpu", dtype, mask, **shape)
    judge = Judge(case, gradients=what != FORWARD)
    assert judge(PEERS[SUBJECT], what).reason == ""
    phases = run.program(run.Contender(PEERS[SUBJECT], case), what, judge.oracle.inputs)

    def call():
        value = None
        for phase in phases:
            value = phase(value)

    with timing.torch_threads(1), torch.set_grad_enabled(what != FORWARD):
        benchmark(call)
