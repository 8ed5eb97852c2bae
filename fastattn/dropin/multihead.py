"""MultiheadAttention: torch.nn.MultiheadAttention with its attention done by `fastattn.attention`.

A subclass that adds no parameter, buffer or attribute, so checkpoints, optimizers and isinstance
checks see torch's own module. Only the computation differs: heads are strided views of the
projections, masks are not expanded, and a row without keys to attend to has weights 0 and output
out_proj.bias, where torch's has NaN.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import api
from ..call.need import need_dense
from ..call.sizes import agree, holds
from ..call.spec import TOKENS, changed
from ..dispatch import fast_path, torch_function
from ..module_types import AsForward
from . import nested, nested_heads


def always_call_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook that does nothing: its presence makes torch call `forward`.

    In eval mode nn.TransformerEncoderLayer takes the parameters out of its self_attn and runs its
    own kernel on them, unless it finds a hook.
    """


class MultiheadAttention(nn.MultiheadAttention):
    """Replace torch.nn.MultiheadAttention.

    The constructor, the parameters, the state_dict, the call and the errors are the same. These
    differences are on purpose. Rows with every key masked give out_proj.bias, weights 0 and finite
    gradients in every mode. A float mask may be float32 with 16-bit inputs. Nested self-attention
    works in training, too. Jagged query, key and value may differ, and are computed packed
    (is_causal=True then needs no mask).

    torch.jit.script cannot compile the module. torch.compile, torch.export and torch.jit.trace can,
    and torch.fx.symbolic_trace records it as one node.

    Args:
        embed_dim: E, the size of queries and outputs.
        num_heads: The number of heads, which divides embed_dim.
        dropout: The probability of dropout of the weights, in training.
        bias: If True, the projections have biases.
        add_bias_kv: If True, append a learned key and value.
        add_zero_attn: If True, append a key and a value of zeros.
        kdim: The size of keys; embed_dim by default.
        vdim: The size of values; embed_dim by default.
        batch_first: If True, inputs and outputs are (B, L, E), otherwise (L, B, E).
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> import torch
        >>> import fastattn
        >>> torchs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> ours = fastattn.MultiheadAttention(32, 4, batch_first=True)
        >>> ours.load_state_dict(torchs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 32)
        >>> torch.testing.assert_close(ours(x, x, x), torchs(x, x, x))
    """

    if TYPE_CHECKING:
        __call__: AsForward  # ty: ignore  (torch says that it is any callable)
    else:
        __call__ = torch_function.call

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments of torch.nn.MultiheadAttention."""
        sizes = dict(kdim=kdim, vdim=vdim, batch_first=batch_first, device=device, dtype=dtype)
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, **sizes)
        self.register_forward_pre_hook(always_call_forward)

    def __prepare_scriptable__(self) -> None:  # torch.jit.script calls this before it compiles
        raise RuntimeError(
            "fastattn.MultiheadAttention cannot be compiled by torch.jit.script: use torch.compile "
            "or torch.export, or torch's own module (fastattn.revert undoes fastattn.convert)"
        )

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: Literal[True] = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        need_weights: Literal[False],
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]: ...
    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention, as torch.nn.MultiheadAttention.forward.

        The meaning and layout of every argument are torch's.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            key_padding_mask: Keys to ignore: bool (True = ignore), or float, which is added to the
                scores.
            need_weights: If True, also return the attention weights.
            attn_mask: Pairs that may not attend: bool (True = may not), or float, which is added to
                the scores.
            average_attn_weights: If True, the weights are the mean over heads.
            is_causal: A hint that attn_mask is the causal mask; it needs attn_mask.

        Shape:
            query: (L, B, E), (B, L, E) with batch_first, or (L, E) without a batch; or nested.
            key: (S, B, kdim), (B, S, kdim) or (S, kdim).
            value: (S, B, vdim), (B, S, vdim) or (S, vdim).
            key_padding_mask: (B, S), or (S,) without a batch.
            attn_mask: (L, S) or (B num_heads, L, S).
            out: As query.
            weights: (B, L, S), or (B, num_heads, L, S) if not averaged; without B if there is no
                batch.

        Returns:
            (out, weights), or (out, None) without need_weights.

        Raises:
            RuntimeError: Where torch does.
            AssertionError: Where torch does.

        Example:
            >>> import torch
            >>> import fastattn
            >>> module = fastattn.MultiheadAttention(32, 4, batch_first=True)
            >>> x = torch.randn(2, 10, 32)
            >>> padding = torch.arange(10) >= torch.tensor([[7], [10]])
            >>> out, weights = module(x, x, x, key_padding_mask=padding)
            >>> out.shape, weights.shape
            (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))
            >>> weights[0, :, 7:].abs().max().item()
            0.0
        """
        if isinstance(query, torch.fx.Proxy):
            torch_function.refuse(self)
        check_mask_kinds(key_padding_mask, attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            if not nested.is_jagged(query):
                check_hint(is_causal, attn_mask)
            masks = key_padding_mask, attn_mask
            asked = need_weights, average_attn_weights, is_causal
            return nested_heads.forward(self, query, key, value, masks, *asked)
        for name, x in (("query", query), ("key", key), ("value", value)):
            need_dense(name, x)

        batched = F._mha_shape_check(  # ty: ignore  (private: torch's own checks and texts)
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        check_hint(is_causal, attn_mask)
        if not batched:
            query, key, value = _one_for_one(lambda x: x[None], query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        # is_causal replaces the mask only in the cases in which torch, too, drops the mask.
        # ONNX's old exporter passes 0-dimensional tensors for flags that have a default.
        causal = bool(is_causal) and key_padding_mask is None and not need_weights
        if causal:
            attn_mask = None

        seq_first = batched and not self.batch_first
        self._check_inputs(query, key, value, seq_first)
        projected = None
        if query is key is value and self._takes_one_call(query):
            no_mask = attn_mask is None and key_padding_mask is None
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            asked = causal, need_weights, average_attn_weights
            found = self._attend_at_once(projected, seq_first, *asked) if no_mask else None
            if found is not None:
                out, weights = found
                out = F.linear(out, self.out_proj.weight, self.out_proj.bias)
                return _as_given(out, weights, batched)
        q, k, v = self._project(query, key, value, seq_first, projected)
        mask = self._merge_masks(q, k, attn_mask, key_padding_mask)
        k, v, mask = self._append_keys(k, v, mask)
        out, weights = self._attend(
            q, k, v, need_weights, average_attn_weights, mask=mask, causal=causal
        )
        return _as_given(self._project_out(out, seq_first), weights, batched)

    # -- projections ---------------------------------------------------------------------------

    def _project(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seq_first: bool,
        projected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, H, L, D) views of as few projections as possible. Nothing is copied.

        projected: those of query, if they are known and it is key and value, too.
        """
        if projected is not None:
            q, k, v = self._split_heads(projected, seq_first)
            return q, k, v
        w, b, e = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        of = self.q_proj_weight if w is None else w
        if not seq_first and b is not None and b.dtype != of.dtype:
            # F.linear takes a bias of another dtype unless the input is contiguous. torch's module
            # puts the sequence first, after which the input is rarely contiguous.
            turned = _one_for_one(lambda x: x.transpose(0, 1), query, key, value)
            return self._project(*turned, seq_first=True)
        if w is None:  # kdim or vdim differs from embed_dim
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None, None, None) if b is None else b.chunk(3)
            projected = F._in_projection(query, key, value, *weights, *biases)
            q, k, v = (self._split_heads(x, seq_first)[0] for x in projected)
            return q, k, v
        if key is not value:
            inputs, counts = (query, key, value), (1, 1, 1)
        elif query is not key:
            inputs, counts = (query, key), (1, 2)
        else:
            inputs, counts = (query,), (3,)
        rows = [count * e for count in counts]
        biases = [None] * len(rows) if b is None else _split_rows(b, rows)
        parts = zip(inputs, _split_rows(w, rows), biases, strict=True)
        heads = [self._split_heads(F.linear(*part), seq_first) for part in parts]
        q, k, v = itertools.chain(*heads)
        return q, k, v

    def _split_heads(self, x: Tensor, seq_first: bool) -> list[Tensor]:
        """(B, L, n·E), or (L, B, n·E) if seq_first, as n views of shape (B, H, L, D)."""
        n = x.size(-1) // self.embed_dim
        x = x.view(*x.shape[:-1], n, self.num_heads, self.head_dim)  # unflatten fixes sizes in ONNX
        order = (1, 2, 0, 3) if seq_first else (0, 2, 1, 3)
        return [part.permute(order) for part in x.unbind(2)]

    def _project_out(self, out: Tensor, seq_first: bool) -> Tensor:
        # attention stores its output as (B, L, H, D): with the batch first, merging heads is free.
        w, b = self.out_proj.weight, self.out_proj.bias
        if not seq_first:
            return F.linear(out.permute(0, 2, 1, 3).flatten(2), w, b)
        rows = out.permute(2, 0, 1, 3)
        return F.linear(rows.flatten(2).flatten(0, 1), w, b).unflatten(0, rows.shape[:2])

    def _append_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned key of add_bias_kv and the zero key of add_zero_attn, never masked."""
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            biases = (self.bias_k.to(k.dtype), self.bias_v.to(v.dtype))
            shape = (1, self.num_heads, 1, self.head_dim)
            extra.append([bias.view(shape).expand(k.size(0), -1, -1, -1) for bias in biases])
        if self.add_zero_attn:
            extra.append([x.new_zeros(*x.shape[:2], 1, self.head_dim) for x in (k, v)])
        if not extra:
            return k, v, mask
        if mask is not None:
            mask = F.pad(mask, (0, len(extra)), value=mask.dtype == torch.bool)
        extra_k, extra_v = zip(*extra, strict=True)
        return torch.cat([k, *extra_k], dim=2), torch.cat([v, *extra_v], dim=2), mask

    def _takes_one_call(self, query: Tensor) -> bool:
        """True for self-attention in inference without appended keys or dropout."""
        w, b = self.in_proj_weight, self.in_proj_bias
        return (
            w is not None
            and self.bias_k is None
            and not self.add_zero_attn
            and not (self.training and self.dropout)
            and (b is None or b.dtype == w.dtype)
            and query.device.type == "cpu"
            and torch_function.is_plain()
            and not torch.is_grad_enabled()
        )

    def _attend_at_once(
        self,
        projected: Tensor,
        seq_first: bool,
        causal: bool,
        need_weights: bool = False,
        average: bool = True,
    ) -> tuple[Tensor, Tensor | None] | None:
        """The outputs of the heads side by side, (B, L, E) or (L, B, E), and the weights, if they
        are needed, by one native call; None if that does not take these.

        projected: (B, L, 3 E) or (L, B, 3 E).
        """
        of = projected, projected, projected
        how = self.num_heads, seq_first, causal, need_weights, average
        found = fast_path.attend(_FAST, *of, *how, {})
        return (found, None) if isinstance(found, Tensor) else found

    # -- attention -----------------------------------------------------------------------------

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        need_weights: bool,
        average: bool,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        options: dict[str, Any] = {"mask": mask, "causal": causal, "key_lengths": key_lengths}
        options |= self._drawn(q.device)
        out, normaliser = api.attend(q, k, v, **options)
        if not need_weights:
            return out, None
        return out, api.weights_from(
            q, k, normaliser=normaliser, average_heads=bool(average), **options
        )

    def _drawn(self, device: torch.device) -> dict[str, Any]:
        """The dropout options. The seed is drawn once, so that weights and output get the same
        dropout, and the output for a manual_seed does not depend on need_weights."""
        if not self.training or self.dropout == 0:
            return {}
        return {"dropout_p": self.dropout, "seed": api.draw_seed(device)}

    def _merge_masks(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as one mask for `attention` (bool: True may attend), as small as possible."""
        batch, heads, rows, keys = *q.shape[:3], k.size(2)
        if attn_mask is not None:
            shape = (rows, keys) if attn_mask.dim() == 2 else (batch * heads, rows, keys)
            if not agree(attn_mask.shape, shape):
                raise RuntimeError(
                    f"The shape of the {len(shape)}D attn_mask is {attn_mask.shape}, "
                    f"but should be {shape}."
                )
            per_head = (1, 1) if attn_mask.dim() == 2 else (batch, heads)
            attn_mask = _may_attend(attn_mask).view(*per_head, rows, keys)
        if not holds(k.size(0) == batch):
            raise RuntimeError(
                f"query has a batch of {batch} but key and value have one of {k.size(0)}; "
                f"this module was made with batch_first={self.batch_first}"
            )
        if key_padding_mask is not None:
            appended = (self.bias_k is not None) + self.add_zero_attn  # torch counts them, too
            sizes = (key_padding_mask.size(0), key_padding_mask.size(1) + appended)
            for dim, (size, got) in enumerate(zip((batch, keys + appended), sizes, strict=True)):
                if not holds(got == size):
                    raise AssertionError(
                        f"Expected key_padded_mask.shape[{dim}] to be {size}, but got {got}"
                    )
            key_padding_mask = _may_attend(key_padding_mask)[:, None, None, :]
        return _with_dtype_for(q, _combine(attn_mask, key_padding_mask, q.dtype))

    # -- checks --------------------------------------------------------------------------------

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor, seq_first: bool) -> None:
        if not holds(query.size(-1) == self.embed_dim):
            raise AssertionError(
                f"was expecting embedding dimension of {self.embed_dim}, but got {query.size(-1)}"
            )
        if key is value:
            return
        packed = self.in_proj_weight is not None
        shapes = (x.shape if packed else x.shape[:2] for x in (key, value))
        if agree(*shapes):
            return
        if not seq_first:  # torch's message shows the sequence first
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        if packed:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
        raise AssertionError(
            f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}"
        )


def _prepare_fast(x: Tensor, *rest: Any) -> fast_path.Prepared:
    _, _, heads, seq_first, causal, need_weights, average, _ = rest
    x = x.view(*x.shape[:2], 3, heads, x.shape[2] // (3 * heads))
    q, k, v = (y.permute((1, 2, 0, 3) if seq_first else (0, 2, 1, 3)) for y in x.unbind(2))
    order = "MBH" if seq_first else TOKENS

    def side_by_side(out: Tensor) -> Tensor:
        return out.permute((2, 0, 1, 3) if seq_first else (0, 2, 1, 3)).flatten(2)

    t, o = api.prepare(q, k, v, {"causal": causal}, orders=(order, order))
    of_weights = changed(o, average_heads=bool(average), out_order=TOKENS, grad_order=TOKENS)
    weights = of_weights if need_weights else None
    return fast_path.Prepared(t, o, side_by_side, weights=weights)


_FAST = fast_path.path(
    _prepare_fast, ["heads", "seq_first", "causal", "need_weights", "average_attn_weights"]
)


def _as_given(out: Tensor, weights: Tensor | None, batched: bool) -> tuple[Tensor, Tensor | None]:
    """The results, without the batch that `forward` adds to inputs of two dimensions."""
    if batched:
        return out, weights
    return out.squeeze(0), None if weights is None else weights.squeeze(0)


def check_mask_kinds(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None:
            need_dense(name, mask)
        if mask is not None and mask.dtype != torch.bool and not torch.is_floating_point(mask):
            raise AssertionError(f"only bool and floating types of {name} are supported")
    if key_padding_mask is None or attn_mask is None or key_padding_mask.dtype == attn_mask.dtype:
        return
    warnings.warn(
        "Support for mismatched key_padding_mask and attn_mask is deprecated. "
        "Use same type for both instead.",
        stacklevel=3,
    )


def check_hint(is_causal: bool, attn_mask: Tensor | None) -> None:
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint. "
            "You may use the Transformer module method "
            "`generate_square_subsequent_mask` to create this mask."
        )


def _one_for_one(
    view: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `view` to each tensor. Those that are one object stay one object."""
    q = view(query)
    k = q if key is query else view(key)
    v = k if value is key else view(value)
    return q, k, v


def _split_rows(x: Tensor, rows: list[int]) -> Sequence[Tensor]:
    return x.split(rows) if len(rows) > 1 else [x]  # split of one part would copy x in backward


def _may_attend(mask: Tensor) -> Tensor:
    """nn.MultiheadAttention's bool masks say True = masked, the opposite of attention's."""
    return ~mask if mask.dtype == torch.bool else mask


def _combine(a: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Both masks in one. A bool and a float mask give a float mask, promoted with `dtype`."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype != torch.bool and b.dtype != torch.bool:
        return a + b
    if a.dtype == b.dtype:
        return a & b
    keep, bias = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(keep, bias.to(torch.promote_types(bias.dtype, dtype)), float("-inf"))


def _with_dtype_for(q: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype in (torch.bool, torch.float32, q.dtype):
        return mask
    if torch.is_autocast_enabled(q.device.type):  # it cast the inputs: cast the mask, too
        return mask.to(q.dtype)
    raise RuntimeError(
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
        f"attn_mask.dtype: {mask.dtype} and query.dtype: {q.dtype} instead."
    )
