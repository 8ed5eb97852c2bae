"""A whole nn.MultiheadAttention, with its projections, against the same module converted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import fastattn

from ..cases import DTYPES, FORWARD, TRAINING
from .race import Race

EMBED, HEADS, LENGTH = 512, 8, 2048
HIDDEN = 0.25
# name: in training mode with its gradients, with padding, with weights; the least ratio
MODES = {
    "train": (True, False, False, 1.25),
    "eval": (False, False, False, 1.8),
    "eval, padding": (False, True, False, 3.9),
    "eval, weights": (False, False, True, 1.8),
}


def races(dtypes: Sequence[str], scale: float) -> Iterator[Race]:
    n = max(8, int(LENGTH * scale))
    for dtype in dtypes:
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=DTYPES[dtype])
        ours = copy.deepcopy(theirs)
        fastattn.convert(ours)
        x = torch.randn(1, n, EMBED, dtype=DTYPES[dtype])
        for name, (train, padded, weights, aim) in MODES.items():
            made, torchs = (call(module, x, train, padded, weights) for module in (ours, theirs))
            what = f"torch's nn.MultiheadAttention over ours, N = {n}, {name}"
            yield Race(what, dtype, TRAINING if train else FORWARD, made, torchs, aim=aim)


def call(
    module: nn.MultiheadAttention, x: Tensor, train: bool, padded: bool, weights: bool
) -> Callable[[], list[Tensor]]:
    """Everything that a call returns: the output, the weights, the gradients."""
    n = x.shape[1]
    hidden = (torch.arange(n) >= int((1 - HIDDEN) * n)).expand(x.shape[:2]) if padded else None
    given = x.clone().requires_grad_(train)
    leaves, dout = [given, *module.parameters()], torch.ones_like(x)

    def results() -> list[Tensor]:
        module.train(train)
        with torch.set_grad_enabled(train):
            out = module(given, given, given, key_padding_mask=hidden, need_weights=weights)
            found = [y for y in out if y is not None]
            return found + (list(torch.autograd.grad(out[0], leaves, dout)) if train else [])

    return results
