"""The fast path: a call on plain memory without a gradient, as one call of the C extension.

The steps of `dispatcher.call` are some dozens of calls of Python and of torch. They take as long as
the kernel of a tiny call. csrc/python/fast_path.h makes the same checks, allocates the result and
runs the kernel. It takes a call if

- q, k and v are tensors of four dimensions in plain memory of the CPU, none of another class than
  Tensor and Parameter, and no other arguments but causal and scale differ from their defaults;
- no gradient is wanted;
- none of the subsystems of torch that `dispatcher.call` distinguishes is active (`_STATES`,
  `_GLOBALS`), nor autocast, a profiler or an observer;
- the CPU kernels run calls of this kind. A plan says so; it is made once for each kind.

Every other call takes the general path, which has the same results and raises the errors. Without
the extension all do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import functional as F

from ..backends.native import marshalling
from ..call.spec import Options, Tensors
from . import context_parallel
from .dispatcher import _observers
from .operation import plan
from .torch_function import SUBSYSTEMS

Prepared = tuple[Tensors, Options]
# (q, k, v, causal, scale) -> what `api.prepare` returns, or None to take the general path.
Prepare = Callable[[Tensor, Tensor, Tensor, Any, Any], Prepared | None]
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


def path(prepare: Prepare, defaults: Mapping[str, Any] | None = None) -> Path:
    """The first argument of `attend`. prepare: of the function that calls `attend`; defaults: of
    the arguments that it gives to `attend` as a dict."""

    def make_plan(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Any) -> Any:
        prepared = prepare(q, k, v, causal, scale)
        return None if prepared is None else _plan(*prepared)

    return make_plan, _STATES, _GLOBALS, torch.is_grad_enabled, torch.get_num_threads, defaults


def _plan(t: Tensors, o: Options) -> Any:
    spec, backend = plan(t, o, marshalling.kind(t))
    of_backend = getattr(backend, "fast_plan", None)
    return None if of_backend is None or o.grad else of_backend(spec, t)


attend: Callable[..., Tensor | None] = marshalling.attend
