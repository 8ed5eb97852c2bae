"""Checks of a machine with a GPU, before anything is tested or timed on it: `make gpu` runs them.

    python -m bench.measure.first_contact NAME [--rehearse]

Each looks for one cause of lost hours on a machine that is new to fastattn, in some seconds. It
prints what it found; the status is 1 if the machine or this package does not do what the rest of
the hour relies on. A rehearsal does the same on the CPU, as far as that can.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from fastattn.backends.triton import launch_cache

from . import isolated_process, machine, nvidia, timing
from .isolated_process import Died, Process, Raised

SECONDS = 60  # of a check, a few of them where no other process has the cores
LAUNCHES = 30  # of a phase that takes the host longer than the device
MOST_GAPS = 2.0  # what DeviceClock may measure, as a multiple of the same kernels in a graph


class Wrong(Exception):
    """What a check found wrong, and what to do."""


Check = Callable[
    [str], Iterator[str]
]  # of a device, "cuda" or in a rehearsal "cpu"; lines to print


def launcher(device: str) -> Iterator[str]:
    """Triton compiles C code with Python.h to call the driver. Without both, it runs nothing."""
    if why := launch_cache.launcher_unavailable():
        raise Wrong(f"{why}. The backend cuda runs without it")
    yield "a C compiler and Python.h are there, or what Triton made of them"


def driver(device: str) -> Iterator[str]:
    """A driver that torch's build cannot use leaves a silent benchmark of the CPU."""
    if why := nvidia.unusable():
        raise Wrong(why)
    yield f"torch {torch.__version__}, built for {torch.version.cuda or 'no CUDA'}"
    if device == "cuda":
        name, capability, here = isolated_process.once(_about)
        version = nvidia.driver_version() or "of unknown version"
        yield f"{name}, compute capability {capability}, driver {version}"
        if not here:
            raise Wrong(
                f"got torch for {torch.cuda.get_arch_list()}, expected code for {capability}: "
                "install a build of torch for this GPU"
            )


def versions(device: str) -> Iterator[str]:
    """An environment that is used as it is may have packages that are too old."""
    command = [sys.executable, str(machine.ROOT / ".ci" / "preflight.py"), "--as-is"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Wrong(done.stderr.strip())
    yield from done.stderr.splitlines()  # what a part of fastattn lacks
    yield ", ".join(f"{name} {x}" for name, x in machine.versions().items())


def processes(device: str) -> Iterator[str]:
    """In exclusive compute mode one process at a time has the GPU: parents leave it to children."""
    yield f"compute mode: {_compute_mode()}"
    for _ in range(2):
        try:
            isolated_process.once(_use, device)
        except Raised as error:
            raise Wrong(
                f"a process {error}: nvidia-smi lists the processes that hold the GPU; end them, "
                "or allow several: nvidia-smi --compute-mode 0"
            ) from None
    yield "two processes used it, one after the other"


def memory(device: str) -> Iterator[str]:
    """A case that is too large is reported, and the next one runs in the same process."""
    with Process() as process:
        before = process.call(os.getpid)
        try:
            process.call(_use_too_much, device)
        except Raised as error:
            yield f"a process {error}"
        else:
            raise Wrong("got memory that no machine has, expected an error of its allocation")
        process.call(_use, device)
        if process.call(os.getpid) != before:
            raise Wrong("the process ended with the allocation, expected it to go on")
    yield "it ran the next case"


def fault(device: str) -> Iterator[str]:
    """After an illegal access a process cannot use its GPU: the rest runs in another."""
    with Process() as process:
        before = process.call(os.getpid)
        try:
            process.call(_fail, device)
        except Died as error:
            yield f"a process was lost: {error}"
        else:
            raise Wrong("got a result, expected the process to be lost by a fault")
        process.call(_use, device)
        if process.call(os.getpid) == before:
            raise Wrong("got the same process again, expected another")
    yield "another one ran the next case"


def clock(device: str) -> Iterator[str]:
    """Where the host is slower than the kernels, events must not time the gaps between these."""
    if device == "cpu":
        raise Wrong("got the CPU, expected a GPU; tests/bench/test_first_contact.py simulates one")
    x = torch.zeros(1, device=device)

    def launches(_: Any = None) -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    yield from gaps(torch.cuda, time.perf_counter, launches, lambda _: graph.replay())


def gaps(
    cuda: Any, now: Callable[[], float], launches: Callable[..., Any], replay: Callable[..., Any]
) -> Iterator[str]:
    """A line with the time of the same kernels by four clocks. `replay` launches them at once.
    Raises Wrong if DeviceClock times more than the kernels."""
    measured = timing.DeviceClock(cuda, now)
    for _ in range(3):
        (of_clock,) = measured.sample((launches,), 5)
    of_graph = _between_events(cuda, replay, measured.cycles)
    of_events = _between_events(cuda, launches, 0)
    (host,) = measured.host((launches,))
    names = ("DeviceClock", "a graph", "events alone", "the host")
    found = zip(names, (of_clock, of_graph, of_events, host), strict=True)
    yield f"{LAUNCHES} launches in us: " + ", ".join(f"{n} {x * 1e6:.1f}" for n, x in found)
    if of_clock > MOST_GAPS * of_graph:
        raise Wrong(
            f"got {of_clock / of_graph:.1f} times the graph's time, expected at most {MOST_GAPS}: "
            "timing.SLEEP is too short for this host, and times of short calls have gaps in them"
        )


def _between_events(cuda: Any, run: Callable[..., Any], cycles: float) -> float:
    """The median of five runs, each behind a sleep of 5 ms if `cycles`, those of a second, are
    given."""
    found = []
    for _ in range(5):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        if cycles:
            cuda._sleep(int(0.005 * cycles))
        begin.record()
        run(None)
        end.record()
        cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


CHECKS: dict[str, Check] = {
    x.__name__: x for x in (driver, launcher, versions, processes, memory, fault, clock)
}


# -- in a process of their own -------------------------------------------------------------------


def _about() -> tuple[str, str, bool]:
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    try:
        _use("cuda")
    except RuntimeError:  # no kernel image is available
        return name, f"{major}.{minor}", False
    return name, f"{major}.{minor}", True


def _use(device: str) -> float:
    return torch.ones(1000, device=device).sum().item()


def _use_too_much(device: str) -> None:
    torch.ones(1 << 50, dtype=torch.int8, device=device)


def _fail(device: str) -> None:
    if device == "cpu":
        os.kill(os.getpid(), signal.SIGSEGV)
    torch.ones(10, device=device)[torch.tensor([1 << 40], device=device)]
    torch.cuda.synchronize()


def _compute_mode() -> str:
    query = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown, as nvidia-smi does not run"
    return done.stdout.strip().replace("\n", ", ") or "unknown"


# -- running one -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _at_most(seconds: int) -> Generator[None, None, None]:
    def late(*about: Any) -> None:
        raise Wrong(f"got no result in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=tuple(CHECKS))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    options = parser.parse_args(arguments)
    try:
        with _at_most(SECONDS):
            for line in CHECKS[options.name]("cpu" if options.rehearse else "cuda"):
                print(line, flush=True)
    except (Wrong, Died, Raised) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Other processes import this module by its name, and find its functions there.
    from bench.measure import first_contact

    sys.exit(first_contact.main())
