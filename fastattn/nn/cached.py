"""Multi-head attention with an optional key-value cache for decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .core import merge_heads, split_heads
from .heads import MultiHead


class KeyValueCache:
    """The keys and values (B, H, n, D) of one attention module, for decoding without gradients.

    The first `append` allocates space for max_len tokens. With max_len None it allocates space for
    its own tokens only, which suits the memory of an encoder. All calls must have the dtype, device
    and grad mode of the first. If a call with this cache raises, make a new cache.
    """

    max_len: int | None
    length: int

    def __init__(self, max_len: int | None = None) -> None:
        self.max_len, self.length = max_len, 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H, m, D); return views of all keys and values so far."""
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "cache: got keys that require grad, expected to decode under torch.no_grad()"
            )
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
        """The keys and values (B, H, length, D) so far; None before the first `append`."""
        if self._k is None or self._v is None:
            return None
        return self._k[:, :, : self.length], self._v[:, :, : self.length]


# For each active `record_weights`: the function that receives each module's weights.
_recorders: list[dict[nn.Module, Callable[[Tensor], None]]] = []


class CachedAttention(MultiHead):
    """Multi-head attention of a sequence to itself or to another (Vaswani et al. 2017, section
    3.2.2). Its parameters and state dict are those of torch.nn.MultiheadAttention."""

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
        """Initialize parameters as torch.nn.MultiheadAttention does."""
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
        """x (B, M, E) attends to memory (B, N, E), or to itself without one; gives (B, M, E).

        mask: 0 or False hides; (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them.
        causal: token i of a sequence attends to tokens 0 to i; not allowed with a memory.
        cache: x continues the cached tokens and attends to them, too; N counts cached and new
            tokens. With a memory, the first call stores the memory's keys in the cache, and later
            calls use these and ignore their `memory`.
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
            if given is not None and (given.ndim != 3 or given.shape[-1] != self.embed_dim):
                raise ValueError(
                    f"{name}: got shape {tuple(given.shape)}, expected (B, N, {self.embed_dim})"
                )
        if memory is not None and memory.shape[0] != x.shape[0]:
            raise ValueError(
                f"memory: got a batch of {memory.shape[0]}, expected {x.shape[0]}, as x has"
            )
        if memory is not None and causal:
            raise ValueError("causal: got True beside a memory, expected it of self-attention only")

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, {super().extra_repr()}"


@contextmanager
def record_weights(model: nn.Module) -> Generator[dict[str, Tensor], None, None]:
    """Record attention weights: inside the block, every `CachedAttention` of `model` stores the
    weights of its last call, after dropout and detached, in the yielded dict. Keys are qualified
    module names, values (B, H, M, N). Outside the block there is no cost.

    >>> with record_weights(model) as weights:
    ...     model(src, tgt)
    >>> weights["decoder.layers.0.cross_attn"]
    """
    found: dict[str, Tensor] = {}
    attentions = [(name, m) for name, m in model.named_modules() if isinstance(m, CachedAttention)]
    listening: dict[nn.Module, Callable[[Tensor], None]] = {
        m: partial(found.__setitem__, name) for name, m in attentions
    }
    _recorders.append(listening)
    try:
        yield found
    finally:
        _recorders[:] = [other for other in _recorders if other is not listening]
