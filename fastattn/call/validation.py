"""The rules for the arguments of a call, and the spec of a call that obeys them.

The rules read only metadata (shapes, dtypes, devices, scalars), so one verdict holds for every
later call of the same kind, and fake tensors with symbolic sizes can be checked too.
`spec.ARGUMENTS` states what each tensor must be; this file checks the tensors against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import argument_hints
from .int4 import BLOCK, BLOCK_BYTES, INT4, columns, row_bytes
from .need import need, need_a_tensor, need_dense, shape_of
from .quantisation import STORAGE
from .sizes import agree, broadcasts, divides
from .spec import (
    ARGUMENTS,
    BLOCK_KEYS,
    BLOCK_ROWS,
    DROPOUT_PERIODS,
    EVERYTHING,
    NUMBERS,
    TOKENS,
    Argument,
    AttentionSpec,
    Options,
    Place,
    Tensors,
    acc_dtype,
    result_letters,
    result_shape,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALIGNMENTS = ("", "top_left", "bottom_right")
# The options that a spec has as they are.
AS_GIVEN = (
    "average_heads",
    "constant_lse",
    "row_invariant",
    "deterministic",
    "out_order",
    "grad_order",
    "score_mod",
)
AS_GIVEN += ("at_row", "at_key", "at_head", "at_item", *DROPOUT_PERIODS)


def describe(t: Tensors, o: Options) -> AttentionSpec:
    """The spec of a call with these tensors and options; raises if they break a rule."""
    check(t, o)
    (_, H, T, D), (_, Hk, S, _) = t.q.shape, t.k.shape
    B, M, N = counts(t, o)
    left, right, bottom_right = o.band
    return AttentionSpec(
        B=B,
        H=H,
        Hk=Hk,
        M=M,
        N=N,
        D=D,
        Dv=0 if t.v is None else columns(t.v),
        dtype=t.q.dtype,
        device=t.q.device.type,
        scale=float(o.scale) if o.scale is not None else 1 / math.sqrt(D) if D else 1.0,
        left=left,
        right=right,
        bottom_right=bottom_right,
        softcap=0.0 if o.softcap is None else float(o.softcap),
        dropout_p=float(o.dropout_p),
        given=frozenset(name for name in Tensors._field_defaults if getattr(t, name) is not None),
        mask_shape=None if t.mask is None else tuple(t.mask.shape),
        mask_dtype=None if t.mask is None else t.mask.dtype,
        needs_grad=o.grad,
        weights=t.v is None,
        acc_dtype_out=o.stored(t.q.dtype) != t.q.dtype,
        rows_after=0 if o.rows is None else o.rows - o.at_row - M,
        keys_after=0 if o.keys is None else o.keys - o.at_key - N,
        T=0 if t.cu_q is None else T,
        S=0 if t.cu_k is None else S,
        P=0 if t.block_table is None else t.k.shape[0],
        page=0 if t.block_table is None else S,
        blocks=0 if t.block_table is None else t.block_table.shape[1],
        floats=0 if t.captured_floats is None else t.captured_floats.shape[0],
        ints=0 if t.captured_ints is None else t.captured_ints.shape[0],
        storage=None if t.k.dtype == t.q.dtype else t.k.dtype,
        **{name: getattr(o, name) for name in AS_GIVEN},
    )


def counts(t: Tensors, o: Options) -> tuple[int, int, int]:
    """B, M and N: items, rows and keys of each item; in a packed batch, of the longest sequence."""
    if t.cu_q is None:
        return t.q.shape[0], t.q.shape[2], t.k.shape[2]
    M, N = (0 if most is None else most for most in (o.max_q, o.max_k))
    return t.cu_q.shape[0] - 1, M, N


def check(t: Tensors, o: Options) -> None:
    """Raise ValueError or TypeError, saying got / expected, for anything that breaks a rule."""
    for name, argument, x in _present(t):
        _type(argument, x, optional=name in Tensors._field_defaults)
    _storage(t)
    for _, argument, x in _present(t):
        if argument.dtype != "kv" or t.k.dtype != INT4:
            _dtype(argument, x, t.q.dtype, t.k_scale is not None)
        expected = f"{t.q.device}, as q has"
        need(x.device == t.q.device, f"{argument.name}.device", x.device, expected)
    sizes = _layout(t) | _packed(t, o)
    sizes |= _of_score_mod(t, o, sizes)
    for name, argument, x in _present(t):
        if name in Tensors._field_defaults:
            _shape_fits(argument, x, sizes)
    _scalars(o, t.q.dtype)
    _place(o.place, *counts(t, o)[1:])
    sums = t.v is not None and t.cu_q is None
    need(
        sums or not o.acc_dtype_out, "acc_dtype_out", True, "False of weights and of packed batches"
    )
    for name in ("out_order", "grad_order"):
        order = getattr(o, name)
        fits = order == TOKENS or (sums and sorted(order) == sorted(TOKENS))
        expected = f"the letters of {TOKENS}, or that itself of weights and of packed batches"
        need(fits, name, repr(order), expected)
    need(o.dropout_p == 0 or t.seed is not None, "seed", None, "a tensor, because dropout_p > 0")


def check_alone(name: str, x: object, of_q: torch.dtype, **sizes: int) -> None:
    """`check` of one optional tensor, if q has this dtype and the letters of shapes these sizes."""
    _type(ARGUMENTS[name], x, optional=True)
    assert isinstance(x, Tensor)
    _dtype(ARGUMENTS[name], x, of_q, scaled=False)
    _shape_fits(ARGUMENTS[name], x, sizes)


def need_memory(t: Tensors) -> None:
    """Raise ValueError for a tensor without storage, as `storage.resize_(0)` leaves it."""
    for _, argument, x in _present(t):
        released = x.numel() and not x.is_meta and not x.data_ptr()
        need(not released, argument.name, "a tensor without storage", "one that has its values")


def _present(t: Tensors) -> Iterator[tuple[str, Argument, Any]]:
    """The tensors that are given, and the required ones (q, k) always: for None a rule raises."""
    for (name, argument), x in zip(ARGUMENTS.items(), t):
        if x is not None or not argument.optional:
            yield name, argument, x


def _type(argument: Argument, x: Any, optional: bool) -> None:
    need_a_tensor(argument.name, x, "a torch.Tensor" + (" or None" if optional else ""))
    need_dense(argument.name, x)


def _dtype(argument: Argument, x: Tensor, of_q: torch.dtype, scaled: bool) -> None:
    exact = acc_dtype(of_q)
    listed = " or ".join(map(str, STORAGE))
    rules = {
        "kv": (
            x.dtype in STORAGE and of_q in DTYPES,
            f"{listed}, because there are scales",
        ),
        "q": (
            x.dtype == of_q and of_q in DTYPES,
            "float32, float64, bfloat16 or float16: convert it with .to()"
            if x.dtype not in DTYPES
            else f"{of_q}, as q has: convert them to one dtype",
        ),
        "mask": (
            x.dtype in (torch.bool, torch.float32, of_q),
            "torch.bool (True = may attend) or torch.float32"
            + (f" or {of_q}, as q has" if of_q != torch.float32 else ""),
        ),
        "integer": (x.dtype in (torch.int32, torch.int64), "torch.int32 or torch.int64"),
        "int64": (x.dtype == torch.int64, "torch.int64"),
        "int8": (x.dtype == torch.int8, "torch.int8"),
        "floating": (x.is_floating_point(), f"a floating dtype such as {exact}"),
        "acc": (x.dtype == exact, str(exact)),
        "float32": (x.dtype == torch.float32, "torch.float32"),
    }
    ok, expected = rules["q" if argument.dtype == "kv" and not scaled else argument.dtype]
    need(ok, f"{argument.name}.dtype", x.dtype, expected)


def _storage(t: Tensors) -> None:
    """k_scale and v_scale must come together, with k and v of the same dtype. Rows in four bits,
    too, are those of both k and v, in a packed batch, and have no scales beside them."""
    given = [name for name in ("k_scale", "v_scale") if getattr(t, name) is not None]
    if t.k.dtype == INT4:
        expected = f"{t.q.dtype}, as q has; attention_packed takes rows in four bits ({INT4})"
        need(t.cu_q is not None, "k.dtype", INT4, expected)
        expected = f"None, because rows in four bits ({INT4}) contain their scales"
        need(not given, "".join(given[:1]), "a tensor", expected)
        if t.v is not None:
            need(t.v.dtype == INT4, "v.dtype", t.v.dtype, f"{INT4}, as k has")
    elif t.v is not None and t.cu_q is not None:
        need(t.v.dtype != INT4, "k.dtype", t.k.dtype, f"{INT4}, as v has")
    if not given:
        return
    need(len(given) == 2, "k_scale and v_scale", f"{given[0]} alone", "both, or neither")
    need(t.cu_q is not None, "k_scale", "a tensor", "None, because cu_q is None")
    if t.v is not None:
        need(t.v.dtype == t.k.dtype, "v.dtype", t.v.dtype, f"{t.k.dtype}, as k has")


def _int4_rows(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    D = q.shape[3]
    expected = f"a head dim that is a multiple of {BLOCK}, because k has rows in four bits ({INT4})"
    need(D % BLOCK == 0, "q", shape_of(q), expected)
    expected = f"rows of {row_bytes(D)} bytes, {BLOCK_BYTES} for {BLOCK} numbers of q's {D}"
    need(k.shape[3] == row_bytes(D), "k", shape_of(k), expected)
    if v is not None:
        expected = f"rows of a multiple of {BLOCK_BYTES} bytes, which have {BLOCK} numbers"
        need(v.shape[3] % BLOCK_BYTES == 0, "v", shape_of(v), expected)


def _layout(t: Tensors) -> dict[str, int]:
    """The sizes that the letters of shapes stand for, from q, k and v."""
    q, k, v = t[:3]
    for name, x in zip("qkv", t[:3]):
        if x is not None:
            axes = ", ".join(ARGUMENTS[name].shapes[0].split())
            need(x.ndim == 4, name, shape_of(x), f"4 dimensions ({axes})")
    B, H, M, D = q.shape
    _, Hk, N, _ = k.shape
    if t.block_table is None:
        need(k.shape[0] == B, "k", shape_of(k), f"batch size {B}, as q has")
    if k.dtype == INT4:
        _int4_rows(q, k, v)
    else:
        need(k.shape[3] == D, "k", shape_of(k), f"head dim {D}, as q has")
    if not divides(Hk, H):
        hint = argument_hints.rows_before_heads(q.shape, k.shape)
        need(False, "k", f"{Hk} heads", f"a divisor of q's {H} heads{hint}")
    if v is not None:
        if t.block_table is None:
            need(v.shape[0] == B, "v", shape_of(v), f"batch size {B}, as q has")
        else:
            need(v.shape[0] == k.shape[0], "v", shape_of(v), f"{k.shape[0]} pages, as k has")
        need(v.shape[1] == Hk, "v", shape_of(v), f"{Hk} heads, as k has")
        need(v.shape[2] == N, "v", shape_of(v), f"{N} rows, as k has")
    return {"2": 2, "B": B, "H": H, "M": M, "N": N, "Bk": k.shape[0], "Hk": Hk, "Nk": N}


def _packed(t: Tensors, o: Options) -> dict[str, int]:
    """The sizes of letters in a packed batch, beside or in place of `_layout`'s; {} if dense."""
    if t.cu_q is None:
        for name, x in (("cu_k", t.cu_k), ("block_table", t.block_table)):
            need(x is None, name, "a tensor", "None, because cu_q is None")
        need(o.max_q is None and o.max_k is None, "max_q", o.max_q, "None, of what is not packed")
        return {}
    need(
        (t.cu_k is None) != (t.block_table is None),
        *("cu_k and block_table", "neither" if t.cu_k is None else "both"),
        "cu_k where keys lie one after the other, block_table where they lie in pages",
    )
    for name, x in (("cu_q", t.cu_q), ("cu_k", t.cu_k)):
        fits = x is None or (x.ndim == 1 and x.shape[0] > 0)
        need(fits, name, x is not None and shape_of(x), "(B + 1,) offsets, one or more")
    for name, most in (("max_q", o.max_q), ("max_k", o.max_k)):
        fits = most is not None and _counted(most)
        need(fits, name, most, f"a number in [0, {INT32_MAX}]")
    need(t.q.shape[0] == 1, "q", shape_of(t.q), "batch size 1 of what is packed")
    for name, rows, cu in (("cu_q", t.q.shape[2], t.cu_q), ("cu_k", t.k.shape[2], t.cu_k)):
        told = cu is None or (cu.shape[0] > 1) | (rows == 0)
        need(told, name, "(1,) offsets, of no sequence", f"those of {rows} rows, or keys")
    at = o.place._replace(head=0, item=0, bottom_right=False)
    need(at == EVERYTHING, "place", o.place, "no row or key of a packed batch")
    for name in DROPOUT_PERIODS:
        x = getattr(o, name)
        need(x == 0, name, x, "0, of a packed batch")
    B, M, N = counts(t, o)
    sizes = {"B": B, "B+1": B + 1, "M": M, "N": N}
    if t.block_table is None:
        return sizes
    table = t.block_table
    need(table.ndim == 2, "block_table", shape_of(table), "2 dimensions (B, blocks)")
    counted = (t.k.shape[2] > 0) & (t.k.shape[2] <= INT32_MAX)
    need(counted, "k", shape_of(t.k), f"pages of 1 to {INT32_MAX} keys")
    need(t.key_lengths is not None, "key_lengths", None, "how many keys each sequence has in pages")
    return sizes | {"blocks": table.shape[1]}


def _of_score_mod(t: Tensors, o: Options, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of letters of what a score_mod captures."""
    letter_sizes = {
        "block_rows": -(-sizes["M"] // BLOCK_ROWS),
        "block_keys": -(-sizes["N"] // BLOCK_KEYS),
    }
    captured = {"floats": t.captured_floats, "ints": t.captured_ints}
    for letter, x in captured.items():
        if x is not None:
            need(x.ndim == 1, f"captured_{letter}", shape_of(x), "one dimension")
            letter_sizes[letter] = x.shape[0]
    given = t.mask_blocks is not None or any(x is not None for x in captured.values())
    need(bool(o.score_mod) or not given, "score_mod", repr(""), "programs, beside captured tensors")
    alone = o.softcap is None or not o.score_mod or o.score_mod.startswith("\n")
    need(alone, "softcap", o.softcap, "None beside a score_mod's program, which contains it")
    return letter_sizes


def _shape_fits(argument: Argument, x: Tensor, sizes: dict[str, int]) -> None:
    name = argument.name
    shapes = [tuple(sizes[letter] for letter in shape.split()) for shape in argument.shapes]
    if argument.shapes == ("",):
        return need(x.numel() == 1, name, shape_of(x), "one element")
    if argument.broadcast:
        (full,) = shapes
        fits = x.ndim <= len(full) and all(map(broadcasts, reversed(x.shape), reversed(full)))
        letters = ", ".join(argument.shapes[0].split())
        hint = "" if fits else argument_hints.mask_shape(x.shape, sizes)
        expected = f"a shape that broadcasts to ({letters}) = {full}{hint}"
        return need(fits, name, shape_of(x), expected)
    if not any(agree(x.shape, s) for s in shapes):
        texts = (f"({', '.join(x.split())}{',' * (' ' not in x)})" for x in argument.shapes)
        expected = " or ".join(f"{a} = {b}" for a, b in zip(texts, shapes))
        need(False, name, shape_of(x), expected)


INT32_MAX = 2**31 - 1  # kernels count rows and keys in 32 bits


def _counted(n: int | torch.SymInt) -> bool:
    """True if n fits the 32-bit counters of kernels. A symbolic size is not compared, because
    torch.export would bound it: the exported program checks the number when it runs."""
    return not isinstance(n, int) or 0 <= n <= INT32_MAX


def _place(place: Place, M: int, N: int) -> None:
    for name, x in zip(NUMBERS, place):
        expected = f"a number in [0, {INT32_MAX}]"
        need(x is None or (x >= 0) & (x <= INT32_MAX), f"place.{name}", x, expected)
    for name, first, own, x in (
        ("rows", place.row, M, place.rows),
        ("keys", place.key, N, place.keys),
    ):
        end = first + own
        need(_counted(end), f"place.{name[:-1]}", first, f"at most {INT32_MAX} - {own} {name}")
        expected = f"at least {end}, where this call's end, or None for that"
        need(x is None or x >= end, f"place.{name}", x, expected)


def check_results(
    t: Tensors, o: Options, of: Iterable[str], tensors: Iterable[Tensor | None], what: str = ""
) -> None:
    """Raise ValueError unless results of an earlier pass have the shapes and dtypes of this call.

    of: the name of each tensor in `RESULTS`. what: "gradient of ", for example, for tensors that
    have the shapes of results. Kernels read these tensors by the sizes of the call.
    """
    exact, stored = acc_dtype(t.q.dtype), o.stored(t.q.dtype)
    for name, x in zip(of, tensors):
        if x is None:
            continue
        shape, letters = result_shape(name, t, o), ", ".join(result_letters(name, o))
        need(agree(x.shape, shape), what + name, shape_of(x), f"({letters}) = {shape}")
        dtype = exact if name in ("normaliser", "lse") else stored
        either = bool(what) or name == "out"  # kernels take those rounded or not
        rounded = either and dtype == stored and x.dtype == t.q.dtype
        need(x.dtype == dtype or rounded, f"{what}{name}.dtype", x.dtype, str(dtype))
        need(x.device == t.q.device, f"{what}{name}.device", x.device, f"{t.q.device}, as q has")


def check_lse(q: object, lse: Any) -> None:
    """Raise unless `lse` is what attention(q, ..., return_lse=True) gives."""
    need_a_tensor("lse", lse, "a torch.Tensor or None")
    need_dense("lse", lse)
    if not isinstance(q, Tensor) or q.ndim != 4:
        return  # the checks of q raise
    exact = acc_dtype(q.dtype)
    need(
        lse.dtype == exact, "lse.dtype", lse.dtype, f"{exact}, as attention(return_lse=True) gives"
    )
    need(lse.device == q.device, "lse.device", lse.device, f"{q.device}, as q has")
    B, H, M, _ = q.shape
    if not agree(lse.shape, (B, H, M)):
        need(False, "lse", shape_of(lse), f"(B, H, M) = {(B, H, M)}")


def _scalars(o: Options, dtype: torch.dtype) -> None:
    need(
        o.causal in ALIGNMENTS,
        "causal",
        repr(o.causal),
        'False, True, "top_left" or "bottom_right"',
    )
    expected = 'False beside causal="top_left", or causal="bottom_right"'
    need(not o.bottom_right or o.causal != "top_left", "place.bottom_right", True, expected)
    p = o.dropout_p
    need(0 <= p <= 1, "dropout_p", p, "a number in [0, 1]")
    for name in DROPOUT_PERIODS:
        x = getattr(o, name)
        need(0 <= x <= INT32_MAX, name, x, f"a number in [0, {INT32_MAX}]")
    for name in ("scale", "softcap"):
        if (x := getattr(o, name)) is not None:
            need(math.isfinite(x), name, x, "a finite number, or None")
    finfo = torch.finfo(acc_dtype(dtype))
    fits = o.softcap is None or finfo.tiny <= o.softcap <= finfo.max
    need(fits, "softcap", o.softcap, f"a number above 0 that {finfo.dtype} holds, or None")
    for name, x in (("left", o.left), ("right", o.right)):
        need(x is None or x >= 0, f"window {name}", x, "0 or more, or None for no limit")


def need_like(name: str, x_t: Tensor, x: Tensor, *about: str) -> None:
    """Raise ValueError unless tangent x_t equals x in these attributes, such as "shape"."""
    for what in about:
        got, own = getattr(x_t, what), getattr(x, what)
        if not (agree(got, own) if what == "shape" else got == own):
            shown = tuple if what == "shape" else str
            need(False, f"{name}_t.{what}", shown(got), f"{shown(own)}, as {name} has")


def need_tangent(name: str, x_t: Any, x: Any) -> None:
    """Raise TypeError or ValueError unless x_t can be the tangent of x."""
    need_a_tensor(f"{name}_t", x_t, "a torch.Tensor or None")
    need_dense(f"{name}_t", x_t)
    moves = isinstance(x, Tensor) and x.is_floating_point()
    why = f"{name} is {'None' if x is None else 'no floating tensor'}"
    need(moves, f"{name}_t", "a tensor", f"None, because {why}")
    need_like(name, x_t, x, "shape", "dtype", "device")
