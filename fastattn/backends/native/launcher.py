"""Base class of backends with kernels behind csrc/abi.h: packs arguments, allocates results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty

from ...call.spec import ARGUMENTS, DIFFERENTIABLE, RESULTS, AttentionSpec, Tangents, Tensors
from ..base import Grads, Layout, Outs, dense_layout, in_order
from ..shared.per_sequence import backward_in_turn, second_in_turn
from . import libraries
from .marshalling import pack, places

# The tensors of each pass after the call's own: field of FaCall -> `Argument.passed_as`.
_GRADIENTS = {f"d{ARGUMENTS[name].field}": ARGUMENTS[name].passed_as for name in DIFFERENTIABLE}
_MOVING = [name for name in DIFFERENTIABLE if name != "captured_floats"]  # what may have a tangent
_TANGENTS = {f"{name}_t": ARGUMENTS[name].passed_as for name in _MOVING}
_MOVED = dict(out_t="strided", lse_t="column")
AFTER: dict[int, dict[str, str]] = {
    libraries.FORWARD: dict(out="strided", lse="pair"),
    libraries.BACKWARD: dict(
        out="strided", lse="pair", dout="strided", dlse="column", **_GRADIENTS
    ),
    libraries.WEIGHTS: dict(weights="broadcast"),
    libraries.WEIGHTS_BACKWARD: dict(dweights="broadcast", **_GRADIENTS),
    libraries.JVP: dict(out="strided", **_MOVED, **_TANGENTS),
    libraries.FORWARD_JVP: dict(out="strided", lse="pair", **_MOVED, **_TANGENTS),
    libraries.SECOND: dict(
        **dict(out="strided", lse="pair", **_MOVED, **_TANGENTS),
        **dict(dout="strided", dlse="column", dout_t="strided", dlse_t="column", **_GRADIENTS),
    ),
}
PLACES = {which: places(after) for which, after in AFTER.items()}


class Launcher:
    """The passes of `Backend`, each as one call into a native library.

    A subclass implements `workspace`, the bytes that the call needs, and `run`, which makes the
    call; or it overrides `_launch`.
    """

    makes_all = False  # allocate unwanted gradients of q, k and v, too?

    def workspace(self, which: int, params: bytes, t: Tensors) -> int:
        raise NotImplementedError

    def run(self, which: int, params: bytes, spec: AttentionSpec, t: Tensors) -> int:
        """Run a pass. Returns 0, or native.BAD_EXTENT plus the index of the refused tensor in
        native.WRITTEN. The caller keeps every tensor alive that `params` points into."""
        raise NotImplementedError

    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        like = prepared(spec)
        out = t.q.new_empty_strided(*like.out, **like.stored)
        normaliser = t.q.new_empty_strided(*like.normaliser, **like.acc)
        self._launch(libraries.FORWARD, like, t, (out, normaliser))
        return out, normaliser

    def backward(
        self, spec: AttentionSpec, t: Tensors, outs: Outs, grads: Grads, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        dout, dlse = grads
        if dout is None:
            dout = t.q.new_zeros(()).expand(outs[0].shape)
        if spec.packed and "mask" in needs_grad and _copies(spec, t.given("mask")) > ROOM:
            made = backward_in_turn(self, spec, t, outs, (dout, dlse), needs_grad)
            return in_grad_order(spec, made, t)
        made = self._gradients(spec, t, needs_grad)
        given = (*outs, dout, dlse, *map(made.get, DIFFERENTIABLE))
        self._launch(libraries.BACKWARD, prepared(spec), t, given)
        return _as_inputs(spec, made, t) if spec.given else made

    def empty_weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        B, H, M, N = spec.B, spec.H, spec.M, spec.N
        shape = (B, M, N) if spec.average_heads else (B, H, M, N)
        return empty(shape, dtype=spec.dtype, device=t.q.device)

    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        weights = self.empty_weights(spec, t)
        self._launch(libraries.WEIGHTS, prepared(spec), t, (with_heads(spec, weights),))
        return weights

    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        grads = self._gradients(spec, t, needs_grad)
        if dweights.numel() == 0:  # its pointer is null, which kernels take for no tensor
            for grad in grads.values():
                grad.zero_()
        else:
            given = (with_heads(spec, dweights), *map(grads.get, DIFFERENTIABLE))
            self._launch(libraries.WEIGHTS_BACKWARD, prepared(spec), t, given)
        return _as_inputs(spec, grads, t) if spec.given else grads

    def jvp(
        self, spec: AttentionSpec, t: Tensors, tangents: Tangents, outs: Outs | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        like = prepared(spec)
        out_t = t.q.new_empty_strided(*like.out)
        lse_t = t.q.new_empty(like.out[0][:3], dtype=spec.acc_dtype)
        moved = (out_t, lse_t, *_tangents(spec, tangents))
        if outs is not None:
            out, normaliser = outs
            self._launch(libraries.JVP, like, t, (out, *moved))
        else:
            out = t.q.new_empty_strided(*like.out, **like.stored)
            normaliser = t.q.new_empty_strided(*like.normaliser, **like.acc)
            self._launch(libraries.FORWARD_JVP, like, t, (out, normaliser, *moved))
        return out, normaliser, out_t, lse_t

    def second(
        self,
        spec: AttentionSpec,
        t: Tensors,
        tangents: Tangents,
        outs: Outs,
        grads: Grads,
        needs_grad: Sequence[str],
    ) -> dict[str, Tensor]:
        if grads[0] is None:
            grads = (outs[0].new_zeros(()).expand(outs[0].shape), *grads[1:])
        if spec.packed and "mask" in needs_grad and _copies(spec, t.given("mask")) > ROOM:
            made = second_in_turn(self, spec, t, tangents, outs, grads, needs_grad)
            return in_grad_order(spec, made, t)
        made = self._gradients(spec, t, needs_grad)
        given = (*outs, *_tangents(spec, tangents), *grads, *map(made.get, DIFFERENTIABLE))
        self._launch(libraries.SECOND, prepared(spec), t, given)
        return _as_inputs(spec, made, t) if spec.given else made

    def _gradients(
        self, spec: AttentionSpec, t: Tensors, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        """Allocate the gradients: of q, k and v in `grad_order`; of mask and sinks in their shape,
        or in a packed batch with a part for each sequence."""
        grads = {}
        for name, layout in prepared(spec).gradients:
            if name in needs_grad or (self.makes_all and layout):
                x = t.given(name)
                if layout:
                    grads[name] = x.new_empty_strided(*layout, **prepared(spec).stored)
                elif spec.packed:
                    grads[name] = x.new_zeros(_by_sequence(spec, name, x), dtype=spec.acc_dtype)
                else:
                    dtype = _kernel_dtype(ARGUMENTS[name].dtype, x, spec)
                    grads[name] = x.new_empty(x.shape, dtype=spec.stored(dtype))
        return grads

    def _launch(
        self, which: int, like: Prepared, t: Tensors, after: tuple[Tensor | None, ...]
    ) -> None:
        """Pack the arguments and run the pass. after: its tensors in the order of `AFTER`."""
        spec = like.spec
        t = convert(spec, t)
        params = pack(like.form, PLACES[which], (*t, *after), libraries.get_num_threads())
        size = self.workspace(which, params, t)
        if size > 0:
            workspace = empty(size + 63, dtype=torch.uint8, device=t.q.device)
            at = -(-workspace.data_ptr() // 64) * 64
            field = libraries.WORKSPACE
            params = params[:field] + libraries.POINTER.pack(at) + params[field + 8 :]
        if status := self.run(which, params, spec, t):
            raise refused(status, spec, dict(zip(AFTER[which], after)))


class Prepared(NamedTuple):
    """Data that all calls with one spec share. A layout is a shape with strides."""

    spec: AttentionSpec
    form: bytes  # FaParams without tensors
    out: Layout
    normaliser: Layout
    gradients: list[tuple[str, Layout | None]]  # all possible ones; None: in its input's shape
    stored: dict[str, Any]  # dtype= for out and gradients, if it is not q's
    acc: dict[str, Any]  # the same for the normaliser: passing a dtype takes time
    brief: bool  # the kernel is too short to release the GIL for


BRIEF = 1 << 18  # steps of about ten microseconds in all, the cost of releasing the GIL


def prepared(spec: AttentionSpec) -> Prepared:
    shared = spec.launcher_cache.get("prepared")
    if shared is None:
        shared = spec.launcher_cache["prepared"] = _prepare(spec)
    return shared


def _prepare(spec: AttentionSpec) -> Prepared:
    H, Hk, D, Dv = (getattr(spec, x) for x in ("H", "Hk", "D", "Dv"))
    B, M, N = spec.memory_sizes
    keys = spec.B * spec.N if spec.paged else N
    like_q = {"q": (B, H, M, D), "k": (B, Hk, N, D), "v": (B, Hk, N, Dv)}
    if spec.weights:
        del like_q["v"]
    laid = {name: dense_layout(*shape, spec.grad_order) for name, shape in like_q.items()}
    return Prepared(
        spec=spec,
        form=libraries.form(spec),
        out=dense_layout(B, H, M, Dv, spec.out_order),
        normaliser=((2, B, H, M), (B * H * M, H * M, M, 1)),
        gradients=[(x, laid.get(x)) for x in DIFFERENTIABLE if x in laid or x in spec.given],
        stored={"dtype": spec.acc_dtype} if spec.acc_dtype_out else {},
        acc={} if spec.acc_dtype == spec.dtype else {"dtype": spec.acc_dtype},
        brief=B * H * (1 + M) * (1 + keys) * (64 + D + Dv) < BRIEF,
    )


def _tangents(spec: AttentionSpec, tangents: Tangents) -> tuple[Tensor | None, ...]:
    """The tangents, in the dtypes that kernels read."""
    named = ((ARGUMENTS[name].dtype, getattr(tangents, name)) for name in _MOVING)
    return tuple(x if x is None else x.to(_kernel_dtype(rule, x, spec)) for rule, x in named)


def _kernel_dtype(rule: str, x: Tensor, spec: AttentionSpec) -> torch.dtype:
    """The dtype in which kernels read or write x. rule: its `Argument.dtype`."""
    return {"floating": spec.acc_dtype, "integer": torch.int64}.get(rule, x.dtype)


def convert(spec: AttentionSpec, t: Tensors) -> Tensors:
    """t with its optional tensors in the dtypes of csrc/abi.h, and integer tensors contiguous."""
    changed = {}
    for name in spec.given:
        a, x = ARGUMENTS[name], getattr(t, name)
        dtype = _kernel_dtype(a.dtype, x, spec)
        if x.dtype != dtype:
            changed[name] = x = x.to(dtype)
        if a.passed_as == "pointer" and not x.is_contiguous():
            changed[name] = x.contiguous()
    return t._replace(**changed) if changed else t


ROOM = 64 << 20  # most bytes for gradients of a shared mask, one for each sequence


def _copies(spec: AttentionSpec, mask: Tensor) -> int:
    """Bytes of a shared mask's gradients, one for each sequence; 0 if the mask is not shared."""
    shape = _by_sequence(spec, "mask", mask)
    return 0 if shape == mask.shape else math.prod(shape) * spec.acc_dtype.itemsize


def _by_sequence(spec: AttentionSpec, name: str, x: Tensor) -> tuple[int, ...]:
    """The shape of a gradient in which each sequence writes its own part: (B,H,M,N) for a mask,
    with 1 where it is broadcast over H, M or N; (B,H) for sinks."""
    letters = ARGUMENTS[name].shapes[0].split()
    shape = (1,) * (len(letters) - x.ndim) + tuple(x.shape)  # a mask may have fewer dimensions
    return (spec.B, *(shape[1:] if "B" in letters else shape))


def in_grad_order(spec: AttentionSpec, grads: dict[str, Tensor], t: Tensors) -> dict[str, Tensor]:
    """Gradients in the dtypes of their tensors, and those of q, k and v in `grad_order`."""
    ordered = {}
    for name, grad in grads.items():
        grad = grad.to(spec.stored(t.given(name).dtype))
        strided = ARGUMENTS[name].passed_as == "strided"
        ordered[name] = in_order(grad, spec.grad_order) if strided else grad
    return ordered


def _as_inputs(spec: AttentionSpec, grads: dict[str, Tensor], t: Tensors) -> dict[str, Tensor]:
    for name in spec.given & grads.keys():  # mask and sinks; the others match already
        x = t.given(name)
        if spec.packed and grads[name].shape != x.shape:  # a part for each sequence
            grads[name] = grads[name].sum(0).reshape(x.shape)
        grads[name] = grads[name].to(spec.stored(x.dtype))
    return grads


def with_heads(spec: AttentionSpec, weights: Tensor) -> Tensor:
    return weights[:, None] if spec.average_heads else weights


# -------------------------------------------------------------------------- results of other sizes

# csrc/common/extents.h compares the sizes of results before the library writes.
_LETTERS = {  # dimensions of what passes write, except gradients
    "out": RESULTS["out"],
    "lse": RESULTS["normaliser"],
    "weights": RESULTS["weights"],
    "out_t": RESULTS["out"],
    "lse_t": RESULTS["lse"],
}


def refused(status: int, spec: AttentionSpec, after: Mapping[str, Tensor | None]) -> RuntimeError:
    """The error for this status. after: the pass's tensors beside those of the call, by field."""
    name = libraries.WRITTEN[status - libraries.BAD_EXTENT]
    x = after[name]
    got = None if x is None else tuple(x.shape)
    return RuntimeError(
        f"{name}: got shape {got}, expected {expected(spec, name)}; nothing was written. "
        "fastattn made this tensor itself: please report the call"
    )


def expected(spec: AttentionSpec, name: str) -> str:
    """The shape that a written tensor must have, in letters and numbers."""
    B, M, N = spec.memory_sizes
    sizes = {x: getattr(spec, x) for x in ("H", "Hk", "D", "Dv")} | {"2": 2, "B": B, "M": M, "N": N}
    of = name[1:] if name[1:] in DIFFERENTIABLE else ""
    a = ARGUMENTS.get(of)
    letters = (a.shapes[0] if a else _LETTERS[name]).split()
    if name == "weights" and spec.average_heads:
        sizes["H"] = 1
    if of in spec.given:  # gradients of mask and sinks
        sizes |= {"B": spec.B, "M": spec.M, "N": spec.N}
        letters = ["B", *(x for x in letters if x != "B")] if spec.packed else letters
    text = f"({', '.join(letters)}) = {tuple(sizes[x] for x in letters)}"
    if a is None or not a.broadcast:
        return text
    return f"{text}, or 1 for {'H, M and N' if spec.packed else 'any of them'}"
