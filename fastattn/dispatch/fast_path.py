"""The fast path: a call on plain memory as one call of the C extension, and its gradients as one.

The steps of `dispatcher.call` are some dozens of calls of Python and of torch. They take as long as
the kernel of a tiny call. csrc/python/fast_path.h makes the same checks, allocates the results and
runs the kernel. It takes a call if

- its tensors are in plain memory of the CPU, none of another class than Tensor and Parameter, and
  its other arguments are numbers, bools, strings, None, or tuples of these;
- none of the subsystems of torch that `dispatcher.call` distinguishes is active (`_STATES`,
  `_GLOBALS`), nor autocast, a profiler or an observer;
- the CPU kernels run calls of this kind on the caller's memory, and gradients, if they are wanted,
  are those of q, k and v alone. A plan says so; it is made once for each kind.

Every other call takes the general path, which has the same results and raises the errors. Without
the extension all do.

With gradients the path computes the results, and then has autograd record them by the Function of
`dispatcher`, which is Python: an extension for the stable ABI cannot make a node of its own.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import functional as F

from ..backends.native import libraries, marshalling
from ..call.spec import ARGUMENTS, PUBLIC, Options, Tensors, changed
from . import context_parallel
from .dispatcher import _observers, record
from .operation import ATTENTION, plan
from .torch_function import SUBSYSTEMS


class Prepared(NamedTuple):
    """A call in the form of the lower layers, and how it returns its results."""

    t: Tensors
    o: Options
    out: Callable[[Tensor], Tensor] | None = None  # a view; None: as it is
    lse: Callable[[Tensor], Tensor] | None = None  # of the normaliser; None: it is not returned
    weights: Options | None = None  # of the weights, which are returned, too; None: they are not


# Makes the call of the arguments of `attend` after its path; None if that call takes the general
# path. It has no effects: it draws no numbers.
Prepare = Callable[..., Prepared | None]
Path = tuple[Any, ...]  # `Path` in fast_path.h

# Functions, each with what it returns while its subsystem is inactive. The last is a setting of
# sdpa_kernel(...), on which the memory layout of the results of torch's functions depends.
_STATES: tuple[Any, ...] = (
    *itertools.chain.from_iterable(SUBSYSTEMS),
    *(torch.autograd._profiler_enabled, False),
    *(_observers.__len__, 0),
    *(torch._C._get_flash_sdp_enabled, True),
)
# Module globals: dict, name, inactive value, and None or a function that decides on other values.
_GLOBALS: tuple[Any, ...] = (
    *(vars(forward_ad), "_current_level", -1, None),
    *(vars(profiler), "_is_profiler_enabled", False, None),
    *(vars(F), "scaled_dot_product_attention", context_parallel.TORCHS, context_parallel.is_inside),
)


def path(prepare: Prepare, names: Iterable[str] = ()) -> Path:
    """The first argument of `attend`. prepare: of the function that calls `attend`; names: of the
    arguments that it gives between v and the dict."""
    names = "q", "k", "v", *names

    def make_plan(*arguments: Any) -> Any:
        *by_position, named = arguments
        prepared = prepare(*arguments)
        if prepared is None:
            return None
        given = dict(zip(names, by_position)) | named
        return _plan(prepared, {name: x for name, x in given.items() if isinstance(x, Tensor)})

    active = _STATES, _GLOBALS, torch.is_grad_enabled, libraries.get_num_threads
    return make_plan, *active, _NUMBERS, record


_NUMBERS = {name: at for at, name in enumerate(PUBLIC)}


def _plan(prepared: Prepared, given: Mapping[str, Tensor]) -> Any:
    """What `read` in fast_path.h reads, or None if the general path has to run these calls. given:
    the caller's tensors, in the order in which `attend` gets them."""
    t, o, view, lse, weights = prepared
    tensors = {name: x for name, x in zip(Tensors._fields, t) if x is not None}
    # No tensor is a number of the plan, and none is made anew. A view of a tensor of the caller
    # lies where every tensor of that layout has such a view.
    if given.keys() != tensors.keys() or not all(_views(x, given[y]) for y, x in tensors.items()):
        return None
    kind = marshalling.kind(t)
    spec, backend = planned = plan(t, o, kind)
    of_backend = getattr(backend, "fast_plan", None)
    fast = None if of_backend is None else of_backend(spec, t)
    if fast is None:
        return None
    out = fast.out if view is None else view(fast.out)
    if not _views(out, fast.out) or (out.data_ptr(), out.numel()) != (
        fast.out.data_ptr(),
        fast.out.numel(),
    ):
        return None
    gradient = None
    if o.grad:
        varying = {name for name, x in tensors.items() if x.requires_grad}
        as_given = all(x is given[name] for name, x in tensors.items())
        if view is not None or not as_given or not varying <= fast.grads.keys():
            return None
    if o.grad and fast.grads:
        names = list(given)
        inputs = Tensors._fields[: spec.fields_to_last_given]
        order = (names.index(name) if name in given else -1 for name in inputs)
        grads = tuple(map(_layout, fast.grads.values()))
        recorded = ATTENTION, o, kind, planned
        gradient = fast.backward, _packed("i", order), grads, out, fast.normaliser, recorded
    places = (
        (
            libraries.offset(ARGUMENTS[name].field),
            tensors[name].data_ptr() - x.data_ptr(),
            name in fast.widened,
        )
        for name, x in given.items()
    )
    if weights is not None:
        weights = _weights_plan(changed(t, v=None, normaliser=fast.normaliser), weights)
        if weights is None or o.grad:
            return None
    normaliser = fast.normaliser.nbytes, *_layout(fast.normaliser), fast.acc or None
    call = fast.call, fast.run, fast.brief, _packed("q", itertools.chain.from_iterable(places))
    return *call, _layout(out), normaliser, lse, weights, gradient


def _weights_plan(t: Tensors, o: Options) -> tuple[bytes, Any] | None:
    """What `read_weights` in fast_path.h reads."""
    spec, backend = plan(t, o, marshalling.kind(t))
    of_backend = getattr(backend, "fast_weights", None)
    return None if of_backend is None else of_backend(spec, t)


def _views(x: Tensor, y: Tensor) -> bool:
    """True if x lies in y's memory."""
    return x.dtype == y.dtype and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(x.shape), x.stride()


def _packed(kind: str, numbers: Iterable[int]) -> bytes:
    return array.array(kind, numbers).tobytes()


def as_it_is(normaliser: Tensor) -> Tensor:
    return normaliser


attend: Callable[..., Any] = marshalling.attend
differentiate: Callable[..., Any] = marshalling.differentiate
