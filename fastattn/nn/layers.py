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
    """The position-wise feed-forward network of a Transformer layer.

    It computes activation(x W_1 + b_1) W_2 + b_2 for every token (Vaswani et al. 2017, section
    3.3), with dropout before W_2.

    Args:
        embed_dim: The number of columns E of the input and the output.
        ff_dim: The number of columns between the two linear maps.
        dropout: The probability with which each element is dropped in training.
        activation: "relu", "gelu" or any function of a tensor.
        bias: If True, both linear maps have a bias.

    Shape:
        x: (..., E).
        out: (..., E).

    Raises:
        ValueError: activation is another string.

    Example:
        >>> import torch
        >>> from fastattn.nn import FeedForward
        >>> FeedForward(16, ff_dim=64, activation="gelu")(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
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
        """Apply the network to every token.

        Args:
            x: Tokens.

        Returns:
            out.
        """
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class Residual(Module):
    """A residual connection around a sublayer, with LayerNorm.

    It computes norm(x + dropout(sublayer(x))) (Vaswani et al. 2017, section 5.4) or, with
    norm_first, x + dropout(sublayer(norm(x))) (Xiong et al. 2020).

    Args:
        embed_dim: The number of columns E of the input and the output.
        dropout: The probability with which each element of the sublayer's output is dropped in
            training.
        norm_first: If True, normalize the input of the sublayer (pre-norm), otherwise the sum
            (post-norm).
        eps: The eps of LayerNorm.
        bias: If True, LayerNorm has a bias.

    Shape:
        x: (..., E).
        out: (..., E).

    Example:
        >>> import torch
        >>> from fastattn.nn import Residual
        >>> residual = Residual(16, norm_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> torch.testing.assert_close(residual(x, torch.zeros_like), x)
    """

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
        """Apply the sublayer to x and add the result to x.

        Args:
            x: Tokens.
            sublayer: A function from (..., E) to (..., E).

        Returns:
            out.
        """
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class _Layer(Module):
    """Base class of both layers.

    It has the modules named in `attentions`, then a feed-forward network, each with a residual
    connection around it.
    """

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
    """A Transformer encoder layer: self-attention, then a feed-forward network.

    With causal attention it is a layer of a language model.

    Args:
        embed_dim: The number of columns E of the input and the output.
        num_heads: The number of heads. It must divide embed_dim.
        ff_dim: The number of columns inside the feed-forward network.
        dropout: The probability of dropout in training. It acts on the attention weights, inside
            the feed-forward network and on each sublayer's output.
        activation: "relu", "gelu" or any function of a tensor.
        norm_first: If True, the layer is pre-norm, otherwise post-norm.
        eps: The eps of LayerNorm.
        bias: If True, all linear maps and LayerNorms have a bias.

    Shape:
        x: (B, M, E).
        mask: (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them; bool or any other
            dtype. N is M, plus the number of cached tokens.
        padding_mask: (B, N); bool or any other dtype.
        out: (B, M, E).

    Raises:
        ValueError: num_heads does not divide embed_dim, or activation is another string.

    Example:
        >>> import torch
        >>> from fastattn.nn import EncoderLayer
        >>> layer = EncoderLayer(32, num_heads=4, ff_dim=64).eval()
        >>> x = torch.randn(2, 5, 32)
        >>> padding_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        >>> out = layer(x, padding_mask=padding_mask)
        >>> torch.testing.assert_close(out[1:, :3], layer(x[1:, :3]))
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
        """Run the layer.

        Args:
            x: Tokens.
            mask: 0 or False hides a key from a row.
            padding_mask: 0 or False hides a key from all rows and heads.
            causal: If True, token i attends to tokens 0 to i.
            cache: The keys of earlier tokens, as in `CachedAttention`.

        Returns:
            out. Rows of padded tokens are finite but meaningless.

        Raises:
            ValueError: A tensor does not have the shape stated above, or a float mask on a CPU
                contains -inf.
        """
        mask = merge_masks(mask, padding_mask, _keys(x, cache), "padding_mask")
        x = self.residual1(x, lambda y: self.self_attn(y, mask=mask, causal=causal, cache=cache))
        return self.residual2(x, self.feed_forward)

    def new_cache(self, max_len: int) -> KeyValueCache:
        """Make an empty cache for `forward`.

        Args:
            max_len: The largest number of tokens that it can have.

        Returns:
            A `KeyValueCache`.

        Example:
            >>> import torch
            >>> from fastattn.nn import EncoderLayer
            >>> layer = EncoderLayer(32, num_heads=4, ff_dim=64).eval()
            >>> x, cache = torch.randn(1, 3, 32), layer.new_cache(max_len=3)
            >>> with torch.no_grad():
            ...     steps = [layer(x[:, i : i + 1], causal=True, cache=cache) for i in range(3)]
            ...     torch.testing.assert_close(torch.cat(steps, 1), layer(x, causal=True))
        """
        return KeyValueCache(max_len)


class DecoderCache(NamedTuple):
    """The caches of a `DecoderLayer` for decoding."""

    self_attn: KeyValueCache
    cross_attn: KeyValueCache


class DecoderLayer(_Layer):
    """A Transformer decoder layer: self-attention, attention to a memory, a feed-forward network.

    The memory is the output of an encoder.

    Args:
        embed_dim, num_heads, ff_dim, dropout, activation, norm_first, eps: As in `EncoderLayer`.
        bias: As in `EncoderLayer`.

    Shape:
        x: (B, M, E).
        memory: (B, N, E).
        mask: (M, M), (B, M, M) or (B, H, M, M), or what broadcasts to them; bool or any other
            dtype. With a cache its columns are the cached and the new tokens.
        memory_mask: (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them.
        padding_mask: (B, M); with a cache it has the cached tokens too.
        memory_padding_mask: (B, N).
        out: (B, M, E).

    Raises:
        ValueError: num_heads does not divide embed_dim, or activation is another string.

    Example:
        >>> import torch
        >>> from fastattn.nn import DecoderLayer
        >>> layer = DecoderLayer(32, num_heads=4, ff_dim=64)
        >>> layer(torch.randn(2, 5, 32), torch.randn(2, 7, 32)).shape
        torch.Size([2, 5, 32])
    """

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
        """Run the layer.

        Args:
            x: Tokens.
            memory: The encoder's output.
            mask: 0 or False hides a key from a row of the self-attention.
            memory_mask: 0 or False hides a key of the memory from a row.
            padding_mask: 0 or False hides a key of the self-attention from all rows and heads.
            memory_padding_mask: 0 or False hides a key of the memory from all rows and heads.
            causal: If True, token i attends to tokens 0 to i of x.
            cache: The keys of earlier tokens and of the memory, from `new_cache`.

        Returns:
            out. Rows of padded tokens are finite but meaningless.

        Raises:
            ValueError: A tensor does not have the shape stated above, or a float mask on a CPU
                contains -inf.
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
        """Make empty caches for `forward`.

        Args:
            max_len: The largest number of tokens of x that the cache can have. The memory may have
                any number.

        Returns:
            A `DecoderCache`: the cache of the self-attention and that of the attention to memory.

        Example:
            >>> from fastattn.nn import DecoderLayer
            >>> cache = DecoderLayer(32, num_heads=4).new_cache(max_len=10)
            >>> cache.self_attn.max_len, cache.cross_attn.max_len
            (10, None)
        """
        return DecoderCache(KeyValueCache(max_len), KeyValueCache())


def _keys(x: Tensor, cache: KeyValueCache | None = None) -> tuple[int, int]:
    """The batch size, and the number of keys that x attends to."""
    return x.shape[0], x.shape[1] + (0 if cache is None else cache.length)


class _Stack(Module):
    """Base class of both stacks: num_layers copies of `layer`, then `norm` if given.

    All copies but the first draw new parameters.
    """

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
        """Make empty caches for `forward`.

        Args:
            max_len: The largest number of tokens that they can have.

        Returns:
            A list of caches, one for each layer.

        Example:
            >>> from fastattn.nn import Encoder, EncoderLayer
            >>> len(Encoder(EncoderLayer(32, 4), num_layers=2).new_cache(max_len=10))
            2
        """
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
    """A stack of encoder layers.

    Args:
        layer: An `EncoderLayer`. The stack has copies of it; all but the first draw new parameters.
        num_layers: The number of layers.
        norm: A module that is applied to the output of the last layer, or None.

    Shape:
        x, mask, padding_mask, out: As in `EncoderLayer`.

    Raises:
        ValueError: num_layers is below 1.

    Example:
        >>> import torch
        >>> from fastattn.nn import Encoder, EncoderLayer
        >>> encoder = Encoder(EncoderLayer(32, num_heads=4, ff_dim=64), num_layers=2)
        >>> encoder(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        causal: bool = False,
        cache: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """Run all layers, then the norm.

        Args:
            x, mask, padding_mask, causal: As in `EncoderLayer.forward`.
            cache: Caches from `new_cache`. The M new tokens attend to all cached tokens and, unless
                causal, to each other.

        Returns:
            out.

        Raises:
            ValueError: A tensor does not have the shape stated above, a float mask on a CPU
                contains -inf, or cache has another number of layers.
        """
        layers = self._with_caches(cache)
        own = cache[0] if cache else None  # all layers' caches have one length
        mask = merge_masks(mask, padding_mask, _keys(x, own), "padding_mask")
        for layer, kept in layers:
            x = layer(x, mask, causal=causal, cache=kept)
        return self._normed(x)


class Decoder(_Stack):
    """A stack of decoder layers.

    Args:
        layer: A `DecoderLayer`. The stack has copies of it; all but the first draw new parameters.
        num_layers: The number of layers.
        norm: A module that is applied to the output of the last layer, or None.

    Shape:
        x, memory, out: As in `DecoderLayer`.
        mask, memory_mask, padding_mask, memory_padding_mask: As in `DecoderLayer`.

    Raises:
        ValueError: num_layers is below 1.

    Example:
        >>> import torch
        >>> from fastattn.nn import Decoder, DecoderLayer
        >>> decoder = Decoder(DecoderLayer(32, num_heads=4, ff_dim=64), num_layers=2)
        >>> decoder(torch.randn(2, 5, 32), torch.randn(2, 7, 32)).shape
        torch.Size([2, 5, 32])
    """

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
        """Run all layers, then the norm.

        Args:
            x, memory, mask, memory_mask: As in `DecoderLayer.forward`.
            padding_mask, memory_padding_mask, causal: As in `DecoderLayer.forward`.
            cache: Caches from `new_cache`: the keys of earlier tokens and of the memory.

        Returns:
            out.

        Raises:
            ValueError: A tensor does not have the shape stated above, a float mask on a CPU
                contains -inf, or cache has another number of layers.
        """
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
