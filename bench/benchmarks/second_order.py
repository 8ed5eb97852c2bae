"""Forward mode and second derivatives, against the passes that they consist of and against torch's
math path, the only path of torch that supports them.

A row is a race, as in `unpadded`: float32, one head, causal, one thread. Memory is what a transform
adds to a fresh process, out and gradients included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fastattn
from fastattn.examples.memory import extra_bytes

from ..cases import FORWARD, TRAINING
from ..peers.registry import SUBJECT
from .varlen import Race

Record = dict[str, Any]
Attention = Callable[..., Tensor]
LENGTHS = (2048, 8192)
MEMORY_LENGTHS = (1024, 2048, 4096)
DIM = 64
GROWTH = 2.2  # highest ok growth of memory if N doubles


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(q, k, v, is_causal=True)


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


SIDES: dict[str, Attention] = {SUBJECT: ours, "torch-math": math}


class Given(NamedTuple):
    """q, k and v, their tangents, and the gradient of out and its tangent."""

    tensors: tuple[Tensor, ...]
    moves: tuple[Tensor, ...]
    dout: Tensor
    dout_t: Tensor


def given(n: int) -> Given:
    torch.manual_seed(0)
    each = [torch.randn(1, 1, n, DIM) for _ in range(8)]
    return Given(tuple(each[:3]), tuple(each[3:6]), *each[6:])


def forward(f: Attention, x: Given) -> Callable[[], Sequence[Tensor]]:
    return lambda: [f(*x.tensors)]


def jvp(f: Attention, x: Given) -> Callable[[], Sequence[Tensor]]:
    return lambda: list(torch.func.jvp(f, x.tensors, x.moves))


def at_once(f: Attention, x: Given) -> Callable[[], Sequence[Tensor]]:
    """The same by fastattn.attention_jvp, which computes forward in the same pass."""
    return lambda: fastattn.attention_jvp(*x.tensors, *x.moves, causal=True)


def backward(f: Attention, x: Given) -> Callable[[], Sequence[Tensor]]:
    """Backward alone: forward has run before."""
    leaves = [y.clone().requires_grad_() for y in x.tensors]
    out = f(*leaves)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)


def double_backward(f: Attention, x: Given) -> Callable[[], Sequence[Tensor]]:
    """Double backward alone: backward has run before."""
    leaves = [y.clone().requires_grad_() for y in (*x.tensors, x.dout)]
    grads = torch.autograd.grad(f(*leaves[:3]), leaves[:3], leaves[3], create_graph=True)
    return lambda: torch.autograd.grad(grads, leaves, x.moves, retain_graph=True)


def hessian_product(f: Attention, x: Given) -> Callable[[], Sequence[Tensor]]:
    """Forward over reverse, with the first passes."""
    loss = torch.func.grad(lambda *y: (f(*y) * x.dout).sum(), (0, 1, 2))
    return lambda: torch.func.jvp(loss, x.tensors, x.moves)[1]


TRANSFORMS = {
    "jvp": jvp,
    "double backward": double_backward,
    "Hessian-vector product": hessian_product,
}


def races(lengths: Sequence[int] = LENGTHS) -> Iterator[Race]:
    for n in lengths:
        x = given(n)
        for name, transform, base, aim in (
            ("attention_jvp over forward", at_once, forward, 3.5),
            ("jvp over forward", jvp, forward, 3.5),
            ("double backward over backward", double_backward, backward, 4.0),
        ):
            what = FORWARD if base is forward else TRAINING
            sides = transform(ours, x), base(ours, x)
            yield Race(f"{name}, N = {n}", "float32", what, *sides, "at most", aim, same=False)
        for name, way in TRANSFORMS.items():
            what = FORWARD if way is jvp else TRAINING
            title = f"torch's math path over {name}, N = {n}"
            yield Race(title, "float32", what, way(ours, x), way(math, x), aim=3.0)


def memory(lengths: Sequence[int] = MEMORY_LENGTHS) -> Iterator[Record]:
    """Records as in `peak_memory`; the mask is the name of a transform."""
    for name in TRANSFORMS:
        for n in lengths:
            for side in SIDES:
                row: Record = {"mask": name, "N": n, "dtype": "float32", "pass": "derivatives"}
                row |= {"B": 1, "H": 1, "D": DIM, "peer": side, "error": ""}
                found = extra_bytes(prepared, (side, name, n), (side, name, 64))
                yield row | {"extra_bytes": found}


def prepared(side: str, name: str, n: int) -> Callable[[], Any]:
    """A whole transform, with its first passes."""
    torch.set_num_threads(1)
    x = given(n)
    return lambda: TRANSFORMS[name](SIDES[side], x)()


def growth(rows: Sequence[Record]) -> Iterator[str]:
    """How our memory of each transform grows if N doubles: 2 is linear."""
    for name in TRANSFORMS:
        ours_rows = [row for row in rows if (row["mask"], row["peer"]) == (name, SUBJECT)]
        for a, b in itertools.pairwise(ours_rows):
            by = b["extra_bytes"] / max(1, a["extra_bytes"])
            met = "met" if by <= GROWTH * b["N"] / a["N"] / 2 else "MISSED"
            yield f"{name}, N = {a['N']} to {b['N']}: {by:.2f} times, at most {GROWTH:g}: {met}"
