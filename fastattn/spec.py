"""What one attention call computes, with every default resolved."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNLIMITED = 1 << 40  # a band edge that no sequence reaches
Maybe = Any  # Tensor | None, where the spec says which: no reader has to ask again


class Feature(enum.Flag):
    """The building blocks a backend may support. A new feature starts here."""

    NONE = 0
    BAND = enum.auto()  # causal and sliding windows: one pair of edges
    LENGTHS = enum.auto()  # key padding: how many keys each batch item has
    MASK = enum.auto()  # boolean or additive
    ALIBI = enum.auto()
    SOFTCAP = enum.auto()
    SINKS = enum.auto()
    DROPOUT = enum.auto()
    GQA = enum.auto()  # fewer key heads than query heads
    WEIGHTS = enum.auto()  # the probabilities themselves
    GRAD = enum.auto()
    PACKED = enum.auto()  # reserved: variable-length batches described by cu_seqlens


class Tensors(NamedTuple):
    """The tensors of a call. Strides are free; nothing here is copied or expanded.

    The weights passes have no `v`; the attention passes have no `normaliser`, an output there.
    """

    q: Tensor  # (B, H, M, D)
    k: Tensor  # (B, Hk, N, D)
    v: Maybe  # (B, Hk, N, Dv)
    mask: Maybe = None  # broadcasts to (B, H, M, N): bool (True = may attend) or additive
    lengths: Maybe = None  # (B,) int32 or int64
    slopes: Maybe = None  # (H,) or (B, H)
    sinks: Maybe = None  # (H,)
    seed: Maybe = None  # one int64 element, read when dropout_p > 0
    normaliser: Maybe = None  # (2, B, H, M): the LSE, and what its rounding lost


class Options(NamedTuple):
    """The scalars of a call, as torch operators can carry them; None means the default."""

    scale: float | None = None  # 1 / sqrt(D)
    causal: str = ""  # "", "top_left" or "bottom_right"
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    backend: str = ""  # the first that can
    grad: bool = False
    average_heads: bool = False  # weights only
    constant_lse: bool = False  # weights only: no gradient through the normaliser


@dataclass(frozen=True, eq=True)
class AttentionSpec:
    """Shapes and semantics of a call. It holds no tensors, so it hashes and caches.

    Row i stands at i' = i + (length - M if bottom_right else 0), and the scores are, in this order,

        s = scale * q.k;  s = softcap * tanh(s / softcap);  s -= slope * |i' - j|;  s += mask
        keep i' - left <= j <= i' + right and j < length

    followed by softmax (with the sink as one more logit) and dropout.
    """

    B: int
    H: int
    Hk: int
    M: int
    N: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: str  # the type alone: "cpu", "cuda"
    scale: float
    left: int = UNLIMITED
    right: int = UNLIMITED
    bottom_right: bool = False
    softcap: float = 0.0  # 0 = off
    dropout_p: float = 0.0
    mask_shape: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    has_lengths: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    needs_grad: bool = False
    weights: bool = False  # asks for the probabilities
    average_heads: bool = False
    constant_lse: bool = False
    packed: bool = False  # reserved for cu_seqlens, with M and N the longest lengths

    def __hash__(self) -> int:  # specs are long-lived keys: hash once
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @functools.cached_property
    def lse_dtype(self) -> torch.dtype:
        """What the normaliser, slopes and sinks are kept in: at least float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @functools.cached_property
    def features(self) -> Feature:
        used = {
            Feature.BAND: self.left < UNLIMITED or self.right < UNLIMITED,
            Feature.LENGTHS: self.has_lengths,
            Feature.MASK: self.mask_shape is not None,
            Feature.ALIBI: self.has_alibi,
            Feature.SOFTCAP: self.softcap > 0,
            Feature.SINKS: self.has_sinks,
            Feature.DROPOUT: self.dropout_p > 0,
            Feature.GQA: self.H != self.Hk,
            Feature.WEIGHTS: self.weights,
            Feature.GRAD: self.needs_grad,
            Feature.PACKED: self.packed,
        }
        return functools.reduce(Feature.__or__, (f for f, on in used.items() if on), Feature.NONE)

    def __str__(self) -> str:
        sizes = " ".join(f"{x}={getattr(self, x)}" for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
        names = [f.name for f in Feature if f & self.features]
        return f"{sizes} {str(self.dtype)[6:]} {self.device} [{' '.join(names).lower()}]"
