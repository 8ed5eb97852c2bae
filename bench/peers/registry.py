"""The measured peers. To add one, write why it may decline a case and how it computes one.

`prepare` turns a case into a call. Objects that users would make once, such as a mask tensor or a
compiled function, are made there and are not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn

from ..cases import DTYPES, Case, Inputs
from ..masks import SEED
from . import external_peers

Call = Callable[[Inputs], Tensor]
# Most bytes of (M, N) matrices that a peer which stores scores may hold at once.
SCORES_BYTES = {"cpu": 512 << 20, "cuda": 8 << 30}
COPIES = 4


@dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[[Case], Call]
    why_not: Callable[[Case, str], str] = lambda case, what: ""  # why it declines a case, or ""
    our_draws: bool = False  # its dropout is fastattn's, so the oracle can repeat it


# The functions are looked up at each call, so that a test can replace them by wrong kernels.
def _fastattn(backend: str | None = None) -> Callable[[Case], Call]:
    def prepare(case: Case) -> Call:
        options: dict[str, Any] = arguments(case) | {"backend": backend}

        def call(x: Inputs) -> Any:
            if not case.rule.added:
                return fastattn.attention(x.q, x.k, x.v, **options)
            return fastattn.attention(x.q, x.k, x.v, mask=x.bias, **options)

        return call

    return prepare


def arguments(case: Case) -> dict[str, Any]:
    """The arguments of fastattn.attention for a case, without the bias."""
    rule, given = case.rule, {}
    if rule.alibi:
        given["alibi_slopes"] = case.slopes()
    if rule.dense:
        return given | {"mask": case.stored()}
    if rule.left is not None:
        given["window"] = (rule.left, rule.right)
    elif rule.right is not None:
        given["causal"] = True
    if rule.padded and rule.tensor:
        given["mask"] = case.compact_mask()
    elif rule.padded:
        given["key_lengths"] = case.lengths()
    if rule.dropout_p:
        given |= {"dropout_p": rule.dropout_p, "seed": SEED}
    return given


def _torch(backend: SDPBackend | None = None) -> Callable[[Case], Call]:
    def prepare(case: Case) -> Call:
        rule = case.rule
        dense = rule.padded or rule.left is not None or rule.dense != ""
        plain_causal = rule.right == 0 and not dense
        mask = case.stored() if dense else None
        options: dict[str, Any] = {"is_causal": plain_causal, "dropout_p": rule.dropout_p}
        options["enable_gqa"] = case.Hk != case.H

        def call(x: Inputs) -> Tensor:
            given = x.bias if rule.biased else mask
            return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=given, **options)

        if backend is None:
            return call

        def only(x: Inputs) -> Tensor:
            with sdpa_kernel([backend]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns, then raises the same
                return call(x)

        return only

    return prepare


def _unavailable(name: str) -> Callable[[Case, str], str]:
    """Why one of our backends declines a case: its reasons for tensors of the same kind."""

    def why_not(case: Case, what: str) -> str:
        element = torch.empty((), dtype=DTYPES[case.dtype], device=case.device)
        q = element.expand(case.B, case.H, case.M, case.D)
        k = element.expand(case.B, case.Hk, case.N, case.D)
        return "; ".join(fastattn.explain(q, k, k).declined.get(name, []))

    return why_not


def _scores_do_not_fit(case: Case, what: str) -> str:
    """Why a peer that stores scores is not tried; "" if they fit."""
    size, most = COPIES * case.B * case.H * case.M * case.N * 4, SCORES_BYTES[case.device]
    if size <= most:
        return ""
    return f"would hold {size / 1e9:.1f} GB of scores, at most {most / 1e9:.1f} GB is tried"


def _needs_cuda(case: Case, what: str) -> str:
    return "" if case.device == "cuda" else "runs on CUDA only"


# fastattn-x and torch-x are the same functions with the backend x alone.
SUBJECT = "fastattn"  # the package under test
BASELINE = "torch"  # the peer that the tables compare it with
PEERS = {
    peer.name: peer
    for peer in (
        Peer(SUBJECT, _fastattn(), our_draws=True),
        Peer("fastattn-triton", _fastattn("triton"), _unavailable("triton"), our_draws=True),
        Peer("fastattn-cuda", _fastattn("cuda"), _unavailable("cuda"), our_draws=True),
        Peer("fastattn-reference", _fastattn("reference"), _scores_do_not_fit, our_draws=True),
        Peer(BASELINE, _torch()),
        Peer("torch-flash", _torch(SDPBackend.FLASH_ATTENTION)),
        Peer("torch-efficient", _torch(SDPBackend.EFFICIENT_ATTENTION), _needs_cuda),
        Peer("torch-cudnn", _torch(SDPBackend.CUDNN_ATTENTION), _needs_cuda),
        Peer("torch-math", _torch(SDPBackend.MATH), _scores_do_not_fit),
        Peer("flex", external_peers.flex, external_peers.flex_why_not),  # torch's, compiled
        Peer("flash-attn", external_peers.flash_attn, external_peers.flash_attn_why_not),
    )
}
DEFAULT = {
    "cpu": (SUBJECT, BASELINE),
    "cuda": (
        *(SUBJECT, "fastattn-cuda", BASELINE, "torch-flash", "torch-efficient", "torch-cudnn"),
        "flash-attn",
    ),
}
COMPILED = ("flex",)  # some ten seconds to compile each case: only in a full sweep on a GPU


def chosen(device: str, names: tuple[str, ...] = (), full: bool = False) -> tuple[str, ...]:
    """fastattn and the named peers, or the device's default."""
    if names:
        return tuple(dict.fromkeys((SUBJECT, *names)))
    return DEFAULT[device] + (COMPILED if full and device == "cuda" else ())
