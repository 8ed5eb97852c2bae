"""Write the tables of the pages in bench/results from result files, with several machines side by
side. Each table is between two comments that name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cases import BACKWARD, FORWARD
from ..cpu_engines import report as engines
from ..measure.machine import words
from ..measure.records import first_threads, markdown, speedup_of, spread, timing_of
from ..peers.registry import SUBJECT
from .console import raced_name, times

Result = dict[str, Any]
Grid = dict[str, dict[str, str]]  # what is written, by row and column
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
    return _side_by_side(f"D={SHOWN_D}", {_machine(x): _speeds(x) for x in results})


def _speeds(result: Result) -> Grid:
    cells = [c for c in result["cells"] if c["D"] == SHOWN_D and c["M"] == c["N"]]
    cells = [c for c in cells if c["pass"] in (FORWARD, BACKWARD)]
    masks = dict.fromkeys(c["mask"] for c in cells)
    lengths = {mask: _shown_length(cells, mask) for mask in masks}
    grid: Grid = {}
    for c in cells:
        if c["N"] == lengths[c["mask"]]:
            row = grid.setdefault(f"{c['dtype']} {c['pass']}", {})
            row[f"{c['mask']}, N={c['N']}"] = _speed(c)
    return grid


def _shown_length(cells: list[Result], mask: str) -> int:
    lengths = {c["N"] for c in cells if c["mask"] == mask}
    return SHOWN_N if SHOWN_N in lengths else max(lengths)


def _speed(cell: Result) -> str:
    if cell["status"] != "ok":
        return "failed"
    entry = timing_of(cell, first_threads([cell]))
    percent = entry["peers"][SUBJECT]["percent_of_peak"]
    return ", ".join([*_ratio(entry), *([f"{percent:.0f}%"] if percent else [])])


def _ratio(entry: Result) -> list[str]:
    ratio = speedup_of(entry)
    return [f"{ratio['median']:.2f}x"] if ratio else []


def decode(results: Sequence[Result]) -> Iterator[str]:
    """One row of queries on one thread: the ratio to torch, and GB/s of keys and values."""
    grids = {_machine(x): _readings(x) for x in results}
    return _side_by_side("one row of queries", grids, key=lambda column: int(column[2:]))


def _readings(result: Result) -> Grid:
    grid: Grid = {}
    for c in result["cells"]:
        if c["M"] == 1 and c["timings"]:
            entry = timing_of(c, first_threads([c]))
            row = grid.setdefault(f"{c['dtype']} {c['H']}:{c['Hk']} heads", {})
            gbs = f"{entry['peers'][SUBJECT]['kv_gbs']:.0f} GB/s"
            row[f"N={c['N']}"] = ", ".join([*_ratio(entry), gbs])
    return grid


def _side_by_side(
    corner: str, grids: Mapping[str, Grid], key: Callable[[str], int] | None = None
) -> Iterator[str]:
    """A line for each row of the grids and each machine that has entries in it. key: what sorts
    columns, which else have the order of their entries."""
    every = [(title, row) for grid in grids.values() for title, row in grid.items()]
    columns = list(dict.fromkeys(column for _, row in every for column in row))
    if key:
        columns.sort(key=key)
    rows = [
        [title, machine, *(grid[title].get(column, "") for column in columns)]
        for title in dict.fromkeys(title for title, _ in every)
        for machine, grid in grids.items()
        if any(grid.get(title, {}).values())
    ]
    return markdown([corner, "machine", *columns], rows) if rows else iter(())


def derivatives(results: Sequence[Result]) -> Iterator[str]:
    """Races, then the memory of each transform."""
    yield from races(results)
    yield ""
    yield from _memory(results, "extra MB")


def races(results: Sequence[Result]) -> Iterator[str]:
    """A row per race and machine: milliseconds of both sides, or tokens per second, their ratio,
    and the aim."""
    rows = [(_machine(x), row) for x in results for row in x.get(x["kind"], [])]
    if not rows:
        return
    rows.sort(key=lambda x: (x[1]["pass"], x[1]["what"], x[1]["dtype"]))
    sides = "ms, or tokens/s" if any("tokens" in row for _, row in rows) else "ms"
    head = "", "machine", f"{sides}, ours and the other's", "ratio [quartiles]", "aim"
    yield from markdown(head, ([raced_name(row), machine, *_raced(row)] for machine, row in rows))


def _raced(row: Result) -> list[str]:
    if row["status"] != "ok":
        return ["failed", "", ""]
    aim = f"{row['rule']} {row['aim']:g}: {'met' if row['met'] else '**missed**'}"
    return [", ".join(times(row)), spread(row["ratio"]), aim]


def memory(results: Sequence[Result]) -> Iterator[str]:
    return _memory(results, "extra MB, forward+backward")


def _memory(results: Sequence[Result], title: str) -> Iterator[str]:
    """Memory on the first machine: it is the same on all."""
    rows = [row for x in results[:1] for row in x["memory"] if row["extra_bytes"] is not None]
    if not rows:
        return
    sizes: Grid = {}
    for row in rows:
        of = sizes.setdefault(f"{row['mask']}, N={row['N']}", {})
        of[row["peer"]] = f"{row['extra_bytes'] / 1e6:.1f}"
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ([name, *(of.get(peer, "") for peer in peers)] for name, of in sizes.items())
    yield from markdown([title, *peers], lines)


# name: the kind of result with its data, and the function that makes lines from such results
TABLES: dict[str, tuple[str, Callable[[Sequence[Result]], Iterator[str]]]] = {
    "speed": ("sweep", speed),
    "decode": ("decode", decode),
    "memory": ("memory", memory),
    **{
        name: (name, races)
        for name in ("serving", "flex", "latent", "selected", "models", "generation")
    },
    "derivatives": ("derivatives", derivatives),
    "engines": ("engines", engines.table),
}
