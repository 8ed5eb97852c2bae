"""The cells of a notebook on attention: the digits that they print, and code that computes them.

The notebook is chapter 3 of a book on language models. notebook_cells.txt, beside this file, has
each tensor that it prints, in order, below a name and a line that explains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import nn

TOKENS = ("Your", "journey", "starts", "with", "one", "step")
INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)
BATCH = torch.stack((INPUTS, INPUTS))
QUERY = INPUTS[1]  # 'journey'
SCORES = INPUTS @ QUERY
MASK = torch.ones(6, 6).tril()
TOLERANCE = 0.51e-4  # half of the fourth decimal, and a little for float32


def simple(queries: Tensor = INPUTS) -> tuple[Tensor, Tensor]:
    """Contexts and weights of section 3.3; its scores are not scaled."""
    return nn.ScaledDotProductAttention(scale=1.0)(queries, INPUTS, INPUTS, need_weights=True)


def linear() -> nn.SelfAttention:
    """Linear projections initialized with the notebook's seed, in its order: q, k, v."""
    torch.manual_seed(123)
    return nn.SelfAttention(3, 2, qkv_bias=False)


def uniform() -> nn.SelfAttention:
    """`linear` with matrices from torch.rand; a linear layer stores its matrix transposed."""
    module = linear()
    torch.manual_seed(123)
    for proj in (module.q_proj, module.k_proj, module.v_proj):
        proj.weight = torch.nn.Parameter(torch.rand(3, 2).T)
    return module


def causal(dropout: float = 0.0) -> nn.CausalSelfAttention:
    """The final module of chapter 3; its projections are those of `linear`."""
    torch.manual_seed(123)
    return nn.CausalSelfAttention(3, 2, context_length=6, dropout=dropout)


def weights(module: torch.nn.Module, *tensors: Tensor) -> Tensor:
    """The weights of a fused call, with the same dropout draws every time."""
    torch.manual_seed(123)
    return module(*tensors, need_weights=True)[1]


def scores(module: nn.SelfAttention, queries: Tensor = INPUTS) -> Tensor:
    """Scores before scale and softmax, in plain torch: the fused kernel does not return them."""
    return module.q_proj(queries) @ module.k_proj(INPUTS).T


def dropped_ones() -> Tensor:
    """Dropout of ones: queries of zeros attend equally to all six keys, with weights 1/6."""
    return 6 * weights(nn.ScaledDotProductAttention(dropout=0.5), 0 * INPUTS, INPUTS, INPUTS)


def shape(x: Tensor) -> Tensor:
    return torch.tensor(x.shape)


# Step name to the function that computes it. Each runs alone, so that a test can select one.
COMPUTE: dict[str, Callable[[], Tensor]] = {
    "cell 4: shape of the inputs": lambda: shape(INPUTS),
    "cell 5: scores of 'journey'": lambda: SCORES,
    "cell 6: one score by hand": lambda: (INPUTS[0] * QUERY).sum(),
    "cell 6: one score by torch": lambda: torch.dot(INPUTS[0], QUERY),
    "cell 7: shares of 'journey'": lambda: SCORES / SCORES.sum(),
    "cell 7: sum of the shares": lambda: (SCORES / SCORES.sum()).sum(),
    "cell 8: softmax by hand": lambda: SCORES.exp() / SCORES.exp().sum(),
    "cell 8: sum by hand": lambda: (SCORES.exp() / SCORES.exp().sum()).sum(),
    "cell 9: weights of 'journey'": lambda: simple(QUERY[None])[1][0],
    "cell 9: sum of the weights": lambda: simple(QUERY[None])[1].sum(),
    "cell 10: context of 'journey'": lambda: simple(QUERY[None])[0][0],
    "cell 11: scores by dot products": lambda: torch.stack([INPUTS @ x for x in INPUTS]),
    "cell 12: scores by one product": lambda: INPUTS @ INPUTS.T,
    "cell 13: weights": lambda: simple()[1],
    "cell 14: sum of row 2 as printed": lambda: simple()[1][1].round(decimals=4).sum(),
    "cell 14: sums of all rows": lambda: simple()[1].sum(-1),
    "cell 15: contexts": lambda: simple()[0],
    "cell 18: query of 'journey'": lambda: uniform().q_proj(QUERY),
    "cell 19: shape of the keys": lambda: shape(uniform().k_proj(INPUTS)),
    "cell 19: shape of the values": lambda: shape(uniform().v_proj(INPUTS)),
    "cell 20: its score of itself": lambda: scores(uniform(), QUERY)[1],
    "cell 21: scores of 'journey'": lambda: scores(uniform(), QUERY),
    "cell 22: weights of 'journey'": lambda: weights(uniform(), INPUTS)[1],
    "cell 23: context of 'journey'": lambda: uniform()(INPUTS)[1],
    "cell 24: SelfAttention, version 1": lambda: uniform()(INPUTS),
    "cell 26: SelfAttention, version 2": lambda: linear()(INPUTS),
    "cell 27: weights": lambda: weights(linear(), INPUTS),
    "cell 28: mask": lambda: MASK,
    "cell 29: weights times mask": lambda: weights(linear(), INPUTS) * MASK,
    "cell 30: weights, renormalised": lambda: weights(linear(), INPUTS, MASK),
    "cell 32: masked scores": lambda: scores(linear()).masked_fill(MASK == 0, -torch.inf),
    "cell 33: causal weights": lambda: weights(causal(), INPUTS),
    "cell 34: dropout of ones": dropped_ones,
    "cell 35: weights, dropped out": lambda: weights(causal(dropout=0.5), INPUTS),
    "cell 36: shape of the batch": lambda: shape(BATCH),
    "cell 38: shape of the contexts": lambda: shape(causal()(BATCH)),
}
# Steps with random draws, which current torch versions do not reproduce, and their values where
# nothing is dropped.
KEPT: dict[str, Callable[[], Tensor]] = {
    "cell 34: dropout of ones": lambda: torch.full((6, 6), 2.0),
    "cell 35: weights, dropped out": lambda: 2 * weights(causal(), INPUTS),
}


@dataclass(frozen=True)
class Step:
    """A tensor of the notebook: its cell and name, what it means, and the digits printed there."""

    section: str
    name: str
    note: str
    printed: str

    def __str__(self) -> str:
        return self.name

    def compute(self) -> Tensor:
        return COMPUTE[self.name]().detach()

    def expected(self) -> Tensor:
        """The printed digits as a number, a vector or a matrix."""
        rows = [[float(x) for x in row.split()] for row in self.printed.split("\n")]
        return torch.tensor(rows).squeeze()

    def difference(self, computed: Tensor) -> float:
        """The largest difference from the printed digits. For a random draw: from 0 or the kept
        value, over our draw and the notebook's."""
        if self.name not in KEPT:
            return largest_difference(computed, self.expected())
        kept = KEPT[self.name]()
        draws = (computed, self.expected())
        return max(largest_difference(x, torch.where(x == 0, 0.0, kept)) for x in draws)


def largest_difference(x: Tensor, expected: Tensor) -> float:
    """The largest difference: 0 for equal infinities, infinity for different shapes."""
    if x.shape != expected.shape:
        return math.inf
    return torch.where(x == expected, 0.0, (x - expected).abs()).max().item()


def read_steps() -> list[Step]:
    """Read notebook_cells.txt: section titles, each followed by blocks of name, note and digits."""
    steps, section = [], ""
    for block in Path(__file__).with_suffix(".txt").read_text("utf-8").strip().split("\n\n"):
        if block.startswith("# "):
            section = block[2:]
        else:
            steps.append(Step(section, *block.split("\n", maxsplit=2)))
    return steps


STEPS = read_steps()
