"""The functions of a call in compiled code: programs as text that kernels cannot read yet.

Sizes may be symbols in a graph of torch.compile or torch.export, and values are not known. Such a
graph has the programs as they were traced, with the sizes of the captured tensors. The operator's
kernel lowers them when the graph runs, for the sizes and the values of that call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.spec import Options, Tensors, acc_dtype
from ..call.validation import check, counts
from .lowering import Begin, Lowered, joined, lower
from .program import Program
from .recognition import Shape

MARK = "unlowered"
ANY_SIZE = Shape(*(1 << 31,) * 4)
NO_VALUES = torch.device("meta")


class Unlowered(NamedTuple):
    """The programs of a call.

    Its text has the blocks of `mod_text.ModText`: the score_mod's program, the mask_mod's, and in
    place of the third the word `unlowered`.
    """

    score: Program | None
    mask: Program | None

    def text(self) -> str:
        return "\n\n".join([*("" if x is None else x.text() for x in self), MARK])

    @classmethod
    @functools.lru_cache(maxsize=512)
    def parse(cls, text: str) -> Unlowered:
        """What `text` states. Raises ValueError unless that is two programs with the same captured
        tensors."""
        *texts, last = text.split("\n\n")
        if len(texts) != 2 or last != MARK:
            raise ValueError(f"score_mod: got {len(texts)} programs before {last!r}, expected 2")
        programs = cls(*(Program.parse(x) if x else None for x in texts))
        for program, kind in zip(programs, ("float", "bool")):
            if program is not None and program.kind != kind:
                raise ValueError(f"score_mod: got a result of {program.kind}, expected {kind}")
        if len({x.captured for x in programs if x is not None}) > 1:
            raise ValueError("score_mod: got two programs that capture different tensors")
        return programs

    def captured(
        self, floats: Tensor | None, ints: Tensor | None, sizes: Sequence[int]
    ) -> list[Tensor]:
        """The captured tensors, as views of the two that `lowering.joined` makes of them.

        sizes: of each tensor in each of its dimensions.
        """
        rest = {"float": floats, "int": ints}
        tensors, todo = [], list(sizes)
        for kind, dims in next((x.captured for x in self if x is not None), ()):
            shape, todo = todo[:dims], todo[dims:]
            of = "float" if kind == "float" else "int"
            source, n = rest[of], math.prod(shape)
            if source is None and not n:
                source = torch.empty(0)
            if source is None or source.shape[0] < n or len(shape) != dims:
                raise ValueError(f"captured_sizes: got {list(sizes)}, expected those of {kind}s")
            own, rest[of] = source[:n].view(shape), source[n:]
            tensors.append(own != 0 if kind == "bool" else own)
        return tensors


def is_unlowered(text: str) -> bool:
    """True for a text that only `lowered_call` reads."""
    return text.endswith(MARK)


def unlowered(
    score: Program | None, mask: Program | None, tensors: Sequence[Tensor], dtype: torch.dtype
) -> Lowered:
    """What operators carry in compiled code. dtype: that of scores."""
    sizes = tuple([n for x in tensors for n in x.shape])
    return Lowered(Unlowered(score, mask).text(), *joined(tensors, dtype), None, sizes or None)


def lowered_call(t: Tensors, o: Options, known: bool = True) -> tuple[Tensors, Options]:
    """The call with its programs lowered, if they are not.

    known: whether sizes and values are known. If not, the programs hold for calls of any size.

    Raises NotImplementedError where whole numbers of the programs may need more than 32 bits, and
    the kernels of the CPU have no more beside float32.
    """
    if not o.score_mod or not is_unlowered(o.score_mod):
        return t, o
    check(t, o)
    given = Unlowered.parse(o.score_mod)
    flat = t.captured_floats, t.captured_ints
    plain = [None if x is None else x.detach() for x in flat]
    sizes_of_captured = tuple(map(int, o.captured_sizes or ()))
    tensors = given.captured(plain[0], plain[1], sizes_of_captured)
    B, M, N = counts(t, o)
    sizes = Shape(B, t.q.shape[1], M, N) if known else ANY_SIZE
    about = sizes, acc_dtype(t.q.dtype), Begin.of(o), t.q.device if known else NO_VALUES
    lowered = lower(given.score, given.mask, tensors, *about, flat=flat)
    if lowered is None:
        raise NotImplementedError(
            "score_mod, mask_mod: whole numbers may need more than 32 bits in compiled code, "
            "expected fewer beside float32: call fastattn outside of compiled code, or give "
            "float64 tensors"
        )
    return t._replace(mask_blocks=lowered.blocks), o._replace(
        score_mod=lowered.text, captured_sizes=None
    )
