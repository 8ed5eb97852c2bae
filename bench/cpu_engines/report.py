"""What the rows say: the nearest engine, printed lines, and the tables of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..measure.machine import words
from ..measure.records import geometric_mean, markdown, spread
from ..peers.registry import SUBJECT
from .environments import ENVIRONMENTS
from .measure import BOUNDS
from .peers import FAMILIES, PEERS, UNQUANTISED

Record = dict[str, Any]
ERRORS = tuple(BOUNDS)  # from the least


def nearest(record: Record) -> tuple[str, float] | None:
    """The engine with the least time, of those with at most the error of the row's width, and its
    time over ours; None if none was timed."""
    ratios = {
        name: peer["ratio"]["median"]
        for name, peer in record["peers"].items()
        if name != UNQUANTISED and peer["ratio"] and equal(record, peer)
    }
    return min(ratios.items(), key=lambda item: item[1]) if ratios else None


def slower(ratio: float) -> bool:
    """Whether we are slower, as the tables round."""
    return round(ratio, 2) < 1


def equal(record: Record, peer: Record) -> bool:
    """Whether the error of the peer is at most that of the row's width."""
    return ERRORS.index(peer["precision"]) <= ERRORS.index(record["width"])


def lines(record: Record) -> Iterator[str]:
    """The row, then a line for each peer that has it or failed."""
    if record["status"] != "ok":
        yield f"{record['row']}: FAILED, not timed: {record['reason']}"
    else:
        found = nearest(record)
        near = f"nearest {found[0]} {found[1]:.2f}" if found else "no ratio"
        load = f"{record['rounds']} rounds, load {record['load']}"
        yield f"{record['row']}: {near}; {load}"
    for name, peer in record["peers"].items():
        if peer["reason"]:
            if not peer["declined"] and not peer["reason"].startswith("absent"):
                yield f"    {name}: {peer['reason']}"
        elif peer["ms"] is not None:
            ratio = f", {spread(peer['ratio'])}" if peer["ratio"] else ""
            other = "" if equal(record, peer) else f" of {peer['precision']}"
            yield f"    {name}: {peer['ms']:.3f} ms{ratio}; error{other} {peer['error']:.1e}"


def summary(result: Record) -> Iterator[str]:
    """The rows in which an engine is faster."""
    found = [(x["row"], *near) for x in result["engines"] if (near := nearest(x))]
    lost = [x for x in found if slower(x[2])]
    yield ""
    yield f"{len(found)} rows beside engines of at most the error, {len(lost)} slower than one"
    for name, engine, ratio in sorted(lost, key=lambda x: x[2]):
        yield f"  {ratio:.2f} {engine}: {name}"


def table(results: Sequence[Record]) -> Iterator[str]:
    """By machine: a row's milliseconds, its nearest engine, and every ratio; then errors."""
    for result in results:
        head = words(result["machine"]), "ours, ms", "nearest", *FAMILIES, UNQUANTISED
        yield from markdown(head, map(_line, result["engines"]))
        yield ""
        yield from _errors(result["engines"])
        yield ""
        yield _licenses(result)
        yield ""


def _line(record: Record) -> list[str]:
    found = nearest(record)
    near = f"{found[0]} {_number(found[1])}" if found else ""
    ours = record["peers"].get(SUBJECT, {}).get("ms")
    each = [_family(record, family) for family in FAMILIES]
    other = _entry(record, UNQUANTISED) if UNQUANTISED in record["peers"] else ""
    return [record["row"], f"{ours:.3f}" if ours else "", near, *each, other]


def _family(record: Record, family: str) -> str:
    names = [x for x in record["peers"] if x in PEERS and PEERS[x].family == family]
    return ", ".join(filter(None, (_entry(record, name) for name in names)))


def _entry(record: Record, name: str) -> str:
    """The ratio, with the variant, and the precision if it has more error than the row's width."""
    peer = record["peers"][name]
    if not peer["ms"]:
        return ""
    variant = name.partition(" ")[2] if name != UNQUANTISED else ""
    if not peer["ratio"]:
        return " ".join(filter(None, (f"{peer['ms']:.3f} ms", variant)))
    same = equal(record, peer)
    ratio = peer["ratio"]["median"]
    text = _number(ratio) if same else f"{ratio:.2f}"
    precision = "" if same or variant in ("f16", "q8_0", "q4_0") else f"({peer['precision']})"
    return " ".join(filter(None, (text, variant, precision)))


def _number(ratio: float) -> str:
    return f"**{ratio:.2f}**" if slower(ratio) else f"{ratio:.2f}"


def _errors(records: Sequence[Record]) -> Iterator[str]:
    """A row for each peer: the mean error of each width of rows."""
    widths = [x for x in ERRORS if any(record["width"] == x for record in records)]
    rows = []
    for name in PEERS:
        alike = (
            [
                peer["error"]
                for x in records
                if x["width"] == width
                if (peer := x["peers"].get(name)) and peer["error"] and not peer["reason"]
            ]
            for width in widths
        )
        means = [geometric_mean(errors) for errors in alike]
        if any(means):
            rows.append([name, *(f"{mean:.1e}" if mean else "" for mean in means)])
    return markdown(["error against float64, geometric mean", *widths], rows)


def _licenses(result: Record) -> str:
    """Each engine with its version and license."""
    licenses = {PEERS[name].family: PEERS[name].environment for name in PEERS}
    texts = [
        f"{name} {result['versions'][name]} ({environment.license})"
        for name, environment in licenses.items()
        if environment in ENVIRONMENTS.values() and environment and name in result["versions"]
    ]
    return "Engines: " + ", ".join(texts) + "."
