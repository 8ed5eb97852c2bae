"""Each of xformers' bias classes as arguments of fastattn: the table of docs/guides/xformers.md.

xformers is not among the packages of the tests: its wheel is for one version of torch. Without
torch's dependencies it imports beside any: pip install --no-deps xformers.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import Place

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    xformers = pytest.importorskip(
        "xformers.ops.fmha.attn_bias", reason="xformers is not installed"
    )

ROWS, KEYS = [3, 5, 2], [6, 5, 4]  # of three sequences
PADDING, PAGE = 8, 4
STARTS = [0, 7, 14, 24]  # of sequences with gaps behind them
LENGTHS = torch.tensor(KEYS)
LAST = Place(bottom_right=True)


def offsets(lengths: list[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def by_xformers(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
    """softmax(q k^T scale + bias) v, of (B, M, H, D)."""
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias.materialize(shape, dtype=q.dtype)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def bias_of_a_tensor() -> Tensor:
    torch.manual_seed(7)
    return random(2, 4, 7, 11)


ONE_CALL = {
    "LowerTriangularMask": (lambda c: c(), dict(causal=True)),
    "LowerTriangularFromBottomRightMask": (lambda c: c(), dict(causal="bottom_right")),
    "LocalAttentionFromBottomRightMask": (
        lambda c: c(window_left=3, window_right=1),
        dict(window=(3, 1), place=LAST),
    ),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        lambda c: c(_window_size=4),
        dict(causal="bottom_right", window=(3, None)),
    ),
    "LowerTriangularMaskWithTensorBias": (
        lambda c: c(bias_of_a_tensor()),
        dict(causal=True, mask=bias_of_a_tensor()),
    ),
}
PADDED = dict(cu_k=torch.arange(4) * PADDING, key_lengths=LENGTHS)
GAPPY = dict(cu_k=torch.tensor(STARTS), key_lengths=LENGTHS)
PLAIN = dict(cu_k=offsets(KEYS))
PACKED = {
    "BlockDiagonalMask": (lambda c: c.from_seqlens(ROWS, KEYS), PLAIN),
    "BlockDiagonalCausalMask": (lambda c: c.from_seqlens(ROWS, KEYS), PLAIN | dict(causal=True)),
    "BlockDiagonalCausalFromBottomRightMask": (
        lambda c: c.from_seqlens(ROWS, KEYS),
        PLAIN | dict(causal="bottom_right"),
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        lambda c: xformers.BlockDiagonalMask.from_seqlens(ROWS, KEYS).make_local_attention(3),
        PLAIN | dict(causal=True, window=(2, None)),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        lambda c: xformers.BlockDiagonalMask.from_seqlens(
            ROWS, KEYS
        ).make_local_attention_from_bottomright(3),
        PLAIN | dict(causal="bottom_right", window=(2, None)),
    ),
    "BlockDiagonalPaddedKeysMask": (lambda c: c.from_seqlens(ROWS, PADDING, KEYS), PADDED),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        lambda c: c.from_seqlens(ROWS, PADDING, KEYS),
        PADDED | dict(causal="bottom_right"),
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        lambda c: c.from_seqlens_local(ROWS, PADDING, KEYS, 2, 1),
        PADDED | dict(window=(2, 1), place=LAST),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        lambda c: c.from_seqlens_local(ROWS, PADDING, KEYS, 3),
        PADDED | dict(causal="bottom_right", window=(2, None)),
    ),
    "BlockDiagonalGappyKeysMask": (lambda c: c.from_seqlens(ROWS, STARTS, KEYS), GAPPY),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        lambda c: c.from_seqlens(ROWS, STARTS, KEYS),
        GAPPY | dict(causal="bottom_right"),
    ),
}
PAGED = {
    "PagedBlockDiagonalPaddedKeysMask": ("BlockDiagonalPaddedKeysMask", {}),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (
        "BlockDiagonalCausalWithOffsetPaddedKeysMask",
        dict(causal="bottom_right"),
    ),
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call(name):
    make, arguments = ONE_CALL[name]
    bias = make(getattr(xformers, name))
    q, k, v = random(2, 7, 4, 16), random(2, 11, 4, 16), random(2, 11, 4, 16)
    ours = fastattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments)
    torch.testing.assert_close(ours.transpose(1, 2), by_xformers(q, k, v, bias))


@pytest.mark.parametrize("name", PACKED)
def test_packed(name):
    make, arguments = PACKED[name]
    bias, tokens = make(getattr(xformers, name)), int(arguments["cu_k"][-1])
    q, k, v = random(1, sum(ROWS), 4, 16), random(1, tokens, 4, 16), random(1, tokens, 4, 16)
    ours = fastattn.attention_packed(q[0], k[0], v[0], offsets(ROWS), **arguments)
    torch.testing.assert_close(ours[None], by_xformers(q, k, v, bias))


@pytest.mark.parametrize("name", PAGED)
def test_paged(name):
    of_padded, arguments = PAGED[name]
    bias = getattr(xformers, of_padded).from_seqlens(ROWS, PADDING, KEYS)
    table = torch.tensor([[2, 0], [1, 5], [4, 3]], dtype=torch.int32)
    bias.make_paged(table, PAGE, getattr(xformers, name))  # it exists, with this table
    q, k, v = random(1, sum(ROWS), 4, 16), random(6, PAGE, 4, 16), random(6, PAGE, 4, 16)
    given = dict(block_table=table, key_lengths=LENGTHS, **arguments)
    ours = fastattn.attention_packed(q[0], k, v, offsets(ROWS), **given)
    k, v = (x[table.long()].reshape(1, -1, 4, 16) for x in (k, v))
    torch.testing.assert_close(ours[None], by_xformers(q, k, v, bias))


def test_the_table_has_every_class():
    found = {x for x in vars(xformers) if x.endswith(("Mask", "MaskWithTensorBias"))}
    gappy = {x for x in found if x.startswith("Paged") and "Gappy" in x}
    assert found - gappy == {*ONE_CALL, *PACKED, *PAGED}
