"""The tables of bench/results/README.md, each between two comments that name it, from a result
file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .cases import BACKWARD, FORWARD
from .flushing import FLUSHED
from .machine import words
from .peers import BASELINE, SUBJECT
from .printed import beyond, first_threads, ratio_at_limit, speedup_of, timing_of

Result = dict[str, Any]
SHOWN_D, SHOWN_N = 64, 2048  # one cell of each kind tells enough; the pictures have the rest


def tables(result: Result) -> dict[str, list[str]]:
    """The lines of every table that this kind of result has the data of, by name."""
    made = {
        name: list(make(result)) for name, (kind, make) in TABLES.items() if kind == result["kind"]
    }
    return {name: lines for name, lines in made.items() if lines}


def write(pages: Sequence[Path], result: Result, source: Path) -> Iterator[str]:
    """Replace every table that both a page has markers for and the result has data for; yield what
    was done. Raises ValueError when there is none, or a marker is missing or repeated."""
    found = tables(result)
    texts = {page: page.read_text() for page in pages}
    places = [(page, name) for page in pages for name in found if _begin(name) in texts[page]]
    if not places:
        expected = " or ".join(_begin(name) for name in found) or "a file that has a table"
        where = ", ".join(map(str, pages))
        raise ValueError(f"{where}: got no place for a table of {source}, expected {expected}")
    for page, name in places:
        lines = [_caption(result, source), "", *found[name]]
        texts[page] = _between(texts[page], name, lines, page)
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
        where += f", {machine['cpu']['isa']}, MKL path {machine['mkl']['path']}"
    return f"From `{source.name}` ({where}; torch {version}; {result['created'][:10]}):"


def speed(result: Result) -> Iterator[str]:
    """Our speed at SHOWN_D and SHOWN_N, or a mask's longest length: the ratio to torch, then the
    percentage of the peak."""
    cells = [c for c in result["cells"] if c["D"] == SHOWN_D and c["M"] == c["N"]]
    cells = [c for c in cells if c["pass"] in (FORWARD, BACKWARD)]
    masks = list(dict.fromkeys(c["mask"] for c in cells))
    lengths = {mask: _shown_length(cells, mask) for mask in masks}
    grid = {(c["dtype"], c["pass"], c["mask"]): c for c in cells if c["N"] == lengths[c["mask"]]}
    if not grid:
        return
    yield _row(f"D={SHOWN_D}", *(f"{mask}, N={lengths[mask]}" for mask in masks))
    yield _row(*["---"] * (1 + len(masks)))
    for dtype, what in dict.fromkeys(key[:2] for key in grid):
        entries = (_entry(grid.get((dtype, what, mask))) for mask in masks)
        yield _row(f"{dtype} {what}", *entries)


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


def decode(result: Result) -> Iterator[str]:
    """One thread, a row of queries: the ratio to torch and GB/s of keys and values."""
    cells = [c for c in result["cells"] if c["M"] == 1 and c["timings"]]
    lengths = sorted({c["N"] for c in cells})
    kinds = dict.fromkeys((c["dtype"], c["H"], c["Hk"]) for c in cells)
    grid = {(c["dtype"], c["H"], c["Hk"], c["N"]): c for c in cells}
    if not grid:
        return
    yield _row("one row of queries", *(f"N={n}" for n in lengths))
    yield _row(*["---"] * (1 + len(lengths)))
    for kind in kinds:
        dtype, h, hk = kind
        entries = (_reading(grid.get((*kind, n))) for n in lengths)
        yield _row(f"{dtype} {h}:{hk} heads", *entries)


def _reading(cell: Result | None) -> str:
    if cell is None:
        return ""
    entry = timing_of(cell, first_threads([cell]))
    ratio, ours = speedup_of(entry), entry["peers"][SUBJECT]
    parts = [f"{ratio['median']:.2f}x"] if ratio else []
    return ", ".join([*parts, f"{ours['kv_gbs']:.0f} GB/s"])


def targets(result: Result) -> Iterator[str]:
    if not result["targets"]:
        return
    yield _row("target", "aim", "measured", "at the limit of the machine", "met")
    yield _row(*["---"] * 5)
    for row in result["targets"]:
        value = "-" if row["measured"] is None else f"{row['measured']:.3g}"
        met = {True: "yes", False: "no", None: row["reason"]}[row["met"]]
        met = "beyond this machine" if beyond(row) else met
        most = _at_limit(row)
        yield _row(row["name"], f"{row['rule']} {row['target']:g} {row['unit']}", value, most, met)


def _at_limit(row: Result) -> str:
    """What would be measured there; a percentage would be 100."""
    most = ratio_at_limit(row)
    if row["unit"].startswith("%"):
        return ""
    return f"{most:.2f}" if most else ""


def subnormals(result: Result) -> Iterator[str]:
    """A row a cell: milliseconds as it is and flushed to zero, their ratio, and torch's."""
    if not result["subnormals"]:
        return
    yield _row("one thread, ms", "as it is", "flushed to zero", "ratio [quartiles]", "torch")
    yield _row(*["---"] * 5)
    for row in result["subnormals"]:
        name = f"{row['dtype']} {row['mask']}, {row['pass']}"
        if row["status"] != "ok":
            yield _row(name, "failed", "", "", "")
            continue
        ms, ratio = row["ms"], row["ratio"]
        spread = f"{ratio['median']:.2f} [{ratio['q1']:.2f} {ratio['q3']:.2f}]"
        times = (f"{ms[x]:.1f}" if x in ms else "" for x in (SUBJECT, FLUSHED))
        yield _row(name, *times, spread, f"{ms[BASELINE]:.1f}" if BASELINE in ms else "")


def memory(result: Result) -> Iterator[str]:
    rows = [row for row in result["memory"] if row["extra_bytes"] is not None]
    if not rows:
        return
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    grid = {(row["mask"], row["N"], row["peer"]): row["extra_bytes"] for row in rows}
    yield _row("extra MB, forward+backward", *peers)
    yield _row(*["---"] * (1 + len(peers)))
    for mask, n in dict.fromkeys(key[:2] for key in grid):
        sizes = (grid.get((mask, n, peer)) for peer in peers)
        yield _row(f"{mask}, N={n}", *("" if x is None else f"{x / 1e6:.1f}" for x in sizes))


def _row(*entries: str) -> str:
    return f"| {' | '.join(entries)} |"


# name: the kind of result that has its data, and what makes its lines
TABLES: dict[str, tuple[str, Callable[[Result], Iterator[str]]]] = {
    "speed": ("sweep", speed),
    "decode": ("decode", decode),
    "memory": ("memory", memory),
    "targets": ("targets", targets),
    "subnormals": ("subnormals", subnormals),
}
