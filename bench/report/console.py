"""The printed output: heading, a line per record, the tables, the summary."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..cases import PASSES
from ..masks import MASKS
from ..measure.machine import kind, words
from ..measure.records import (
    BUSY,
    busy,
    clock_of,
    first_threads,
    geometric_mean,
    speedup_of,
    spread,
    timing_of,
)
from ..peers.registry import BASELINE, SUBJECT

Record = dict[str, Any]
Result = dict[str, Any]


def ratio_of(entry: Record) -> str:
    """The median of our speed-up over torch; busy, or - if it was not timed."""
    ratio = speedup_of(entry)
    return f"{ratio['median']:.2f}" if ratio else "busy" if busy(entry) else "-"


def title(cell: Record) -> str:
    """A cell in words; Hk and M are left out if they equal H and N."""
    heads = f" H{cell['H']}:{cell['Hk']}" if cell["H"] != cell["Hk"] else ""
    rows = f" M{cell['M']}" if cell["M"] != cell["N"] else ""
    return f"{cell['dtype']} D{cell['D']}{heads}{rows} N{cell['N']} {cell['mask']} {cell['pass']}"


def one_line(cell: Record) -> str:
    if cell["status"] != "ok":
        return f"{title(cell)}: FAILED, not timed: {cell['reason']}"
    entry = timing_of(cell, first_threads([cell]))
    text = f"{title(cell)}: {_rate(entry['peers'][SUBJECT]['gflops'])}"
    return text + _times(entry, " torch") + host(entry["peers"][SUBJECT])


def _times(entry: Record, peer: str = "") -> str:
    """`ratio_of` as the part of a line: ", 1.25x torch", ", busy" or nothing."""
    ratio = ratio_of(entry)
    return {"busy": ", busy", "-": ""}.get(ratio, f", {ratio}x{peer}")


def host(row: Record) -> str:
    """The times of the device and of the host, if both were measured."""
    if "host_ms" not in row:
        return ""
    bound = ": bound by the host" if bound_by_host(row) else ""
    return f", device {row['median_ms']:.3f} ms, host {row['host_ms']:.3f} ms{bound}"


def bound_by_host(row: Record) -> bool:
    """Does the host take longer to submit a call than the device to run it?"""
    return row.get("host_ms", 0) > row["median_ms"]


# ------------------------------------------------------------------------------------ the sweep


def table(cells: list[Record]) -> Iterator[str]:
    """A block for each dtype, pass and two masks, a row for each head dim and length."""
    threads = first_threads(cells)
    every = sorted({t["threads"] for c in cells for t in c["timings"] if t["threads"] != threads})
    kinds = list(MASKS)
    pairs = [kinds[i : i + 2] for i in range(0, len(kinds), 2)]
    for dtype in dict.fromkeys(cell["dtype"] for cell in cells):
        for what in PASSES:
            for masks in pairs:
                chosen = [
                    c
                    for c in cells
                    if (c["dtype"], c["pass"]) == (dtype, what)
                    if c["mask"] in masks
                ]
                shown = [mask for mask in masks if any(c["mask"] == mask for c in chosen)]
                if shown:
                    yield from _block(chosen, shown, threads, every[-1] if every else None)


def _block(
    cells: list[Record], masks: list[str], threads: int | None, every: int | None
) -> Iterator[str]:
    yield ""
    head = f"{cells[0]['dtype']} {cells[0]['pass']}, {clock_of(threads)}"
    yield f"{head}; GF/s, ratio [quartiles], % of peak" + (
        f", ratio of wall times on {every} threads" if every else ""
    )
    head = f"{'ours':>7}{'torch':>7}{'ratio':>6} {'[quartiles]':<13}{'%':>4}"
    head += f"{f'x{every}':>7}" if every else ""
    yield (f"{'':12}" + "  ".join(mask.center(len(head)) for mask in masks)).rstrip()
    yield f"{'D':>4}{'N':>7} " + "  ".join([head] * len(masks))
    grid = {(c["D"], c["N"], c["mask"]): c for c in cells}
    for d, n in dict.fromkeys((c["D"], c["N"]) for c in cells):
        row = [_entry(grid.get((d, n, mask)), threads, every) for mask in masks]
        yield f"{d:4}{n:7} " + "  ".join(f"{text:<{len(head)}}" for text in row).rstrip()
    for cell in cells:
        if cell["status"] != "ok":
            yield f"  {one_line(cell)}"


def _entry(cell: Record | None, threads: int | None, every: int | None) -> str:
    if cell is None:
        return "      -"
    if cell["status"] != "ok":
        return " FAILED"
    entry = timing_of(cell, threads)
    ours, baseline = entry["peers"][SUBJECT], entry["peers"].get(BASELINE)
    percent = ours["percent_of_peak"]
    text = _number(ours["gflops"]) + _number(baseline["gflops"] if baseline else None)
    text += _speedup(entry) + (f"{percent:4.0f}" if percent else "   -")
    return text + (f"{ratio_of(timing_of(cell, every)):>7}" if every else "")


def _number(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:7.1f}" if value < 1e4 else f"{value:7.0f}"


def _speedup(entry: Record) -> str:
    q = speedup_of(entry)
    quartiles = spread(q).partition(" ")[2] if q else ""
    return f"{ratio_of(entry):>6} {quartiles:<13}"


def _rate(gflops: float) -> str:
    return f"{gflops:.0f} GF/s" if gflops < 1e4 else f"{gflops / 1e3:.1f} TFLOP/s"


# --------------------------------------------------------------------------------- other commands


def small_table(cells: list[Record], reading: bool = False) -> Iterator[str]:
    """A row per cell and thread count, in milliseconds; with `reading`, GB/s of keys and values."""
    yield ""
    yield f"{'':56}{'ours ms':>9}{'torch ms':>9}{'ratio':>7}" + (
        f"{'GB/s':>7}{'% of read':>10}" if reading else ""
    )
    for cell in cells:
        if cell["status"] != "ok":
            yield one_line(cell)
        for entry in cell["timings"]:
            threads = f", {entry['threads']} threads" if (entry["threads"] or 1) > 1 else ""
            ours, baseline = entry["peers"][SUBJECT], entry["peers"].get(BASELINE)
            text = f"{title(cell) + threads:56}{ours['median_ms']:9.3f}"
            text += f"{baseline['median_ms']:9.3f}" if baseline else f"{'-':>9}"
            text += f"{ratio_of(entry):>7}{host(ours)}"
            if reading:
                percent = ours["percent_of_read"]
                text += f"{ours['kv_gbs']:7.1f}" + (f"{percent:9.0f}%" if percent else "")
            yield text


def memory_line(record: Record) -> str:
    extra, where = record["extra_bytes"], f"extra memory, {record['mask']} N{record['N']}"
    value = f"FAILED: {record['error']}" if extra is None else f"{extra / 1e6:.1f} MB"
    return f"{where} D{record['D']} {record['dtype']} {record['pass']}: {record['peer']} {value}"


def raced_name(row: Record) -> str:
    threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
    return f"{row['what']}, {row['dtype']} {row['pass']}, {threads}"


def race_line(row: Record) -> str:
    name = raced_name(row)
    if row["status"] != "ok":
        return f"FAILED: {name}, not timed: {row['reason']}"
    aim = f"{row['rule']} {row['aim']:g}: {'met' if row['met'] else 'MISSED'}"
    aim = "busy" if busy(row) else f"{spread(row['ratio'])}, {aim}"
    return f"{name}: {aim}; {' and '.join(times(row))}{'' if 'tokens' in row else ' ms'}"


def times(row: Record) -> list[str]:
    """Milliseconds of ours and of the other, or tokens per second."""
    ms = [row["ms"][side] for side in ("ours", "other")]
    if tokens := row.get("tokens"):
        return [f"{1e3 * tokens / x:.0f}/s" for x in ms]
    return [f"{x:.2f}" for x in ms]


# --------------------------------------------------------------------------------- the whole run


def heading(result: Result) -> Iterator[str]:
    machine, torch_version = result["machine"], result["versions"]["torch"]
    cpu, mkl = machine["cpu"], machine["mkl"]
    load = result["load"]["start"]
    yield f"{words(machine)} ({machine['device']}), {machine['threads']} threads, load {load}"
    yield f"fastattn's CPU kernels: {cpu['isa'] or cpu['unavailable']}"
    yield f"torch {torch_version}, {cpu['torch_isa']}; MKL path: {mkl['path']} ({mkl['note']})"
    for dtype, ceiling in result["ceilings"]["compute"].items():
        register, matmul = ceiling["register_gflops"], ceiling["matmul_gflops"]
        limit = _rate(register) if register else "not measured"
        if sustained := ceiling.get("sustained_gflops"):
            limit += f", sustained {_rate(sustained)}"
        yield f"{dtype} ceilings: register loop {limit}, torch matmul {_rate(matmul)}"
    rows = result["ceilings"]["memory"]
    for row in (x for x in rows if x["bytes"] == max(y["bytes"] for y in rows)):
        where = clock_of(row["threads"])
        yield f"memory, {where}: read {row['read_gbs']:.1f}, copy {row['copy_gbs']:.1f} GB/s"


def summary(result: Result) -> Iterator[str]:
    yield ""
    yield from map(memory_line, result["memory"])
    for dtype, means in accuracy(result["cells"]).items():
        errors = (f"{name} {error:.2e}" for name, error in means.items())
        yield f"{dtype} error against float64, geometric mean: {', '.join(errors)}"
    yield from _peers(result["cells"])
    yield from _hosts(result["cells"])
    yield from _busy(result["cells"])
    yield from _backends(result["cells"])
    rest = "" if result["complete"] else "; interrupted, the rest was not measured"
    if result["cells"]:
        failed = sum(cell["status"] != "ok" for cell in result["cells"])
        yield f"{len(result['cells'])} cells verified, {failed} failed{rest}"


def conclusion(result: Result) -> Iterator[str]:
    """The last lines of a run: the median ratio, the best and the worst row, the machine."""
    threads = first_threads(result["cells"])
    rows = [
        (ratio["median"], title(cell))
        for cell in result["cells"]
        if (ratio := speedup_of(timing_of(cell, threads)))
    ]
    if rows:
        (best, first), (worst, last) = max(rows), min(rows)
        median = statistics.median(ratio for ratio, _ in rows)
        of = f"the median of {len(rows)} rows, {clock_of(threads)}"
        yield f"\n{median:.2f} times as fast as torch: {of}"
        yield f"best {best:.2f}: {first}; worst {worst:.2f}: {last}"
        yield kind(result["machine"])


def accuracy(cells: list[Record]) -> dict[str, dict[str, float]]:
    """dtype -> peer -> geometric mean over cells and tensors of the error against float64."""
    means: dict[str, dict[str, float]] = {}
    for dtype in dict.fromkeys(cell["dtype"] for cell in cells):
        alike = [cell["peers"] for cell in cells if cell["dtype"] == dtype]
        for peer in dict.fromkeys(name for peers in alike for name in peers):
            found = (e for peers in alike for e in peers[peer]["errors"].values())
            if mean := geometric_mean([error for error in found if 0 < error < math.inf]):
                means.setdefault(dtype, {})[peer] = mean
    return means


def _peers(cells: list[Record]) -> Iterator[str]:
    """Our mean ratio to each peer but torch, which the tables show, and why cells lack times."""
    threads = first_threads(cells)
    for peer in dict.fromkeys(name for cell in cells for name in cell["peers"]):
        ratios = [q["median"] for c in cells if (q := speedup_of(timing_of(c, threads), peer))]
        reasons = Counter(c["peers"][peer]["reason"] for c in cells if c["peers"][peer]["reason"])
        mean = geometric_mean(ratios)
        if mean and peer != BASELINE:
            yield f"{mean:.2f}x {peer} (geometric mean of {len(ratios)} cells)"
        for reason, count in reasons.items() if peer != SUBJECT else ():
            yield f"{peer}: no time in {count} cells: {reason}"


def _hosts(cells: list[Record]) -> Iterator[str]:
    """For each peer, the number of cells in which the host takes longer than the device."""
    threads = first_threads(cells)
    rows = [timing_of(cell, threads).get("peers", {}) for cell in cells]
    for peer in dict.fromkeys(name for row in rows for name in row):
        timed = [row[peer] for row in rows if peer in row and "host_ms" in row[peer]]
        if count := sum(map(bound_by_host, timed)):
            yield f"{peer}: bound by the host in {count} of {len(timed)} cells"


def _busy(cells: list[Record]) -> Iterator[str]:
    """For each number of threads, how many ratios are left out."""
    counts = Counter(t["threads"] for cell in cells for t in cell["timings"] if busy(t))
    for threads, count in counts.items():
        yield (
            f"busy: other processes took more than {BUSY:.0%} of the cores in {count} of "
            f"{len(cells)} cells on {threads} threads; their ratios are in the file alone"
        )


def _backends(cells: list[Record]) -> Iterator[str]:
    """Which of our backends ran; if it was the reference, why the others declined."""
    if not cells:
        return
    counts = Counter(cell["backend"] for cell in cells)
    yield "backend: " + ", ".join(f"{name} ({count} cells)" for name, count in counts.items())
    unfused = [cell["declined"] for cell in cells if cell["backend"] == "reference"]
    for name, reasons in unfused[0].items() if unfused else ():
        yield f"  {name} declined: {'; '.join(reasons)}"
