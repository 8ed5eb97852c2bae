"""What one attention call computes, with every default resolved.

`PUBLIC` lists the arguments that calls share, for readers; `Tensors` every tensor of a call,
`Options` its scalars. Signatures, docstrings, tables in the documentation, the operators' schemas,
plans, vmap's folding, the packing for kernels and the rules on tensors are loops over these lists.
A scalar also has a default (`validation.describe`) and rules (`validation._scalars`).

Two names for the logarithm of the softmax's denominator:

    LSE, lse    (B,H,M): log(sum(exp(s))) of each row's scores s, with the sink's logit if any
    normaliser  (2,B,H,M): the LSE, and its rounding error. The probabilities before dropout are
                exp(s - normaliser[0] - normaliser[1]). FaParams has it as `lse`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor
from typing_extensions import TypedDict  # torch depends on it

from .int4 import INT4, columns

UNLIMITED = 1 << 40  # a band edge that no sequence reaches
TOKENS = "BMH"  # the memory order of heads after a projection; "BHM" is contiguous


class Place(NamedTuple):
    """State the position of a call in a larger call, of which it is a part.

    Args:
        row: The index in the larger call of this call's first row.
        key: The same for the first key.
        head: The same for the first query head.
        item: The same for the first item of the batch.
        rows: The number of rows of the larger call. None: this call has the last row.
        keys: The number of keys of the larger call. None: this call has the last key.
        bottom_right: If True, the last row of the larger call stands at its last key, as with
            causal="bottom_right", and never with causal=True. Without causal, windows and ALiBi
            count from i' = i + length - M, as in flash-attn.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16)
        >>> whole = fastattn.attention(q, k, v, causal=True)
        >>> place = fastattn.Place(row=6)  # rows 6 to 9 of the call above
        >>> last = fastattn.attention(q[:, :, 6:], k, v, causal=True, place=place)
        >>> torch.testing.assert_close(last, whole[:, :, 6:])
    """

    row: int = 0
    key: int = 0
    head: int = 0
    item: int = 0
    rows: int | None = None
    keys: int | None = None
    bottom_right: bool = False


EVERYTHING = Place()  # of a call that is not a part of another
NUMBERS = Place._fields[:-1]


class Feature(enum.Flag):
    """The building blocks that a backend may support. Each backend lists those that it has.

    Every backend has those up to PAGED: a feature belongs there only then, because a backend must
    decline a feature that it lacks.
    """

    meaning: str  # a row of the support table, for readers

    def __new__(cls, meaning: str) -> Feature:
        made = object.__new__(cls)
        made._value_ = 1 << len(cls.__members__) >> 1
        made.meaning = meaning
        return made

    NONE = ""
    BAND = "causal (both alignments), window"
    LENGTHS = "key_lengths"
    MASK = "mask: bool or float of any broadcast shape, gradient in that shape"
    ALIBI = "alibi_slopes"
    SOFTCAP = "softcap"
    SINKS = "sinks, with gradient"
    DROPOUT = "dropout, the same draws on every backend"
    GQA = "grouped heads (GQA, MQA)"
    WEIGHTS = "attention_weights, per head or averaged"
    GRAD = "backward, with a loss on the LSE too"
    PLACE = "place: the call is a part of a larger one"
    PACKED = "attention_packed: sequences of different lengths (cu_seqlens)"
    PAGED = "block_table: keys and values in pages"
    PAGED_GRAD = "backward with block_table, and of attention_selected"
    INVARIANT = "row_invariant: decoding has the bits of the whole"
    QUANTISED = "k_scale, v_scale: keys and values of int8 or float8, without gradient"
    INT4 = "keys and values in four bits (torch.uint8 rows), without gradient"
    TANGENTS = "forward mode (jvp) and second derivatives"
    UNROUNDED = "parts of a ring: 16 bits in, float32 out"
    SCORE_MOD = "score_mod, mask_mod: functions on each score"


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
        element of any shape. If it is passed as "broadcast", any shape that broadcasts. A packed
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
    feature: Feature = Feature.NONE
    name: str = ""  # set from the field of `Tensors`
    gradient: bool = False
    field: str = ""  # the name in FaParams, if it is not that of `NATIVE_NAMES`
    optional: bool = True

    @property
    def broadcast(self) -> bool:
        return self.passed_as == "broadcast"

    def counts_items(self, x: Tensor) -> bool:
        """True if the first dimension of x is that of the items."""
        letters = (shape.split() for shape in self.shapes if not self.broadcast)
        return any(each[0] == "B" and len(each) == x.ndim for each in letters if each)


Given = Tensor | None


class Tensors(NamedTuple):
    """The tensors of a call. Strides are free; nothing here is copied or expanded.

    The weights passes have no `v`; the attention passes have no `normaliser`, which they return.
    mask is bool (True = may attend) or additive. cu_q and cu_k, of a packed batch, are the first
    row and key of each sequence, then T and S; block_table has the pages of each sequence; k_scale
    and v_scale are the factors of rows in eight bits. captured_floats, captured_ints and
    mask_blocks, the class of each block of 32 rows and 64 keys, are those of a score_mod and a
    mask_mod (`score_mods.lowering`).
    """

    q: Annotated[Tensor, Argument(("B H M D",), "q", "strided", gradient=True)]
    k: Annotated[Tensor, Argument(("B Hk N D",), "kv", "strided", gradient=True)]
    v: Annotated[Given, Argument(("B Hk N Dv",), "kv", "strided", gradient=True)]
    mask: Annotated[
        Given, Argument(("B H M N",), "mask", "broadcast", Feature.MASK, gradient=True)
    ] = None
    key_lengths: Annotated[Given, Argument(("B",), "integer", "pointer", Feature.LENGTHS)] = None
    alibi_slopes: Annotated[Given, Argument(("H", "B H"), "floating", "column", Feature.ALIBI)] = (
        None
    )
    sinks: Annotated[
        Given, Argument(("H",), "floating", "column", Feature.SINKS, gradient=True)
    ] = None
    seed: Annotated[Given, Argument(("",), "int64", "pointer")] = None  # for dropout
    cu_q: Annotated[Given, Argument(("B+1",), "integer", "pointer", Feature.PACKED)] = None
    cu_k: Annotated[Given, Argument(("B+1",), "integer", "pointer", Feature.PACKED)] = None
    block_table: Annotated[Given, Argument(("B blocks",), "integer", "pointer", Feature.PAGED)] = (
        None
    )
    k_scale: Annotated[Given, Argument(("Bk Hk Nk",), "float32", "column", Feature.QUANTISED)] = (
        None
    )
    v_scale: Annotated[Given, Argument(("Bk Hk Nk",), "float32", "column", Feature.QUANTISED)] = (
        None
    )
    captured_floats: Annotated[
        Given,
        Argument(("floats",), "acc", "pointer", Feature.SCORE_MOD, gradient=True, field="floats"),
    ] = None
    captured_ints: Annotated[
        Given, Argument(("ints",), "int64", "pointer", Feature.SCORE_MOD, field="ints")
    ] = None
    mask_blocks: Annotated[
        Given,
        Argument(
            ("B H block_rows block_keys",),
            "int8",
            "broadcast",
            Feature.SCORE_MOD,
            field="classes",
        ),
    ] = None
    normaliser: Annotated[Given, Argument(("2 B H M",), "acc", "pair", field="lse")] = None

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


ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]


class ScoreArguments(TypedDict, total=False):
    """What every call takes, those on selected keys and the oracle's included."""

    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    scale: float | None


class MaskArguments(ScoreArguments, total=False):
    """What those take that choose no keys by index."""

    mask: Tensor | None
    window: tuple[int | None, int | None] | None
    alibi_slopes: Tensor | None
    place: Place | None


class CacheArguments(MaskArguments, total=False):
    """What `KVCache.attention` takes beside q, causal and offsets: all of `Arguments`, except
    key_lengths, which the cache supplies."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    row_invariant: bool
    deterministic: bool | None
    backend: str | None


class Arguments(CacheArguments, total=False):
    """What every public call takes beside q, k and v. See `attention` for their meaning."""

    causal: bool | Literal["top_left", "bottom_right"]
    key_lengths: Tensor | None


class TangentArguments(Arguments, total=False):
    """What `attention_jvp` takes beside q, k, v and their tangents."""

    mask_t: Tensor | None
    sinks_t: Tensor | None


class Public(NamedTuple):
    """The documentation of an argument. A table has the first sentence of `text`."""

    text: str
    shape: str = ""  # of a tensor
    stage: str = ""  # "score": it changes a score before anything is added to it


PUBLIC = {  # in the order of signatures
    "mask": Public(
        "Either bool (True = may attend), or float, which is added to the scores. It is read in "
        "place. Rows that are all False or -inf are empty. The gradient of a float mask has the "
        "mask's shape: it is summed over broadcast dimensions.",
        "Broadcasts to (B, H, M, N); bool, q's dtype or float32.",
    ),
    "causal": Public(
        'Keep the keys j <= i\'. True or "top_left" puts row i at i\' = i. "bottom_right" puts it '
        "at i' = i + length - M, where length is key_lengths[b] or N; rows with i' < 0 are empty."
    ),
    "window": Public(
        "A pair (left, right): keep the keys i' - left <= j <= i' + right. None in the pair is no "
        "limit. Rows with no key in their window are empty."
    ),
    "key_lengths": Public(
        "The number of keys of each item, in [0, N]. Keys at or past the length are never read and "
        "have gradient 0. An item of length 0 has empty rows.",
        "(B,), int32 or int64.",
    ),
    "alibi_slopes": Public(
        "Subtract slope |i' - j| from the scores. The slopes have no gradient.",
        "(H,) or (B, H).",
    ),
    "softcap": Public(
        "Replace each score s by softcap tanh(s / softcap); above 0. The gradient of s is "
        "multiplied by 1 - tanh(s / softcap)^2.",
        stage="score",
    ),
    "sinks": Public(
        "One more logit for each head in each row's denominator. It has no value.",
        "(H,). The gradient is (H,).",
    ),
    "dropout_p": Public(
        "After the softmax, drop each probability with this probability and divide the others by "
        "1 - dropout_p. The LSE does not change."
    ),
    "seed": Public(
        "The seed of dropout. The kernel draws (Philox-4x32-10) by seed and place, and draws the "
        "same in backward. None draws a seed from torch's generator. Under vmap, each example of "
        "one seed draws what it draws alone.",
        "An int, or one int64 element on q's device.",
    ),
    "scale": Public(
        "The factor of q k^T; 1 / sqrt(D) by default. 0 and negative numbers are allowed."
    ),
    "place": Public(
        "A `fastattn.Place`, if this call is a part of a larger call. causal, window, key_lengths "
        "(up to the larger call's keys), ALiBi and dropout count from the start of the larger "
        "call. q, k, v, mask, slopes and sinks are those of the part. The results of a call cut "
        "into blocks of rows, keys, heads or items equal those of the whole call. "
        "`fastattn.merge` combines blocks of keys; only one of them gets the sinks. "
        "place.bottom_right aligns the rows of a call without causal."
    ),
    "score_mod": Public(
        "A function (score, b, h, i, j) -> score of 0-d tensors, after the scale and before "
        "softcap, as torch's flex_attention has it; see `flex_attention` for what it may do. b, h, "
        "i and j count in the larger call with place. Floating tensors that it captures have "
        "gradients: the first, in reverse mode. The kernels of the CPU and of Triton run it on "
        "each score; elsewhere what it adds to the score becomes a mask, and other functions raise "
        "NotImplementedError.",
        stage="score",
    ),
    "mask_mod": Public(
        "A function (b, h, i, j) -> bool, True where row i may attend to key j. It hides after all "
        "other stages. Keys that it hides in whole blocks are skipped."
    ),
    "row_invariant": Public(
        "If True, the bits of a row do not depend on the number of rows in the call: decoding "
        "token by token, in chunks or at once gives the same bits. This turns off the kernels for "
        "few rows. If False, only the results of those kernels differ, in the last bits."
    ),
    "deterministic": Public(
        "If True, gradients have the same bits in every run. If False, the CUDA kernels of compute "
        "capability 9.0 may add the sums of q's gradient in any order, which makes backward up to "
        "a fifth faster; all others have one order. If None, "
        "torch.are_deterministic_algorithms_enabled() decides."
    ),
    "backend": Public(
        "Run on this backend, or raise. None takes the first backend that can run the call. See "
        "`fastattn.explain`."
    ),
}
# None, except these:
DEFAULTS: dict[str, Any] = dict.fromkeys(PUBLIC)
DEFAULTS |= {"causal": False, "dropout_p": 0.0, "row_invariant": False}


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
    deterministic: bool = False
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


Fields = TypeVar("Fields", Tensors, Options)
_is_compiling = torch.compiler.is_compiling


def changed(x: Fields, **values: Any) -> Fields:
    """x with other values of the fields that are named, as `x._replace(**values)`.

    torch.compile traces `_replace` from torch 2.9 on, and the code below before that, too.
    """
    if not _is_compiling():
        return x._replace(**values)  # ty: ignore
    kind = type(x)
    return kind(*[values.get(name, old) for name, old in zip(kind._fields, x)])


def _arguments() -> dict[str, Argument]:
    arguments = {}
    for name, hint in get_type_hints(Tensors, include_extras=True).items():
        kind, argument = get_args(hint)
        field = argument.field or NATIVE_NAMES.get(name, name)
        optional = get_origin(kind) is not None  # a union, with None
        arguments[name] = argument._replace(name=name, field=field, optional=optional)
    return arguments


ARGUMENTS = _arguments()  # by name, in the order of `Tensors`
INDEX = {name: at for at, name in enumerate(ARGUMENTS)}
BY_HEAD = tuple(a for a in ARGUMENTS.values() if a.shapes[0] == "H")  # a number for each head
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
    deterministic: bool = False
    acc_dtype_out: bool = False  # out and gradients are stored in `acc_dtype`
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
# Whole numbers, too, but last in FaParams.
DROPOUT_PERIODS = ("dropout_batch_period", "dropout_head_period")
# The scalars for kernels behind csrc/abi.h, in the order of FaParams. It has `threads` between the
# WHOLE and the REAL ones.
WHOLE = (
    *("B", "H", "Hk", "M", "N", "D", "Dv", "left", "right", "bottom_right"),
    *("average_heads", "constant_lse", "row_invariant", "deterministic"),
    *PLACED,
    *("T", "S", "P", "page", "blocks"),
)
REAL = ("scale", "softcap", "dropout_p")
