"""The programs of a score_mod and a mask_mod as text, as options and operators carry them.

The programs have at most two captured tensors, of one dimension: 0 has floats, 1 has ints
(`lowering` makes such programs).
"""

from __future__ import annotations

from typing import NamedTuple

from .program import Program

CAPTURED = (("float", 1), ("int", 1))  # of each of the programs


class ModText(NamedTuple):
    """The programs of a call as text, as operators carry them.

    outside: True at a pair where a captured tensor is indexed out of range, unless the conditions
        before it in the mask_mod hide the pair. None: at no pair.
    """

    score: Program | None = None
    mask: Program | None = None
    outside: Program | None = None

    def text(self) -> str:
        return "\n\n".join("" if x is None else x.text() for x in self)

    def described(self) -> list[str]:
        """As in ["score_mod: a program of 7 values"]."""
        named = {"score_mod": self.score, "mask_mod": self.mask}
        return [f"{x}: a program of {len(y.values)} values" for x, y in named.items() if y]

    @classmethod
    def parse(cls, text: str) -> ModText:
        """The programs of a text. Raises ValueError unless it is of three programs that capture
        these tensors."""
        parts = text.split("\n\n")
        if len(parts) != len(cls._fields):
            raise ValueError(f"score_mod: got {len(parts)} programs, expected {len(cls._fields)}")
        programs = cls(*(Program.parse(x) if x else None for x in parts))
        for program, kind in zip(programs, ("float", "bool", "bool")):
            if program is None:
                continue
            if program.kind != kind:
                raise ValueError(f"score_mod: got a result of {program.kind}, expected {kind}")
            if program.captured != CAPTURED:
                raise ValueError(f"score_mod: got {program.captured}, expected {CAPTURED}")
            reads = any(x.op == "score" for x in program.values)
            if reads and kind == "bool":
                raise ValueError("score_mod: got a mask_mod that reads the score")
        return programs
