"""The table of seeded faults, faults.txt. Blocks of lines:

    title: the call of calls.py that must detect it
    = why it survives, if it does
    a file of csrc/
    -the code as it is
    +the code with the fault

The edits of a file follow one another, and so do files.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    where: str
    old: str
    new: str


class Fault(NamedTuple):
    title: str
    seen_by: str
    edits: tuple[Edit, ...]
    survives: str  # the explanation, or ""


@functools.cache
def every():
    """{title: Fault}, in order."""
    text = Path(__file__).with_name("faults.txt").read_text()
    blocks = re.split(r"\n{2,}", re.sub(r"(?m)^#.*\n?", "", text).strip())
    found = [fault(x.splitlines()) for x in blocks]
    assert len({x.title for x in found}) == len(found), "two faults have one title"
    return {x.title: x for x in found}


def fault(lines):
    title, seen_by = lines.pop(0).rsplit(": ", 1)
    survives, edits = "", []
    for line in lines:
        sign, text = line[0], line[1:]
        if sign == "=":
            survives = " ".join((survives, text.strip())).strip()
        elif sign == "-":
            if edits[-1][2]:  # the next edit of this file
                edits.append((edits[-1][0], [], []))
            edits[-1][1].append(text)
        elif sign == "+":
            edits[-1][2].append(text)
        else:
            edits.append((line, [], []))
    return Fault(title, seen_by, tuple(Edit(x, *map("\n".join, y)) for x, *y in edits), survives)


def applied(fault, where, text):
    """The text of a file after the fault's edits of it. The old code of each must occur once."""
    for edit in fault.edits:
        if edit.where == where:
            times = text.count(edit.old)
            assert times == 1, f"{fault.title}: {edit.old!r} is in {where} {times} times"
            text = text.replace(edit.old, edit.new)
    return text
