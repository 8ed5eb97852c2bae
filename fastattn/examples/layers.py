"""Layers that mix tokens, and measurements of them: time, memory, the longest chain of dependent
operations, and the path from the first token to the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import linear_regression
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn

from .common import progress
from .memory import extra_bytes

ATTENTION, PLAIN, RECURRENT = "self-attention", "in plain torch", "recurrent"
CONVOLUTION, DILATED, RESTRICTED = "convolutional", "dilated", "restricted"

Layer = Callable[[Tensor], Tensor]  # (B,n,d) to (B,n,d)

ROUNDS, TURN_S = 8, 0.02
MAX_COLUMNS = 512  # of a head, in the fused kernels


@dataclass(frozen=True)
class Case:
    """A layer and its sizes: `batch` sequences of n tokens of width d, k taps of a convolution, r
    keys of restricted attention. The last tap or key is the token itself."""

    layer: str
    n: int
    d: int
    k: int = 3
    r: int = 64
    batch: int = 1

    def make(self) -> Layer:
        """The layer, with frozen weights: the memory of their gradients does not depend on n."""
        if self.layer == ATTENTION:
            return attention
        if self.layer == PLAIN:
            return plain_attention
        if self.layer == RESTRICTED:
            return partial(attention, window=(self.r - 1, 0))
        if self.layer == CONVOLUTION:
            return convolution(self.d, self.k)
        if self.layer == RECURRENT:
            rnn = nn.RNN(self.d, self.d, batch_first=True).requires_grad_(False)
            return lambda x: rnn(x)[0]
        raise ValueError(f"layer: got {self.layer!r}, expected one that stands alone")

    def tokens(self) -> Tensor:
        return torch.randn(self.batch, self.n, self.d)


class Curve(NamedTuple):
    """A measured value for each size."""

    sizes: list[int]
    values: list[float]

    def slope(self) -> float:
        """The exponent of the values' growth with size: least squares over the last three."""
        x, y = ([math.log(value) for value in row[-3:]] for row in self)
        return linear_regression(x, y).slope


def attention(x: Tensor, window: tuple[int, int] | None = None) -> Tensor:
    """Fused softmax(x x^T / sqrt(d)) x, (B,n,d) to (B,n,d): the paper counts no projections."""
    h = _heads(x)
    out = fastattn.attention(h, h, h, window=window)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(2)


def plain_attention(x: Tensor) -> Tensor:
    """`attention` in torch's operations, which store the n x n weights."""
    h = _heads(x)
    weights = (h @ h.mT / math.sqrt(h.shape[-1])).softmax(-1)
    return (weights @ h).transpose(1, 2).flatten(2)


def _heads(x: Tensor) -> Tensor:
    """(B,n,d) to (B,H,n,d/H), with one head up to MAX_COLUMNS."""
    return x.unflatten(-1, (math.ceil(x.shape[-1] / MAX_COLUMNS), -1)).transpose(1, 2)


def convolution(d: int, k: int, dilation: int = 1) -> Layer:
    """A causal convolution with k taps, `dilation` tokens apart."""
    conv = nn.Conv1d(d, d, k, dilation=dilation).requires_grad_(False)
    return lambda x: conv(F.pad(x.mT, ((k - 1) * dilation, 0))).mT


def forward_seconds(cases: Sequence[Case]) -> dict[Case, float]:
    """This thread's CPU time of a forward pass, the least over several rounds. All cases take turns
    in each round, because other processes rarely slow a case in every round."""
    calls = {case: partial(case.make(), case.tokens()) for case in cases}
    least = dict.fromkeys(calls, math.inf)
    with torch.no_grad():
        for case in progress([*calls] * ROUNDS, "time"):
            now = time.thread_time()
            end = now + TURN_S
            while now < end:
                start, _, now = now, calls[case](), time.thread_time()
                least[case] = min(least[case], now - start)
    return least


def training_bytes(cases: Sequence[Case]) -> dict[Case, int]:
    """Peak memory that forward and backward add, each case in a fresh process."""
    return {
        case: extra_bytes(_training, [case], [replace(case, n=256)])
        for case in progress(cases, "memory")
    }


def _training(case: Case) -> Callable[[], Tensor]:
    torch.set_num_threads(1)
    layer, x = case.make(), case.tokens().requires_grad_()
    return lambda: torch.autograd.grad(layer(x).sum(), x)[0]


def longest_chain(case: Case) -> int:
    """Nodes on the longest path through the layer's autograd graph: operations that must run one
    after the other, on any number of processors."""
    end = case.make()(case.tokens().requires_grad_()).grad_fn
    lengths: dict[object, int] = {None: 0}
    todo = [end]
    while todo:  # no recursion: a recurrent layer's chain is deeper than Python's stack
        node = todo[-1]
        before = [earlier for earlier, _ in node.next_functions] if node else []
        unknown = [earlier for earlier in before if earlier not in lengths]
        if not unknown:
            lengths[todo.pop()] = 1 + max((lengths[earlier] for earlier in before), default=0)
        todo += unknown
    return lengths[end]


def path_length(case: Case) -> int:
    """Layers, or recurrent steps, until the last token's gradient reaches the first token."""
    x = case.tokens().requires_grad_()
    for length, h in enumerate(_states(case, x), 1):
        (gradient,) = torch.autograd.grad(h[:, -1].sum(), x, retain_graph=True)
        if gradient[:, 0].any():
            return length
    raise AssertionError("there is always one more state")


def _states(case: Case, x: Tensor) -> Iterator[Tensor]:
    """x after one layer, two layers, and so on. For the recurrent layer: the states of one layer
    after one step, two steps, and so on; in a step every token reads its left neighbour's state."""
    cell, state = nn.RNNCell(case.d, case.d), torch.zeros_like(x)
    for i in count():
        if case.layer == RECURRENT:
            state = cell(x[0], F.pad(state[0], (0, 0, 1, -1)))[None]
            yield state
        else:
            dilated = case.layer == DILATED
            x = convolution(case.d, case.k, case.k**i)(x) if dilated else case.make()(x)
            yield x
