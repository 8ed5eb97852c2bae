"""Multi-head attention with an optional key-value cache for decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.need import need_constant
from ..call.sizes import holds
from .core import merge_heads, split_heads
from .heads import MultiHead

_NO_GRADIENT = "a cache keeps keys and values without their gradient"


class KeyValueCache:
    """The keys and values of one attention module, for decoding without gradients.

    The first `append` allocates space. All calls must have the dtype, device and grad mode of the
    first. If a call with this cache raises, make a new cache.

    Args:
        max_len: Allocate space for so many tokens. None allocates space for the tokens of the first
            `append` only, which suits the memory of an encoder.

    Shape:
        keys: (B, H, length, D), any dtype.
        values: (B, H, length, D).

    Example:
        >>> import torch
        >>> from fastattn.nn import CachedAttention, KeyValueCache
        >>> attention, cache = CachedAttention(32, num_heads=4), KeyValueCache(max_len=3)
        >>> x = torch.randn(1, 3, 32)
        >>> with torch.no_grad():
        ...     steps = [attention(x[:, i : i + 1], causal=True, cache=cache) for i in range(3)]
        ...     torch.testing.assert_close(torch.cat(steps, 1), attention(x, causal=True))
        >>> cache.length
        3
    """

    max_len: int | None
    length: int

    def __init__(self, max_len: int | None = None) -> None:
        self.max_len, self.length = max_len, 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them so far.

        Args:
            k: The new keys.
            v: The new values.

        Shape:
            k: (B, H, m, D).
            v: (B, H, m, D).
            all_k: (B, H, length, D), with the new length.
            all_v: (B, H, length, D).

        Returns:
            (all_k, all_v), views of the cache.

        Raises:
            ValueError: k or v requires grad outside torch.no_grad(), there is no room for m tokens,
                or the shapes are not those of the calls before.

        Example:
            >>> import torch
            >>> from fastattn.nn import KeyValueCache
            >>> cache = KeyValueCache(max_len=10)
            >>> k, v = torch.randn(2, 1, 4, 3, 8)
            >>> k.shape, cache.append(k, v)[0].shape, cache.append(k, v)[0].shape
            (torch.Size([1, 4, 3, 8]), torch.Size([1, 4, 3, 8]), torch.Size([1, 4, 6, 8]))
        """
        need_constant(_NO_GRADIENT, k=k, v=v)
        all_k, all_v = self._k, self._v
        if all_k is None or all_v is None:
            room = k.shape[2] if self.max_len is None else self.max_len
            all_k, all_v = (x.new_empty(*x.shape[:2], room, x.shape[3]) for x in (k, v))
        start, end = self.length, self.length + k.shape[2]
        room = all_k.shape[2]
        if end > room:
            raise ValueError(
                f"cache: got tokens {start} to {end - 1}, expected 0 to {room - 1}; make the cache "
                "with a larger max_len"
            )
        for kept, new in ((all_k, k), (all_v, v)):
            place = kept[:, :, start:end]
            if place.shape != new.shape:
                raise ValueError(
                    f"cache: got keys of shape {tuple(new.shape)}, expected {tuple(place.shape)}, "
                    "as in the calls before; make a new cache for another batch"
                )
            place.copy_(new)
        self._k, self._v, self.length = all_k, all_v, end
        return all_k[:, :, :end], all_v[:, :, :end]

    def view(self) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values so far.

        Shape:
            k: (B, H, length, D).
            v: (B, H, length, D).

        Returns:
            (k, v), views of the cache; None before the first `append`.

        Example:
            >>> import torch
            >>> from fastattn.nn import KeyValueCache
            >>> cache = KeyValueCache(max_len=10)
            >>> print(cache.view())
            None
            >>> _ = cache.append(*torch.randn(2, 1, 4, 3, 8))
            >>> k, v = cache.view()
            >>> k.shape
            torch.Size([1, 4, 3, 8])
        """
        if self._k is None or self._v is None:
            return None
        return self._k[:, :, : self.length], self._v[:, :, : self.length]


# For each active `record_weights`: the function that receives each module's weights.
_recorders: list[dict[nn.Module, Callable[[Tensor], None]]] = []


class CachedAttention(MultiHead):
    """Multi-head attention of a sequence to itself or to another, with an optional cache.

    This is the attention of Vaswani et al. 2017, section 3.2.2. Parameters and state dict are those
    of torch.nn.MultiheadAttention.

    Args:
        embed_dim: The number of columns E of the input and the output.
        num_heads: The number of heads. It must divide embed_dim.
        dropout: The probability with which each weight is dropped in training.
        bias: If True, all projections have a bias.

    Shape:
        x: (B, M, E).
        memory: (B, N, E).
        mask: (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them; bool or any other
            dtype. With a cache N counts cached and new tokens.
        out: (B, M, E).

    Raises:
        ValueError: num_heads does not divide embed_dim.

    Example:
        >>> import torch
        >>> from fastattn.nn import CachedAttention
        >>> attention = CachedAttention(32, num_heads=4)
        >>> torchs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> _ = torchs.load_state_dict(attention.state_dict())
        >>> x = torch.randn(2, 5, 32)
        >>> torch.testing.assert_close(attention(x), torchs(x, x, x)[0])
    """

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    out_proj: nn.Linear

    def __init__(
        self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout)
        self.embed_dim = embed_dim
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as torch.nn.MultiheadAttention does.

        Example:
            >>> from fastattn.nn import CachedAttention
            >>> attention = CachedAttention(32, num_heads=4)
            >>> attention.reset_parameters()
            >>> bool((attention.in_proj_bias == 0).all())
            True
        """
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend each token of x to the memory, or to x itself without one.

        Args:
            x: Tokens.
            memory: The tokens to attend to; None is x.
            mask: 0 or False hides a key. A mask of three dimensions is the same for all heads.
            causal: If True, token i of a sequence attends to tokens 0 to i. Not allowed with a
                memory.
            cache: The keys of earlier calls. x continues the cached tokens and attends to them,
                too. With a memory, the first call stores the memory's keys in the cache, and later
                calls use these and ignore their `memory`.

        Returns:
            out.

        Raises:
            ValueError: A tensor does not have the shape stated above, causal is True beside a
                memory, a float mask on a CPU contains -inf, the cache has no room, or what it keeps
                requires grad.
        """
        self._check(x, memory, causal)
        if memory is None:
            q, k, v = (split_heads(y, self.num_heads) for y in self._project(x, 0, 3))
            if cache is not None:
                k, v = cache.append(k, v)
        else:
            (q,) = (split_heads(y, self.num_heads) for y in self._project(x, 0, 1))
            k, v = self._of_memory(memory, cache)
        recorders = [listening[self] for listening in _recorders if self in listening]
        out, weights = self._attend(
            *(q, k, v),
            mask=mask,
            causal="bottom_right" if causal else False,  # aligns the last row with the last key
            need_weights=bool(recorders),
        )
        if weights is not None:
            for record in recorders:
                record(weights.detach())
        return self.out_proj(merge_heads(out))

    def _of_memory(self, memory: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, Tensor]:
        kept = None if cache is None else cache.view()
        if kept is not None:
            weights = dict(in_proj_weight=self.in_proj_weight, in_proj_bias=self.in_proj_bias)
            need_constant(_NO_GRADIENT, memory=memory, **weights)
            return kept
        k, v = (split_heads(y, self.num_heads) for y in self._project(memory, 1, 3))
        return (k, v) if cache is None else cache.append(k, v)

    def _project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Projections first to last - 1 of x; 0 is q, 1 is k, 2 is v."""
        rows = slice(first * self.embed_dim, last * self.embed_dim)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x, self.in_proj_weight[rows], bias).chunk(last - first, dim=-1)

    def _check(self, x: Tensor, memory: Tensor | None, causal: bool) -> None:
        for name, given in (("x", x), ("memory", memory)):
            if given is None:
                continue
            if given.ndim != 3 or not holds(given.shape[-1] == self.embed_dim):
                raise ValueError(
                    f"{name}: got shape {tuple(given.shape)}, expected (B, N, {self.embed_dim})"
                )
        if memory is not None and not holds(memory.shape[0] == x.shape[0]):
            raise ValueError(
                f"memory: got a batch of {memory.shape[0]}, expected {x.shape[0]}, as x has"
            )
        if memory is not None and causal:
            raise ValueError(
                "causal: got True beside a memory, expected False: only self-attention is causal"
            )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, {super().extra_repr()}"


@contextmanager
def record_weights(model: nn.Module) -> Generator[dict[str, Tensor], None, None]:
    """Record the attention weights of every `CachedAttention` of a model, as a context manager.

    Inside the block each module stores the weights of its last call. Outside the block there is no
    cost.

    Args:
        model: A module.

    Shape:
        weights: (B, H, M, N) of each module, after dropout and detached.

    Returns:
        A context manager that yields a dict. Its keys are qualified module names, its values the
        weights.

    Example:
        >>> import torch
        >>> from fastattn.nn import Transformer, record_weights
        >>> sizes = dict(embed_dim=32, num_heads=4, num_encoder_layers=1, num_decoder_layers=1)
        >>> model = Transformer(vocab_size=100, ff_dim=64, **sizes)
        >>> src, tgt = torch.randint(100, (2, 7)), torch.randint(100, (2, 5))
        >>> with record_weights(model) as weights:
        ...     logits = model(src, tgt)
        >>> weights["decoder.layers.0.cross_attn"].shape
        torch.Size([2, 4, 5, 7])
    """
    weights: dict[str, Tensor] = {}
    attentions = [(name, m) for name, m in model.named_modules() if isinstance(m, CachedAttention)]
    listening: dict[nn.Module, Callable[[Tensor], None]] = {
        m: partial(weights.__setitem__, name) for name, m in attentions
    }
    _recorders.append(listening)
    try:
        yield weights
    finally:
        _recorders[:] = [other for other in _recorders if other is not listening]
