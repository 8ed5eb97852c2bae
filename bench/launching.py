"""What a call of Triton's kernels costs the CPU before the driver launches: a stub takes launches.

No GPU is needed: Triton takes the stub for the driver of one, compiles as far as its own language,
and calls the stub where it would call the driver.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fastattn.compiled import interpreted

from .aot import SHARED, Absent

ARCHS = (80, 90)  # without, and with tensor descriptors
CALLS = 300
STAGES = ("ttgir", "llir", "ptx", "cubin")  # what would follow Triton's own language
# What those would tell of a kernel; `shared` is the bytes of shared memory.
METADATA = dict(shared=0, tmem_size=None, global_scratch_size=0, global_scratch_align=1)
METADATA |= dict(profile_scratch_size=0, profile_scratch_align=1)
_devices = itertools.count(1000)  # Triton keeps what it compiled by device: each stub has its own


class Stub(Absent):
    """Triton's driver of a GPU of `arch` that does nothing; `launched`, where set, sees launches.

    It gets the compiled kernel's metadata, and what Triton's launcher is given.
    """

    def __init__(self, arch: int):
        super().__init__(arch)
        self.device, self.stream = next(_devices), 0
        self.launched: Callable[..., None] | None = None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED[arch]},
            load_binary=lambda name, *rest: (name, object(), 0, 0, 1024),
            unload_module=lambda module: None,
        )
        self.launcher_cls = self.launcher

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream

    def launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            if self.launched:
                self.launched(metadata, *args)

        return launch


def _stages(backend: Any = None, stages: Any = None, *rest: Any) -> tuple[str, str]:
    """Triton's hook into its passes: there are none after its own language."""

    def skip(name: str, code: Any, metadata: dict[str, Any]) -> Any:
        metadata.update(METADATA | {"name": "kernel"} | metadata)
        return code if name == "ttgir" else b"" if name == "cubin" else ""

    if stages is not None:
        stages.update({name: functools.partial(skip, name) for name in STAGES})
    key = f"stub {METADATA}"
    return key, key


@contextlib.contextmanager
def stubbed(arch: int) -> Generator[Stub]:
    """Inside, the Triton backend takes CPU tensors for those of a stub of a GPU."""
    from triton import knobs
    from triton.runtime import driver

    from fastattn.backends import triton as launcher

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        # Of its own: what is compiled by half is for no other.
        undo.enter_context(mock.patch.dict("os.environ", TRITON_CACHE_DIR=folder))
        stub = Stub(arch)
        for where, name, value in (
            (driver, "_active", stub),
            (knobs.runtime, "add_stages_inspection_hook", _stages),
            (launcher, "architecture", lambda device: arch),
            (launcher, "processors", lambda device: 132),
        ):
            undo.enter_context(mock.patch.object(where, name, value))
        yield stub


def measure(arch: int, calls: int) -> dict[str, float]:
    """Microseconds of CPU time, by call: the median."""
    from fastattn import check, spec
    from fastattn.backends.triton import Triton

    def call(M: int, N: int, Hk: int, **options: Any) -> tuple[Any, Any]:
        sizes = ((8, M), (Hk, N), (Hk, N))
        q, k, v = (torch.zeros(2, heads, n, 64, dtype=torch.bfloat16) for heads, n in sizes)
        t = spec.Tensors(q, k, v)
        return check.describe(t, spec.Options(**options)), t

    backend = Triton()
    kinds = {
        "forward": call(128, 128, 8),
        "forward, causal": call(128, 128, 8, right=0),
        "decode": call(1, 8192, 2),
    }
    with stubbed(arch):
        found = {
            name: median(functools.partial(backend.forward, *x), calls) for name, x in kinds.items()
        }
        s, t = kinds["forward"]
        out, normaliser = backend.forward(s, t)
        given = (s, t, out, normaliser, out, None, ("q", "k", "v"))
        back = functools.partial(backend.backward, *given)
        return found | {"backward": median(back, calls)}


def median(call: Callable[[], Any], calls: int) -> float:
    laps = []
    for _ in range(calls + 20):  # the first compile, and warm up
        start = time.thread_time_ns()
        call()
        laps.append(time.thread_time_ns() - start)
    return sorted(laps[20:])[calls // 2] / 1e3


def lines() -> Iterator[str]:
    """What `measure` finds, as `bench overhead` prints it; why not, without Triton."""
    if importlib.util.find_spec("triton") is None:
        yield "Triton is not installed: its launches are not measured"
        return
    if interpreted():
        yield "Triton's interpreter is on: its launches are not measured"
        return
    yield "Triton: CPU time of a call that has run before, above the driver's launch, in µs:"
    for arch in ARCHS:
        found = measure(arch, CALLS)
        yield f"  sm_{arch}  " + "  ".join(f"{name} {time:.0f}" for name, time in found.items())
