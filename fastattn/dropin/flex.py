"""torch.nn.attention.flex_attention.flex_attention, call for call, with gradients on every device.

The user's functions are traced to programs (`fastattn.score_mods`). What `attention` has an
argument for becomes that argument. The kernels of the CPU and of Triton run the rest on each score.
Where they cannot (`api.runs_programs`), and for tables that are as large as a mask, the rest of a
mask_mod becomes a bool mask, and what a score_mod adds becomes a float mask, each in the smallest
shape that its indices span; a score_mod of another form then runs on the oracle.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import reference
from ..api import attend, autocast, draw_seed, may_autocast, runs_programs
from ..backends.base import in_order
from ..backends.base import names as backend_names
from ..call.need import flag
from ..call.sizes import divides, holds, is_decided, known
from ..call.spec import TOKENS, MaskMod, ScoreMod, acc_dtype
from ..dispatch.torch_function import is_plain
from ..require_torch import TORCH_VERSION
from ..score_mods.kept_calls import About, mod_call
from ..score_mods.lowering import Lowered
from ..score_mods.mod_call import ModCall
from ..score_mods.recognition import Shape
from . import flex_blocks
from .sdpa import _order_of

ROWS = 256  # of the scores that `_max_scores` computes at a time


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: Any = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Any = ...,
    *,
    return_aux: None = ...,
    mask_mod: MaskMod | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    sinks: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: Any = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: Any = ...,
    *,
    return_aux: Any = ...,
    mask_mod: MaskMod | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    sinks: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor | tuple[Tensor, Any]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Any]:
    """Compute attention with a score_mod and a mask_mod, as torch's flex_attention, and train it.

    softmax(score_mod(query key^T scale)) value, over the keys that mask_mod and block_mask show.
    It needs no compiler and no block mask, and has gradients on CPUs, in captured tensors too.

    Functions are traced at each call, in some ten microseconds an operation. They may use Python's
    operators, comparisons, torch.where, casts and torch's functions of one number, and index
    captured tensors by expressions of b, h, i and j. Scores and floating captured tensors are
    computed in float32, in float64 for float64 tensors; whole numbers have 64 bits, but on CPUs a
    float32 that becomes a whole number is at most 2^30.

    A band (i >= j, i - j <= w), key lengths, a tanh cap and slopes of heads become arguments of
    `attention`. On CPUs its kernels run the rest as a program on each score: no tensor of size M N
    is stored, and blocks of 32 rows and 64 keys that mask_mod hides are skipped. The values of
    captured tensors are read for this. A captured tensor that is indexed by [.., i, j] and is large
    or has a gradient becomes a mask. So does a function with whole numbers that may need more than
    32 bits (64 for float64).

    On GPUs Triton's kernels run programs. Each new function, or one that captures a tensor of
    another shape, is compiled for some seconds. No value of a captured tensor is read before a
    kernel runs, and an index out of range is clamped; with FASTATTN_CHECK=1 in the environment it
    raises as on CPUs. A mask_mod of a large call is first called for each pair, once for the heads
    and items that share it, to find the blocks to skip. Gradients of captured tensors are exact
    sums of float32 terms, the same in every run; while one is computed it takes up to 280 bytes for
    each captured number. Without Triton functions become masks: a condition of i and j takes M N
    bytes, and what a score_mod adds four times as many. A score_mod that is not softcap(score) +
    f(b, h, i, j) then runs on the oracle, in O(B H M N) memory. On all devices second derivatives
    by captured tensors run there.

    In compiled and exported code the functions are traced as part of the graph; the programs are
    lowered when it runs. Where torch.compile cannot follow a function, `fastattn.Mod` has it traced
    outside. A function with whole numbers of more than 32 bits needs float64 tensors there.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        score_mod: score_mod(score, b, h, i, j) -> score, after the scale.
        block_mask: torch's BlockMask. Its lists decide: full blocks skip its mask_mod, and blocks
            that are not listed are hidden.
        scale: The factor of query key^T; 1 / sqrt(E) by default.
        enable_gqa: If True, the heads of key and value divide query's.
        return_lse: If True, also return the LSE.
        kernel_options: Ignored.
        return_aux: torch's AuxRequest: also return torch's AuxOutput with what it asks for.
        mask_mod: mask_mod(b, h, i, j) -> bool, True where row i may attend to key j. With a
            block_mask, both must show a key. fastattn.and_masks and or_masks, which are torch's,
            combine several.
        dropout_p: The probability of dropout, as in `fastattn.attention`.
        seed: The seed of dropout; None draws one.
        sinks: One more logit for each head in each row's denominator.
        backend: Run on this backend, or raise. None takes the first that can run the call.

    Shape:
        query: (B, H, M, E), float32, float64, bfloat16 or float16.
        key: (B, Hk, N, E), query's dtype. B is 1 beside a block mask of query's batch size.
        value: (B, Hk, N, Ev), query's dtype.
        sinks: (H,).
        seed: An int, or an int64 tensor of one element.
        out: (B, H, M, Ev), query's dtype, in memory in the order of query's dimensions.
        lse: (B, H, M), float32 (float64 for float64): natural logarithms, -inf for a row that sees
            no key. max_scores is of the same form.

    Returns:
        out; (out, lse) with return_lse; (out, AuxOutput) with return_aux. A row that sees no key
        gives 0. max_scores has no gradient.

    Raises:
        TypeError: A function branches on an argument, or returns no number; the message names the
            line.
        ValueError: return_lse beside return_aux; shapes that do not fit, as in torch's function.
        NotImplementedError: A function uses an operation that programs do not have, or the backend
            cannot run the call.
        IndexError: A function indexes a captured tensor out of range. A condition of mask_mod may
            do so at pairs that the conditions before it, joined by &, hide; score_mod at pairs
            that mask_mod hides. On GPUs such an index is clamped, unless FASTATTN_CHECK=1.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 4, 50, 16).requires_grad_().unbind()
        >>> table = torch.randn(4, 99, requires_grad=True)
        >>> def relative(score, b, h, i, j):
        ...     return score + table[h, i - j + 49]
        >>> out = fastattn.flex_attention(q, k, v, relative, mask_mod=lambda b, h, i, j: i >= j)
        >>> out.sum().backward()
        >>> table.grad.shape
        torch.Size([4, 99])
    """
    _check(query, key, value, enable_gqa, block_mask, return_lse, return_aux)
    listed = None if block_mask is None else flex_blocks.mask_mod_of(block_mask)
    device = query.device
    casts = may_autocast() and torch.is_autocast_enabled(device.type)
    if casts:
        query, key, value, _ = autocast(query, key, value, None)
    if _is_shared(key, query):
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = Shape(*query.shape[:3], key.shape[2])
    runs = runs_programs(device, backend)
    about = About(sizes, acc_dtype(query.dtype), device, None, None, runs, False)
    with torch.autocast(device.type, enabled=False) if casts else nullcontext():
        rest: dict[str, Any] = dict(scale=scale, sinks=sinks, dropout_p=dropout_p, seed=seed)
        shown = flex_blocks.both(mask_mod, listed)
        call, left, lowered = mod_call(score_mod, shown, about, is_plain())
        if lowered is not None:
            rest["softcap"] = left.softcap
            out, lse = _in_kernels(call, lowered, query, key, value, backend=backend, **rest)
        elif call.sum is None:
            out, lse = _on_the_oracle(call, query, key, value, backend, **rest)
        else:
            out, lse = _fused(call, query, key, value, backend=backend, **rest)
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput  # torch 2.9; `_check` looked

    largest = _max_scores(call, query, key, scale) if return_aux.max_scores else None
    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest)


def _in_kernels(
    call: ModCall, lowered: Lowered, query: Tensor, key: Tensor, value: Tensor, **rest: Any
) -> tuple[Tensor, Tensor]:
    """The output and the LSE, by kernels that run the programs."""
    structure = call.structure
    given = dict(
        window=structure.band, key_lengths=structure.key_lengths, alibi_slopes=structure.alibi
    )
    try:
        return _attend(query, key, value, mod=lowered, **given, **rest)
    except IndexError:
        call.check_indices()  # with the index in the message
        raise


def _attend(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    order = _order_of(query)
    orders = order, order if order in ("BHM", TOKENS) else "BHM"
    given |= dict(orders=orders, function="flex_attention")
    out, normaliser = attend(query, key, value, **given)
    return out, normaliser[0]


def _fused(
    call: ModCall, query: Tensor, key: Tensor, value: Tensor, **rest: Any
) -> tuple[Tensor, Tensor]:
    """The output and the LSE, by `attention` with what the functions amount to."""
    parts, given = call.sum, call.masks()
    assert parts is not None
    given["mask"] = call.bias(given["mask"])
    given |= dict(softcap=parts.softcap, alibi_slopes=call.structure.alibi)
    return _attend(query, key, value, **given, **rest)


def _on_the_oracle(
    call: ModCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backend: str | None,
    seed: int | Tensor | None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """The same for a score_mod of any form, in memory O(B H M N)."""
    if backend not in (None, "reference"):
        if backend not in backend_names():
            raise ValueError(f"backend: got {backend!r}, expected one of {backend_names()}")
        raise NotImplementedError(
            f"backend {backend!r} cannot run a score_mod that is not softcap(score) + f(b, h, i, j)"
        )
    program = call.score
    assert program is not None
    q, k, v = (x.to(call.dtype) for x in (query, key, value))
    out, lse = reference.attention(
        q,
        k,
        v,
        score_mod=lambda score: call.value(program, score),
        seed=draw_seed(query.device) if seed is None and rest["dropout_p"] else seed,
        return_lse=True,
        **call.masks(),
        **rest,
    )
    return in_order(out.to(query.dtype), _order_of(query)), lse


@torch.no_grad()
def _max_scores(call: ModCall, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """(B,H,M): the largest score of each row, some rows at a time."""
    q, k = query.to(call.dtype), key.to(call.dtype)
    k = k.repeat_interleave(q.shape[1] // torch.sym_max(k.shape[1], 1), dim=1)
    if known(k.shape[2] == 0):
        return q.new_full(q.shape[:3], -math.inf)
    scale = reference.factor(q, scale=scale)
    parts, largest = [(q, call.indices()["i"])], []
    if is_decided(q.shape[2]):
        parts = zip(*(x.split(ROWS, dim=-2) for x in parts[0]), strict=True)
    for of_rows, i in parts:
        s = of_rows @ k.mT * scale
        if call.score is not None:
            s = call.value(call.score, s, i=i).expand(s.shape)
        if call.mask is not None:
            s = s.masked_fill(~call.value(call.mask, i=i), -math.inf)
        largest.append(s.amax(-1))
    return torch.cat(largest, 2)


def _is_shared(key: Tensor, query: Tensor) -> bool:
    """True if one item of keys is for several of queries."""
    return known(key.shape[0] == 1) and not known(query.shape[0] == 1)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    enable_gqa: bool,
    block_mask: Any,
    return_lse: bool,
    return_aux: Any,
) -> None:
    """Apply torch's rules that `attention` does not have, with the first words of its messages."""
    flag("enable_gqa", enable_gqa)
    flag("return_lse", return_lse)
    if any(x.is_nested for x in (query, key, value)):
        raise NotImplementedError("flex_attention does not support NestedTensor inputs")
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise NotImplementedError(f"query, key, and value must be 4D tensors, got {shapes}")
    if not holds(query.shape[-1] == key.shape[-1]):
        raise ValueError(
            "Expect query and key/value to have the same embedding dimension but got "
            f"E={query.shape[-1]} and E={key.shape[-1]}."
        )
    heads, of_keys = query.shape[1], key.shape[1]
    if not enable_gqa and not holds(heads == of_keys):
        raise ValueError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={heads} and Hkv={of_keys}. Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and not divides(of_keys, heads):
        raise ValueError(
            "Expect number of query heads to be a multiple of kv heads for GQA but got "
            f"Hq={heads} and Hkv={of_keys}."
        )
    if return_lse and return_aux is not None:
        raise ValueError("Cannot specify both return_lse and return_aux.")
    if return_aux is not None and TORCH_VERSION < (2, 9):
        raise NotImplementedError(
            f"return_aux: got one with torch {torch.__version__}, expected torch 2.9 or newer, "
            "which has AuxRequest and AuxOutput: use return_lse=True for the LSE"
        )
    if block_mask is not None:
        flex_blocks.need_block_mask(block_mask)
    expands = block_mask is not None and _is_shared(key, query)
    if not holds((block_mask if expands else key).shape[0] == query.shape[0]):
        raise ValueError(
            "Expect query and key/value to have the same batch size, or key/value of 1 beside a "
            f"block_mask of query's, but got Bq={query.shape[0]} and Bkv={key.shape[0]}."
        )
    if block_mask is not None:
        flex_blocks.check(block_mask, query, key)
