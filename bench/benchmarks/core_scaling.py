"""Simulate calls on the cores of servers, from times of tasks that one core here measured.

`python -m bench scaling` prints the page that `core_scaling.json` gives, which `--measure` writes:
the tasks of each call in `CALLS` for each number of threads, and real runs on this machine's
threads, beside which the simulation stands. `page` is results/cpu-scaling.txt.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastattn.backends.native import libraries
from fastattn.backends.native.cpu import Cpu

from ..measure import machine, timing
from ..reporting import simulated_page
from .scheduler import MACHINES, TURIN, TWO_GENOA, Machine, Result, Tasks, run
from .task_times import Call, Phase, Runs, least_of

MEASURED = Path(__file__).with_name("core_scaling.json")
PAGE, PICTURE = "cpu-scaling.txt", "cpu-scaling.png"
THREADS = (1, 2, 8, 16, 32, 64, 96, 128, 192)


def decoding(H: int, N: int, B: int = 1, dtype: torch.dtype = torch.float32) -> Call:
    return Call("forward", B, H, 8, 1, N, 128, dtype=dtype)


def _long(what: str, N: int) -> Call:
    return Call(what, 1, 32, 8, N, N, 128, causal=True)


def _bert(what: str, B: int) -> Call:
    return Call(what, B, 12, 12, 128, 128, 64)


# float32, D = 128 and 32 heads on 8, causal; BERT's are 12 heads of D = 64, N = 128.
CALLS = {
    **{f"prefill, N {n}": _long("forward", n) for n in (512, 2048)},
    **{f"BERT, B {b}": _bert("forward", b) for b in (1, 8, 32)},
    **{f"decode, 8 heads on 8, {n >> 10}k": decoding(8, n) for n in (2048, 8192, 1 << 17)},
    **{
        f"decode, 32 heads on 8, {n >> 10}k": decoding(32, n)
        for n in (2048, 8192, 1 << 15, 1 << 17)
    },
    "decode, 32 heads on 8, 8k, bfloat16": decoding(32, 8192, dtype=torch.bfloat16),
    "decode, 32 heads on 8, 4k, B 32": decoding(32, 4096, 32),
    **{f"backward, N {n}": _long("backward", n) for n in (512, 2048)},
    "backward, BERT, B 8": _bert("backward", 8),
}
# Chunks of fewer keys, each alone.
SHORT = {n: decoding(8, n) for n in (128, 256, 512)}
# Beside real runs here: short calls, of which the quickest of many runs is that of an idle machine.
VALIDATED = {
    "BERT, B 1": _bert("forward", 1),
    "BERT, B 4": _bert("forward", 4),
    "prefill, N 128": _long("forward", 128),
    "decode, 8 heads on 8, 2k": decoding(8, 2048),
    "decode, 32 heads on 8, 4k": decoding(32, 4096),
    "backward, BERT, B 1": _bert("backward", 1),
}
BUDGET = 1.5  # seconds to time a plan; four times as long beside real runs
Record = Mapping[str, Any]

# -- measured on this machine ----------------------------------------------------------------------


def measure() -> Record:
    """The contents of core_scaling.json."""
    found: dict[str, Any] = {
        "machine": machine.describe("cpu")["cpu"]["model"],
        "isa": libraries.cpu_isa(),
        "short": {str(n): _plans(Runs(call), (1,)) for n, call in SHORT.items()},
        "validated": {name: _validated(Runs(call)) for name, call in VALIDATED.items()},
    }
    found["calls"] = {name: _plans(Runs(call), THREADS) for name, call in CALLS.items()}
    return found


def _plans(runs: Runs, threads: Sequence[int]) -> list[dict[str, Any]]:
    """The plans of these numbers of threads; several may have one plan."""
    same: dict[tuple[int, ...], list[int]] = {}
    for n in threads:
        same.setdefault(tuple(runs.counts(n)), []).append(n)
    return [
        {"threads": each, "phases": [_rounded(x) for x in runs.phases(each[0], BUDGET)]}
        for each in same.values()
    ]


def _rounded(phase: Phase) -> dict[str, Any]:
    return {"tasks": phase.tasks, "us": [float(f"{1e6 * x:.4g}") for x in phase.seconds]}


def _validated(runs: Runs) -> dict[str, Any]:
    """Tasks and real runs on one and on two threads in turn, so that load affects them alike: the
    least microseconds of each."""
    backend, begin = Cpu(), time.perf_counter()
    awake = Runs(Call("forward", 4, 8, 8, 64, 64, 64))  # its threads wait for the next call
    rounds: dict[str, list[float]] = {"1": [], "2": []}
    timed: list[list[Phase]] = []
    while len(timed) < 3 or time.perf_counter() - begin < 4 * BUDGET:
        timed.append(runs.phases(2, 0.0, least=1))
        for threads in (1, 2):
            runs.flush()
            with timing.torch_threads(threads):
                awake.run(backend)
                start = time.perf_counter()
                runs.run(backend)
                rounds[str(threads)].append(1e6 * (time.perf_counter() - start))
    phases = [_rounded(x) for x in least_of(timed)]
    return {"phases": phases, "us": {n: round(min(x), 1) for n, x in rounds.items()}}


# -- simulated -------------------------------------------------------------------------------------


def read(path: Path = MEASURED) -> Record:
    return json.loads(path.read_text())


def phases_of(plans: Sequence[Record], threads: int) -> list[Phase]:
    """The plan of the greatest number of threads that is no more."""
    best = max((n, i) for i, x in enumerate(plans) for n in x["threads"] if n <= threads)[1]
    return [_phase(x) for x in plans[best]["phases"]]


def _phase(record: Record) -> Phase:
    return Phase(record["tasks"], [1e-6 * x for x in record["us"]])


def tasks_of(call: Call, phases: Sequence[Phase]) -> list[Tasks]:
    """Phases with the bytes that they move and the order that they keep."""
    each = [x.each() for x in phases]
    if call.M == 1:  # the merge reads what chunks left in caches
        return [Tasks(x, call.bytes if i == 0 else 0.0) for i, x in enumerate(each)]
    all_seconds = sum(map(sum, each))
    found = [Tasks(x, call.bytes * sum(x) / all_seconds) for x in each]
    if call.what == "backward":  # prepare; keys, which add to dQ in turn; dQ or sums of segments
        tiles = phases[0].tasks // (call.B * call.H)
        chunks = -(-call.N // 128)
        segments = phases[1].tasks // (chunks * call.B * call.Hk)
        steps = max(1, tiles * (call.H // call.Hk) // segments)
        lag = max(each[1]) / steps
        found[1] = found[1]._replace(chain=phases[1].tasks // chunks, lag=lag)
    return found


def simulate(
    record: Record, name: str, where: Machine, placement: str = "local", all_threads: bool = False
) -> Result:
    """all_threads: wake threads whatever the work of the call is."""
    call = CALLS[name]
    tasks = tasks_of(call, phases_of(record["calls"][name], where.cores))
    return run(tasks, where, math.inf if all_threads else call.work, placement)


def validated(record: Record, name: str, threads: int) -> float:
    """Simulated over measured seconds on the machine that measured. Two cores do not exhaust
    its memory."""
    call, found = VALIDATED[name], record["validated"][name]
    here = Machine(record["machine"], threads, 1, math.inf)
    result = run(tasks_of(call, [_phase(x) for x in found["phases"]]), here, call.work)
    return result.seconds / (1e-6 * found["us"][str(threads)])


def chunked(record: Record, H: int, N: int, keys: int) -> list[Tasks]:
    """Decoding with chunks of another number of keys. The time of a chunk is linear in its keys, by
    the times of short calls; that of a merge in its chunks."""
    call, parts = decoding(H, N), -(-N // keys)
    few, many = (
        statistics.mean(phases_of(record["short"][str(n)], 1)[0].each()) for n in (128, 512)
    )
    fixed = max(0.0, few - (many - few) / 3)
    plan = phases_of(record["calls"][f"decode, {H} heads on 8, {N >> 10}k"], 1)
    chunk = (statistics.mean(plan[0].each()) - fixed) * keys / 512 + fixed
    longest = phases_of(record["calls"][f"decode, {H} heads on 8, 128k"], 1)[1]
    merge = statistics.median(longest.seconds) * parts / 256
    return [Tasks([chunk] * (8 * parts), call.bytes), Tasks([max(merge, 5e-7)] * H)]


def show(options: argparse.Namespace) -> int:
    if options.measure:
        MEASURED.write_text(json.dumps(measure(), separators=(",", ":")) + "\n")
    record = read()
    drawn = functools.partial(draw, record=record)
    simulated_page.show(options, page(record), drawn, PAGE, PICTURE)
    return 0


# -- the page --------------------------------------------------------------------------------------


def page(record: Record) -> str:
    lines = [
        "# python -m bench scaling: simulated from times of tasks that one core measured, of",
        f"# {record['machine']}, {record['isa']}, float32. No server ran this.",
        "# bench/benchmarks/scheduler.py has the model and its constants. Cores are as fast as",
        "# this one. idle: the share of the cores' time without a task. bound: the limit that",
        "# alone takes longest: compute; memory; tasks, the longest or those in turn; threads,",
        "# those that the library wakes for the call's work; wake. One row's keys are in no cache.",
        "",
        "Beside real runs on this machine: simulated over measured, the quickest of many runs",
        f"{'':28}{'one thread':>12}{'two':>8}",
    ]
    for name in VALIDATED:
        ratios = (validated(record, name, n) for n in (1, 2))
        lines.append(f"{name:28}" + "".join(f"{x:>{w}.2f}" for x, w in zip(ratios, (12, 8))))
    for where in MACHINES:
        lines += ["", *_table(record, where)]
    lines += ["", *_chunks(record), "", *_placements(record)]
    return "\n".join(x.rstrip() for x in lines) + "\n"


def _table(record: Record, where: Machine) -> Iterator[str]:
    rate = where.memory() / 1e9
    yield f"{where.name}: {rate:.0f} GB/s sustained"
    yield f"{'':38}{'one core':>12}{'all':>11}{'times':>7}{'efficiency':>12}{'idle':>6}  bound"
    for name in CALLS:
        one, all_cores = simulate(record, name, where.with_cores(1)), simulate(record, name, where)
        times = one.seconds / all_cores.seconds
        yield (
            f"{name:38}{1e3 * one.seconds:>9.2f} ms{1e6 * all_cores.seconds:>8.0f} us{times:>7.1f}"
            f"{times / where.cores:>12.0%}{all_cores.imbalance:>6.0%}  {all_cores.bound}"
        )


def _chunks(record: Record) -> Iterator[str]:
    sizes = 128, 256, 512, 1024
    yield "Decoding one row, chunks of other numbers of keys: us on all cores (512 is in use)"
    yield f"{'':42}" + "".join(f"{x:>8}" for x in sizes)
    for where in MACHINES[:-1]:
        for H, N in ((8, 2048), (8, 8192), (32, 2048), (32, 8192), (32, 1 << 17)):
            times = (run(chunked(record, H, N, n), where, decoding(H, N).work) for n in sizes)
            name = f"{where.cores} cores, {H} heads on 8, {N >> 10}k"
            yield f"{name:42}" + "".join(f"{1e6 * x.seconds:>8.0f}" for x in times)


PLACEMENTS = ("local", "interleaved", "one node")


def _placements(record: Record) -> Iterator[str]:
    yield f"Where keys are, {TWO_GENOA.name}: us"
    yield f"{'':38}" + "".join(f"{x:>13}" for x in PLACEMENTS)
    for name in (x for x in CALLS if x.startswith("decode")):
        times = (simulate(record, name, TWO_GENOA, x).seconds for x in PLACEMENTS)
        yield f"{name:38}" + "".join(f"{1e6 * x:>13.0f}" for x in times)


# -- the picture -----------------------------------------------------------------------------------

DRAWN = (
    *("prefill, N 2048", "BERT, B 32", "BERT, B 1", "backward, N 2048"),
    *("decode, 8 heads on 8, 2k", "decode, 32 heads on 8, 8k", "decode, 32 heads on 8, 128k"),
)


def draw(new: Callable[..., Any], record: Record, cores: Sequence[int] = THREADS) -> Any:
    """How many times as fast calls are on more cores of the largest machine."""
    figure = new(7.2, 4.6)
    axis = figure.subplots()
    for name in DRAWN:
        one = simulate(record, name, TURIN.with_cores(1)).seconds
        times = [one / simulate(record, name, TURIN.with_cores(n)).seconds for n in cores]
        axis.plot(cores, times, marker="o", markersize=3, linewidth=1.4, label=name)
    axis.plot(cores, cores, color="#999999", linestyle="--", linewidth=1, label="cores")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(cores, map(str, cores), fontsize=8)
    axis.set_yticks(cores, map(str, cores), fontsize=8)
    axis.set_xlabel("cores", fontsize=9)
    axis.set_ylabel("times as fast as on one", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    axis.set_title(f"Simulated: {TURIN.name}", fontsize=10)
    return figure
