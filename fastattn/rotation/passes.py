"""How a call of norm_rope reaches its kernel, and its derivatives.

    torch.compile, torch.export, any dispatch mode  ->  the torch.library operators
    torch.func transforms, autograd                 ->  `NormRope`
    none of them                                    ->  the kernel itself
    forward mode, and tensors without a kernel      ->  `composed`: torch's operations

`composed` has every derivative, so that of `NormRopeBackward` is one of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from ..backends.native import libraries
from ..backends.native.marshalling import kind
from ..dispatch.run_pass import dispatch_mode_active
from ..dispatch.vmap_fold import front, pick
from ..namespace import add_op_namespace_prefix, operator
from . import kernel
from .form import Form, Rows, check_offsets, composed

_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_FORM = len(Form._fields)
_ROWS = len(Rows._fields)
TAGS = (torch.Tag.needs_exact_strides,)  # results lie in memory as q and k do


def call(form: Form, rows: Rows, outs: Sequence[Tensor] = ()) -> Sequence[Tensor]:
    """The results, in `outs` if these are given: plain tensors, for a call without gradient."""
    assert rows.q is not None
    if rows.q.device.type != "cpu":
        return _by_operations(form, rows)
    if _is_compiling() or (dispatch_mode_active() and not _transforms()):
        return operator("norm_rope")(*rows, *form)
    if forward_ad._current_level >= 0:
        return _by_operations(form, rows)
    if _transforms() or (torch.is_grad_enabled() and _requires_grad(rows)):
        return NormRope.apply(form, *rows)
    return _forward(form, rows, outs)


def _by_operations(form: Form, rows: Rows) -> Sequence[Tensor]:
    """`composed`, for offsets that were checked, where the CPU can read them."""
    cu = rows.cu
    if cu is not None and cu.device.type == "cpu" and not _is_compiling() and kind((cu,)):
        check_offsets(rows)
    return composed(form, rows)


def _requires_grad(rows: Rows) -> bool:
    return any(x is not None and x.requires_grad for x in rows)


def _is_in_memory(tensors: tuple[Tensor | None, ...]) -> bool:
    """True if the kernels take these."""
    return kind(tensors) is not None and libraries.cpu_unavailable() is None


def empty_results(rows: Rows) -> list[Tensor]:
    return [torch.empty_like(x) for x in rows[:2] if x is not None]


def _laid_out_as(empty: Tensor, y: Tensor) -> Tensor:
    """y, in memory as the kernel's result, on which a compiled program relies."""
    return y if y.stride() == empty.stride() else empty.copy_(y)


def _forward(form: Form, rows: Rows, outs: Sequence[Tensor] = ()) -> Sequence[Tensor]:
    if not _is_in_memory(rows):
        if dispatch_mode_active():
            return operator("norm_rope")(*rows, *form)
        found = _by_operations(form, rows)
        return [_laid_out_as(x, y) for x, y in zip(empty_results(rows), found)]
    outs = outs or empty_results(rows)
    kernel.forward(form, rows, outs)
    return outs


# --------------------------------------------------------------------------- the backward pass


def _backward(
    form: Form, rows: Rows, grads: Sequence[Tensor | None], wants: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The gradients of q, k and the weights, None where there is none: of weights only those in
    `wants`. rows: q and k only where they have a norm."""
    if _is_in_memory((*rows, *grads)):
        return kernel.backward(form, rows, grads, wants)
    if dispatch_mode_active():
        found = operator("norm_rope_backward")(*grads, *rows, *form, *wants)
        return _spread(found, _present(grads, wants))
    found = _composed_backward(form, rows, grads, wants)
    for at, (g, x) in enumerate(zip(grads, rows)):
        like, y = g if x is None else x, found[at]
        if like is not None and y is not None:
            found[at] = _laid_out_as(torch.empty_like(like), y)
    return found


def _present(grads: Sequence[Tensor | None], wants: Sequence[bool]) -> list[bool]:
    """Which of the four gradients there are."""
    given = [g is not None for g in grads]
    return [*given, *(a and b for a, b in zip(given, wants))]


def _spread(found: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    each = iter(found)
    return [next(each) if there else None for there in present]


def _composed_backward(form, rows, grads, wants) -> list[Tensor | None]:
    given = [g is not None for g in grads]
    # The gradient of a rotation alone does not depend on what it rotated.
    q, k = (
        None if g is None else torch.zeros_like(g) if x is None else x
        for g, x in zip(grads, rows[:2])
    )
    places = [i for i, x in enumerate((q, k)) if x is not None]
    places += [4 + i for i in range(2) if given[i] and wants[i]]
    whole = rows._replace(q=q, k=k)

    def results(*changed: Tensor) -> tuple[Tensor, ...]:
        every: list[Any] = list(whole)
        for i, x in zip(places, changed):
            every[i] = x
        return composed(form, Rows(*every))

    pull = torch.func.vjp(results, *(whole[i] for i in places))[1]
    found = pull(tuple(g for g in grads if g is not None))
    return _spread(found, _present(grads, wants))


def _saved(form: Form, rows: Rows) -> Rows:
    """What the backward pass needs: a rotation alone keeps its tables."""
    q = rows.q if form.q_norm else None
    k = rows.k if form.k_norm else None
    return rows._replace(q=q, k=k)


def _wants(needs: Sequence[bool]) -> tuple[bool, bool]:
    return needs[4], needs[5]  # as in Rows


def _as_inputs(found: Sequence[Tensor | None]) -> Rows:
    dq, dk, dq_weight, dk_weight = found
    return Rows(dq, dk, None, None, dq_weight, dk_weight, None)


class NormRope(Function):
    """(form, *rows): the results for q and, if it is given, k."""

    @staticmethod
    def forward(form: Form, *rows: Any) -> Any:
        return tuple(_forward(form, Rows(*rows)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.form, *rows = inputs
        ctx.save_for_backward(*_saved(ctx.form, Rows(*rows)))
        ctx.set_materialize_grads(False)
        needs: Any = Rows(*ctx.needs_input_grad[1:])
        needed = needs.q or needs.q_weight, needs.k or needs.k_weight
        ctx.mark_non_differentiable(*(y for y, x in zip(output, needed) if not x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grads = grads if len(grads) == 2 else (*grads, None)
        if all(g is None for g in grads):
            return None, *[None] * _ROWS
        form, rows, wants = ctx.form, Rows(*ctx.saved_tensors), _wants(ctx.needs_input_grad[1:])
        if torch.is_grad_enabled() or _transforms():
            found = differentiable_backward(form, rows, grads, wants)
        else:
            found = _backward(form, rows, grads, wants)
        return None, *_as_inputs(found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        form, *rows = args

        def run(*tensors):
            return NormRope.apply(form, *tensors)

        results = _vmapped(run, info.batch_size, rows, in_dims[1:], 0, True)
        return tuple(results), (0,) * len(results)


def differentiable_backward(form, rows, grads, wants) -> list[Tensor | None]:
    found = NormRopeBackward.apply(form, tuple(wants), *grads, *rows)
    return _spread(found, _present(grads, wants))


class NormRopeBackward(Function):
    """(form, wants, *grads, *rows): the gradients that there are."""

    @staticmethod
    def forward(form: Form, wants: Any, *tensors: Any) -> Any:
        found = _backward(form, Rows(*tensors[2:]), tensors[:2], wants)
        return tuple(x for x in found if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.form, ctx.wants, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *moves: Any) -> Any:
        return None, None, *_second(ctx.form, ctx.wants, ctx.saved_tensors, moves)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        form, wants, *tensors = args

        def run(*tensors):
            return NormRopeBackward.apply(form, wants, *tensors)

        folds = not any(_present(tensors[:2], wants)[2:])
        results = _vmapped(run, info.batch_size, tensors, in_dims[2:], 2, folds)
        return tuple(results), (0,) * len(results)


def _second(form: Form, wants, tensors: Sequence[Any], moves) -> list[Tensor | None]:
    """The gradients of the backward pass's gradients."""
    tables = (4, 5, 8)  # cos, sin and cu
    places = [i for i, x in enumerate(tensors) if x is not None and i not in tables]

    def gradients(*changed: Tensor) -> tuple[Tensor, ...]:
        every = list(tensors)
        for i, x in zip(places, changed):
            every[i] = x
        found = _composed_backward(form, Rows(*every[2:]), every[:2], wants)
        return tuple(x for x in found if x is not None)

    pull = torch.func.vjp(gradients, *(tensors[i] for i in places))[1]
    found: list[Tensor | None] = [None] * len(tensors)
    for i, x in zip(places, pull(tuple(moves))):
        found[i] = x
    return found


# --------------------------------------------------------------------------- vmap


def _vmapped(
    run: Callable[..., Sequence[Tensor]],
    V: int,
    tensors: Sequence[Any],
    dims: Sequence[int | None],
    first: int,
    folds: bool,
) -> list[Tensor]:
    """V calls as one with V times as many items, or one after the other where weights or offsets
    of each call are its own. tensors: some of (B,H,M,D), then from `first` on the rows."""
    if V == 0:
        raise ValueError("vmap: got a dimension of size 0, expected one call or more")
    shared = dims[first + 4 :]
    if any(dim is not None for dim in shared) or not folds:
        calls = [run(*pick(tensors, dims, i)) for i in range(V)]
        return [torch.stack(list(x)) for x in zip(*calls)]
    item, dim = next((x, dim) for x, dim in zip(tensors, dims) if x is not None)
    B = item.shape[0 if dim is None or dim > 0 else 1]
    folded = list(tensors)
    tables = [i for i in (first + 2, first + 3) if tensors[i] is not None]
    # Both are folded alike: tensors of tables have one shape.
    own_tables = any(dims[i] is not None or tensors[i].ndim == 3 for i in tables)
    for i, (x, dim) in enumerate(zip(tensors, dims)):
        if x is None:
            continue
        if i < first + 2:
            folded[i] = front(V, x, dim).flatten(0, 1)
        elif i in tables and own_tables:
            own = front(V, x, dim)  # (V,M,R/2) or (V,B,M,R/2)
            own = own[:, None].expand(V, B, *own.shape[1:]) if own.ndim == 3 else own
            folded[i] = own.flatten(0, 1)
    return [x.unflatten(0, (V, B)) for x in run(*folded)]


# --------------------------------------------------------------------------- the operators

_TENSORS = ", ".join(f"Tensor? {name}" for name in Rows._fields)
_SCALARS = (
    "str q_norm, str k_norm, float eps, float weight_offset, SymInt rotary_dim, int rotary_start, "
    "bool interleaved, bool deinterleave, bool rope_first"
)


def _split(given: Sequence[Any]) -> tuple[Form, Rows]:
    return Form(*given[_ROWS:]), Rows(*given[:_ROWS])


@torch.library.custom_op(
    add_op_namespace_prefix("norm_rope"),
    mutates_args=(),
    schema=f"({_TENSORS}, {_SCALARS}) -> Tensor[]",
    tags=TAGS,
)
def _operator(*given):
    form, rows = _split(given)
    return list(_forward(form, rows))


@_operator.register_fake
def _(*given):
    return empty_results(_split(given)[1])


@torch.library.custom_op(
    add_op_namespace_prefix("norm_rope_backward"),
    mutates_args=(),
    schema=f"(Tensor? dq_out, Tensor? dk_out, {_TENSORS}, {_SCALARS}, bool q_weight_wanted, "
    "bool k_weight_wanted) -> Tensor[]",
    tags=TAGS,
)
def _backward_operator(*given):
    form, rows = _split(given[2:-2])
    return [x for x in _backward(form, rows, given[:2], given[-2:]) if x is not None]


@_backward_operator.register_fake
def _(*given):
    _, rows = _split(given[2:-2])
    grads, wants = given[:2], given[-2:]
    found = [torch.empty_like(g if x is None else x) for g, x in zip(grads, rows) if g is not None]
    weights = zip((rows.q_weight, rows.k_weight), _present(grads, wants)[2:])
    return found + [torch.empty_like(w) for w, there in weights if there and w is not None]


def _save(ctx, inputs, output) -> None:
    form, rows = _split(inputs)
    ctx.form = form
    ctx.save_for_backward(*_saved(form, rows))
    ctx.set_materialize_grads(False)


def _derivative(ctx, grads):
    grads = list(grads) + [None] * (2 - len(grads))
    none = [None] * (_ROWS + _FORM)
    if all(g is None for g in grads):
        return tuple(none)
    rows, wants = Rows(*ctx.saved_tensors), _wants(ctx.needs_input_grad[:_ROWS])
    found = operator("norm_rope_backward")(*grads, *rows, *ctx.form, *wants)
    return *_as_inputs(_spread(found, _present(grads, wants))), *none[_ROWS:]


def _save_of_backward(ctx, inputs, output) -> None:
    ctx.form, _ = _split(inputs[2:-2])
    ctx.wants = inputs[-2:]
    ctx.save_for_backward(*inputs[: 2 + _ROWS])


def _derivative_of_backward(ctx, moves):
    found = _second(ctx.form, ctx.wants, ctx.saved_tensors, moves)
    return *found, *[None] * (_FORM + 2)


_operator.register_autograd(_derivative, setup_context=_save)
_backward_operator.register_autograd(_derivative_of_backward, setup_context=_save_of_backward)


@_operator.register_vmap
def _(info, in_dims, *given):
    def run(*rows):
        return operator("norm_rope")(*rows, *given[_ROWS:])

    results = _vmapped(run, info.batch_size, given[:_ROWS], in_dims[:_ROWS], 0, True)
    return results, [0] * len(results)


@_backward_operator.register_vmap
def _(info, in_dims, *given):
    n = 2 + _ROWS

    def run(*tensors):
        return operator("norm_rope_backward")(*tensors, *given[n:])

    folds = not any(_present(given[:2], given[-2:])[2:])
    results = _vmapped(run, info.batch_size, given[:n], in_dims[:n], 2, folds)
    return results, [0] * len(results)
