"""The backend protocol, support declared as data, and the choice among backends."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ..call.spec import AttentionSpec, Feature, Tangents, Tensors
from ..namespace import PACKAGE
from .preference import PREFERENCE, KernelClasses, Rule, rules
from .shared import gpu

Outs = Sequence[Tensor]  # out and the normaliser; of `WithTangents.jvp`, and their tangents
Names = Sequence[str]  # of tensors
Grads = Sequence[Tensor | None]  # dout and dlse; of `WithTangents.second`, and their tangents

# The features that every backend has. Each backend lists the others that it has.
COMMON_FEATURES = Feature(Feature.PAGED_GRAD.value - 1)


class Chips(NamedTuple):
    """GPUs that a backend has kernels for: of an architecture, and newer ones up to the next entry
    of `Support.chips`."""

    architecture: int  # 75 for compute capability 7.5
    dtypes: frozenset[torch.dtype]
    remark: str = ""  # what a user should know of all calls there
    # By dtype, the largest head dim of forward mode and second derivatives, if less than others'.
    tangent_head_dims: tuple[tuple[torch.dtype, int], ...] = ()


@dataclass(frozen=True)
class Support:
    """What a backend can do. Selection, errors, test skips and the README's table read it."""

    devices: frozenset[str] | None  # None = any
    dtypes: frozenset[torch.dtype]
    max_head_dim: int | None  # for D and Dv; None = any
    features: Feature
    max_length: int | None = None  # for M and N, and for T and S of packed batches; None = any
    forward_head_dims: tuple[int, int] | None = None  # D and Dv of calls that are forward alone
    chips: tuple[Chips, ...] = ()  # of GPUs, the oldest first; none for a backend of other devices

    def on(self, architecture: int | None) -> Chips | None:
        """What the backend has for GPUs of an architecture. None: nothing, or no GPU is asked
        about."""
        older = (x for x in reversed(self.chips) if x.architecture <= (architecture or 0))
        return next(older, None)

    def dtypes_on(self, architecture: int | None) -> frozenset[torch.dtype]:
        chips = self.on(architecture)
        return chips.dtypes if chips else self.dtypes

    def too_old(self, architecture: int | None) -> str | None:
        """Why the backend runs nothing on a GPU of an architecture, or None."""
        if architecture is None or not self.chips:
            return None
        return gpu.too_old(architecture, self.chips[0].architecture)

    def head_dims(self, spec: AttentionSpec) -> tuple[int | None, int | None]:
        """The largest D and Dv for the passes that a call needs; None = any."""
        more = spec.features.value & (Feature.GRAD | Feature.WEIGHTS | Feature.TANGENTS).value
        return (not more and self.forward_head_dims) or (self.max_head_dim, self.max_head_dim)

    def why_not(self, spec: AttentionSpec, architecture: int | None = None) -> list[str]:
        """The reasons to decline `spec`, on a GPU of this architecture if it is given; empty if the
        backend can run it."""
        old, dtypes = self.too_old(architecture), self.dtypes_on(architecture)
        where = " on this GPU" if spec.dtype in self.dtypes else ""
        moved = spec.features.value & Feature.TANGENTS.value and self.on(architecture)
        most = dict(moved.tangent_head_dims).get(spec.dtype) if moved else None
        wide = max(spec.D, spec.Dv)
        devices, longest, (d, dv) = self.devices, self.max_length, self.head_dims(spec)
        rows, keys = max(spec.rows, spec.T), max(spec.keys, spec.S, spec.P * spec.page)
        missing = _names(spec.features.value & ~self.features.value)
        rules = [
            (devices is None or spec.device in devices, f"no kernel for device {spec.device!r}"),
            (not old, f"{old}"),
            (spec.dtype in dtypes, f"no kernel for {spec.dtype}{where}"),
            (d is None or spec.D <= d, f"head dim {spec.D} is over {d}"),
            (dv is None or spec.Dv <= dv, f"value head dim {spec.Dv} is over {dv}"),
            (
                most is None or wide <= most,
                f"head dim {wide} is over {most} for tangents in {spec.dtype} on this GPU",
            ),
            (longest is None or rows <= longest, f"{rows} queries are over {longest}"),
            (longest is None or keys <= longest, f"{keys} keys are over {longest}"),
            (not missing, f"does not support {', '.join(missing)}"),
        ]
        return [reason for ok, reason in rules if not ok]


def _names(bits: int) -> list[str]:
    """The names of these features; bits that no Feature has are listed by number."""
    known = [f for f in Feature if f.value & bits]
    rest = bits & ~sum(f.value for f in known)
    return [str(f.name).lower() for f in known] + ([f"feature {rest:#x}"] if rest else [])


class Backend(Protocol):
    """Kernels behind one interface.

    `t` has the caller's tensors. `check` has verified their shapes, dtypes and devices; the backend
    checks values (key lengths in range). out and its tangent have the memory order
    `spec.out_order`, the gradients of q, k and v have `spec.grad_order`. Gradients are returned by
    the names of their tensors in `Tensors`, at least those that `needs_grad` lists.
    """

    name: str
    support: Support

    def unavailable(self) -> str | None:
        """Why the backend cannot run on this machine, or None. Constant within a process. A backend
        for GPUs can if one GPU here is new enough; `support.chips` says which."""
        ...

    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        """out (B,H,M,Dv), and the normaliser (2,B,H,M) in spec.acc_dtype, contiguous.

        normaliser[0] is the LSE, and normaliser[1] its rounding error: their sum is the row maximum
        plus the logarithm of the sum. Without the error term exp(s - LSE) is N times too large
        where log N is below the float32 spacing of the scores. A row without keys has its sink,
        or -inf if there are no sinks, and 0.
        """
        ...

    def backward(
        self, spec: AttentionSpec, t: Tensors, outs: Outs, grads: Grads, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        """Gradients of q, k, v, mask and sinks, each in its input's dtype and shape."""
        ...

    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        """Probabilities after dropout (B,H,M,N), or (B,M,N) averaged over heads."""
        ...

    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        """Gradients of q, k, mask and sinks."""
        ...


class WithTangents(Backend, Protocol):
    """A backend with Feature.TANGENTS. x_t is the tangent of x; None is zero and costs nothing."""

    def jvp(
        self, spec: AttentionSpec, t: Tensors, tangents: Tangents, outs: Outs | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out, the normaliser, and their tangents: out_t with out's shape and dtype, and lse_t
        (B,H,M) in spec.acc_dtype, 0 (or its sink's tangent) for a row without keys. outs: those of
        an earlier forward pass, which are not computed again.

            lse_t = sum_j P s_t,   out_t = sum_j P Z ((s_t - lse_t) v + v_t)

        s_t is the tangent of the scores; Z is the dropout factor of P.
        """
        ...

    def second(
        self,
        spec: AttentionSpec,
        t: Tensors,
        tangents: Tangents,
        outs: Outs,
        grads: Grads,
        needs_grad: Sequence[str],
    ) -> dict[str, Tensor]:
        """The tangents of `backward`'s gradients of q, k, v, mask and sinks, in their dtypes and
        shapes, for the tangents of the tensors and those of dout and dlse.

        outs: the results of `jvp` for these tangents. With the tangent x_t of each x in `backward`,

            dS_t = P ((s_t - lse_t) (Z dP - delta) + Z dP_t - delta_t)
        """
        ...


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def dense_layout(B: int, H: int, M: int, D: int, order: str) -> Layout:
    """The gapless layout of (B,H,M,D): D is innermost, and `order` lists B, H and M from the
    outermost. A size of 0 counts as 1, as in torch's own strides."""
    sizes, strides, step = {"B": B, "H": H, "M": M}, {}, torch.sym_max(D, 1)
    for letter in reversed(order):
        strides[letter] = step
        step *= torch.sym_max(sizes[letter], 1)
    return (B, H, M, D), (strides["B"], strides["H"], strides["M"], 1)


def empty_dense(like: Tensor, shape: Sequence[int], dtype: torch.dtype, order: str) -> Tensor:
    """An uninitialised tensor with the layout `dense_layout(*shape, order)`."""
    return like.new_empty_strided(*dense_layout(*shape, order), dtype=dtype)


def in_order(x: Tensor, order: str) -> Tensor:
    """x (B,H,M,D) in the layout of `dense_layout`; copied unless it has that layout already."""
    dims = [*map("BHM".index, order), 3]
    return x.permute(dims).contiguous().permute([dims.index(at) for at in range(4)])


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of `x` broadcast to (B,H,M,N), aligned to the right: 0 where it repeats."""
    strides = (0 if n == 1 else s for n, s in zip(x.shape, x.stride()))
    return (*(0,) * (4 - x.ndim), *strides)


BAD_INDEX = (
    "a score_mod or mask_mod indexes a captured tensor out of range at a pair of a row and a key: "
    "clamp the index, or hide such pairs before it, by other arguments or by conditions of the "
    "mask_mod, joined by &"
)

_BACKENDS: dict[str, Backend] = {}
_warned: set[str] = set()


def register(backend: Backend) -> None:
    """Add `backend` to those that `choose` tries; last if `PREFERENCE` does not name it."""
    _BACKENDS[backend.name] = backend


def names() -> list[str]:
    """The names of all registered backends, in order of preference."""
    known = [name for name in PREFERENCE if name in _BACKENDS]
    return known + [name for name in _BACKENDS if name not in PREFERENCE]


def ordered(spec: AttentionSpec, device: torch.device | None) -> list[str]:
    """The names of all registered backends, in order of preference for a call on this device."""
    order = names()
    for rule in _applying(spec, device):
        order.remove(rule.backend)
        order.insert(order.index(rule.instead_of), rule.backend)
    return order


def measured(spec: AttentionSpec, device: torch.device | None, chosen: str) -> str:
    """The file by which the chosen backend comes before another; "" if there is none."""
    sources = [x.source for x in _applying(spec, device) if x.backend == chosen]
    return sources[-1] if sources else ""


def _applying(spec: AttentionSpec, device: torch.device | None) -> list[Rule]:
    """The rules that decide about a call."""
    architecture = gpu.found(device)
    if device is None or architecture is None:
        return []
    known = set(names())
    found = [x for x in rules(device) if {x.backend, x.instead_of} <= known]
    return [x for x in found if x.admits(spec, architecture) and _applies(x, spec, device)]


def _applies(rule: Rule, spec: AttentionSpec, device: torch.device) -> bool:
    # A library is loaded last: only for a call that the rule is about.
    if _declines(rule.backend, spec, device):
        return False
    if not rule.kernels:
        return True
    backend = cast(KernelClasses, get(rule.backend))
    return set(backend.kernels(spec, device).values()) == {rule.kernels}


def get(name: str) -> Backend:
    if name not in _BACKENDS:
        raise ValueError(f"backend: got {name!r}, expected one of {names()}, or None for the best")
    return _BACKENDS[name]


def available_backends() -> dict[str, str | None]:
    """List all backends in order of preference, with the reason why one cannot run here.

    On some GPUs some calls have another order, which `explain` follows and `python -m fastattn`
    prints. Of several GPUs one may be too old for a backend, which `explain` says of its calls.

    Returns:
        A dict from the name of each backend to None if it can run on this machine, on one of its
        GPUs at least, else to the reason why it cannot.

    Example:
        >>> import fastattn
        >>> reasons = fastattn.available_backends()
        >>> list(reasons)[:3]
        ['cpu', 'triton', 'cuda']
        >>> reasons["reference"] is None
        True
    """
    return {name: get(name).unavailable() for name in names()}


def unavailable(name: str, device: torch.device) -> str | None:
    """Why backend `name` runs nothing on this device of the machine, or None."""
    backend = get(name)
    return backend.support.too_old(gpu.found(device)) or backend.unavailable()


def why_not(name: str, spec: AttentionSpec, device: torch.device | None = None) -> list[str]:
    """Why backend `name` declines `spec` on a device (None: any of its type); empty if it can run
    it."""
    backend = get(name)
    down = backend.unavailable()
    declined = backend.support.why_not(spec, gpu.found(device))
    return [down, *(x for x in declined if x != down)] if down else declined


def _declines(name: str, spec: AttentionSpec, device: torch.device | None) -> list[str]:
    """Return what `why_not` returns, but call `unavailable` only if the declared support admits
    `spec`, because `unavailable` may load a library or import Triton."""
    declined = get(name).support.why_not(spec, gpu.found(device))
    return declined or why_not(name, spec, device)


def explain_choice(reasons: dict[str, list[str]]) -> str:
    return "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())


def choose(spec: AttentionSpec, requested: str = "", device: torch.device | None = None) -> Backend:
    """The first backend that can run `spec` on a device (None: any device of the type that it
    names); if `requested` is given, only that backend.

    Raises NotImplementedError with every backend's reasons, ValueError for an unknown name.
    """
    declined: dict[str, list[str]] = {}
    for name in [requested] if requested else ordered(spec, device):
        declined[name] = _declines(name, spec, device)
        if not declined[name]:
            if name == "reference" and not requested:
                _warn_slow(declined)
            return _BACKENDS[name]
    if requested:
        declined |= {name: why_not(name, spec, device) or ["can run it"] for name in names()}
    what = f"backend {requested!r} cannot" if requested else "no backend can"
    raise NotImplementedError(f"{what} run {spec}:\n{explain_choice(declined)}")


def _warn_slow(declined: dict[str, list[str]]) -> None:
    """Warn once, for each set of reasons, that no fused kernel runs."""
    reasons = explain_choice({name: why for name, why in declined.items() if why})
    if reasons and reasons not in _warned:
        _warned.add(reasons)
        warnings.warn(
            "fastattn runs this attention call on the slow O(M N) reference backend, because every "
            f'fused backend declined (backend="reference" asks for it silently):\n{reasons}',
            stacklevel=_caller_level(),
        )


def _caller_level() -> int:
    """The stacklevel, counted from our caller, of the first frame outside fastattn and torch."""
    frame, level, inside = sys._getframe(1), 1, (PACKAGE, "torch")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
