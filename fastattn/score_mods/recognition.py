"""Structure of programs: bands, key lengths, caps and slopes that kernels know.

Only what has the same result, gradients and meaning is recognised; all else stays a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .evaluate import evaluate
from .program import Program, Value, conjuncts, needed, part, renumbered

Band = tuple["int | None", "int | None"]


class Shape(NamedTuple):
    """The sizes of a call: items of the batch, query heads, rows, keys."""

    batch: int
    heads: int
    rows: int
    keys: int


class Structure(NamedTuple):
    """What a score_mod and a mask_mod have of known structure.

    band: (left, right): row i sees keys i - left to i + right. None in the pair is no limit. A side
        may be negative. None: no band.
    key_lengths: int64 [B]: row i of item b sees keys below key_lengths[b].
    softcap: c of c tanh(score / c), after `score`.
    alibi: float [H]: slope |i - j| is subtracted, after `softcap`.
    score: the program of the rest of the score_mod, which comes first. None: no rest.
    mask: the program of the rest of the mask_mod. None: no rest.
    of_elements: whether elements of captured tensors decided key lengths, or that there are none.
    """

    band: Band | None = None
    key_lengths: Tensor | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    score: Program | None = None
    mask: Program | None = None
    of_elements: bool = False


def recognise(
    score: Program | None,
    mask: Program | None,
    tensors: Sequence[Tensor],
    shape: Shape,
    dtype: torch.dtype = torch.float32,
) -> Structure:
    """The structure of a score_mod and a mask_mod, which capture these tensors. Indices begin at 0.

    Values of captured tensors are read, on a CPU alone: never of a GPU's, of tensors without data,
    or under vmap. Programs keep the numbers of their captured tensors. dtype: that of scores.
    """
    structure = Structure() if mask is None else _of_mask(mask, tensors, shape, dtype)
    return structure if score is None else _of_score(structure, score, tensors, shape, dtype)


def inputs_of(program: Program) -> set[str]:
    """The names among score, b, h, i, j that a program reads."""
    return {x.op for x in program.values} & {"score", "b", "h", "i", "j"}


def _known(program: Program, tensors: Sequence[Tensor], **names) -> Tensor | None:
    """The value of a program, or None where it cannot be read."""
    used = {x.tensor for x in program.values if x.tensor is not None}
    if any(_unreadable(tensors[x]) for x in used):
        return None
    given = {name: names.pop(name, torch.zeros((), dtype=torch.int64)) for name in "bhij"}
    plain = [x.detach() if at in used else x for at, x in enumerate(tensors)]
    try:
        value = evaluate(program, plain, **given, **names)
        if value.numel():
            value.flatten()[0].item()  # raises under vmap
    except (IndexError, RuntimeError):
        return None
    return value


def _unreadable(tensor: Tensor) -> bool:
    # Of a subclass, fake or not, or with a gradient: its values are no constants of the call.
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.device.type != "cpu" or tensor.requires_grad:
        return True
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def _of_mask(mask: Program, tensors, shape: Shape, dtype) -> Structure:
    left: int | None = None
    right: int | None = None
    lengths, of_elements = None, False
    rest: list[int] = []
    for at in conjuncts(mask):
        edges = _band(mask, at)
        if edges is not None:
            left, right = _least(left, edges[0]), _least(right, edges[1])
            continue
        if _always(mask, at):
            continue
        leaf = part(mask, at)
        if inputs_of(leaf) <= {"b", "j"}:
            of_leaf = _lengths(leaf, tensors, shape, dtype)
            if of_leaf is not None:
                of_elements |= any(x.tensor is not None for x in leaf.values)
                lengths = of_leaf if lengths is None else torch.minimum(lengths, of_leaf)
                continue
        rest.append(at)
    band = None if left is right is None else (left, right)
    if lengths is not None and bool((lengths == shape.keys).all()):
        lengths = None
    return Structure(band, lengths, mask=_conjunction(mask, rest), of_elements=of_elements)


def _conjunction(program: Program, leaves: list[int]) -> Program | None:
    """The program of the conjunction of some values."""
    if not leaves:
        return None
    kept = needed(program.values, *leaves)
    values = list(renumbered(program.values, kept))
    result, *others = (kept.index(x) for x in leaves)
    if not others and result != len(values) - 1:
        return part(program, leaves[0])
    for x in others:
        values.append(Value("and", (result, x), "bool"))
        result = len(values) - 1
    return Program(tuple(values), program.captured)


def _least(x: int | None, y: int | None) -> int | None:
    return min((z for z in (x, y) if z is not None), default=None)


def _band(program: Program, at: int) -> Band | None:
    """The band of a comparison of i - j, or of |i - j|, with a constant."""
    value = program.values[at]
    if value.op == "not":
        opposite = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}
        inner = program.values[value.args[0]]
        if inner.op not in opposite:
            return None
        value = inner._replace(op=opposite[inner.op])
    if value.op not in ("ge", "gt", "le", "lt") or _is_float(program, value):
        return None
    x, y = value.args if value.op in ("ge", "gt") else reversed(value.args)  # x >= y, or x > y
    strict = value.op in ("gt", "lt")
    inner, limit = program.values[y], program.values[x].number
    if inner.op == "abs" and isinstance(limit, int):  # limit >= |i - j + c|
        form, width = difference(program, inner.args[0], None), limit - strict
        if form is None or form[0] != -form[1] or abs(form[0]) != 1:
            return None
        c = form[2] * form[0]  # of i - j + c
        return width - c, width + c
    form = difference(program, x, y)
    if form is None or form[0] != -form[1] or abs(form[0]) != 1:
        return None
    c = form[2] - strict  # i - j + c >= 0, or j - i + c >= 0
    return (None, c) if form[0] == 1 else (c, None)


def _is_float(program: Program, value: Value) -> bool:
    return program.values[value.args[0]].kind == "float"


def _always(program: Program, at: int) -> bool:
    """Whether a value is true of all indices, which are at least 0."""
    value = program.values[at]
    if value.op == "constant":
        return value.number is True
    if value.op not in ("ge", "gt", "le", "lt") or _is_float(program, value):
        return False
    x, y = value.args if value.op in ("ge", "gt") else reversed(value.args)
    form = difference(program, x, y)
    if form is None:
        return False
    return form[0] >= 0 and form[1] >= 0 and form[2] - (value.op in ("gt", "lt")) >= 0


def _lengths(leaf: Program, tensors, shape: Shape, dtype) -> Tensor | None:
    """The lengths of a mask of keys that shows the first ones, for each item."""
    b, j = torch.arange(shape.batch)[:, None], torch.arange(shape.keys)
    seen = _known(leaf, tensors, b=b, j=j, dtype=dtype)
    if seen is None:
        return None
    seen = seen.expand(shape.batch, shape.keys)
    lengths = seen.sum(1)
    return lengths if torch.equal(seen, j < lengths[:, None]) else None


def _of_score(structure: Structure, score: Program, tensors, shape: Shape, dtype) -> Structure:
    edge = structure.band[1] if structure.band else None
    causal = edge is not None and edge <= 0
    at = len(score.values) - 1
    value = score.values[at]
    if value.op in ("add", "sub"):
        pairs = [value.args] if value.op == "sub" else [value.args, value.args[::-1]]
        for x, bias in pairs:
            if "score" in inputs_of(part(score, bias)):
                continue
            alibi = _slopes(score, bias, tensors, shape, dtype, causal)
            if alibi is not None:
                alibi = -alibi if value.op == "add" else alibi
                structure, at = structure._replace(alibi=alibi), x
                break
    inner, number = cap_at(score, at)
    if inner is not None:
        structure, at = structure._replace(softcap=number), inner
    if score.values[at].op != "score":
        structure = structure._replace(score=part(score, at))
    return structure


def _slopes(program: Program, at: int, tensors, shape, dtype, causal: bool) -> Tensor | None:
    """The slopes s of a bias s |i - j|, where one factor reads h alone and one is a distance."""
    sign, factors, todo = 1.0, [], [at]
    while todo:
        value = program.values[here := todo.pop()]
        if value.op == "neg":
            sign, todo = -sign, [*todo, value.args[0]]
        elif value.op == "mul":
            todo.extend(value.args)
        else:
            factors.append(here)
    signs = [_distance(program, x, causal) for x in factors]
    if len(factors) != 2 or sum(x is not None for x in signs) != 1:
        return None
    distance = next(x for x in signs if x is not None)
    (slope,) = (part(program, x) for x, is_distance in zip(factors, signs) if is_distance is None)
    if not inputs_of(slope) <= {"h"} or slope.kind != "float":
        return None
    known = _known(slope, tensors, h=torch.arange(shape.heads), dtype=dtype)
    return None if known is None else sign * distance * known.expand(shape.heads)


def _distance(program: Program, at: int, causal: bool) -> float | None:
    """1 of |i - j|, or of i - j under causal; -1 of its negative; None of all else."""
    value = program.values[at]
    absolute = False
    while value.op in ("abs", "to_float"):
        absolute = absolute or value.op == "abs"
        at = value.args[0]
        value = program.values[at]
    if value.kind != "int":
        return None
    form = difference(program, at, None)
    if form is None or form not in ((1, -1, 0), (-1, 1, 0)):
        return None
    if absolute:
        return 1.0
    return float(form[0]) if causal else None


def cap_at(program: Program, at: int) -> tuple[int | None, float]:
    """x and c of c tanh(x / c); (None, 0) of all else."""
    value = program.values[at]
    if value.op != "mul":
        return None, 0.0
    for x, y in (value.args, value.args[::-1]):
        c, tanh = program.values[x].number, program.values[y]
        if c is None or not 0 < c < float("inf") or tanh.op != "tanh":
            continue
        inner = program.values[tanh.args[0]]
        numbers = [program.values[z].number for z in inner.args]
        if inner.op == "div" and numbers[1] == c:
            return inner.args[0], float(c)
        for this, other in ((0, 1), (1, 0)):
            if inner.op == "mul" and numbers[this] is not None and numbers[this] == 1 / c:
                return inner.args[other], float(c)
    return None, 0.0


# ------------------------------------------------------------------------------------ linear forms


Form = tuple[int, int, int]  # ci, cj, c


def difference(program: Program, x: int, y: int | None) -> Form | None:
    """The linear form of the int value x minus the int value y (None: 0); None if the difference is
    no linear form of i and j."""
    forms = [_form(program, x), (0, 0, 0) if y is None else _form(program, y)]
    if forms[0] is None or forms[1] is None:
        return None
    return _added(forms[0], forms[1], -1)


def _added(x: Form, y: Form, factor: int) -> Form:
    return x[0] + factor * y[0], x[1] + factor * y[1], x[2] + factor * y[2]


def _form(program: Program, at: int) -> Form | None:
    value = program.values[at]
    if value.op == "constant":
        return (0, 0, value.number) if type(value.number) is int else None
    if value.op in ("i", "j"):
        return (1, 0, 0) if value.op == "i" else (0, 1, 0)
    if value.op not in ("add", "sub", "neg", "mul") or value.kind != "int":
        return None
    forms = [_form(program, x) for x in value.args]
    if any(x is None for x in forms):
        return None
    x, *others = forms
    assert x is not None
    if value.op == "neg":
        return _added((0, 0, 0), x, -1)
    y = others[0]
    assert y is not None
    if value.op != "mul":
        return _added(x, y, 1 if value.op == "add" else -1)
    if x[:2] == (0, 0):
        x, y = y, x
    return _added((0, 0, 0), x, y[2]) if y[:2] == (0, 0) else None
