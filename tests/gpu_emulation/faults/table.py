"""The table of seeded faults, in the text files beside this one. Blocks of lines:

    title: the slice that must detect it
    = why it survives, if it does
    a file of csrc/ or fastattn/, or a compiled kernel
    -the code as it is
    +the code with the fault

The edits of a file follow one another, and so do files. A number before a title is from the list
that the table began with.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
KINDS = ("kernels", "assembly", "launch", "compiled", "hopper")


class Edit(NamedTuple):
    where: str
    old: str
    new: str

    @property
    def of(self):
        """What it alters: sources, python, or compiled code."""
        if self.where.startswith("fastattn/"):
            return "python"
        return "sources" if re.search(r"\.(h|cuh|cu)$", self.where) else "compiled"


class Fault(NamedTuple):
    title: str
    seen_by: str
    edits: tuple[Edit, ...]
    survives: str  # the explanation, or ""

    @property
    def number(self):
        """The number in the first list, or ""."""
        found = re.match(r"(\d\db?) ", self.title)
        return found[1] if found else ""


@functools.cache
def every():
    """{title: Fault} of all kinds, in order."""
    found = [fault for kind in KINDS for fault in of(kind).values()]
    assert len({x.title for x in found}) == len(found), "two faults have one title"
    return {x.title: x for x in found}


def of(kind):
    """{title: Fault} of a file."""
    text = (HERE / f"{kind}.txt").read_text()
    blocks = re.split(r"\n{2,}", re.sub(r"(?m)^#.*\n?", "", text).strip())
    found = [fault(x.splitlines()) for x in blocks]
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


def applied_to_compiled(fault, text):
    """PTX after the fault's edits of the kernels in it. Here `old` is a pattern; `2: ` or `-1: `
    before it is the index, from 0, of the match to edit if there are several."""
    kernels = re.split(r"(?=^\.visible \.entry )", text, flags=re.M)
    return "".join(compiled(fault, x) for x in kernels)


def kernels_of(edit, text):
    """The beginnings of the kernels that the edit is for."""
    return re.findall(rf"^\.visible \.entry \w*{edit.where}", text, re.M)


def compiled(fault, kernel):
    for edit in fault.edits:
        if not kernels_of(edit, kernel):
            continue
        index, pattern = re.fullmatch(r"(?:(-?\d+): )?(.*)", edit.old, re.S).groups()
        found = list(re.finditer(pattern, kernel, re.M))
        at = int(index or 0)
        enough = len(found) == 1 if index is None else -len(found) <= at < len(found)
        assert enough, f"{fault.title}: {edit.old!r} is in {edit.where} {len(found)} times"
        start, end = found[at].span()
        kernel = kernel[:start] + found[at].expand(edit.new) + kernel[end:]
    return kernel
