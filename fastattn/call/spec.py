"""What one attention call computes, with every default resolved.

`Tensors` lists every tensor of a call once, `Options` its scalars. The operators' schemas, plans,
vmap's folding, the packing for native kernels and the rules on tensors are loops over these lists.
A scalar also has a default (`validation.describe`) and rules (`validation._scalars`).

Two names for the logarithm of the softmax's denominator:

    LSE, lse    (B,H,M): log(sum(exp(s))) of each row's scores s, with the sink's logit if any
    normaliser  (2,B,H,M): the LSE, and its rounding error. The probabilities before dropout are
                exp(s - normaliser[0] - normaliser[1]). FaParams has it as `lse`.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from .int4 import INT4, columns
from .place import Place

UNLIMITED = 1 << 40  # a band edge that no sequence reaches
TOKENS = "BMH"  # the memory order of heads after a projection; "BHM" is contiguous


class Feature(enum.Flag):
    """The building blocks that a backend may support. Each backend lists those that it has."""

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
    PLACE = enum.auto()  # the call is a part of a larger one
    PACKED = enum.auto()  # sequences of different lengths, one after the other
    PAGED = enum.auto()  # keys and values in pages, found by a table
    PAGED_GRAD = enum.auto()  # backward through pages
    INVARIANT = enum.auto()  # a row's bits do not depend on how many rows the call has
    QUANTISED = enum.auto()  # keys and values in eight bits, a scale for each row
    INT4 = enum.auto()  # keys and values in four bits, scales within each row
    TANGENTS = enum.auto()  # the passes of forward mode and of second derivatives
    UNROUNDED = enum.auto()  # results for 16-bit inputs in the dtype of the sums
    SCORE_MOD = enum.auto()  # functions of the score, its row and its key, as programs


MEANING = {  # the rows of the support table, for readers
    Feature.BAND: "causal (both alignments), window",
    Feature.LENGTHS: "key_lengths",
    Feature.MASK: "mask: bool or float of any broadcast shape, gradient in that shape",
    Feature.ALIBI: "alibi_slopes",
    Feature.SOFTCAP: "softcap",
    Feature.SINKS: "sinks, with gradient",
    Feature.DROPOUT: "dropout, the same draws on every backend",
    Feature.GQA: "grouped heads (GQA, MQA)",
    Feature.WEIGHTS: "attention_weights, per head or averaged",
    Feature.GRAD: "backward, with a loss on the LSE too",
    Feature.PLACE: "place: the call is a part of a larger one",
    Feature.PACKED: "attention_packed: sequences of different lengths (cu_seqlens)",
    Feature.PAGED: "block_table: keys and values in pages",
    Feature.PAGED_GRAD: "backward with block_table, and of attention_selected",
    Feature.INVARIANT: "row_invariant: decoding has the bits of the whole",
    Feature.QUANTISED: "k_scale, v_scale: keys and values of int8 or float8, without gradient",
    Feature.INT4: "keys and values in four bits (torch.uint8 rows), without gradient",
    Feature.TANGENTS: "forward mode (jvp) and second derivatives",
    Feature.UNROUNDED: "parts of a ring: 16 bits in, float32 out",
    Feature.SCORE_MOD: "score_mod, mask_mod: functions on each score",
}


# Names in csrc/abi.h and in the operators' schemas, which saved programs contain, if these differ
# from the names in Python.
NATIVE_NAMES = {
    "key_lengths": "lengths",
    "alibi_slopes": "slopes",
    "block_table": "pages",
    "acc_dtype_out": "unrounded",
    "dropout_batch_period": "items_again",
    "dropout_head_period": "heads_again",
}


class Argument(NamedTuple):
    """The properties of one tensor.

    shapes: its dimensions as letters, "B H M D"; several if the caller has the choice; "" for one
        element of any shape. With `broadcast`, any shape that broadcasts to the one given. A packed
        tensor has the rows or keys of all sequences, T or S, in place of M or N, and 1 for B. Keys
        and values in pages have the number of pages for B, and the rows of a page for N. Bk and Nk
        are k's sizes for B and N.
    dtype: "q", that of q; "kv", that of q or, with scales, one of quantisation.STORAGE, or
        int4.INT4, with `int4.row_bytes` for D; "mask", that of q, bool or float32; "floating", any,
        which kernels get as `acc_dtype`; "acc", float32, or float64 for float64 inputs; "float32";
        "integer", int32 or int64; "int64"; "int8".
    passed_as: how it is passed to kernels behind csrc/abi.h: a key of `marshalling.PASSED_AS`.
    """

    shapes: tuple[str, ...]
    dtype: str
    passed_as: str
    name: str = ""  # set from the field of `Tensors`
    feature: Feature = Feature.NONE
    gradient: bool = False
    broadcast: bool = False
    field: str = ""  # the name in FaParams, if it is not that of `NATIVE_NAMES`
    optional: bool = True


class Tensors(NamedTuple):
    """The tensors of a call. Strides are free; nothing here is copied or expanded.

    The weights passes have no `v`; the attention passes have no `normaliser`, which they return.
    """

    q: Annotated[Tensor, Argument(("B H M D",), "q", "strided", gradient=True)]
    k: Annotated[Tensor, Argument(("B Hk N D",), "kv", "strided", gradient=True)]
    v: Annotated[Tensor | None, Argument(("B Hk N Dv",), "kv", "strided", gradient=True)]
    mask: Annotated[  # bool (True = may attend) or additive
        Tensor | None,
        Argument(
            ("B H M N",), "mask", "broadcast", feature=Feature.MASK, gradient=True, broadcast=True
        ),
    ] = None
    key_lengths: Annotated[
        Tensor | None, Argument(("B",), "integer", "pointer", feature=Feature.LENGTHS)
    ] = None
    alibi_slopes: Annotated[
        Tensor | None, Argument(("H", "B H"), "floating", "column", feature=Feature.ALIBI)
    ] = None
    sinks: Annotated[
        Tensor | None,
        Argument(("H",), "floating", "column", feature=Feature.SINKS, gradient=True),
    ] = None
    seed: Annotated[Tensor | None, Argument(("",), "int64", "pointer")] = None  # for dropout
    cu_q: Annotated[  # packed batch: the first row of each sequence, then T
        Tensor | None, Argument(("B+1",), "integer", "pointer", feature=Feature.PACKED)
    ] = None
    cu_k: Annotated[
        Tensor | None, Argument(("B+1",), "integer", "pointer", feature=Feature.PACKED)
    ] = None
    block_table: Annotated[  # packed batch: the pages of each sequence's keys and values
        Tensor | None, Argument(("B blocks",), "integer", "pointer", feature=Feature.PAGED)
    ] = None
    k_scale: Annotated[  # packed batch with k in eight bits: the factor of each row
        Tensor | None, Argument(("Bk Hk Nk",), "float32", "column", feature=Feature.QUANTISED)
    ] = None
    v_scale: Annotated[
        Tensor | None, Argument(("Bk Hk Nk",), "float32", "column", feature=Feature.QUANTISED)
    ] = None
    captured_floats: Annotated[  # of a score_mod and a mask_mod: `score_mods.lowering`
        Tensor | None,
        Argument(
            ("floats",),
            "acc",
            "pointer",
            feature=Feature.SCORE_MOD,
            gradient=True,
            field="floats",
        ),
    ] = None
    captured_ints: Annotated[
        Tensor | None,
        Argument(("ints",), "int64", "pointer", feature=Feature.SCORE_MOD, field="ints"),
    ] = None
    mask_blocks: Annotated[  # of a mask_mod: the class of each block of 32 rows and 64 keys
        Tensor | None,
        Argument(
            ("B H block_rows block_keys",),
            "int8",
            "broadcast",
            feature=Feature.SCORE_MOD,
            broadcast=True,
            field="classes",
        ),
    ] = None
    normaliser: Annotated[Tensor | None, Argument(("2 B H M",), "acc", "pair", field="lse")] = None

    def given(self, name: str) -> Tensor:
        """The tensor of that name, which must not be None."""
        x = getattr(self, name)
        assert x is not None, name
        return x


class Tangents(NamedTuple):
    """The tangents of a call's tensors, each with its tensor's shape and dtype; None means zero.
    The tensors that have a gradient have a tangent."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    captured_floats: Tensor | None = None


class Options(NamedTuple):
    """The scalars of a call, as torch operators can carry them; None means the default."""

    scale: float | None = None  # 1 / sqrt(D)
    causal: str = ""  # "", "top_left" or "bottom_right"
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    backend: str = ""  # "": the first that can run the call
    grad: bool = False
    average_heads: bool = False  # weights only
    constant_lse: bool = False  # weights only: no gradient through the normaliser
    max_q: int | None = None  # packed batch: no sequence has more rows (max_k: more keys)
    max_k: int | None = None
    row_invariant: bool = False
    acc_dtype_out: bool = False  # attention only: results in `acc_dtype`, to be added to others
    out_order: str = TOKENS  # out's dimensions in memory, the outermost first; D is the innermost
    grad_order: str = TOKENS  # the same of the gradients of q, k and v; "M" is rows or keys
    score_mod: str = ""  # the programs of a score_mod and a mask_mod: `score_mods.mod_text.ModText`
    captured_sizes: tuple[int, ...] | None = None  # in compiled code: `score_mods.unlowered`
    dropout_batch_period: int = 0  # `vmap_fold`
    dropout_head_period: int = 0
    at_row: int = 0  # from here on: `Place`
    at_key: int = 0
    at_head: int = 0
    at_item: int = 0
    rows: int | None = None
    keys: int | None = None
    # `Place.bottom_right`: align windows and ALiBi of a call without `causal` at the bottom right.
    # It changes nothing beside causal="bottom_right", and is refused beside causal="top_left".
    bottom_right: bool = False

    @property
    def place(self) -> Place:
        at = self.at_row, self.at_key, self.at_head, self.at_item
        return Place(*at, self.rows, self.keys, self.bottom_right)

    @property
    def band(self) -> tuple[int, int, bool]:
        """left, right and bottom_right for `AttentionSpec`."""
        left = UNLIMITED if self.left is None else min(self.left, UNLIMITED)
        right = UNLIMITED if self.right is None else self.right
        right = min(right, 0 if self.causal else UNLIMITED)
        return left, right, self.bottom_right or self.causal == "bottom_right"

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of out if q has this dtype, and of the gradient of a tensor with this dtype."""
        return acc_dtype(dtype) if self.acc_dtype_out else dtype


def _arguments() -> dict[str, Argument]:
    found = {}
    for name, hint in get_type_hints(Tensors, include_extras=True).items():
        kind, argument = get_args(hint)
        field = argument.field or NATIVE_NAMES.get(name, name)
        optional = get_origin(kind) is not None  # a union, with None
        found[name] = argument._replace(name=name, field=field, optional=optional)
    return found


ARGUMENTS = _arguments()  # by name, in the order of `Tensors`
INDEX = {name: at for at, name in enumerate(ARGUMENTS)}
DIFFERENTIABLE = tuple(name for name, a in ARGUMENTS.items() if a.gradient)
assert Tangents._fields == DIFFERENTIABLE
# What passes return, in q's dtype unless `acc_dtype_out`; normaliser and lse in `acc_dtype`.
RESULTS = {
    "out": "B H M Dv",
    "normaliser": "2 B H M",
    "lse": "B H M",  # the tangent of the LSE
    "weights": "B H M N",  # or, averaged over heads, B M N
}
WITH_TANGENTS = ("out", "normaliser", "out", "lse")  # what a jvp pass returns, as in `RESULTS`
INCOMING = ("out", "lse", "out", "lse")  # gradients that a second pass takes, and their tangents


def result_letters(name: str, o: Options) -> list[str]:
    """The dimensions of one of `RESULTS` in this call."""
    letters = RESULTS[name].split()
    averaged = name == "weights" and o.average_heads
    return [letter for letter in letters if letter != "H" or not averaged]


def result_shape(name: str, t: Tensors, o: Options) -> tuple[int, ...]:
    """The shape of one of `RESULTS` in this call; of packed tensors, the shape in memory."""
    (B, H, M, _), N = t.q.shape, t.k.shape[2]
    sizes = {"2": 2, "B": B, "H": H, "M": M, "N": N, "Dv": 0 if t.v is None else columns(t.v)}
    return tuple(sizes[letter] for letter in result_letters(name, o))


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the normaliser, slopes and sinks: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=True)
class AttentionSpec:
    """Shapes and semantics of a call. It holds no tensors, so it hashes and caches.

    Row i has position i' = i + (length - M if bottom_right else 0). The scores are, in this order,

        s = scale * q.k;  s = score_mod(s, b, h, i, j);  s = softcap * tanh(s / softcap)
        s -= slope * |i' - j|;  s += mask
        keep i' - left <= j <= i' + right and j < length and mask_mod

    followed by softmax (with the sink as one more logit) and dropout.

    In a packed batch each of B sequences has its own M and N, at most these. q is (1,H,T,D) and k
    is (1,Hk,S,D), or in P pages (P,Hk,page,D), where a sequence's length is its N. If this call is
    a part of a larger one, i, j, length and M in the formula are those of the larger call: i and j
    count from at_row and at_key, M is at_row + M + rows_after, and dropout counts heads and items
    from at_head and at_item. If this call is several calls (`vmap_fold`), dropout's draws repeat
    after the items and heads of one: item b draws what b % dropout_batch_period does.
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
    given: frozenset[str] = frozenset()  # the names of the optional tensors that are not None
    mask_shape: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    needs_grad: bool = False
    tangents: bool = False  # asks for the passes that take `Tangents`
    paged_grad: bool = False  # asks for the backward pass of keys and values in pages
    weights: bool = False  # asks for the probabilities
    average_heads: bool = False
    constant_lse: bool = False
    row_invariant: bool = False
    acc_dtype_out: bool = (
        False  # out and gradients are stored in `acc_dtype`, not in their own dtype
    )
    out_order: str = TOKENS
    grad_order: str = TOKENS
    at_row: int = 0
    at_key: int = 0
    at_head: int = 0
    at_item: int = 0
    rows_after: int = 0
    keys_after: int = 0
    dropout_batch_period: int = 0  # 0: never
    dropout_head_period: int = 0
    T: int = 0  # packed batch: the rows of all sequences together, and in S the keys
    S: int = 0
    P: int = 0  # the number of pages, the rows of one, and the most pages of a sequence
    page: int = 0
    blocks: int = 0
    score_mod: str = ""
    floats: int = 0  # the numbers of elements of captured_floats and captured_ints
    ints: int = 0
    storage: torch.dtype | None = None  # the dtype of k and v, if it is not that of q

    def __hash__(self) -> int:  # specs are long-lived keys: hash once
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @functools.cached_property
    def launcher_cache(self) -> dict[str, Any]:
        """A cache of what launchers derive from this spec, by name. Launchers write to it."""
        return {}

    @functools.cached_property
    def acc_dtype(self) -> torch.dtype:
        return acc_dtype(self.dtype)

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """As `Options.stored`."""
        return acc_dtype(dtype) if self.acc_dtype_out else dtype

    @functools.cached_property
    def features(self) -> Feature:
        used = {
            Feature.BAND: self.left < UNLIMITED or self.right < UNLIMITED,
            Feature.SOFTCAP: self.softcap > 0,
            Feature.DROPOUT: self.dropout_p > 0,
            Feature.GQA: self.H != self.Hk,
            Feature.WEIGHTS: self.weights,
            Feature.GRAD: self.needs_grad,
            Feature.TANGENTS: self.tangents,
            Feature.PAGED_GRAD: self.paged_grad,
            Feature.INVARIANT: self.row_invariant,
            Feature.UNROUNDED: self.acc_dtype_out,
            Feature.SCORE_MOD: bool(self.score_mod),
            Feature.INT4: self.storage == INT4,
            Feature.PLACE: any(getattr(self, name) for name in (*PLACED, *DROPOUT_PERIODS)),
        }
        by_tensors = (ARGUMENTS[name].feature for name in self.given)
        by_scalars = (feature for feature, on in used.items() if on)
        return functools.reduce(Feature.__or__, (*by_tensors, *by_scalars), Feature.NONE)

    @functools.cached_property
    def fields_to_last_given(self) -> int:
        """The number of fields of `Tensors` from q to the last one that is given. It is at least 3,
        because v counts even if it is None."""
        return 1 + max(INDEX[name] for name in {"v", *self.given})

    @property
    def packed(self) -> bool:
        return "cu_q" in self.given

    @property
    def paged(self) -> bool:
        return "block_table" in self.given

    @property
    def memory_sizes(self) -> tuple[int, int, int]:
        """The sizes in memory of the dimensions B, M and N of q, k, v and of results. They are 1, T
        and S for a packed batch."""
        return (1, self.T, self.S) if self.packed else (self.B, self.M, self.N)

    @property
    def rows(self) -> int:
        """The rows of the larger call, or of this one if there is none."""
        return self.at_row + self.M + self.rows_after

    @property
    def keys(self) -> int:
        return self.at_key + self.N + self.keys_after

    @property
    def place(self) -> Place:
        at = self.at_row, self.at_key, self.at_head, self.at_item
        return Place(*at, self.rows, self.keys, self.bottom_right)

    def __str__(self) -> str:
        sizes = " ".join(f"{x}={getattr(self, x)}" for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
        names = [f.name for f in Feature if f & self.features]
        return f"{sizes} {str(self.dtype)[6:]} {self.device} [{' '.join(names).lower()}]"


BLOCK_ROWS, BLOCK_KEYS = 32, 64  # of a block that `mask_blocks` has a class for
# The position of the call in a larger one.
PLACED = ("at_row", "at_key", "at_head", "at_item", "rows_after", "keys_after")
DROPOUT_PERIODS = (
    "dropout_batch_period",
    "dropout_head_period",
)  # whole numbers, too, but last in FaParams
# The scalars for kernels behind csrc/abi.h, in the order of FaParams. It has `threads` between the
# WHOLE and the REAL ones.
WHOLE = (
    *("B", "H", "Hk", "M", "N", "D", "Dv", "left", "right", "bottom_right"),
    *("average_heads", "constant_lse", "row_invariant"),
    *PLACED,
    *("T", "S", "P", "page", "blocks"),
)
REAL = ("scale", "softcap", "dropout_p")
