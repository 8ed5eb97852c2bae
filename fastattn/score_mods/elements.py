"""Functions of small tensors in a traced function, element by element.

A captured row, as pos[i], becomes its elements where a function needs them: each is a symbol of
its own, loaded by a constant last index. A program has no tensors, and no kernel sees one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .symbols import PARTS, Elements, Symbol, Table, Trace, places, refused, steps_of

MOST = 64  # elements of one tensor in a function


def is_part(x: object) -> bool:
    """True for an operand of one dimension or more."""
    return isinstance(x, PARTS) or (isinstance(x, Tensor) and x.dim() > 0)


def elements_of(t: Trace, x: Any, name: str) -> Elements:
    """The elements of an operand of the function `name`, of one dimension or more."""
    if isinstance(x, Elements):
        return x
    if isinstance(x, Tensor):
        x = Table(t, x, (None,) * x.dim())
    assert isinstance(x, Table)
    checked(x.shape, name, x.described())
    symbols = []
    for place in itertools.product(*[range(n) for n in x.shape]):
        rest = iter(place)
        index = [t.constant(next(rest)) if y is None else y for y in x.index]
        symbols.append(t.load(x.tensor, tuple(index)))
    return Elements(t, x.shape, symbols)


def checked(shape: Sequence[int], name: str, of: str) -> None:
    count = math.prod(shape)
    if not 0 < count <= MOST:
        raise refused(
            TypeError,
            f"{name} got {of}, {count} elements, expected 1 to {MOST}: index it by b, h, i or j, "
            "as in bias[h, i, j], or compute it outside of the function and index the result; a "
            "longer dot product may be further columns of query and key",
        )


def made(t: Trace, shape: Sequence[int], symbols: list[Symbol]) -> Symbol | Elements:
    return Elements(t, shape, symbols) if len(shape) else symbols[0]


def by_element(
    t: Trace, name: str, handler: Callable, args: tuple, kwargs: dict
) -> Symbol | Elements:
    """What the handler of a function of numbers returns for each element of the operands, which
    broadcast as torch's do."""
    given = [*args, *kwargs.values()]
    parts = {at: elements_of(t, x, name) for at, x in enumerate(given) if is_part(x)}
    shape = _broadcast([x.shape for x in parts.values()], name)
    checked(shape, name, "operands that broadcast to a tensor")
    expanded = {at: _expanded(x, shape) for at, x in parts.items()}
    results = []
    for place in range(math.prod(shape)):
        own = [expanded[at][place] if at in expanded else x for at, x in enumerate(given)]
        results.append(handler(t, *own[: len(args)], **dict(zip(kwargs, own[len(args) :]))))
    return made(t, shape, results)


def _broadcast(shapes: list, name: str) -> list[int]:
    shape: list[int] = []
    for at in range(1, max([len(x) for x in shapes]) + 1):
        sizes = {x[-at] for x in shapes if len(x) >= at} - {1}
        if len(sizes) > 1:
            got = ", ".join(str(tuple(x)) for x in shapes)
            raise refused(TypeError, f"{name} got shapes that do not broadcast: {got}")
        shape.insert(0, sizes.pop() if sizes else 1)
    return shape


def _expanded(x: Elements, shape: Sequence[int]) -> list[Symbol]:
    steps = [0 if n == 1 else step for n, step in zip(x.shape, steps_of(x.shape))]
    steps = [0] * (len(shape) - len(steps)) + steps
    return [x.symbols[at] for at in places([(y, range(n)) for y, n in zip(steps, shape)])]


def groups(x: Elements, dims: Sequence[int]) -> Iterator[list[Symbol]]:
    """The symbols along these dimensions, for each place in the others."""
    axes = [(step, range(n)) for step, n in zip(steps_of(x.shape), x.shape)]
    along = places([axes[at] for at in dims])
    for first in places([y for at, y in enumerate(axes) if at not in dims]):
        yield [x.symbols[first + y] for y in along]
