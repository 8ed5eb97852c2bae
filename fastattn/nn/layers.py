"""The layers of the Transformer and their stacks (Vaswani et al. 2017, section 3.1).

Masks: 0 or False hides. A mask is (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them; a
padding mask is (B, N), 0 where a key is padding. They compose with each other and with `causal`.
Outputs of padded queries are finite but meaningless.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from .cached import CachedAttention, KeyValueCache
from .core import Module, merge_masks

Activation = Callable[[Tensor], Tensor]
ActivationName = Literal["relu", "gelu"]
ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(Module):
    """activation(x W_1 + b_1) W_2 + b_2 for every token (section 3.3), with dropout before W_2.

    activation is "relu", "gelu" or any function of a tensor.
    """

    linear1: nn.Linear
    linear2: nn.Linear
    dropout: nn.Dropout
    activation: Activation

    def __init__(
        self,
        embed_dim: int,
        ff_dim: int = 2048,
        *,
        dropout: float = 0.1,
        activation: ActivationName | Activation = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(
                f'activation: got "{activation}", expected "relu", "gelu" or a function'
            )
        self.linear1 = nn.Linear(embed_dim, ff_dim, bias=bias)
        self.linear2 = nn.Linear(ff_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class Residual(Module):
    """A residual connection around a sublayer, with LayerNorm: norm(x + dropout(sublayer(x)))
    (section 5.4), or with norm_first x + dropout(sublayer(norm(x))) (Xiong et al. 2020)."""

    norm: nn.LayerNorm
    dropout: nn.Dropout

    def __init__(
        self,
        embed_dim: int,
        *,
        dropout: float = 0.1,
        norm_first: bool = False,
        eps: float = 1e-5,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embed_dim, eps=eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., E) to (..., E), the shapes of the sublayer."""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class _Layer(Module):
    """Base of both layers: the modules named in `attentions`, then a feed-forward network, with a
    residual connection around each."""

    attentions: tuple[str, ...]
    self_attn: CachedAttention
    residual1: Residual
    residual2: Residual
    feed_forward: FeedForward

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ff_dim: int = 2048,
        *,
        dropout: float = 0.1,
        activation: ActivationName | Activation = "relu",
        norm_first: bool = False,
        eps: float = 1e-5,
        bias: bool = True,
    ) -> None:
        super().__init__()
        for name in self.attentions:
            attention = CachedAttention(embed_dim, num_heads, dropout=dropout, bias=bias)
            self.add_module(name, attention)
        self.feed_forward = FeedForward(
            embed_dim, ff_dim, dropout=dropout, activation=activation, bias=bias
        )
        for i in range(1, len(self.attentions) + 2):
            residual = Residual(
                embed_dim, dropout=dropout, norm_first=norm_first, eps=eps, bias=bias
            )
            self.add_module(f"residual{i}", residual)


class EncoderLayer(_Layer):
    """Self-attention, then a feed-forward network; post-norm unless norm_first.

    dropout acts on the attention weights, inside the feed-forward network and on each sublayer's
    output. With `causal` this is a layer of a language model.
    """

    attentions: tuple[str, ...] = ("self_attn",)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        causal: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x (B, M, E) to (B, M, E), with mask (M, N), (B, M, N) or (B, H, M, N) and padding_mask
        (B, N): 0 or False hides a key. N is M, plus the cached tokens with a cache, which works as
        in `CachedAttention`."""
        mask = merge_masks(mask, padding_mask, _keys(x, cache), "padding_mask")
        x = self.residual1(x, lambda y: self.self_attn(y, mask=mask, causal=causal, cache=cache))
        return self.residual2(x, self.feed_forward)

    def new_cache(self, max_len: int) -> KeyValueCache:
        return KeyValueCache(max_len)


class DecoderCache(NamedTuple):
    """The caches of a `DecoderLayer` for decoding."""

    self_attn: KeyValueCache
    cross_attn: KeyValueCache


class DecoderLayer(_Layer):
    """Masked self-attention, attention to the encoder's memory, then a feed-forward network;
    dropout and norm_first as in `EncoderLayer`."""

    attentions: tuple[str, ...] = ("self_attn", "cross_attn")
    cross_attn: CachedAttention
    residual3: Residual

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        *,
        causal: bool = True,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """x (B, M, E) and memory (B, N, E) to (B, M, E).

        mask and padding_mask act on the self-attention, as in `EncoderLayer`. memory_mask, (M, N),
        (B, M, N) or (B, H, M, N), and memory_padding_mask, (B, N), act on the attention to memory.
        0 or False hides a key.
        """
        own, cross = (None, None) if cache is None else cache
        mask = merge_masks(mask, padding_mask, _keys(x, own), "padding_mask")
        memory_mask = merge_masks(
            memory_mask, memory_padding_mask, _keys(memory), "memory_padding_mask"
        )
        x = self.residual1(x, lambda y: self.self_attn(y, mask=mask, causal=causal, cache=own))
        x = self.residual2(x, lambda y: self.cross_attn(y, memory, memory_mask, cache=cross))
        return self.residual3(x, self.feed_forward)

    def new_cache(self, max_len: int) -> DecoderCache:
        return DecoderCache(KeyValueCache(max_len), KeyValueCache())


def _keys(x: Tensor, cache: KeyValueCache | None = None) -> tuple[int, int]:
    """The batch size, and the number of keys that x attends to."""
    return x.shape[0], x.shape[1] + (0 if cache is None else cache.length)


class _Stack(Module):
    """num_layers copies of `layer`, then `norm` if given. All copies but the first draw new
    parameters."""

    layers: nn.ModuleList
    norm: nn.Module | None

    def __init__(self, layer: Any, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers: got {num_layers}, expected at least 1")
        first, *others = (copy.deepcopy(layer) for _ in range(num_layers))
        self.layers = nn.ModuleList([first, *map(_drawn_anew, others)])
        self.norm = norm

    def new_cache(self, max_len: int) -> list[Any]:
        """Empty caches for `forward`, one for each layer, for sequences of up to max_len tokens."""
        layers: Any = self.layers
        return [layer.new_cache(max_len) for layer in layers]

    def _with_caches(self, cache: list | None) -> Iterator[tuple[nn.Module, Any]]:
        if cache is not None and len(cache) != len(self.layers):
            raise ValueError(
                f"cache: got one of {len(cache)} layers, expected {len(self.layers)}, as this "
                "stack's new_cache makes it"
            )
        return zip(self.layers, itertools.repeat(None) if cache is None else cache)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


class Encoder(_Stack):
    """A stack of `EncoderLayer`s: Encoder(EncoderLayer(512, 8), num_layers=6)."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        causal: bool = False,
        cache: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """x (B, M, E) to (B, M, E), masks as in `EncoderLayer`: (M, N) and (B, N), 0 or False
        hides. cache comes from `new_cache`; with it, the M new tokens attend to all cached tokens
        and, unless `causal`, to each other."""
        layers = self._with_caches(cache)
        own = cache[0] if cache else None  # all layers' caches have one length
        mask = merge_masks(mask, padding_mask, _keys(x, own), "padding_mask")
        for layer, kept in layers:
            x = layer(x, mask, causal=causal, cache=kept)
        return self._normed(x)


class Decoder(_Stack):
    """A stack of `DecoderLayer`s: Decoder(DecoderLayer(512, 8), num_layers=6)."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        *,
        causal: bool = True,
        cache: list[DecoderCache] | None = None,
    ) -> Tensor:
        """x (B, M, E) and memory (B, N, E) to (B, M, E), masks as in `DecoderLayer`: (M, M),
        (M, N), (B, M) and (B, N), 0 or False hides. cache comes from `new_cache`."""
        layers = self._with_caches(cache)
        own = cache[0].self_attn if cache else None  # all layers' caches have one length
        mask = merge_masks(mask, padding_mask, _keys(x, own), "padding_mask")
        memory_mask = merge_masks(
            memory_mask, memory_padding_mask, _keys(memory), "memory_padding_mask"
        )
        for layer, kept in layers:
            x = layer(x, memory, mask, memory_mask, causal=causal, cache=kept)
        return self._normed(x)


def _drawn_anew(layer: nn.Module) -> nn.Module:
    for module in layer.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return layer
