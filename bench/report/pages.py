"""Write the tables of the pages in bench/results from result files, with several machines side by
side. Each table is between two comments that name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cases import BACKWARD, FORWARD
from ..cpu_engines import report as engines
from ..measure.machine import words
from ..measure.records import first_threads, speedup_of, spread, timing_of
from ..peers.registry import SUBJECT
from .console import raced_name

Result = dict[str, Any]
SHOWN_D, SHOWN_N = 64, 2048  # one cell of each kind is enough; the pictures have the rest


def tables(found: Mapping[Path, Result]) -> dict[str, list[str]]:
    """The lines of every table that these results have data for, by name: the source of each
    machine's figures, then the figures, side by side."""
    made = {}
    for name, (kind, make) in TABLES.items():
        of = {path: result for path, result in found.items() if result["kind"] == kind}
        if lines := list(make(list(of.values()))) if of else []:
            sources = (_caption(result, path) for path, result in of.items())
            made[name] = [*sources, "", *lines]
    return made


def write(pages: Sequence[Path], found: Mapping[Path, Result]) -> Iterator[str]:
    """Replace every table that both a page has markers for and a result has data for; yield what
    was written. Raises ValueError if there is none, or a marker is missing or repeated."""
    made = tables(found)
    texts = {page: page.read_text() for page in pages}
    places = [(page, name) for page in pages for name in made if _begin(name) in texts[page]]
    if not places:
        expected = " or ".join(_begin(name) for name in made) or "files that have a table"
        where, sources = ", ".join(map(str, pages)), ", ".join(map(str, found))
        raise ValueError(f"{where}: got no place for a table of {sources}, expected {expected}")
    for page, name in places:
        texts[page] = _between(texts[page], name, made[name], page)
    for page, name in places:
        page.write_text(texts[page])
        yield f"wrote the {name} table of {page}"


def _between(text: str, name: str, lines: Sequence[str], readme: Path) -> str:
    begin, end = _begin(name), f"<!-- {name}:end -->"
    counts = text.count(begin), text.count(end)
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"{readme}: got {counts} of {begin} and {end}, expected one each in order")
    head, rest = text.split(begin)
    return "\n".join([head + begin, *lines, end + rest.split(end)[1]])


def _begin(name: str) -> str:
    return f"<!-- {name}:begin -->"


def _caption(result: Result, source: Path) -> str:
    machine, version = result["machine"], result["versions"]["torch"]
    where = words(machine)
    if machine["device"] == "cpu":
        where += f": {machine['cpu']['isa']}, MKL path {machine['mkl']['path']}"
    for dtype, rates in result["ceilings"]["compute"].items():
        if sustained := rates.get("sustained_gflops"):
            where += (
                f", {dtype} peak {rates['register_gflops']:.0f} GF/s, sustained {sustained:.0f}"
            )
    return f"- `{source.name}`: {where}; torch {version}, {result['created'][:10]}"


def _machine(result: Result) -> str:
    return words(result["machine"])


def speed(results: Sequence[Result]) -> Iterator[str]:
    """Our speed on one thread at SHOWN_D and SHOWN_N, or a mask's longest length: the ratio to
    torch and the percentage of the peak."""
    grids = {_machine(x): _shown(x) for x in results}
    columns = list(dict.fromkeys(key[2:] for grid in grids.values() for key in grid))
    if not columns:
        return
    yield _row(f"D={SHOWN_D}", "machine", *(f"{mask}, N={n}" for mask, n in columns))
    yield _row(*["---"] * (2 + len(columns)))
    for dtype, what in dict.fromkeys(key[:2] for grid in grids.values() for key in grid):
        for name, grid in grids.items():
            entries = [_entry(grid.get((dtype, what, *column))) for column in columns]
            if any(entries):
                yield _row(f"{dtype} {what}", name, *entries)


def _shown(result: Result) -> dict[tuple[str, str, str, int], Result]:
    cells = [c for c in result["cells"] if c["D"] == SHOWN_D and c["M"] == c["N"]]
    cells = [c for c in cells if c["pass"] in (FORWARD, BACKWARD)]
    masks = dict.fromkeys(c["mask"] for c in cells)
    lengths = {mask: _shown_length(cells, mask) for mask in masks}
    return {
        (c["dtype"], c["pass"], c["mask"], c["N"]): c for c in cells if c["N"] == lengths[c["mask"]]
    }


def _shown_length(cells: list[Result], mask: str) -> int:
    lengths = {c["N"] for c in cells if c["mask"] == mask}
    return SHOWN_N if SHOWN_N in lengths else max(lengths)


def _entry(cell: Result | None) -> str:
    if cell is None:
        return ""
    if cell["status"] != "ok":
        return "failed"
    entry = timing_of(cell, first_threads([cell]))
    ratio, percent = speedup_of(entry), entry["peers"][SUBJECT]["percent_of_peak"]
    parts = [f"{ratio['median']:.2f}x"] if ratio else []
    return ", ".join(parts + ([f"{percent:.0f}%"] if percent else []))


def decode(results: Sequence[Result]) -> Iterator[str]:
    """One row of queries on one thread: the ratio to torch, and GB/s of keys and values."""
    grids = {}
    for result in results:
        cells = [c for c in result["cells"] if c["M"] == 1 and c["timings"]]
        grids[_machine(result)] = {(c["dtype"], c["H"], c["Hk"], c["N"]): c for c in cells}
    lengths = sorted({key[3] for grid in grids.values() for key in grid})
    if not lengths:
        return
    yield _row("one row of queries", "machine", *(f"N={n}" for n in lengths))
    yield _row(*["---"] * (2 + len(lengths)))
    for kind in dict.fromkeys(key[:3] for grid in grids.values() for key in grid):
        dtype, h, hk = kind
        for name, grid in grids.items():
            entries = [_reading(grid.get((*kind, n))) for n in lengths]
            if any(entries):
                yield _row(f"{dtype} {h}:{hk} heads", name, *entries)


def _reading(cell: Result | None) -> str:
    if cell is None:
        return ""
    entry = timing_of(cell, first_threads([cell]))
    ratio, ours = speedup_of(entry), entry["peers"][SUBJECT]
    parts = [f"{ratio['median']:.2f}x"] if ratio else []
    return ", ".join([*parts, f"{ours['kv_gbs']:.0f} GB/s"])


def derivatives(results: Sequence[Result]) -> Iterator[str]:
    """Races, then the memory of each transform."""
    yield from races(results)
    yield ""
    yield from _memory(results, "extra MB")


def races(results: Sequence[Result]) -> Iterator[str]:
    """A row per race and machine: milliseconds of both sides, their ratio, and the aim."""
    rows = [(_machine(x), row) for x in results for row in x.get(x["kind"], [])]
    if not rows:
        return
    yield _row("", "machine", "ms, ours and the other's", "ratio [quartiles]", "aim")
    yield _row(*["---"] * 5)
    for machine, row in sorted(rows, key=lambda x: (x[1]["pass"], x[1]["what"], x[1]["dtype"])):
        yield _row(raced_name(row), machine, *_raced(row))


def _raced(row: Result) -> list[str]:
    if row["status"] != "ok":
        return ["failed", "", ""]
    ms = row["ms"]
    aim = f"{row['rule']} {row['aim']:g}: {'met' if row['met'] else '**missed**'}"
    return [f"{ms['ours']:.2f}, {ms['other']:.2f}", spread(row["ratio"]), aim]


def memory(results: Sequence[Result]) -> Iterator[str]:
    return _memory(results, "extra MB, forward+backward")


def _memory(results: Sequence[Result], title: str) -> Iterator[str]:
    """Memory on the first machine: it is the same on all."""
    rows = [row for x in results[:1] for row in x["memory"] if row["extra_bytes"] is not None]
    if not rows:
        return
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    grid = {(row["mask"], row["N"], row["peer"]): row["extra_bytes"] for row in rows}
    yield _row(title, *peers)
    yield _row(*["---"] * (1 + len(peers)))
    for mask, n in dict.fromkeys(key[:2] for key in grid):
        sizes = (grid.get((mask, n, peer)) for peer in peers)
        yield _row(f"{mask}, N={n}", *("" if x is None else f"{x / 1e6:.1f}" for x in sizes))


def _row(*entries: str) -> str:
    return f"| {' | '.join(entries)} |"


# name: the kind of result with its data, and the function that makes lines from such results
TABLES: dict[str, tuple[str, Callable[[Sequence[Result]], Iterator[str]]]] = {
    "speed": ("sweep", speed),
    "decode": ("decode", decode),
    "memory": ("memory", memory),
    **{name: (name, races) for name in ("serving", "flex", "latent", "selected", "models")},
    "derivatives": ("derivatives", derivatives),
    "engines": ("engines", engines.table),
}
