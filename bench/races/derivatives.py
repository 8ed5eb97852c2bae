"""Forward mode and second derivatives, against the passes that they consist of and against torch's
math path, the only path of torch that supports them.

float32, one head, causal. Memory is what a transform adds to a fresh process, out and gradients
included; ours is linear in N.
"""

from __future__ import annotations

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
from .race import Race

Record = dict[str, Any]
Attention = Callable[..., Tensor]
LENGTHS = (2048, 8192)
MEMORY_LENGTHS = (1024, 2048, 4096)
DIM = 64


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


def races(dtypes: Sequence[str], scale: float) -> Iterator[Race]:
    for length in LENGTHS if "float32" in dtypes else ():
        n = int(length * scale)
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


def memory(scale: float) -> Iterator[Record]:
    """Records as in `peak_memory`; the mask is the name of a transform."""
    for name in TRANSFORMS:
        for n in (int(x * scale) for x in MEMORY_LENGTHS):
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
