"""Calls on DTensors: each rank computes its block of the call, at the position of that block.

Along each dimension of the mesh q is cut by items, heads or rows, or not at all. The other tensors
are cut in the same way if they have that axis. Items and heads need nothing from other ranks; rows
are computed by `attention` of this package. `to_local` and `from_local` pass gradients on, those of
second order as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ..api import scalars_of
from ..backends.base import in_order
from ..call.spec import ARGUMENTS, Argument, Options, Tensors, result_letters
from ..call.validation import check
from ..dispatch import context_parallel, dispatcher
from ..dispatch.library_ops import opaque_to_dynamo
from ..dispatch.operation import ATTENTION, Operation
from . import layout
from .attention_call import attention
from .layout import CONTIGUOUS, Span

AXES = ("B", "H", "M")  # dimensions of q, and of other tensors with these letters in their shapes
ALSO = {"Hk": "H"}
ALSO_OF_KEYS = {"N": "M", **ALSO}


class Cut(NamedTuple):
    """How q is cut. axes: for each dimension of the mesh, which of `AXES` it cuts, or None."""

    mesh: DeviceMesh
    axes: tuple[str | None, ...]
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, q: DTensor) -> Cut:
        axes = []
        for x in q.placements:
            if x.is_replicate():
                axes.append(None)
            elif type(x) is Shard and x.dim < len(AXES):
                axes.append(AXES[x.dim])
            else:
                expected = "Shard(0) by items, Shard(1) by heads, Shard(2) by rows, or Replicate()"
                raise _elsewhere("q", q, expected)
        return cls(q.device_mesh, tuple(axes), q.placements)

    def ranks(self, axis: str) -> int:
        return math.prod(self.mesh.size(i) for i, x in enumerate(self.axes) if x == axis)

    def part(self, size: int, axis: str) -> Span:
        """This rank's span of an axis, which is cut as torch.chunk does."""
        own = Span(0, size)
        for i, x in enumerate(self.axes):
            if x == axis:
                of = layout.spans(CONTIGUOUS, own.size, self.mesh.size(i))
                (cut,) = of[self.mesh.get_local_rank(i)] or (Span(0, 0),)
                own = Span(own.first + cut.first, own.first + cut.end)
        return own

    def lies(self, letters: Sequence[str], also: dict[str, str]) -> list[Placement]:
        """The placements of a tensor with these dimensions."""
        dims = {also.get(letter, letter): dim for dim, letter in enumerate(letters)}
        return [Shard(dims[x]) if x in dims else Replicate() for x in self.axes]

    def local(self, name: str, x: Any) -> Any:
        """This rank's part of a tensor. Its gradient flows back to the whole tensor."""
        argument = ARGUMENTS[name]
        if x is None:
            return None
        if not isinstance(x, DTensor):
            x = self._whole(name, argument, x)
        if x.device_mesh != self.mesh:
            got = f"a DTensor on {x.device_mesh}"
            raise ValueError(f"{argument.name}: got {got}, expected {self.mesh}, as q is on")
        also = ALSO_OF_KEYS if name in ("k", "v") else ALSO
        placements = self.lies(_letters(argument, x), also)
        if any(not has.is_replicate() and has != to for has, to in zip(x.placements, placements)):
            raise _elsewhere(argument.name, x, f"{_shown(placements)}, as q has {_shown(self)}")
        # The gradient of a replicated tensor is the sum over ranks. Over ranks that divide rows,
        # `attention` has summed it already.
        by_part = (
            Partial() if to.is_replicate() and axis in ("B", "H") else to
            for to, axis in zip(placements, self.axes)
        )
        return x.redistribute(placements=placements).to_local(grad_placements=tuple(by_part))

    def _whole(self, name: str, argument: Argument, x: Tensor) -> DTensor:
        """A plain tensor is the same whole on every rank; of seeds, the first rank's is used."""
        whole = [Replicate()] * self.mesh.ndim
        if name == "seed":
            return distribute_tensor(x, self.mesh, whole)
        if x.requires_grad and torch.is_grad_enabled():
            raise _plain(argument.name)
        return DTensor.from_local(x, self.mesh, whole, run_check=False)


REDISTRIBUTE = "use its redistribute(placements=...)"


@opaque_to_dynamo
def call(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """`dispatcher.call` for calls with DTensors."""
    for name in ("q", "k", "v"):
        x = getattr(t, name)
        if isinstance(x, Tensor) and not isinstance(x, DTensor):
            raise _plain(name)
    check(t, o)
    assert isinstance(t.q, DTensor)
    cut = Cut.of(t.q)
    _need_possible(op, t, o, cut)
    own = Tensors(*map(cut.local, Tensors._fields, t))
    if o.dropout_p:  # draws depend on the head and the item
        head, item = (cut.part(t.q.shape[i], AXES[i]).first for i in (1, 0))
        o = o._replace(at_head=o.at_head + head, at_item=o.at_item + item)
    outs = _of_rows(own, o, cut) if "M" in cut.axes else dispatcher.call(op, own, o)
    whole = op.outputs(Tensors(*map(_nowhere, t)), o)
    results = []
    for name, x, y in zip(op.results, outs, whole):
        letters = result_letters(name, o)
        lies = cut.lies(letters, ALSO)
        x = DTensor.from_local(x, cut.mesh, lies, shape=y.shape, stride=y.stride())
        # The incoming gradient may have other placements. redistribute converts it and keeps its
        # grad_fn, which from_local would drop.
        results.append(x.redistribute(placements=lies))
    return tuple(results)


def _elsewhere(name: str, x: Any, expected: str) -> ValueError:
    got = f"placements {_shown(x)}"
    return ValueError(f"{name}: got {got}, expected {expected}: {REDISTRIBUTE}")


def _plain(name: str) -> TypeError:
    return TypeError(
        f"{name}: got a plain tensor beside DTensors, expected a DTensor: distribute_tensor of "
        "torch.distributed.tensor makes it, or DTensor.from_local"
    )


def _need_possible(op: Operation, t: Tensors, o: Options, cut: Cut) -> None:
    """Raise if a rank's tensors, each cut as q is, would not make a valid call."""
    if cut.mesh.get_coordinate() is None:
        raise RuntimeError(f"q: got a DTensor on {cut.mesh}, expected one that this rank is in")
    if o.score_mod:
        raise NotImplementedError(
            "q: got a DTensor beside a score_mod or a mask_mod, expected a plain tensor: "
            "to_local() gives the part of this rank, for fastattn.distributed.attention, which "
            "runs functions"
        )
    H, Hk, ranks = t.q.shape[1], t.k.shape[1], cut.ranks("H")
    if H != Hk and Hk % ranks:
        raise ValueError(
            f"k: got {Hk} heads for q's {H} on {ranks} ranks, expected ranks that divide them: "
            f"{REDISTRIBUTE} of q, k and v so that fewer ranks do, or repeat_interleave k's and v's"
        )
    if t.cu_q is not None and {"B", "M"} & {*cut.axes}:
        expected = "heads, Shard(1) of (T, H, D), or Replicate()"
        raise ValueError(f"q: got a packed batch cut by rows, expected {expected}: {REDISTRIBUTE}")
    if "M" not in cut.axes:
        if o.average_heads and "H" in cut.axes:
            expected = "average_heads=False; then take the mean over heads"
            raise ValueError(
                f"average_heads: got True for heads on {ranks} ranks, expected {expected}"
            )
        return
    if op != ATTENTION:
        expected = (
            "Shard(0) by items, Shard(1) by heads, or Replicate(), where weights are asked for"
        )
        raise ValueError(f"q: got placements {_shown(t.q)}, expected {expected}: {REDISTRIBUTE}")
    if context_parallel.is_reordered():
        raise RuntimeError(
            "q: got DTensors of a sequence whose order torch's context parallelism has changed, "
            "expected that of the sequence (load_balancer=None); fastattn.distributed.attention("
            "..., layout='zigzag') balances the work"
        )


def _of_rows(t: Tensors, o: Options, cut: Cut) -> tuple[Tensor, Tensor]:
    """(out, normaliser) of this rank's rows. The LSE's rounding error, which no caller of this
    function reads, is set to 0."""
    mesh, dims = cut.mesh, [i for i, x in enumerate(cut.axes) if x == "M"]
    if len(dims) == 1:
        group: Any = mesh.get_group(dims[0])
    elif len(dims) == mesh.ndim:
        group = mesh
    else:
        group = mesh[tuple((mesh.mesh_dim_names or ())[i] for i in dims)]
    given = {ARGUMENTS[name].name: x for name, x in t._asdict().items() if x is not None}
    out, lse = attention(**given, **scalars_of(o), group=group, return_lse=True)
    out = in_order(out, o.out_order)  # its memory order on one rank
    return out, torch.stack([lse, torch.zeros_like(lse)])


def _letters(argument: Argument, x: Tensor) -> list[str]:
    """The letters of x's dimensions, with "1" for a dimension that is broadcast."""
    if argument.broadcast:
        letters = argument.shapes[0].split()
        own = letters[len(letters) - x.ndim :]
        return ["1" if n == 1 else letter for letter, n in zip(own, x.shape)]
    shapes = (shape.split() for shape in argument.shapes)
    return next((letters for letters in shapes if len(letters) == x.ndim), [])


def _nowhere(x: Tensor | None) -> Any:
    """A meta tensor with the shape and dtype of x."""
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device="meta")


def _shown(x: Any) -> str:
    placements = x if isinstance(x, list) else x.placements
    return f"[{', '.join(map(repr, placements))}]"
