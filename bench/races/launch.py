"""The CPU time of a GPU call before the driver's launch, measured with a stub of the driver.

No GPU is needed: tests/support/launch_stub.py. Two costs are not measured: our own library, which
does some arithmetic and two queries of CUDA's runtime; and torch's allocation of GPU memory, which
is slower than that of CPU memory.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ARCHS = (80, 90)  # without, and with tensor descriptors
CALLS = 300


def measure(backend: Any, calls: int) -> dict[str, float]:
    """Median CPU time of each kind of call, in microseconds."""
    from fastattn.call import spec, validation

    def call(M: int, N: int, Hk: int, **options: Any) -> tuple[Any, Any]:
        sizes = ((8, M), (Hk, N), (Hk, N))
        q, k, v = (torch.zeros(2, heads, n, 64, dtype=torch.bfloat16) for heads, n in sizes)
        t = spec.Tensors(q, k, v)
        return validation.describe(t, spec.Options(**options)), t

    kinds = {
        "forward": call(128, 128, 8),
        "forward, causal": call(128, 128, 8, right=0),
        "decode": call(1, 8192, 2),
    }
    found = {
        name: median(functools.partial(backend.forward, *x), calls) for name, x in kinds.items()
    }
    s, t = kinds["forward"]
    outs = backend.forward(s, t)
    given = (s, t, outs, (outs[0], None), ("q", "k", "v"))
    return found | {"backward": median(functools.partial(backend.backward, *given), calls)}


def median(call: Callable[[], Any], calls: int) -> float:
    laps = []
    for _ in range(calls + 20):  # the first 20 compile and warm up
        start = time.thread_time_ns()
        call()
        laps.append(time.thread_time_ns() - start)
    return sorted(laps[20:])[calls // 2] / 1e3


def lines(save: bool = False) -> Iterator[str]:
    """The figures of `measure`, or why there are none."""
    yield "CPU time of a call that has run before, above the driver's launch, in µs:"
    yield from (f"  {name:13} {value}" for name, value in (("CUDA", _cuda()), *_triton()))


def _cuda() -> str:
    from tests.support import launch_stub as stub

    with tempfile.TemporaryDirectory() as folder:
        try:
            library = stub.compiled_stub(Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            return f"not measured: {error}"
        return _formatted(measure(stub.cuda_backend(library), CALLS))


def _triton() -> Iterator[tuple[str, str]]:
    from fastattn.backends.triton.backend import Triton
    from tests.support import launch_stub as stub

    if why := stub.why_no_triton():
        yield "Triton", f"not measured: {why}"
        return
    for arch in ARCHS:
        with stub.stubbed(arch):
            yield f"Triton, sm_{arch}", _formatted(measure(Triton(), CALLS))


def _formatted(found: dict[str, float]) -> str:
    return "  ".join(f"{name} {time:.1f}" for name, time in found.items())
