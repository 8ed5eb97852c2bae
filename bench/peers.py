"""Who is measured. To add a peer, write why it may decline a case and how it computes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fastattn

from .cases import Case

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Case], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    attention: Attention
    why_not: Callable[[Case], str] = lambda case: ""  # the reason it cannot do a case, or ""


# Both are looked up at call time, so that a test may put a wrong kernel in their place.
def _fastattn(q, k, v, case):
    return fastattn.attention(q, k, v, causal=case.mask == "causal")


def _torch_sdpa(q, k, v, case):
    return F.scaled_dot_product_attention(q, k, v, is_causal=case.mask == "causal")


SUBJECT = "fastattn"  # whose claims are judged
BASELINE = "torch"  # whose time is the numerator of every speed-up
PEERS = {
    peer.name: peer
    for peer in (
        Peer(SUBJECT, "fastattn.attention", _fastattn),
        Peer(BASELINE, "torch F.scaled_dot_product_attention", _torch_sdpa),
    )
}
