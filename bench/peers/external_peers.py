"""Peers other than this package and torch's SDPA: why each declines a case, and how it computes."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cases import FORWARD, Case, Inputs

Call = Callable[[Inputs], Tensor]
# Most bytes of (M, N) matrices that a peer which stores scores may hold at once.
SCORES_BYTES = {"cpu": 512 << 20, "cuda": 8 << 30}
COPIES = 4


# ------------------------------------------------------------------------------------------- naive


def naive_why_not(case: Case, what: str) -> str:
    """Why a peer that stores scores is not tried; "" if the scores fit."""
    size, most = COPIES * case.B * case.H * case.M * case.N * 4, SCORES_BYTES[case.device]
    if size <= most:
        return ""
    return f"would hold {size / 1e9:.1f} GB of scores, at most {most / 1e9:.1f} GB is tried"


def naive(case: Case) -> Call:
    rule, group = case.rule, case.H // case.Hk
    banded = rule.padded or rule.right is not None
    hidden = ~case.compact_mask() if banded else None

    def call(x: Inputs) -> Tensor:
        k, v = (y.repeat_interleave(group, 1) if group > 1 else y for y in (x.k, x.v))
        s = x.q @ k.mT / math.sqrt(case.D)
        if x.bias is not None:
            s = s + x.bias
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        p = torch.softmax(s, -1)
        return torch.nn.functional.dropout(p, rule.dropout_p) @ v

    return call


# ----------------------------------------------------------------------------------- flex_attention


def flex_why_not(case: Case, what: str) -> str:
    if case.rule.dropout_p:
        return "flex_attention has no dropout"
    if case.device == "cpu" and what != FORWARD:
        return "flex_attention has no backward on the CPU"
    return ""


@functools.cache
def _compiled() -> Any:
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    # Every shape, dtype, grad mode and thread count is compiled separately. Past the recompile
    # limit torch would run flex_attention uncompiled, with all scores in memory, and only warn.
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 10000}
    torch._dynamo.config.load_config(limits | {"fail_on_recompile_limit_hit": True})
    return torch.compile(flex_attention, dynamic=False)


def flex(case: Case) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    rule, lengths = case.rule, case.lengths()

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        keep = j < lengths[b]
        if rule.left is not None:
            keep = keep & (j >= i - rule.left)
        if rule.right is not None:
            keep = keep & (j <= i + rule.right)
        return keep

    banded = rule.padded or rule.right is not None
    B = case.B if rule.padded else None
    blocks = (
        create_block_mask(mask_mod, B, None, case.M, case.N, device=case.device) if banded else None
    )
    options = {"block_mask": blocks, "enable_gqa": case.Hk != case.H}

    def call(x: Inputs) -> Tensor:
        if (bias := x.bias) is None:
            return _compiled()(x.q, x.k, x.v, **options)

        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + bias[0, h, i, j]

        return _compiled()(x.q, x.k, x.v, score_mod=score_mod, **options)

    return call


# ------------------------------------------------------------------------ packages, where installed


def _absent(package: str, case: Case) -> str:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if case.device != "cuda":
        return "runs on CUDA only"
    if case.rule.dense:
        return "takes no dense boolean mask"
    return "" if not case.rule.padded else "padding would need its variable-length interface"


def flash_attn_why_not(case: Case, what: str) -> str:
    if reason := _absent("flash_attn", case):
        return reason
    if case.dtype == "float32":
        return "takes float16 and bfloat16 only"
    return "has no float mask" if case.rule.biased else ""


def flash_attn(case: Case) -> Call:
    from flash_attn import flash_attn_func  # ty: ignore[import-not-found]

    rule = case.rule
    left = -1 if rule.left is None else rule.left
    options = {"causal": rule.right == 0, "window_size": (left, -1), "dropout_p": rule.dropout_p}
    return lambda x: flash_attn_func(*_tokens(x), **options).transpose(1, 2)


def _tokens(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (B, N, H, D)."""
    return x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2)
