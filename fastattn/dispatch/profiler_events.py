"""Events of torch's profilers for kernels that run without the dispatcher.

The dispatcher records an event for each operator that it calls. A kernel that is called directly
records the event of its operator itself: the same name, the same arguments, once.

A profiler that counts FLOPs (`with_flops=True`) knows only some of aten's operators by name: it
counts none here. torch.utils.flop_counter.FlopCounterMode counts all (see `flops`). With
`with_stack=True` a profiler records calls of Python functions as events, too: the time of a kernel
is then the self time of the Python function, inside the kernel's event, that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from ..namespace import add_op_namespace_prefix
from .operation import Operation

_records_thread = torch.autograd._profiler_enabled
_profiler = torch.autograd.profiler


def recording() -> bool:
    """True if a running profiler may record this thread. The check takes 60 ns.

    A profiler of all threads (`profile_all_threads`) sets a flag of the process, not of a thread.
    """
    return _records_thread() or _profiler._is_profiler_enabled


def recorded(op: Operation, suffix: str, run: Callable, given: tuple, *arguments: Iterable) -> Any:
    """Run `run(*given)` as an event of the operator. arguments: the operator's, in parts."""
    every = [x for part in arguments for x in part]
    with _RecordFunctionFast(add_op_namespace_prefix(op.name + suffix), every):
        return run(*given)
