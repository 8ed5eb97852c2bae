"""The public calls: resolve the arguments, then run an operation."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, Literal, overload

import torch
from torch import (
    Tensor,
    are_deterministic_algorithms_enabled,
    is_autocast_enabled,
    is_grad_enabled,
)
from torch.nn import functional as F
from typing_extensions import Unpack  # torch depends on it

from .backends.base import unavailable
from .backends.native.libraries import cpu_unavailable
from .backends.native.marshalling import kind
from .backends.shared.per_sequence import longest
from .backends.shared.value_checks import check_values, checks_values
from .call.argument_hints import by_position
from .call.causal_sequences import causal_mask_mod
from .call.constants import constant
from .call.int4 import INT4
from .call.need import alignment, flag, need_a_tensor, need_dense, real, whole
from .call.packed_layout import heads_first, pages_first, rows_first, scales_first
from .call.quantisation import STORAGE
from .call.qv import joined
from .call.row_lengths import check_row_lengths, mask_mod_of, score_mod_of, with_row_lengths
from .call.row_lengths import check_values as row_lengths_in_range
from .call.signatures import refuse_unknown, with_arguments
from .call.spec import (
    ARGUMENTS,
    DEFAULTS,
    EVERYTHING,
    NUMBERS,
    TOKENS,
    UNLIMITED,
    Arguments,
    MaskMod,
    Options,
    Place,
    ScoreMod,
    Tensors,
    acc_dtype,
    changed,
)
from .call.validation import check, check_lse, counts, describe
from .dispatch import (
    advice,
    context_parallel,
    fast_path,
    library_ops,  # noqa: F401  registers the operators that `dispatcher` dispatches to
)
from .dispatch.dispatcher import call
from .dispatch.operation import ATTENTION, MAX_PLANS, WEIGHTS
from .dispatch.torch_function import (
    handle,
    is_compiling,
    is_dynamo_compiling,
    is_overridden,
    is_plain,
)
from .score_mods.kept_calls import About
from .score_mods.kept_calls import mod_call as made_of
from .score_mods.lowering import Begin, Lowered
from .score_mods.mod_call import ModCall
from .score_mods.recognition import Shape
from .score_mods.tracing import need_arguments

IN_TOKENS = TOKENS, TOKENS
_MASK, *_AS_GIVEN, _SEED = (name for name in Tensors._field_defaults if name in DEFAULTS)
# The fastest way from arguments to `Tensors`, which compilers cannot trace.
_as_given = operator.itemgetter(*_AS_GIVEN)
_SCALARS = "causal", "dropout_p", "scale", "softcap", "backend", "row_invariant", "deterministic"
_scalars = operator.itemgetter(*_SCALARS)
_tensors = functools.partial(tuple.__new__, Tensors)
_ABSENT = (None,) * (len(Tensors._fields) - len("qkv") - 2 - len(_AS_GIVEN))
_any_autocast = torch._C._is_any_autocast_enabled


class PackedArguments(Arguments, total=False):
    """What `attention_packed` takes beside q, k, v and offsets."""

    block_table: Tensor | None
    max_q: int | None
    max_k: int | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    qv: Tensor | None
    row_lengths: Tensor | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qv: Tensor | None = None,
    return_lse: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qv: Tensor | None = None,
    return_lse: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qv: Tensor | None = None,
    return_lse: bool,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
@advice.public
@with_arguments
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *surplus: object,
    qv: Tensor | None = None,
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(score(q k^T)) v in one fused pass (FlashAttention-2, Dao 2023).

    No M x N matrix is stored. Scores go through these stages, in this order: scale, score_mod,
    softcap, ALiBi, mask, mask_mod. Query head h reads key head h // (H / Hk) (GQA).

    A row that may attend to no key is empty: its output is 0, its LSE is -inf (or its sink), and
    its gradients are zero.

    Only key_lengths keeps NaN and infinity in hidden keys of k or v out of the results. With mask,
    causal or window it is unspecified whether they reach a result: whole blocks are skipped, single
    keys are multiplied by 0. Subnormal bfloat16 inputs (below 2^-126) may count as 0: the VDPBF16PS
    and AMX instructions, used on processors that have them, flush them.

    First and second derivatives are fused, in forward mode, in reverse mode, and with either over
    reverse: torch.func, dual numbers, create_graph=True, is_grads_batched. `attention_jvp` is
    forward mode that works in compiled code.

    scale, softcap and dropout_p are Python or numpy numbers. Bools and tensors raise TypeError: a
    tensor would have no gradient, and reading it would wait for the GPU.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        {arguments}
        qv: More queries, of the values: scores are then q k^T + qv v^T (FlashAttention-3). For keys
            in two parts, of which one is the value: latent attention. The default scale is then
            1 / sqrt(D + Dv). If k and v are adjacent columns in memory, as in a latent cache, they
            are read in place; else the call copies them side by side. Head dims count D + Dv for q
            and k.
        return_lse: If True, also return the natural logarithm of the softmax denominator, sinks
            included. A loss on it has a gradient too.

    Shape:
        q: (B, H, M, D), float32, float64, bfloat16 or float16, of any strides.
        k: (B, Hk, N, D), same dtype and device. Hk divides H. Any size may be 0.
        v: (B, Hk, N, Dv), same dtype and device.
        {shapes}
        qv: (B, H, M, Dv), same dtype and device.
        out: (B, H, M, Dv), q's dtype.
        lse: (B, H, M), float32 (float64 for float64).

    Returns:
        out, or (out, lse) with return_lse. For any layout of q, the memory order of out is (B, M,
        H, Dv), and that of the gradients of q, k and v is (B, M, H, D). So out.transpose(1, 2) is
        contiguous, and `flatten(2)` then merges heads without a copy. `out.view(B * H, M, Dv)`
        raises: use `reshape`, or `scaled_dot_product_attention`, which returns torch's memory
        layout.

    Raises:
        ValueError: An argument has a value, shape, dtype or device that breaks these rules.
        TypeError: An argument has a wrong type, or its name is unknown.
        NotImplementedError: No backend can run the call (the text has every backend's reasons).
            Also for third derivatives, for forward mode over forward mode, and for forward mode of
            compiled code.
        IndexError: A score_mod or a mask_mod indexes a captured tensor out of range at a pair that
            other arguments do not hide. A mask_mod's conditions, joined by &, hide pairs from
            those after them and from the score_mod. On a GPU only if FASTATTN_CHECK=1; otherwise
            such an index is clamped.
        RuntimeError: The call is inside torch's context_parallel, and has no place.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q = torch.randn(1, 8, 128, 64)
        >>> k, v = torch.randn(2, 1, 2, 256, 64)  # four query heads share a key head
        >>> out, lse = fastattn.attention(q, k, v, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 128, 64]), torch.Size([1, 8, 128]))
        >>> p = torch.softmax(q @ k.repeat_interleave(4, 1).mT / 8, -1)
        >>> torch.testing.assert_close(out, p @ v.repeat_interleave(4, 1))
        >>> recent = fastattn.attention(q, k, v, causal="bottom_right", window=(63, None))
    """
    if surplus:
        raise by_position("attention", "q, k, v", surplus)
    if qv is None and not is_dynamo_compiling():
        found = fast_path.attend(_FAST, q, k, v, return_lse, arguments)
        if found is not None:
            return found
    if return_lse is not True and return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    if v is None:
        raise no_values(k)
    if qv is not None:
        q, k = joined(q, k, v, qv)
    if is_overridden(q, k, v) and not is_compiling():
        return handle(attention, (q, k, v), return_lse=return_lse, **arguments)
    t, o = prepare(q, k, v, arguments)
    out, normaliser = call(ATTENTION, t, o)
    return (out, normaliser[0]) if return_lse else out


@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **arguments: Unpack[PackedArguments],
) -> Tensor: ...
@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[PackedArguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    *,
    return_lse: bool,
    **arguments: Unpack[PackedArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
@advice.public
@with_arguments
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    *surplus: object,
    block_table: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    qv: Tensor | None = None,
    row_lengths: Tensor | None = None,
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of B sequences of different lengths, stored without padding.

    The sequences lie one after the other in q, k and v. Each one is an item of `attention`. On a
    CPU a sequence has the same bits alone and in every batch. It has them in a padded batch too, if
    both calls have more rows than the kernels for few rows take. On a GPU this holds with
    row_invariant, or many rows.

    Args:
        q: Queries of all sequences.
        k: Keys of all sequences, or pages of keys with block_table.
        v: Values, laid out as k.
        cu_q: Offsets: sequence b has rows cu_q[b] to cu_q[b+1]. They begin at 0, never fall, and
            end at T. A sequence may be empty.
        cu_k: The same for keys; they end at S. None with block_table.
        block_table: The pages of each sequence, in order; it replaces cu_k. Sequence b has
            key_lengths[b] keys in its pages. Pages may have any number of keys, and sequences may
            share a page: its gradient is the sum over them. Pages and table entries past a
            sequence's length are never read. There is no forward mode and no second derivative.
        max_q: The largest number of rows of a sequence. None reads it from the offsets, which waits
            for a GPU. Compiled code cannot read offsets and takes T: pass max_q there if there is a
            mask.
        max_k: The same for keys; compiled code takes S. With block_table, None does not read
            lengths: max_k is then blocks * page, and a mask has that many columns, or one. A mask
            of fewer columns needs max_k.
        k_scale: The scales of the rows of k, if k is stored in eight bits. A row's values are its
            numbers times its scale, computed in float32 (float64 for float64) and rounded to q's
            dtype; on a CPU the result has the bits of a call on rows stored that way. For a few
            rows on long keys the CPU may leave out that rounding, which errs less; not with
            row_invariant. Such rows of 16 bits may be multiplied by int8 as integers of 16 bits,
            and so may the weights of values: `docs/guides/decoding.md` has the bounds of their
            errors. Kernels widen rows as they read them. There is no gradient. Rows in four bits,
            as `KVCache` has them with storage="int4", have no k_scale: 32 numbers are 16 bytes,
            then their scale and their minimum in bfloat16. Values are number * scale + minimum in
            float32 (float64 for float64), which kernels may round to q's dtype. There is no
            gradient, either.
        v_scale: The same for v.
        qv: More queries, of the values, as in `attention`; not of rows in eight or four bits.
        row_lengths: The number of rows of each sequence that are used, if these are fewer than cu_q
            says: the first ones. The others are empty rows. "bottom_right" aligns the last row that
            is used. Dropout draws for sequence b what it draws for item 2 b of a batch. max_q is
            that of all rows.
        return_lse: If True, also return the LSE.
        **arguments: Those of `attention`. "bottom_right" aligns the last row of each sequence with
            its last key. causal may be a bool tensor: whether each sequence is causal, as by True,
            or as by "bottom_right" with Place(bottom_right=True). Dropout draws for sequence b what
            it draws for item b of a batch. key_lengths is at most a sequence's number of keys. Only
            head, item and bottom_right of place may be set.

    Shape:
        q: (T, H, D), T rows of all sequences.
        k: (S, Hk, D), or (P, page, Hk, D) with block_table: P pages. q's dtype; torch.int8,
            float8_e4m3fn or float8_e5m2 with k_scale. In four bits torch.uint8, D / 32 * 20 for D.
        v: (S, Hk, Dv), or (P, page, Hk, Dv).
        cu_q: (B + 1,), int32 or int64, on q's device.
        cu_k: As cu_q.
        block_table: (B, blocks), int32 or int64.
        k_scale: (S, Hk) or (P, page, Hk), float32; (Hk,) for each head, or () for all.
        v_scale: As k_scale.
        qv: (T, H, Dv), q's dtype.
        row_lengths: (B,), int32 or int64, on q's device.
        mask: Broadcasts to (B, H, max_q, max_k).
        causal: A bool, a string, or (B,), torch.bool.
        key_lengths: (B,).
        out: (T, H, Dv), q's dtype.
        lse: (T, H), float32 (float64 for float64).

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        ValueError: As `attention`. Also for offsets or pages out of range, on a GPU only if
            FASTATTN_CHECK=1; otherwise GPU kernels clamp them.
        TypeError, NotImplementedError: As `attention`.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 7, 4, 32)  # sequences of 3, 0 and 4 tokens
        >>> cu = torch.tensor([0, 3, 3, 7])
        >>> out = fastattn.attention_packed(q, k, v, cu, cu, causal=True)
        >>> out.shape
        torch.Size([7, 4, 32])
        >>> first = (x[:3].transpose(0, 1)[None] for x in (q, k, v))
        >>> alone = fastattn.attention(*first, causal=True)
        >>> torch.testing.assert_close(out[:3], alone[0].transpose(0, 1))
    """
    if surplus:
        raise by_position("attention_packed", "q, k, v, cu_q, cu_k", surplus)
    where = cu_q, cu_k, block_table, max_q, max_k, k_scale, v_scale
    known = max_q is not None and (max_k is not None or cu_k is None)  # a plan sees no offsets
    plain = known and qv is None and row_lengths is None
    if plain and not is_dynamo_compiling():
        found = fast_path.attend(_FAST_PACKED, q, k, v, *where, return_lse, arguments)
        if found is not None:
            return found
    if return_lse is not True and return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    if v is None:
        raise no_values(k)
    if qv is not None:
        if k_scale is not None or v_scale is not None:
            raise NotImplementedError("qv: got keys or values in eight bits, expected no scales")
        if isinstance(k, Tensor) and k.dtype == INT4:
            raise NotImplementedError(f"qv: got keys in four bits ({INT4}), expected q's dtype")
        q, k = joined(q, k, v, qv)
    if is_overridden(q, k, v) and not is_compiling():
        own = {"block_table": block_table, "max_q": max_q, "max_k": max_k}
        own |= {"k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse}
        own |= {"row_lengths": row_lengths}
        return handle(attention_packed, (q, k, v), cu_q, cu_k, **own, **arguments)
    t, o = prepare_packed(q, k, v, *where, arguments, row_lengths=row_lengths)
    out, normaliser = call(ATTENTION, t, o)
    out = rows_first(out)
    return (out, _packed_lse(normaliser)) if return_lse else out


@advice.public
@with_arguments
def attention_weights(
    q: Tensor,
    k: Tensor,
    *surplus: object,
    lse: Tensor | None = None,
    average_heads: bool = False,
    **arguments: Unpack[Arguments],
) -> Tensor:
    """Compute the probabilities that `attention` multiplies v by, after dropout.

    They have a first derivative in reverse mode. Without lse, gradients reach q, k, mask and sinks
    through the normaliser too, which then has more than float32 precision. So omit lse where every
    score of a row is huge (a mask of finfo.min or -1e9).

    Args:
        q: Queries, as in `attention`.
        k: Keys, as in `attention`.
        lse: The LSE that `attention(..., return_lse=True)` returned for the same arguments. It
            saves the pass that computes it, and is a constant to autograd.
        average_heads: If True, return the mean over heads, in no more memory than that.
        **arguments: Those of `attention`.

    Shape:
        q: (B, H, M, D).
        k: (B, Hk, N, D).
        lse: (B, H, M), float32 (float64 for float64).
        weights: (B, H, M, N), or (B, M, N) with average_heads; q's dtype.

    Returns:
        The weights.

    Raises:
        ValueError, TypeError: As `attention`.
        NotImplementedError: As `attention`, and for a derivative of any other kind.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k = torch.randn(2, 1, 4, 10, 32)
        >>> weights = fastattn.attention_weights(q, k, causal=True, average_heads=True)
        >>> weights.shape
        torch.Size([1, 10, 10])
        >>> torch.testing.assert_close(weights.sum(-1), torch.ones(1, 10))
    """
    if surplus:
        raise by_position("attention_weights", "q, k", surplus)
    flag("average_heads", average_heads)
    if is_overridden(q, k) and not is_compiling():
        own = {"lse": lse, "average_heads": average_heads}
        return handle(attention_weights, (q, k), **own, **arguments)
    resolved(arguments, "attention_weights")
    constant = lse is not None
    if lse is None:
        undropped: dict[str, Any] = {
            x: y for x, y in arguments.items() if x not in ("dropout_p", "seed")
        }
        with torch.no_grad():  # v has no columns: only the normaliser is needed
            _, normaliser = attend(q, k, _no_columns(k), **undropped)
    else:
        check_lse(q, lse)
        normaliser = torch.stack([lse, torch.zeros_like(lse)])
    return weights_from(
        q,
        k,
        normaliser=normaliser,
        average_heads=average_heads,
        differentiate_lse=not constant,
        **arguments,
    )


def _no_columns(k: Tensor) -> Tensor:
    need_a_tensor("k", k)
    need_dense("k", k)
    return k[..., :0] if k.ndim else k  # the checks reject a k without dimensions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    orders: tuple[str, str] = IN_TOKENS,
    function: str = "attention",
    mod: Lowered | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """`attention` with its normaliser (2,B,H,M): the LSE, and the LSE's rounding error.

    orders, function, mod: as in `prepare`.
    """
    if mod is None and not is_dynamo_compiling():
        found = fast_path.attend(_FAST_WITH_NORMALISER, q, k, v, orders, arguments)
        if found is not None:
            return found
    if v is None:
        raise no_values(k)
    t, o = prepare(q, k, v, arguments, function, orders=orders, mod=mod)
    out, normaliser = call(ATTENTION, t, o)
    return out, normaliser


def no_values(k: object) -> TypeError:
    """The error for v=None: in the layers below this one, v=None asks for attention weights."""
    name = "k" if k is None else "v"
    return TypeError(
        f"{name}: got NoneType, expected a torch.Tensor: attention(x, x, x) is self-attention"
    )


def weights_from(
    q: Tensor,
    k: Tensor,
    *,
    normaliser: Tensor,
    average_heads: bool = False,
    differentiate_lse: bool = True,
    **arguments: Any,
) -> Tensor:
    """`attention_weights` from a normaliser that `attend` computed with the same arguments.

    With `differentiate_lse`, backward treats the normaliser as a function of q, k, mask and sinks,
    although the tensor is detached here: the forward value is reused, and the derivative is that of
    the whole softmax.
    """
    t, o = prepare(q, k, None, arguments)
    t = changed(t, normaliser=normaliser.detach())
    o = changed(o, average_heads=average_heads, constant_lse=not differentiate_lse)
    return call(WEIGHTS, t, o)[0]


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed for dropout from torch's generator: `torch.manual_seed` repeats it."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)


_defaults = constant(tuple(DEFAULTS.items()))
_of_options = constant(tuple(Options._field_defaults.items()))
_names = constant((_SCALARS, tuple(_AS_GIVEN), _ABSENT))


def resolved(arguments: Any, function: str) -> dict[str, Any]:
    """`arguments` completed with defaults. An unknown one raises TypeError, naming `function`."""
    if is_compiling():
        given = {name: arguments.get(name, x) for name, x in _defaults()}
        known = all(name in given for name in arguments)
    else:
        given = DEFAULTS | arguments if arguments else DEFAULTS
        known = len(given) == len(DEFAULTS)
    if not known:
        refuse_unknown(function, arguments)
    return given


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    arguments: Any,
    function: str = "attention",
    *,
    orders: tuple[str, str] = IN_TOKENS,
    mod: Lowered | None = None,
    in_parts: bool = False,
) -> tuple[Tensors, Options]:
    """Convert public arguments, named as in `Arguments`, to the form that all lower layers read.

    orders: the memory order of out, and of the gradients of q, k and v (`Options.out_order`).
    mod: the programs of a score_mod and a mask_mod.
    in_parts: whether the call will be computed in parts, each with `lowered_call`.
    """
    compiling = is_compiling()
    given = resolved(arguments, function)
    window, mask, seed = given["window"], given["mask"], given["seed"]
    scalars = [given[name] for name in _names()[0]] if compiling else _scalars(given)
    if given["deterministic"] is None:
        scalars = *scalars[:-1], are_deterministic_algorithms_enabled(), orders
    else:
        scalars = *scalars, orders
    may_be_a_part = compiling or F.scaled_dot_product_attention is not context_parallel.TORCHS
    if may_be_a_part and given["place"] is None and context_parallel.is_inside():
        raise RuntimeError(f"{function}: {context_parallel.WORDS}")
    if window is not None or given["place"] is not None:
        scalars = *scalars, *_edges(window), *_place(given["place"])
    if compiling:
        plain, with_grad = _options(*scalars)
    else:
        try:
            plain, with_grad = _remembered(*scalars)
        except TypeError:  # a scalar is not hashable, or wrong: then this call raises
            plain, with_grad = _options(*scalars)
    if (compiling or _any_autocast()) and isinstance(q, Tensor):
        q, k, v, mask = autocast(q, k, v, mask)
    if seed is not None or plain.dropout_p:
        seed = _seed(seed, plain.dropout_p, q)
    if compiling:
        _, as_given, absent = _names()
        t = Tensors(q, k, v, mask, *[given[name] for name in as_given], seed, *absent)
    else:
        t = _tensors((q, k, v, mask, *_as_given(given), seed, *_ABSENT))
    if given["score_mod"] is not None or given["mask_mod"] is not None:
        functions = given["score_mod"], given["mask_mod"]
        return _with_functions(t, plain, *functions, in_parts)
    if mod is not None:
        t = _with_captured(t, mod)
        plain, with_grad = (
            changed(x, score_mod=mod.text, captured_sizes=mod.sizes) for x in (plain, with_grad)
        )
    return t, with_grad if is_grad_enabled() and _requires_grad(t) else plain


_lse = operator.itemgetter(0)  # of the normaliser


def _prepare_fast(
    q: Tensor, k: Tensor, v: Tensor, return_lse: Any, arguments: Any
) -> fast_path.Prepared | None:
    if draws(arguments):
        return None
    lse = _lse if flag("return_lse", return_lse) else None
    return fast_path.Prepared(*prepare(q, k, v, arguments), lse=lse)


def _prepare_fast_with_normaliser(
    q: Tensor, k: Tensor, v: Tensor, orders: tuple[str, str], arguments: Any
) -> fast_path.Prepared | None:
    if draws(arguments):
        return None
    return fast_path.Prepared(*prepare(q, k, v, arguments, orders=orders), lse=fast_path.as_it_is)


_FAST_WITH_NORMALISER = fast_path.path(_prepare_fast_with_normaliser, ["orders"])


def draws(arguments: Any) -> bool:
    """True if the call draws a seed, or makes a tensor of a given one."""
    return bool(arguments.get("dropout_p")) and not isinstance(arguments.get("seed"), Tensor)


_FAST = fast_path.path(_prepare_fast, ["return_lse"])


def scalars_of(o: Options) -> dict[str, Any]:
    """The scalars of `Arguments` from which `prepare` made these options."""
    scalars = dict(window=(o.left, o.right), place=o.place)
    others = {argument.name for argument in ARGUMENTS.values()} | {"score_mod", "mask_mod"}
    for name in DEFAULTS.keys() - scalars.keys() - others:
        scalars[name] = DEFAULTS[name] if getattr(o, name) == "" else getattr(o, name)
    return scalars


def prepare_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    block_table: Tensor | None,
    max_q: int | None,
    max_k: int | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    arguments: Any,
    function: str = "attention_packed",
    row_lengths: Tensor | None = None,
) -> tuple[Tensors, Options]:
    """`prepare` for a packed batch."""
    paged = block_table is not None
    causal = arguments.get("causal")
    functions: dict[str, Any] = {x: arguments.get(x) for x in ("score_mod", "mask_mod")}
    if any(functions.values()):  # they are traced when the sizes of sequences are known
        arguments = {name: x for name, x in arguments.items() if name not in functions}
    if isinstance(causal, Tensor):
        arguments = {name: x for name, x in arguments.items() if name != "causal"}
    laid = pages_first if paged else heads_first
    t, o = prepare(heads_first("q", q), laid("k", k), laid("v", v), arguments, function)
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None:
            t = changed(t, **{name: scales_first(name, x, t.k, paged)})
            if is_grad_enabled():
                _no_gradient(name, x)
    max_q = longest("max_q", max_q, cu_q, q.shape[0])
    if max_k is None and isinstance(block_table, Tensor) and block_table.ndim == 2:
        max_k = block_table.shape[1] * k.shape[1]
    max_k = longest("max_k", max_k, cu_k, k.shape[0])
    t = changed(t, cu_q=cu_q, cu_k=cu_k, block_table=block_table)
    o = changed(o, max_q=max_q, max_k=max_k)
    if row_lengths is not None or isinstance(causal, Tensor):
        check(t, o)  # before sequences are others than the caller's
        if not is_compiling():
            need_arguments(**functions)
    if row_lengths is not None:
        check_row_lengths(row_lengths, t)
        known = not is_compiling() and kind((*t, row_lengths)) is not None
        if known and checks_values(t.q.device):
            check_values(describe(t, o), t)
            row_lengths_in_range(row_lengths, t)
    if isinstance(causal, Tensor):
        functions["mask_mod"] = causal_mask_mod(causal, row_lengths, t, o, functions["mask_mod"])
    if row_lengths is not None:
        t, o = with_row_lengths(row_lengths, t, o)
        functions = {
            "score_mod": score_mod_of(functions["score_mod"]),
            "mask_mod": mask_mod_of(functions["mask_mod"]),
        }
    if any(functions.values()):
        return _with_functions(t, o, **functions)
    return t, o


def _packed_lse(normaliser: Tensor) -> Tensor:
    return rows_first(normaliser[0])


def _prepare_fast_packed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> fast_path.Prepared | None:
    *where, return_lse, arguments = rest
    if draws(arguments):
        return None
    lse = _packed_lse if flag("return_lse", return_lse) else None
    t, o = prepare_packed(q, k, v, *where, arguments)
    return fast_path.Prepared(t, o, rows_first, lse)


_FAST_PACKED = fast_path.path(
    _prepare_fast_packed,
    ["cu_q", "cu_k", "block_table", "max_q", "max_k", "k_scale", "v_scale", "return_lse"],
)


def runs_programs(device: torch.device, backend: str | None) -> bool:
    """True if kernels that run programs, the CPU's or Triton's, run calls on this device and
    backend. Compiled code does not look whether the kernels are there: the oracle runs programs
    where they are not."""
    if device.type == "cpu" and backend in (None, "", "cpu"):
        return is_compiling() or cpu_unavailable() is None
    interpreted = device.type == "cpu" and backend == "triton"
    on_gpu = device.type == "cuda" and backend in (None, "", "triton")
    return (interpreted or on_gpu) and (is_compiling() or unavailable("triton", device) is None)


def _with_functions(
    t: Tensors,
    o: Options,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    in_parts: bool = False,
) -> tuple[Tensors, Options]:
    """The call with a score_mod and a mask_mod, as programs, or as a mask where no kernel runs them
    or where a mask is as small.

    Raises:
        NotImplementedError: The kernels of this device run no programs, and the score_mod amounts
            to no mask.
    """
    if not is_compiling() and not in_parts:  # there, operators check, and each part is checked
        _check_once(t, o)
    device, dtype = t.q.device, acc_dtype(t.q.dtype)
    B, M, N = counts(t, o)
    runs = runs_programs(device, o.backend)
    begin = None if _is_plain(t, o) else Begin.of(o)
    sizes = Shape(B, t.q.shape[1], M, N)
    about = About(sizes, dtype, device, begin, o.softcap, runs, in_parts)
    mod_call, rest, lowered = made_of(score_mod, mask_mod, about, is_plain())
    options: dict[str, Any] = {}
    if mod_call.structure.band is not None:
        options["left"], options["right"] = mod_call.structure.band
    if mod_call.structure.key_lengths is not None:
        t = changed(t, key_lengths=mod_call.structure.key_lengths)
    if mod_call.structure.alibi is not None:
        t = changed(t, alibi_slopes=mod_call.structure.alibi)
    if in_parts and lowered is None and (rest.score is not None or rest.mask is not None):
        raise NotImplementedError(
            f"score_mod: got backend={o.backend or None!r} on {device.type}, whose kernels run no "
            "programs, in a call in parts, which has no mask; use backend=None, or "
            "strategy='gather' or 'ulysses'"
        )
    options["softcap"] = rest.softcap
    if lowered is not None:
        t = _with_captured(t, lowered)
        options["score_mod"], options["captured_sizes"] = lowered.text, lowered.sizes
    elif rest.score is None:
        t = changed(t, mask=_mask_of(mod_call, t.mask))
    elif mod_call.sum is not None and o.softcap is None:
        t = changed(t, mask=_mask_of(mod_call, t.mask))
        options["softcap"] = mod_call.sum.softcap
    else:
        raise NotImplementedError(
            "score_mod: the kernels of this device run no programs, and a score_mod that is not "
            "softcap(score) + f(b, h, i, j), without a softcap after it, amounts to no mask: "
            "fastattn.flex_attention runs it on the oracle"
        )
    return t, changed(o, grad=is_grad_enabled() and _requires_grad(t), **options)


_checked: set[Any] = set()


def _check_once(t: Tensors, o: Options) -> None:
    """`check`, once for each kind of call."""
    key = (None if is_compiling() else kind(t)), o
    if key[0] is None or key not in _checked:
        check(t, o)
        if len(_checked) >= MAX_PLANS:
            _checked.clear()
        if key[0] is not None:
            _checked.add(key)


def _is_plain(t: Tensors, o: Options) -> bool:
    """True if functions may become arguments: the call has none of these, and is a whole."""
    given = o.left, o.right, o.softcap, t.key_lengths, t.alibi_slopes, t.cu_q
    return not o.causal and o.place == EVERYTHING and all(x is None for x in given)


def _with_captured(t: Tensors, mod: Lowered) -> Tensors:
    if mod.floats is mod.ints is mod.blocks is None:
        return t
    return changed(t, captured_floats=mod.floats, captured_ints=mod.ints, mask_blocks=mod.blocks)


def _mask_of(mod_call: ModCall, mask: Tensor | None) -> Tensor | None:
    """The mask of a call, with what its functions, which are a sum, add and hide."""
    shown = mod_call.masks()["mask"]
    bias = mod_call.bias(None)
    if bias is not None:
        if mask is not None and mask.dtype == torch.bool:
            bias, mask = torch.where(mask, bias, -math.inf), None
        mask = bias if mask is None else bias + mask
    if shown is None or mask is None:
        return mask if shown is None else shown
    return mask & shown if mask.dtype == torch.bool else torch.where(shown, mask, -math.inf)


def _options(
    causal: Any,
    dropout_p: Any,
    scale: Any,
    softcap: Any,
    backend: Any,
    row_invariant: Any,
    deterministic: Any,
    orders: Any,
    left: Any = None,
    right: Any = None,
    *place: Any,
) -> tuple[Options, Options]:
    """The options of a call without gradients, and of the same call with gradients."""
    aligned = alignment(causal)
    dropout_p = real("dropout_p", dropout_p)
    scale = None if scale is None else real("scale", scale)
    softcap = None if softcap is None else real("softcap", softcap)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: got {backend!r}, expected a name, or None for the best")
    given: dict[str, Any] = {
        "scale": scale,
        "causal": aligned,
        "left": left,
        "right": right,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "backend": backend or "",
        "row_invariant": flag("row_invariant", row_invariant),
        "deterministic": flag("deterministic", deterministic),
        "out_order": orders[0],
        "grad_order": orders[1],
    }
    if place:
        given |= dict(zip(Options._fields[-len(place) :], place))
    fields: dict[str, Any] = {name: given.get(name, x) for name, x in _of_options()}
    with_grad: dict[str, Any] = {**fields, "grad": True}
    return Options(**fields), Options(**with_grad)


# The checks of scalars take longer than all else of `prepare`; the bound is that of plans.
# typed=True: a call with True must not get the cached result for 1, which is equal to it.
_remembered = functools.lru_cache(maxsize=4096, typed=True)(_options)


_CONSTANT = tuple(at for at, a in enumerate(ARGUMENTS.values()) if not a.gradient)


def _requires_grad(t: Tensors) -> bool:
    for x in t:
        if x is not None and isinstance(x, Tensor) and x.requires_grad:  # checks reject non-tensors
            break
    else:
        return False
    for at in _CONSTANT:
        x = t[at]
        if x is not None and isinstance(x, Tensor) and x.requires_grad:
            _no_gradient(list(ARGUMENTS)[at], x)
    return True


def _no_gradient(name: str, x: Tensor) -> None:
    if x.requires_grad:
        raise ValueError(
            f"{name}: got a tensor that requires grad, expected a constant: there is no gradient "
            f"for it; pass {name}.detach()"
        )


def _place(place) -> Place:
    if place is None:
        return EVERYTHING
    if not isinstance(place, Place):
        raise TypeError(f"place: got {place!r}, expected a fastattn.Place or None")
    bottom_right = flag("place.bottom_right", place.bottom_right)
    numbers = [
        x
        if x is None and Place._field_defaults[name] is None
        else whole(f"place.{name}", x, "a whole number")
        for name, x in zip(NUMBERS, place)
    ]
    return Place(*numbers, bottom_right=bottom_right)  # ty: ignore


def _edges(window) -> tuple:
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        expected = "a pair (left, right) of ints or None"
        raise ValueError(f"window: got {window!r}, expected {expected}") from None
    return _edge("left", left), _edge("right", right)


def _edge(side: str, x):
    if x is None:
        return None
    x = whole(f"window {side}", x, "an int, or None for no limit")
    return UNLIMITED if type(x) is int and x > UNLIMITED else x  # operators take int64


def may_autocast() -> bool:
    """True if autocast may be active. Compiled code cannot ask for all devices: True there."""
    return is_compiling() or _any_autocast()


def autocast(q, k, v, mask):
    """Cast q, k, v and a float mask to the autocast dtype, as torch's SDPA; float64 stays."""
    device = q.device.type
    if not is_autocast_enabled(device):
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device)

    def cast(x):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if x.dtype == torch.float64 or x.dtype in STORAGE:
            return x
        return x.to(dtype)

    return cast(q), cast(k), cast(v), cast(mask)


def _seed(seed, dropout_p: float, q: Tensor) -> Tensor | None:
    """The seed as a tensor; None if it is not a tensor and dropout_p is 0."""
    if isinstance(seed, Tensor):
        return seed
    expected = (
        "an int of 64 bits, an int64 tensor of one element on q's device, or None to draw one"
    )
    if seed is not None:
        seed = whole("seed", seed, expected)
        if not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed: got {seed}, expected {expected}")
    if not dropout_p:
        return None
    device = q.device if isinstance(q, Tensor) else "cpu"  # the checks reject a q that is no tensor
    if seed is None:
        return draw_seed(device)
    return torch.full((1,), seed if seed < 1 << 63 else seed - (1 << 64), device=device)
