"""The commands: each function takes the parsed options and returns the exit status.

A command that measures fills its sections of a result, prints them and saves the file. Its status
is 0 if everything passed, 1 if something failed its verification, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from .benchmarks import (
    core_scaling,
    decoding,
    functions,
    gpu_session,
    latent_attention,
    launch_overhead,
    peak_memory,
    performance_targets,
    rank_scaling,
    second_order,
    selected_keys,
    simulation,
    subnormal_cost,
    tiny_call,
    varlen,
    whole_models,
    whole_module,
)
from .cases import BACKWARD, BOTH, DTYPES, FORWARD, GRIDS, PASSES, SECONDS, TRAINING, Case, Grid
from .cpu_engines import command as engine_command
from .cpu_engines import environments
from .cpu_engines import report as engine_report
from .measure import isolated_process, machine, nvidia, precompile, run
from .peers.registry import BASELINE, SUBJECT, chosen
from .plots import pictures
from .reporting import comparison, console, progress, results, results_page
from .reporting.results import Result
from .static_gpu import ledger_report

Options = argparse.Namespace
Races = Callable[[Sequence[str]], Iterable[varlen.Race]]  # those of these dtypes
PAGES = sorted(results.FOLDER.glob("*.md"))


def sweep(options: Options) -> int:
    device = _device(options)
    preset = "full" if options.full else "quick on a GPU" if device == "cuda" else "quick"
    cases = [case for grid in grids(options, preset) for case in grid.cases(device)]
    with (
        _apart(device) as process,
        _result("sweep", options, device, _dtypes(cases), process) as result,
    ):
        if not options.sweep_only:
            result["overhead"] = tiny_call.measure(device, chosen(device), None, process)
            if process:  # the memory probes are processes that use the same GPU
                process.close()
            result["memory"] = peak_memory.measure(device)
        _cells(result, options, cases, tuple(options.passes or PASSES), SECONDS[preset], process)
    _print(console.table(result["cells"]))
    return _finish(result, options)


def grids(options: Options, preset: str) -> tuple[Grid, ...]:
    """The preset's grids; with a given axis, one grid of it and the first grid's other axes."""
    axes = ("lengths", "dims", "dtypes", "masks")
    given = {axis: tuple(getattr(options, axis)) for axis in axes if getattr(options, axis)}
    first = GRIDS[preset][0]
    rest = {axis: getattr(first, axis) for axis in axes}
    return (Grid(**rest | given),) if given else GRIDS[preset]


def decode(options: Options) -> int:
    device = _device(options)
    given = {x: getattr(options, x) for x in ("dtypes", "rows", "lengths") if getattr(options, x)}
    cases = list(decoding.cases(device, **given))
    with (
        _apart(device) as process,
        _result("decode", options, device, _dtypes(cases), process) as result,
    ):
        _cells(result, options, cases, (FORWARD,), 0.5, process)
    _print(console.small_table(result["cells"], reading=True))
    return _finish(result, options)


def few_rows(options: Options) -> int:
    device = _device(options)
    cases = list(decoding.trained(device, tuple(options.dtypes or ("float32",))))
    with (
        _apart(device) as process,
        _result("few-rows", options, device, _dtypes(cases), process) as result,
    ):
        _cells(result, options, cases, (TRAINING,), 1.0, process)
    _print(console.small_table(result["cells"]))
    return _finish(result, options)


def overhead(options: Options) -> int:
    device = _device(options)
    cases = tiny_call.small_cases(device)
    with (
        _apart(device) as process,
        _result("overhead", options, device, _dtypes(cases), process) as result,
    ):
        peers = chosen(device, tuple(options.peers))
        result["overhead"] = tiny_call.measure(device, peers, options.threads, process)
        _cells(result, options, cases, (FORWARD,), 0.1, process)
    _print(console.small_table(result["cells"]))
    _print(launch_overhead.lines())
    return _finish(result, options)


def mha(options: Options) -> int:
    device = _device(options)
    with _result("mha", options, device, ("float32",)) as result:
        for mode in options.modes or whole_module.MODES:
            result["modules"] += whole_module.measure(
                device, (mode,), options.length, options.seconds or 1.0, options.threads
            )
            print(console.module_line(result["modules"][-1]), flush=True)
    return _finish(result, options)


def memory(options: Options) -> int:
    device = _device(options)
    peers = tuple(dict.fromkeys((SUBJECT, *(options.peers or (BASELINE,)))))
    with (
        _apart(device) as process,
        _result("memory", options, device, ("float32",), process) as result,
    ):
        if process:
            process.close()
        for mask in options.masks:
            for n in options.lengths or peak_memory.LENGTHS:
                result["memory"] += peak_memory.measure(device, (n,), (mask,), peers)
                _print(map(console.memory_line, result["memory"][-len(peers) :]))
    return _finish(result, options)


def targets(options: Options) -> int:
    """Status 1 if a verification failed; with --strict also if a target was missed."""
    kind = machine.units(machine.describe("cpu")["cpu"])
    chosen_targets = performance_targets.selected(kind, options.only)
    if options.list or not chosen_targets:
        _print(target.name for target in chosen_targets)
        return 0 if chosen_targets else 2
    with _result("targets", options, "cpu", tuple(DTYPES)) as result:
        limits = results.limits(result)
        rows = (target.judge(limits, kind) for target in chosen_targets)
        for row in progress.follow(rows, len(chosen_targets), console.target_line):
            result["targets"].append(row)
    _print(map(console.target_line, result["targets"]))
    status = _finish(result, options)
    missed = any(row["met"] is False and not console.beyond(row) for row in result["targets"])
    return status or int(options.strict and missed)


def subnormals(options: Options) -> int:
    chosen_cases = list(
        subnormal_cost.cases(options.dtypes or BOTH, options.masks or subnormal_cost.MASKS)
    )
    passes = (FORWARD, BACKWARD)
    with _result("subnormals", options, "cpu", _dtypes(chosen_cases)) as result:
        records = (
            subnormal_cost.measure(case, what, options.seconds or subnormal_cost.SECONDS)
            for case in chosen_cases
            for what in passes
        )
        total = run.cell_count(chosen_cases, passes)
        for record in progress.follow(records, total, console.subnormal_line):
            result["subnormals"].append(record)
    _print(map(console.subnormal_line, result["subnormals"]))
    return _finish(result, options)


def serving(options: Options) -> int:
    return _of_races("serving", options, varlen.races)


def flex(options: Options) -> int:
    races = functools.partial(functions.races, compiled=options.compiled)
    return _of_races("flex", options, races, threads=1)


def latent(options: Options) -> int:
    return _of_races("latent", options, latent_attention.races, threads=1)


def selected(options: Options) -> int:
    return _of_races("selected", options, selected_keys.races, threads=1)


def tiny(options: Options) -> int:
    return _of_races("tiny", options, tiny_call.races, threads=1)


def _of_races(kind: str, options: Options, races: Races, **threads: int) -> int:
    """A command that measures races."""
    dtypes = options.dtypes or BOTH
    with _result(kind, options, "cpu", tuple(dtypes)) as result:
        for race in races(dtypes):
            seconds = options.seconds or varlen.SECONDS
            result[kind].append(varlen.measure(race, seconds, **threads))
            print(varlen.line(result[kind][-1]), flush=True)
    return _finish(result, options)


def engines(options: Options) -> int:
    if options.install is not None:
        return environments.install(options.install)
    rows, peers = engine_command.chosen(options)
    with _result("engines", options, "cpu", tuple(DTYPES)) as result:
        _print(engine_command.measured(rows, peers, options, result))
    _print(engine_report.summary(result))
    return _finish(result, options)


def models(options: Options) -> int:
    """Rows are races, as in `serving`, at each number of threads."""
    dtypes, lengths = options.dtypes or BOTH, options.lengths or whole_models.LENGTHS
    counts = options.threads or dict.fromkeys((1, torch.get_num_threads()))
    with whole_models.registered(), _result("models", options, "cpu", tuple(dtypes)) as result:
        for race in whole_models.races(dtypes, lengths, only=options.only):
            for count in counts:
                seconds = options.seconds or whole_models.SECONDS
                result["models"].append(varlen.measure(race, seconds, count))
                print(varlen.line(result["models"][-1]), flush=True)
    return _finish(result, options)


def derivatives(options: Options) -> int:
    """Rows are races, as in `serving`, on one thread; then memory."""
    with _result("derivatives", options, "cpu", ("float32",)) as result:
        for race in second_order.races(options.lengths or second_order.LENGTHS):
            seconds = options.seconds or varlen.SECONDS
            result["derivatives"].append(varlen.measure(race, seconds, 1))
            print(varlen.line(result["derivatives"][-1]), flush=True)
        for row in second_order.memory(options.lengths or second_order.MEMORY_LENGTHS):
            result["memory"].append(row)
            print(console.memory_line(row), flush=True)
    _print(second_order.growth(result["memory"]))
    return _finish(result, options)


def distributed(options: Options) -> int:
    """Print the simulation, then measure ranks on this machine."""
    simulation.show(options)
    if options.simulate:
        return 0
    with _result("distributed", options, "cpu", ("float32",)) as result:
        for ranks in options.ranks or rank_scaling.RANKS:
            given = options.lengths or rank_scaling.LENGTHS, options.seconds or rank_scaling.SECONDS
            rows, memory = rank_scaling.measure(ranks, *given)
            result["distributed"] += rows
            result["memory"] += memory
            _print(map(rank_scaling.line, rows))
    _print(rank_scaling.growth(result["memory"]))
    return _finish(result, options)


scaling, ledger = core_scaling.show, ledger_report.run


def gpu(options: Options) -> int:
    """Status 1 if a part failed or ran out of time, else 130 if a part was not begun."""
    record, path = gpu_session.run(options.only, options.rehearse, options.minutes, options.output)
    _print(gpu_session.summary(record, path))
    failed = {x["status"] for x in record["parts"]} & {gpu_session.FAILED, gpu_session.TIMEOUT}
    return 1 if failed else 0 if record["complete"] else 130


def compare(options: Options) -> int:
    found = comparison.changes(results.read(options.first), results.read(options.second))
    _print(comparison.lines(found, options.fail_under))
    if options.fail_under is None:
        return 0
    return int(not found or bool(comparison.regressions(found, options.fail_under)))


def plot(options: Options) -> int:
    folder = options.output or options.file.parent
    folder.mkdir(parents=True, exist_ok=True)
    messages = list(pictures.draw_all(results.read(options.file), folder / options.file.stem))
    _print(messages or ["no picture: the file has no cells to draw"])
    return 0 if any(line.startswith("wrote") for line in messages) else 1


def report(options: Options) -> int:
    files = options.files or sorted(results.FOLDER.glob("*.json"))
    found = {path: results.read(path) for path in files}
    if options.files and not options.pages:  # the pages show what is committed
        for lines in results_page.tables(found).values():
            _print(lines)
        return 0
    _print(results_page.write(options.pages or PAGES, found))
    for path, result in found.items():
        _print(pictures.draw_all(result, path.with_suffix("")))
    if not options.files:
        _print(pictures.draw_glance(list(found.values()), results.FOLDER / "glance.png"))
    return 0


# ---------------------------------------------------------------------------------------- the parts


def _apart(device: str) -> contextlib.AbstractContextManager[isolated_process.Process | None]:
    """A separate process for work on a GPU; None for the CPU, which this process uses."""
    return contextlib.nullcontext() if device == "cpu" else isolated_process.Process()


@contextlib.contextmanager
def _result(
    kind: str,
    options: Options,
    device: str,
    dtypes: tuple[str, ...],
    process: isolated_process.Process | None = None,
) -> Generator[Result, None, None]:
    """A result to fill. Ctrl-C ends the block and keeps what is done."""
    settings = {k: v for k, v in vars(options).items() if isinstance(v, (str, int, float, list))}
    started = time.perf_counter()
    result = results.start(kind, device, dtypes, settings, process)
    _print(console.heading(result))
    try:
        yield result
        result["complete"] = True
    except KeyboardInterrupt:
        print("\ninterrupted: finished results are kept", file=sys.stderr)
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["load"]["end"] = machine.load()


def _cells(
    result: Result,
    options: Options,
    cases: list[Case],
    passes: tuple[str, ...],
    seconds: float,
    process: isolated_process.Process | None,
) -> None:
    device = result["machine"]["device"]
    peers = chosen(device, tuple(options.peers), getattr(options, "full", False))
    budget, limits = options.seconds or seconds, results.limits(result)
    records = run.cells(cases, passes, peers, limits, budget, options.threads, process)
    total = run.cell_count(cases, passes)
    if process:
        _compile(process, cases, passes)
    for record in progress.follow(records, total, console.one_line):
        result["cells"].append(record)


def _compile(process: isolated_process.Process, cases: list[Case], passes: tuple[str, ...]) -> None:
    try:
        for text in process.stream(precompile.ahead, cases, passes):
            progress.show(text)
    except (isolated_process.Died, isolated_process.Raised) as error:  # the cells report the error
        progress.show(f"nothing more is compiled ahead: {error}")


def _finish(result: Result, options: Options) -> int:
    _print(console.summary(result))
    races = ("serving", "flex", "latent", "selected", "models", "derivatives", "distributed")
    races += ("engines",)
    sections = ("tiny", "cells", "memory", "modules", "targets", "subnormals", *races)
    if any(result[section] for section in sections):
        complete = options.save and result["complete"]  # else no committed file is replaced
        results.save(result, options.output or (results.FOLDER / ("" if complete else "local")))
    _print(console.conclusion(result))
    rows = [row for section in ("tiny", "cells", "modules", *races) for row in result[section]]
    failed = any(row["status"] != "ok" for row in rows)
    failed |= any(row["peer"] == SUBJECT and row["error"] for row in result["memory"])
    failed |= any(row["failed"] for row in result["targets"])
    failed |= any(subnormal_cost.verdict(row) in ("slow", "failed") for row in result["subnormals"])
    failed |= bool(result["overhead"] and result["overhead"]["errors"].get(SUBJECT))
    return 1 if failed else 0 if result["complete"] else 130


def _dtypes(cases: list[Case]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(case.dtype for case in cases))


def _device(options: Options) -> str:
    """Raises ValueError if no device is named and torch cannot use the GPU."""
    if options.device:
        return options.device
    if why := nvidia.unusable():
        raise ValueError(f"{why}. --device cpu measures the CPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)
