"""Peers other than this package and torch's SDPA: why each declines a case, and how it computes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..cases import FORWARD, Case, Inputs

Call = Callable[[Inputs], Tensor]


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
