"""Events of torch's profilers for kernels that run without the dispatcher.

The dispatcher records an event for each operator that it calls. A kernel that is called directly
records the event of its operator itself: the same name, the same arguments, once.

A profiler that counts FLOPs (`with_flops=True`) knows some of aten's operators by name and no
others: it counts none here. torch.utils.flop_counter.FlopCounterMode counts all (see `flops`). With
`with_stack=True` a profiler records calls of Python functions as events, too: the time of a kernel
is then the self time of the function in it that runs the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from .operation import Operation

_records_thread = torch.autograd._profiler_enabled
_profiler = torch.autograd.profiler


def recording() -> bool:
    """Does a profiler run that may record what this thread does? It takes 60 ns to ask.

    A profiler of all threads (`profile_all_threads`) is known to no thread by itself.
    """
    return _records_thread() or _profiler._is_profiler_enabled


def recorded(op: Operation, suffix: str, run: Callable, given: tuple, *arguments: Iterable) -> Any:
    """`run(*given)` as an event. arguments: those of the operator, in parts."""
    every = [x for part in arguments for x in part]
    with _RecordFunctionFast(f"fastattn::{op.name}{suffix}", every):
        return run(*given)
