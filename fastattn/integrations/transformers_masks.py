"""Translate transformers' mask functions to arguments of `fastattn.attention`, without a tensor.

transformers composes a mask from a few functions of indices. They are recognized by name, and their
parameters are read from their closures. Any other function becomes the exact boolean mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from .transformers_forms import VERSIONS, refuse_unknown

_is_compiling = torch.compiler.is_compiling
RELATIVE = {"causal", "window"}  # arguments that a packed batch applies to each sequence
# Further arguments that mask functions get: what fastattn's mask may leave out, and a mask's form.
_KNOWN = frozenset(
    ("allow_is_causal_skip", "allow_is_bidirectional_skip", "local_size", "dtype", "config")
)
# The arguments of each function that makes a mask function, which that keeps in its closure.
_HELD = {
    "and_masks": {"mask_functions"},
    "sliding_window_overlay": {"sliding_window"},
    "sliding_window_bidirectional_overlay": {"sliding_window"},
    "chunked_overlay": {"chunk_size", "left_padding"},
    "packed_sequence_mask_function": {"packed_sequence_mask"},
    "remap_positions_for_packed_sequence": {"mask_function", "position_ids"},
}


class StructuredMask:
    """The object that `make_mask` gives the model for `attend`, in place of a (B,1,M,N) tensor.

    arguments: of `fastattn.attention`. starts: (B,N), True where a packed sequence begins. exact()
    is the boolean mask. A model may slice it. Any other operation raises, because such a model
    computes attention itself.
    """

    ndim = 4
    dtype: torch.dtype = torch.bool
    shape: tuple[int, ...]
    arguments: dict[str, Any]
    exact: Callable[[], Tensor]
    starts: Tensor | None

    # Not a dataclass: FSDP takes those apart, to cast their tensors.
    def __init__(
        self,
        shape: tuple[int, ...],
        arguments: dict[str, Any],
        exact: Callable[[], Tensor],
        starts: Tensor | None = None,
    ):
        self.shape, self.arguments, self.exact, self.starts = shape, arguments, exact, starts
        self._offsets: tuple[Tensor, int] | None = None

    @property
    def offsets(self) -> tuple[Tensor, int] | None:
        """Where sequences begin among the B N rows, (sequences + 1,), and the longest length.
        Computed on first use, because it synchronizes with a GPU; a paged cache never uses it."""
        if self.starts is not None and self._offsets is None:
            offsets = self.starts.flatten().nonzero()[:, 0]
            offsets = torch.nn.functional.pad(offsets, (0, 1), value=self.starts.numel())
            self._offsets = offsets, int(offsets.diff().max())
        return self._offsets

    def fits(self, M: int, N: int) -> bool:
        """Return True if this mask describes M rows and N keys.

        Some models make a mask for one row and use it for all rows. If nothing is hidden, some make
        it for one key.
        """
        if not self.arguments and self.starts is None and self.shape[3] == 1:
            return True
        alike = self.shape[2] == 1 and not RELATIVE & self.arguments.keys()
        return self.shape[3] == N and (alike or self.shape[2] == M)

    def __getitem__(self, where: Any) -> StructuredMask:
        plain = isinstance(where, tuple) and all(isinstance(x, (int, slice)) for x in where)
        without_head = (slice(None), 0), (slice(None), 0, slice(None), slice(None))
        if plain and where in without_head and len(self.shape) == 4 and self.shape[1] == 1:
            shape = (self.shape[0], *self.shape[2:])
            return StructuredMask(shape, self.arguments, lambda: self.exact()[:, 0], self.starts)
        return of_tensor(self.exact()[where])

    def to(self, *args: Any, **kwargs: Any) -> StructuredMask:
        """Copy this mask to another device, as models that span several devices do."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None:
            return self

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        arguments = {name: moved(x) for name, x in self.arguments.items()}
        starts, exact = moved(self.starts), self.exact
        return StructuredMask(self.shape, arguments, lambda: exact().to(device), starts)

    def contiguous(self) -> StructuredMask:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _strange(f"torch.{getattr(function, '__name__', function)}")

    def _added(self, other: Any) -> StructuredMask:
        raise _strange("a sum")

    def _inverted(self) -> StructuredMask:
        raise _strange("`~`")

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, StructuredMask):
            return self is other
        raise _strange("a comparison")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up
            raise AttributeError(name)
        raise MaskError(str(_strange(f"`.{name}`")))

    def _counted(self) -> int:
        raise _strange("a loop, or numpy")

    __hash__ = object.__hash__


# The operators that a mask refuses. setattr hides them from type checkers, which then refuse them.
_REFUSED = {
    StructuredMask._counted: "len iter abs int float index",
    StructuredMask._added: "add radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul "
    "xor rxor floordiv mod and rand or ror lt gt le ge",
    StructuredMask._inverted: "invert neg",
}
for _answer, _operators in _REFUSED.items():
    for _name in _operators.split():
        setattr(StructuredMask, f"__{_name}__", _answer)


class MaskError(AttributeError, TypeError):
    """An AttributeError, so that `hasattr` works, and a TypeError, as other operations raise."""


def _strange(where: str) -> TypeError:
    return TypeError(
        f"mask: got one that fastattn made in {where}, expected it in fastattn's attention "
        "function alone: this model also computes attention itself, which would be "
        "wrong with attn_implementation='fastattn'; leave it at 'eager' or 'sdpa'"
    )


def of_tensor(mask: Tensor) -> StructuredMask:
    return StructuredMask(tuple(mask.shape), {"mask": mask}, lambda: mask)


class Pattern(NamedTuple):
    """The structure of a mask function. Row i and key j count from the start of the sequence."""

    causal: bool = False
    window: tuple[int, int | None] | None = None  # i - left <= j <= i + right
    chunk: tuple[int, Tensor] | None = None  # its size, and left padding (B,)
    sequences: Tensor | None = None  # (B,N): sequence index in a packed batch
    restarts: bool = False  # positions count from the start of each packed sequence


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> StructuredMask:
    """The mask function of `AttentionMaskInterface`. It never returns None, so that a model that
    does not pass its masks to fastattn fails at its first call. Raises TypeError for an argument,
    and ValueError for a mask function, that is not as in the known versions."""
    refuse_unknown("a mask", rest, _KNOWN)
    if isinstance(attention_mask, StructuredMask):  # `generate` made it before
        return attention_mask
    shape = batch_size, 1, q_length, kv_length

    def exact() -> Any:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    pattern = None if use_vmap else _pattern(mask_function)
    if pattern is not None and pattern.restarts and pattern.sequences is None:
        pattern = None  # positions that restart in one sequence
    if pattern is not None and not isinstance(kv_offset, Tensor):
        # A static cache of a window counts in plain numbers, but transformers keeps its mask, too.
        static = isinstance(q_offset, Tensor) or rest.get("allow_is_causal_skip") is False
        if isinstance(q_offset, Tensor) and q_offset.device.type == "cpu" and not _is_compiling():
            q_offset = int(q_offset)
        seen = _seen(attention_mask, kv_offset, kv_length)
        rows = CallRows(batch_size, q_length, kv_length, q_offset, kv_offset, device, static)
        if (starts := _starts(pattern, seen, rows)) is not None:
            return StructuredMask(
                shape, {"causal": pattern.causal, **_window(pattern)}, exact, starts
            )
        if (arguments := _arguments(pattern, seen, rows)) is not None:
            return StructuredMask(shape, arguments, exact)
    mask = exact()
    return StructuredMask(shape, {"mask": mask}, lambda: mask)


class CallRows(NamedTuple):
    """Positions of a call's rows and keys: the first are at q_offset and kv_offset. `static`: the
    cache is static, so arguments must have the same form at every step, for compiled code."""

    B: int
    M: int
    N: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device | str
    static: bool

    @property
    def end(self) -> Any:
        """How many keys are at or before the position of the last row."""
        return self.q_offset + self.M - self.kv_offset


def _pattern(function: Any) -> Pattern | None:
    """The Pattern of a mask function, or None if it is not recognized. torch.compile cannot read
    closures: while it traces, only the two basic functions are recognized."""
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if _is_compiling() or getattr(function, "__module__", "") != masking_utils.__name__:
        return None
    name = function.__qualname__.split(".")[0]
    if name not in _HELD:
        return None
    held = [x.cell_contents for x in function.__closure__ or ()]
    held = dict(zip(function.__code__.co_freevars, held))
    if held.keys() != _HELD[name]:
        raise ValueError(
            f"mask_function: got {name} of {', '.join(sorted(held))}, expected it of "
            f"{', '.join(sorted(_HELD[name]))}, as in transformers {' or '.join(VERSIONS)}; leave "
            "this model at 'eager' or 'sdpa'"
        )
    match name:
        case "and_masks":
            return functools.reduce(_both, map(_pattern, held["mask_functions"]))
        case "sliding_window_overlay":
            return Pattern(window=(held["sliding_window"] - 1, None))
        case "sliding_window_bidirectional_overlay":
            return Pattern(window=(held["sliding_window"], held["sliding_window"]))
        case "chunked_overlay":
            return Pattern(chunk=(held["chunk_size"], held["left_padding"]))
        case "packed_sequence_mask_function":
            return Pattern(sequences=held["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            inside = _pattern(held["mask_function"])  # positions rise by one within a sequence
            return None if inside is None or inside.chunk else inside._replace(restarts=True)
    return None


def _both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The intersection of two patterns; None if one is unknown or both set a window or a chunk."""
    if a is None or b is None or (a.window and b.window) or (a.chunk and b.chunk):
        return None
    return Pattern(
        a.causal or b.causal,
        a.window or b.window,
        a.chunk or b.chunk,
        b.sequences if a.sequences is None else a.sequences,
        a.restarts or b.restarts,
    )


def _window(pattern: Pattern) -> dict[str, Any]:
    return {} if pattern.window is None else {"window": pattern.window}


def _seen(padding: Tensor | None, first: int, N: int) -> Tensor | None:
    """(B,N): which keys are not padding. None: no padding mask was given."""
    if padding is None:
        return None
    padding = padding[:, first : first + N]
    if padding.shape[1] < N:
        padding = torch.nn.functional.pad(padding, (0, N - padding.shape[1]))
    return padding


def _starts(pattern: Pattern, seen: Tensor | None, rows: CallRows) -> Tensor | None:
    """(B,N): where packed sequences or chunks begin. None if the call does not have that form."""
    if _is_compiling() or (pattern.sequences is None and pattern.chunk is None):
        return None
    if seen is not None and not seen.all():
        return None
    starts = torch.zeros(rows.B, rows.N, dtype=torch.bool, device=rows.device)
    starts[:, 0] = True
    if pattern.sequences is not None:
        starts[:, 1:] = pattern.sequences.diff(dim=1) != 0
    else:
        size, begun = pattern.chunk or (0, None)
        if not (rows.end == rows.M == rows.N > size) or begun is None or begun.any():
            return None
        starts[:, ::size] = True
    return starts


def _arguments(pattern: Pattern, seen: Tensor | None, rows: CallRows) -> dict[str, Any] | None:
    """The arguments of `fastattn.attention`, or None if they cannot express the mask."""
    if pattern.sequences is not None or not _in_one_chunk(pattern, rows):
        return None
    if not pattern.causal:
        if pattern.window is not None and not (rows.end == rows.M == rows.N):
            return None
        return _window(pattern) | _padding(seen, rows, right=True)
    end, N = rows.end, rows.N
    if isinstance(end, Tensor):  # of a static cache: its value is not read
        padding = _padding(seen, rows, right=False)
        lengths = end.expand(rows.B).contiguous()
        return dict(causal="bottom_right", key_lengths=lengths, **padding, **_window(pattern))
    if end > N:
        return None
    needed = pattern.window and (rows.static or end > pattern.window[0] + 1)
    window = _window(pattern) if needed else {}
    if end == rows.M == N:
        return dict(causal=True) | window | _padding(seen, rows, right=True)
    arguments = window | _padding(seen, rows, right=False)
    if rows.M > 1 or window:
        arguments["causal"] = "bottom_right"
    if end < N or rows.static:
        arguments["key_lengths"] = torch.full((rows.B,), end, device=rows.device)
    return arguments


def _in_one_chunk(pattern: Pattern, rows: CallRows) -> bool:
    """Whether there is only one chunk, so that chunks hide nothing."""
    if pattern.chunk is None:
        return True
    if _is_compiling() or isinstance(rows.q_offset, Tensor) or rows.kv_offset:
        return False
    size, begun = pattern.chunk
    return rows.end <= size and not begun.any()


def _padding(seen: Tensor | None, rows: CallRows, *, right: bool) -> dict[str, Any]:
    """Arguments for padding among the keys up to the last row's: key_lengths if `right` and all
    padding is on the right, else a mask of columns, which a static cache has at every step, in one
    layout."""
    if seen is None:
        return {}
    if not right and rows.static:
        return {"mask": seen.contiguous()[:, None, None]}
    if not _is_compiling():
        before = seen if right else seen[:, : rows.end]
        if before.all():
            return {}
        if right:
            lengths = seen.sum(1)
            if torch.equal(seen, torch.arange(rows.N, device=seen.device) < lengths[:, None]):
                return {"key_lengths": lengths}
    return {"mask": seen[:, None, None]}
