"""A score_mod and a mask_mod in the form that operators and kernels take.

Captured tensors become two tensors of one dimension, one of floats and one of ints. Each load gets
one index into them. Blocks of pairs that the mask_mod hides or shows as a whole are found by
interval arithmetic.

A third program tells where an index is out of range, also of pairs that the mask_mod hides: kernels
clamp the index, so another element would decide. An index must be in range at each pair that the
call's other arguments show; in a mask_mod where the conditions before it, joined by &, show the
pair, too, and in a score_mod where the mask_mod does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.sizes import known
from ..call.spec import BLOCK_KEYS, BLOCK_ROWS, Options
from .bounds import Bounds, Ints, bounds, extremes, is_inside
from .intervals import block_classes
from .mod_text import CAPTURED, ModText
from .program import Builder, Program, Value, conjuncts, needed
from .recognition import Shape, inputs_of

CLASSES_FROM = 1 << 15  # pairs of one head: below, classes cost more than they save
MOST_PLANES = 64  # of classes, in calls with fewer pairs of one head than this:
ANY_PLANES_FROM = 1 << 20  # classes of a plane take a millisecond, a tenth of its attention or less
MOST_COPIED = 1 << 20  # captured numbers: a larger table is read by the mask that it makes
INT32 = range(-(2**31), 2**31)
CPU = torch.device("cpu")


class Lowered(NamedTuple):
    """What operators carry.

    text: of `ModText`.
    floats: (numbers,), float32 or float64, with the gradients of the captured tensors; or None.
    ints: (numbers,), int64, or None.
    blocks: (B or 1, H or 1, blocks of rows, blocks of keys), int8, of `intervals`; or None.
    sizes: of each captured tensor in each dimension, beside a text of `unlowered`; symbols, maybe.
    """

    text: str
    floats: Tensor | None
    ints: Tensor | None
    blocks: Tensor | None
    sizes: tuple[int, ...] | None = None


class Begin(NamedTuple):
    """The first index of each kind: that of a call within a larger one."""

    item: int = 0
    head: int = 0
    row: int = 0
    key: int = 0

    @classmethod
    def of(cls, o: Options) -> Begin:
        return cls(o.at_item, o.at_head, o.at_row, o.at_key)


def may_lower(score: Program | None, mask: Program | None, tensors: Sequence[Tensor]) -> bool:
    """False where a mask serves better: a captured tensor is as large as one."""
    programs = [x for x in (score, mask) if x is not None]
    if any(_is_like_a_mask(x, p, tensors) for p in programs for x in p.values):
        return False
    used = {x.tensor for p in programs for x in p.values if x.tensor is not None}
    return not known(sum(tensors[x].numel() for x in used) > MOST_COPIED)


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Captured tensors, one after the other: the floats in this dtype, the others in int64. None
    where there is no number."""
    flat = []
    for floating, own in ((True, dtype), (False, torch.int64)):
        parts = [x.to(own).reshape(-1) for x in tensors if x.is_floating_point() == floating]
        if known(sum(x.numel() for x in parts) == 0):
            flat.append(None)
        else:
            flat.append(parts[0].contiguous() if len(parts) == 1 else torch.cat(parts))
    return flat[0], flat[1]


def lower(
    score: Program | None,
    mask: Program | None,
    tensors: Sequence[Tensor],
    shape: Shape,
    dtype: torch.dtype,
    begin: Begin,
    device: torch.device = CPU,
    flat: tuple[Tensor | None, Tensor | None] | None = None,
) -> Lowered | None:
    """Lower the programs of a call. Values of captured tensors are read if all are on a CPU.

    tensors: the captured tensors of both programs.
    shape: the sizes of the call; of a packed batch, the longest.
    dtype: that in which scores are computed.
    begin: the first indices.
    device: of the call. Kernels of CPUs have 32 bits for whole numbers beside float32 scores, and
        take classes of blocks.
    flat: what `joined` made of all captured tensors. None: join those that programs load.

    None where another form serves better: whole numbers do not fit in the bits that kernels have
    for them, or, without `flat`, a captured tensor is as large as a mask.
    """
    if flat is None and not may_lower(score, mask, tensors):
        return None
    programs = [x for x in (score, mask) if x is not None]
    used = sorted({x.tensor for p in programs for x in p.values if x.tensor is not None})
    joins = used if flat is None else range(len(tensors))
    shapes = {x: tuple(map(int, tensors[x].shape)) for x in joins}  # torch.jit.trace has tensors
    table = tuple((x, tensors[x].is_floating_point(), shapes[x]) for x in joins)
    ends = (x + max(n, 1) - 1 for x, n in zip(begin, shape))
    on_cpu = device.type == "cpu" and all(tensors[x].device.type == "cpu" for x in used)
    known = extremes({x: tensors[x] for x in used}) if on_cpu else {}
    narrow = on_cpu and dtype == torch.float32
    text = _text(score, mask, table, tuple(zip(begin, ends)), tuple(known.items()), narrow)
    if text is None:
        return None
    blocks = _blocks(mask, tensors, shape, dtype, begin) if on_cpu and mask is not None else None
    if flat is None:
        flat = joined([tensors[x] for x in used], dtype)
    return Lowered(text, *flat, blocks)


@functools.lru_cache(maxsize=512)
def _text(
    score: Program | None,
    mask: Program | None,
    joins: tuple[tuple[int, bool, tuple[int, ...]], ...],
    ranges: tuple[tuple[int, int], ...],
    extremes: tuple[tuple[int, tuple[int, int]], ...],
    narrow: bool,
) -> str | None:
    """The text of the lowered programs.

    joins: the number of each captured tensor that is joined, whether it has floats, its shape.
    ranges: the first and the last b, h, i and j.
    extremes: the bounds of captured tensors of whole numbers.
    narrow: whether whole numbers have 32 bits. If one may need more, there is no text.
    """
    table, inputs, known = _Table.of(joins), dict(zip("bhij", ranges)), dict(extremes)
    flattened = [x and table.flattened(x, inputs, known) for x in (score, mask)]
    text = ModText(*flattened, table.outside(score, mask, inputs, known))
    own: Ints = {}
    if known:
        least, most = zip(*known.values())
        own[1] = min(least), max(most)
    if narrow and not all(_is_narrow(x, inputs, own) for x in text if x):
        return None
    return text.text()


def _is_narrow(program: Program, inputs: dict[str, tuple[int, int]], ints: Ints) -> bool:
    """True if each whole number fits in 32 bits."""
    for value, interval in zip(program.values, bounds(program, inputs, ints)):
        if value.kind != "int":
            continue
        if interval is None or interval[0] < INT32.start or interval[1] >= INT32.stop:
            return False
    return True


def _is_like_a_mask(value: Value, program: Program, tensors: Sequence[Tensor]) -> bool:
    """True for a load by [.., i, j] of a tensor that is large or has a gradient, also of one of
    several numbers of a pair."""
    ops = [program.values[x].op for x in value.args]
    if value.tensor is None or [x for x in ops if x != "constant"][-2:] != ["i", "j"]:
        return False
    x = tensors[value.tensor]
    return x.requires_grad or known(x.numel() > MOST_COPIED >> 4)


class _Table(NamedTuple):
    """Where the numbers of each captured tensor begin in the two tensors of `joined`."""

    kinds: dict[int, str]  # of the tensors that are joined
    first: dict[int, int]
    shapes: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, joins: Sequence[tuple[int, bool, tuple[int, ...]]]) -> _Table:
        """joins: the number of each tensor, whether it has floats, its shape."""
        kinds, first, shapes = {}, {}, {}
        room = {"float": 0, "int": 0}
        for x, floating, shape in joins:
            kinds[x], shapes[x] = "float" if floating else "int", shape
            first[x] = room[kinds[x]]
            room[kinds[x]] += math.prod(shape)
        return cls(kinds, first, shapes)

    def flattened(
        self, program: Program, inputs: dict[str, tuple[int, int]], ints: Ints
    ) -> Program:
        """The program with one index for each load, into the two flat tensors."""
        builder = Builder()
        numbers, _ = self._emitted(builder, program, inputs, ints)
        return builder.program(numbers[-1], CAPTURED)

    def outside(
        self,
        score: Program | None,
        mask: Program | None,
        inputs: dict[str, tuple[int, int]],
        ints: Ints,
    ) -> Program | None:
        """The program of where an index is out of range; None if it never is. A condition of the
        mask_mod may index out of range where those before it hide, the score_mod where any does."""
        builder = Builder()
        shown, wrong = builder.constant(True), builder.constant(False)
        for program in (mask, score):
            if program is None:
                continue
            numbers, tests = self._emitted(builder, program, inputs, ints)
            for at in conjuncts(program):
                own = (y for x in needed(program.values, at) for y in tests.pop(x, ()))
                for test in dict.fromkeys(own):  # neighbouring elements have one index
                    wrong = builder.emit("or", wrong, builder.emit("and", shown, test))
                if program is mask:
                    shown = builder.emit("and", shown, numbers[at])
        never = builder.values[wrong].number is False
        return None if never else builder.program(wrong, CAPTURED)

    def _emitted(
        self, builder: Builder, program: Program, inputs: dict[str, tuple[int, int]], ints: Ints
    ) -> tuple[list[int], dict[int, list[int]]]:
        """The number in `builder` of each value of a program, and for each load the bools that are
        true where its index is out of range."""
        number: list[int] = []
        tests: dict[int, list[int]] = {}
        known = bounds(program, inputs, ints)
        for at, value in enumerate(program.values):
            args = [number[x] for x in value.args]
            if value.op == "constant":
                assert value.number is not None
                number.append(builder.constant(value.number))
            elif value.op == "load":
                of_args = [known[x] for x in value.args]
                tests[at] = []
                number.append(self._load(builder, value, args, of_args, tests[at]))
            else:
                number.append(builder.emit(value.op, *args))
        return number, tests

    def _load(
        self,
        builder: Builder,
        value: Value,
        args: list[int],
        known: list[Bounds],
        tests: list[int],
    ) -> int:
        """tests: gets the bools that are true where the index is out of range."""
        tensor = value.tensor
        assert tensor is not None
        shape = self.shapes[tensor]
        if 0 in shape:  # nothing to read
            tests.append(builder.constant(True))
            zeros = {"float": 0.0, "int": 0, "bool": False}
            return builder.constant(zeros[value.kind])
        index = builder.constant(self.first[tensor])
        step = 1
        for x, size, interval in reversed(list(zip(args, shape, known))):
            n = builder.constant(size)
            if not is_inside(interval, size):
                low = builder.emit("lt", x, builder.constant(-size))
                tests.append(builder.emit("or", low, builder.emit("ge", x, n)))
            if interval is None or interval[0] < 0:
                negative = builder.emit("lt", x, builder.constant(0))
                x = builder.emit("where", negative, builder.emit("add", x, n), x)
            scaled = builder.emit("mul", x, builder.constant(step))
            index = builder.emit("add", scaled, index)
            step *= size
        kind = self.kinds[tensor]
        number = builder.load(0 if kind == "float" else 1, kind, (index,))
        return builder.emit("to_bool", number) if value.kind == "bool" else number


def _blocks(
    mask: Program, tensors: Sequence[Tensor], shape: Shape, dtype: torch.dtype, begin: Begin
) -> Tensor | None:
    pairs = shape.rows * shape.keys
    if pairs < CLASSES_FROM:
        return None
    reads = inputs_of(mask)
    items = shape.batch if "b" in reads else 1
    heads = shape.heads if "h" in reads else 1
    if not items * heads or (items * heads > MOST_PLANES and pairs < ANY_PLANES_FROM):
        return None
    planes = [
        block_classes(
            mask,
            tensors,
            shape.rows,
            shape.keys,
            block_rows=BLOCK_ROWS,
            block_keys=BLOCK_KEYS,
            b=begin.item + item,
            h=begin.head + head,
            row=begin.row,
            key=begin.key,
            dtype=dtype,
        )
        for item, head in itertools.product(range(items), range(heads))
    ]
    return torch.stack(planes).to(torch.int8).unflatten(0, (items, heads))
