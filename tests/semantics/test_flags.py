"""Flags are True or False: a number, a text, None or a tensor raises."""

import numpy as np
import pytest
import torch

import fastattn

T = torch.randn(1, 2, 8, 16)
ROWS, OFFSETS = T[0].transpose(0, 1), torch.tensor([0, 8])
SCORES = torch.randn(1, 2, 8)
CACHE = fastattn.KVCache(1, 2, 16, capacity=16, storage=torch.int8)
CACHE.append(torch.randn(1, 2, 16, 16) + 100, torch.randn(1, 2, 16, 16))  # with an offset
FLAGS = {  # of each other call, with the name of the flag
    "attention_packed": (
        "return_lse", lambda **x: fastattn.attention_packed(*[ROWS] * 3, OFFSETS, OFFSETS, **x)
    ),
    "attention_weights": ("average_heads", lambda **x: fastattn.attention_weights(T, T, **x)),
    "attention_jvp": ("return_lse", lambda **x: fastattn.attention_jvp(*[T] * 6, **x)),
    "attention_selected": (
        "return_lse",
        lambda **x: fastattn.attention_selected(T, T, T, torch.zeros(1, 1, 8, 1).long(), **x),
    ),
    "top_blocks": ("shared", lambda **x: fastattn.top_blocks(T, T, block=4, count=1, **x)),
    "lightning_index": (
        "return_scores", lambda **x: fastattn.lightning_index(T, T[:, 0], SCORES, count=1, **x)
    ),
    "KVCache.attention": ("return_lse", lambda **x: CACHE.attention(T, **x)),
    "KVCache.attention, rows": ("allow_empty_rows", lambda **x: CACHE.attention(T, **x)),
    "KVCache": ("grow", lambda **x: fastattn.KVCache(1, 2, 16, capacity=8, **x)),
    "flex_attention": ("return_lse", lambda **x: fastattn.flex_attention(T, T, T, **x)),
    "flex_attention, groups": ("enable_gqa", lambda **x: fastattn.flex_attention(T, T, T, **x)),
    "nn.ScaledDotProductAttention": (
        "need_weights", lambda **x: fastattn.nn.ScaledDotProductAttention()(T, T, T, **x)
    ),
    "Place": (
        "bottom_right", lambda **x: fastattn.attention(T, T, T, place=fastattn.Place(**x))
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", [1, 0, "yes", None, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_a_bool(name, wrong):
    flag, function = FLAGS[name]
    for right in (True, False, np.False_):
        function(**{flag: right})
    with pytest.raises(TypeError, match=f"{flag}: got .*, expected True or False"):
        function(**{flag: wrong})
