"""The commands: each function takes the parsed options and returns the exit status.

A command that measures fills its sections of a result, prints them and saves the file. Its status
is 0 if everything passed, 1 if something failed its verification, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence

import torch

from . import families
from . import models as whole_models
from .cases import BOTH, DTYPES, GRIDS, PASSES, SECONDS, Case, Grid
from .cpu_engines import cases as engine_cases
from .cpu_engines import environments
from .cpu_engines import measure as engine_measure
from .cpu_engines import peers as engine_peers
from .cpu_engines import report as engine_report
from .measure import isolated_process, machine, nvidia, peak_memory, precompile, progress, run
from .peers.registry import BASELINE, SUBJECT, chosen
from .races import race as races
from .races import random_calls
from .races.tables import TABLES, Table
from .report import comparison, console, pages, pictures, results
from .report.results import Result
from .serving import measure as serving_measure

Options = argparse.Namespace


def sweep(options: Options) -> int:
    device = _device(options)
    preset = "full" if options.full else "quick on a GPU" if device == "cuda" else "quick"
    cases = [case for grid in grids(options, preset) for case in grid.cases(device)]
    with (
        _apart(device) as process,
        _result("sweep", options, device, _dtypes(cases), process) as result,
    ):
        if not options.sweep_only:
            if process:  # the memory probes are processes that use the same GPU
                process.close()
            result["memory"] += peak_memory.measure(device)
        _cells(result, options, cases, tuple(options.passes or PASSES), SECONDS[preset], process)
    _print(console.table(result["cells"]))
    return _finish(result, options)


def grids(options: Options, preset: str) -> tuple[Grid, ...]:
    """The preset's grids; with a given axis, one grid of it and the first grid's other axes."""
    axes = (axis.name for axis in dataclasses.fields(Grid))
    given = {axis: tuple(x) for axis in axes if (x := getattr(options, axis))}
    return (dataclasses.replace(GRIDS[preset][0], **given),) if given else GRIDS[preset]


def race(options: Options) -> int:
    """A result, and a file, for each table."""
    return max(_table(name, TABLES[name], options) for name in options.tables)


def _table(name: str, table: Table, options: Options) -> int:
    if table.lines:
        _print(table.lines(options.save))
        return 0
    dtypes = tuple(options.dtypes or table.dtypes)
    rows = _named(table.rows(dtypes, options.scale), options.only)
    if table.whats:
        return _of_cases(name, table, rows, dtypes, options)
    with _result(name, options, "cpu", dtypes) as result:
        counts = options.threads or table.threads or (torch.get_num_threads(),)
        _raced(result, rows, options.seconds or table.seconds, counts)
        if table.memory and not options.only:
            _remembered(result, table.memory(options.scale))
    return _finish(result, options)


def _of_cases(
    name: str, table: Table, rows: Iterable, dtypes: tuple[str, ...], options: Options
) -> int:
    device = _device(options)
    cases = [dataclasses.replace(case, device=device) for case in rows]
    with _apart(device) as process, _result(name, options, device, dtypes, process) as result:
        _cells(result, options, cases, table.whats, table.seconds, process)
    _print(console.small_table(result["cells"], reading=name == "decode"))
    return _finish(result, options)


def _named(rows: Iterable, texts: Sequence[str]) -> Iterator:
    """Rows with one of the texts in their names, or all."""
    for row in rows:
        name = str(row) if isinstance(row, Case) else f"{row.name}, {row.what}"
        if not texts or any(text in name for text in texts):
            yield row


def _raced(
    result: Result, rows: Iterable[races.Race], seconds: float, counts: Sequence[int]
) -> None:
    """One row at a time: the tensors of a row that is timed are freed before the next is made."""
    found = result.setdefault(result["kind"], [])
    for row in rows:
        for count in counts:
            found.append(races.measure(row, seconds, count))
            print(console.race_line(found[-1]), flush=True)


def _remembered(result: Result, rows: Iterable[Result]) -> None:
    for row in rows:
        result["memory"].append(row)
        print(console.memory_line(row), flush=True)


def random(options: Options) -> int:
    """Calls that a seed draws, on one thread, and the distribution of their ratios."""
    dtypes = tuple(options.dtypes or random_calls.DTYPES)
    measured = tuple(x for x in dtypes if x in DTYPES)
    with _result("random", options, "cpu", measured) as result:
        rows = random_calls.races(dtypes, options.cells, options.seed)
        _raced(result, rows, options.seconds or 0.2, (1,))
    _print(random_calls.summary(result["random"]))
    return _finish(result, options)


def models(options: Options) -> int:
    """Whole models, as races at each number of threads."""
    dtypes, lengths = options.dtypes or BOTH, options.lengths or whole_models.LENGTHS
    counts = options.threads or tuple(dict.fromkeys((1, torch.get_num_threads())))
    with families.registered(), _result("models", options, "cpu", tuple(dtypes)) as result:
        rows = whole_models.races(dtypes, lengths, options.scale, options.only)
        _raced(result, rows, options.seconds or whole_models.SECONDS, counts)
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
        lengths = options.lengths or peak_memory.LENGTHS
        _remembered(result, peak_memory.measure(device, lengths, options.masks, peers))
    return _finish(result, options)


def engines(options: Options) -> int:
    """A part of the rows or engines is named in the file's name, so that it never replaces the
    whole (`results.stem`)."""
    if options.install is not None:
        return environments.install(options.install)
    options.only = [*options.rows, *options.engines, *["quick"] * options.quick]
    options.only += [f"{options.threads} threads"] * (options.threads != 1)
    rows = engine_cases.selected(options.rows, options.quick)
    chosen_peers, seconds = engine_peers.selected(options.engines), options.seconds
    with _result("engines", options, "cpu", tuple(DTYPES)) as result:
        result["engines"] = []
        with engine_measure.Workers(chosen_peers, options.threads) as workers:
            _print(f"{name}: {reason}" for name, reason in workers.absent.items())
            for row in rows:
                record = engine_measure.measure(row, workers, seconds or engine_measure.SECONDS)
                result["engines"].append(record)
                result["versions"] |= workers.versions
                _print(engine_report.lines(record))
    _print(engine_report.summary(result))
    return _finish(result, options)


def serving(options: Options) -> int:
    _print(serving_measure.measure(options.engines, options.dtype, options.rounds))
    return 0


def report(options: Options) -> int:
    """Files that are named: their tables, and their pictures beside them. With --compare: two of
    them, cell by cell. None: the pages of bench/results, and all pictures."""
    if options.compare:
        return _compare(options)
    found = {path: results.read(path) for path in options.files or results.committed()}
    if options.files and not options.pages:
        for lines in pages.tables(found).values():
            _print(lines)
    else:
        _print(pages.write(options.pages or results.PAGES, found))
    for path, result in found.items():
        _print(pictures.draw_all(result, path.with_suffix("")))
    if not options.files:
        _print(pictures.draw_glance(list(found.values()), machine.RESULTS / "glance.png"))
    return 0


def _compare(options: Options) -> int:
    if len(options.files) != 2:
        raise ValueError(f"--compare: got {len(options.files)} files, expected two")
    found = comparison.changes(*map(results.read, options.files))
    _print(comparison.lines(found, options.fail_under))
    if options.fail_under is None:
        return 0
    return int(not found or bool(comparison.regressions(found, options.fail_under)))


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
    plan = run.Plan(passes, peers, limits, budget, options.threads)
    if process:
        _compile(process, cases, passes)
    records, total = run.cells(cases, plan, process), len(cases) * len(passes)
    for record in progress.follow(records, total, console.one_line):
        result["cells"].append(record)


def _compile(process: isolated_process.Process, cases: list[Case], passes: tuple[str, ...]) -> None:
    progress.show("compiling the kernels of every kind of call")
    try:
        progress.show(process.call(precompile.ahead, cases, passes))
    except (isolated_process.Died, isolated_process.Raised) as error:  # the cells report the error
        progress.show(f"nothing is compiled ahead: {error}")


def _finish(result: Result, options: Options) -> int:
    _print(console.summary(result))
    rows = [*result["cells"], *result.get(result["kind"], ())]
    if rows or result["memory"]:
        complete = options.save and result["complete"]  # else no committed file is replaced
        path = results.save(
            result, options.output or machine.RESULTS / ("" if complete else "local")
        )
        _print([f"wrote {path}", *pictures.draw_all(result, path.with_suffix(""))])
    _print(console.conclusion(result))
    failed = any(row.get("status", "ok") != "ok" for row in rows)
    failed |= any(row["peer"] == SUBJECT and row["error"] for row in result["memory"])
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
