"""The printed page: heading, one line a cell, the table, the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .cases import MASKS, PASSES
from .peers import BASELINE, SUBJECT

Record = dict[str, Any]
Result = dict[str, Any]
RULE = {None: "the GPU, device events", 1: "one thread, thread CPU time"}


def timing_of(cell: Record, phase: str, threads: int | None) -> Record:
    """The entry of a cell, empty where nothing was timed."""
    for entry in cell["timings"]:
        if (entry["phase"], entry["threads"]) == (phase, threads):
            return entry
    return {}


def first_threads(cells: list[Record]) -> int | None:
    """The thread count that the table shows in full: 1 on a CPU, None on a GPU."""
    return next((t["threads"] for cell in cells for t in cell["timings"]), 1)


def one_line(cell: Record) -> str:
    name = f"{cell['dtype']} D{cell['D']} N{cell['N']} {cell['mask']} {cell['pass']}"
    if cell["status"] != "ok":
        return f"{name}: FAILED, not timed: {cell['reason']}"
    entry = timing_of(cell, cell["pass"], first_threads([cell]))
    text = f"{name}: {_rate(entry['peers'][SUBJECT]['gflops'])}"
    return text + (f", {entry['speedup']['median']:.2f}x torch" if entry["speedup"] else "")


def table(cells: list[Record]) -> Iterator[str]:
    """A block for each dtype and pass, a row for each head dim and length, full beside causal."""
    threads = first_threads(cells)
    every = sorted({t["threads"] for c in cells for t in c["timings"] if t["threads"] != threads})
    for dtype in dict.fromkeys(cell["dtype"] for cell in cells):
        for what in PASSES:
            chosen = [c for c in cells if (c["dtype"], c["pass"]) == (dtype, what)]
            if chosen:
                yield from _block(chosen, dtype, what, threads, every[-1] if every else None)


def _block(
    cells: list[Record], dtype: str, what: str, threads: int | None, every: int | None
) -> Iterator[str]:
    yield ""
    yield f"{dtype} {what}, {RULE[threads]}; GF/s, ratio [quartiles], % of peak" + (
        f", ratio of wall times on {every} threads" if every else ""
    )
    head = f"{'ours':>7}{'torch':>7}{'ratio':>6} {'[quartiles]':<13}{'%':>4}"
    head += f"{f'x{every}':>6}" if every else ""
    yield f"{'':12}" + "  ".join(mask.center(len(head)) for mask in MASKS)
    yield f"{'D':>4}{'N':>7} " + "  ".join([head] * len(MASKS))
    grid = {(c["D"], c["N"], c["mask"]): c for c in cells}
    for d, n in dict.fromkeys((c["D"], c["N"]) for c in cells):
        row = [_entry(grid.get((d, n, mask)), what, threads, every) for mask in MASKS]
        yield f"{d:4}{n:7} " + "  ".join(f"{text:<{len(head)}}" for text in row).rstrip()
    for cell in cells:
        if cell["status"] != "ok":
            yield f"  {one_line(cell)}"


def _entry(cell: Record | None, what: str, threads: int | None, every: int | None) -> str:
    if cell is None:
        return "      -"
    if cell["status"] != "ok":
        return " FAILED"
    entry = timing_of(cell, what, threads)
    ours, theirs = entry["peers"][SUBJECT], entry["peers"].get(BASELINE)
    percent = ours["percent_of_peak"]
    text = _number(ours["gflops"]) + _number(theirs["gflops"] if theirs else None)
    text += _speedup(entry["speedup"]) + (f"{percent:4.0f}" if percent else "   -")
    if every:
        other = timing_of(cell, what, every)["speedup"]
        text += f"{other['median']:6.2f}" if other else "     -"
    return text


def _number(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:7.1f}" if value < 1e4 else f"{value:7.0f}"


def _speedup(q: Record | None) -> str:
    if not q:
        return f"{'-':>6} {'':13}"
    spread = f"[{q['q1']:.2f} {q['q3']:.2f}]"
    return f"{q['median']:6.2f} {spread:<13}"


def _rate(gflops: float) -> str:
    return f"{gflops:.0f} GF/s" if gflops < 1e4 else f"{gflops / 1e3:.1f} TFLOP/s"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def heading(result: Result) -> Iterator[str]:
    machine, torch_version = result["machine"], result["versions"]["torch"]
    cpu, mkl = machine["cpu"], machine["mkl"]
    load = result["load"]["start"]
    yield f"{machine['name']} ({machine['device']}), {machine['threads']} threads, load {load}"
    yield f"fastattn's CPU kernels: {cpu['isa'] or cpu['unavailable']}"
    yield f"torch {torch_version}, {cpu['torch_isa']}; MKL path: {mkl['path']} ({mkl['note']})"
    for dtype, ceiling in result["ceilings"].items():
        register, matmul = ceiling["register_gflops"], ceiling["matmul_gflops"]
        limit = _rate(register) if register else "not measured"
        yield f"{dtype} ceilings: register loop {limit}, torch matmul {_rate(matmul)}"


def summary(result: Result) -> Iterator[str]:
    yield ""
    for entry in result["overhead"]["timings"] if result["overhead"] else ():
        times = [f"{name} {row['median_us']:.1f} us" for name, row in entry["peers"].items()]
        errors = result["overhead"]["errors"].items()
        times += [f"{name} FAILED, not timed: {error}" for name, error in errors if error]
        count = f"{entry['threads']} threads, " if (entry["threads"] or 1) > 1 else ""
        where = f"{result['overhead']['case']}; {count}{entry['clock']}"
        yield f"tiny call ({where}): {', '.join(times)}"
    if memory := result["memory"]:
        extras = (
            f"{name} FAILED: {memory['errors'][name]}" if extra is None else f"{name} {_mb(extra)}"
            for name, extra in memory["extra_bytes"].items()
        )
        yield f"extra memory ({memory['case']}): {', '.join(extras)}"
    for dtype, means in result["accuracy"].items():
        errors = (f"{name} {error:.2e}" for name, error in means.items())
        yield f"{dtype} error against float64, geometric mean: {', '.join(errors)}"
    yield from _backends(result["cells"])
    yield ""
    yield from map(_claim_line, result["claims"])
    failed = sum(cell["status"] != "ok" for cell in result["cells"])
    rest = "" if result["complete"] else "; interrupted, the rest was not measured"
    yield f"{len(result['cells'])} cells, {failed} failed{rest}"


def _backends(cells: list[Record]) -> Iterator[str]:
    """Which of our backends ran; the reasons, where it was not a fused one."""
    if not cells:
        return
    counts = Counter(cell["backend"] for cell in cells)
    yield "backend: " + ", ".join(f"{name} ({count} cells)" for name, count in counts.items())
    unfused = [cell["declined"] for cell in cells if cell["backend"] == "reference"]
    for name, reasons in unfused[0].items() if unfused else ():
        yield f"  {name} declined: {'; '.join(reasons)}"


def _claim_line(claim: Record) -> str:
    measured, percent = claim["measured"], claim["percent_of_peak"]
    verdict = {True: "met", False: "NOT MET", None: "not measured"}[claim["met"]]
    value = "-" if measured is None else f"{measured:.3g}"
    text = f"{verdict:>12}: {claim['claim']}: {value} {claim['unit']}"
    text += f" (target: {claim['rule']} {claim['target']:g})"
    if percent:
        text += f"; at {percent:.0f}% of the register-loop peak, {claim['possible']:.2f} at 100%"
    return text
