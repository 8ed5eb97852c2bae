"""A fault: where, by which rule, and what is written instead."""

import difflib
from typing import NamedTuple

# Functions that change no result: they move data sooner, or promise what the caller knows.
HINTS = {"prefetch", "__builtin_prefetch", "multiple_of", "max_contiguous", "assume"}


class Fault(NamedTuple):
    file: str
    line: int
    rule: str
    start: int  # of the text that is replaced, in characters
    end: int
    new: str

    def plant(self, source):
        return source[: self.start] + self.new + source[self.end :]

    def diff(self, source):
        lines = source.splitlines(), self.plant(source).splitlines()
        return [x for x in [*difflib.unified_diff(*lines, lineterm="", n=0)][2:] if x[0] in "+-"]

    def __str__(self):
        return f"{self.file}:{self.line}: {self.rule}"
