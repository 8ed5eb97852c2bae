"""The page of a first hour: the status of each part, and the end of its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]
REHEARSAL = "**Rehearsal: no GPU was used, and no figure on this page is a measurement of one.**"


def lines(record: Record) -> Iterator[str]:
    machine, commit = record["machine"], record["commit"]
    title = "Rehearsal of the first hour" if record["rehearsal"] else "The first hour"
    yield f"# {title}: {machine['name']}"
    yield ""
    if record["rehearsal"]:
        yield from (REHEARSAL, "")
    versions = ", ".join(f"{name} {x}" for name, x in record["versions"].items())
    at = f"{commit['sha'][:12]}{', with changes' * commit['dirty']}" if commit else "no checkout"
    yield f"{record['created']}; commit {at}; {versions}."
    if gpu := machine.get("gpu"):
        yield ""
        yield f"Compute capability {gpu['capability']}, CUDA {gpu['cuda']}; {gpu['clocks']}"
    yield ""
    yield from table(record)
    for part in record["parts"]:
        if part["tail"]:
            yield from section(part)


def table(record: Record) -> Iterator[str]:
    parts = record["parts"]
    yield "| part | what became of it | seconds | of at most | its last words |"
    yield "|---|---|---|---|---|"
    for x in parts:
        last = x["last"].strip("= ").replace("|", "\\|")[:100]
        yield f"| {x['name']} | {x['status']} | {x['seconds']:.0f} | {x['limit']:.0f} | {last} |"
    counts = Counter(x["status"] for x in parts)
    yield ""
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    yield f"{len(parts)} parts{' of a rehearsal' * record['rehearsal']}: {summary}."


def section(part: Record) -> Iterator[str]:
    yield ""
    yield f"## {part['name']}{' (rehearsal)' * part['rehearsal']}"
    yield ""
    yield f"`{part['command']}`"
    yield ""
    yield from (f"    {line}".rstrip() for line in part["tail"])
