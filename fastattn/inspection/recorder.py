"""Replace attention functions while a model runs, and collect the records of their calls.

`capture` converts the arguments of a call into a record, which `call_record` defines.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ..dispatch import dispatcher
from .call_record import SDPA, CallRecord
from .capture import CallCapture, wants_weights, with_original_restored


class _Here(threading.local):
    """The state of one thread, because models may call from several."""

    def __init__(self) -> None:
        self.inside = False  # True during a call that is recorded
        self.modules: list[nn.Module] = []


class Recorder:
    def __init__(self, owner: nn.Module | None):
        self.owner = owner
        self.names: dict[int, str] = (
            {} if owner is None else {id(m): n for n, m in owner.named_modules()}
        )
        self.calls: dict[tuple[Any, ...], CallRecord] = {}
        self._here, self._lock = _Here(), threading.Lock()
        self._last: dict[tuple, int] = {}  # number of keys in the latest call by module and kind
        self._growing: set[tuple] = set()

    @contextmanager
    def watching(self) -> Generator[None]:
        capture = CallCapture(self._modules)
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            for holder, name, make_record in (
                (F, SDPA, capture.sdpa),
                (F, "multi_head_attention_forward", capture.weights),
                (torch, "_native_multi_head_attention", capture.multihead),
                (torch, "_transformer_encoder_layer_fwd", capture.encoder_layer),
            ):
                original = getattr(holder, name)
                undo.callback(setattr, holder, name, original)
                setattr(holder, name, self._stand_in(original, name, make_record))
            undo.enter_context(dispatcher.observed(self._own(capture)))
            yield

    def _enter(self, module: nn.Module, args) -> None:
        self._here.modules.append(module)

    def _leave(self, module: nn.Module, args, out) -> None:
        modules = self._here.modules
        if any(x is module for x in modules):  # else it was entered before the hooks were set
            while modules.pop() is not module:
                pass

    def _modules(self) -> Iterator[nn.Module]:
        yield from reversed(self._here.modules)
        if self.owner is not None:
            yield from self.owner.modules()

    def _stand_in(self, original: Callable, name: str, make_record: Callable) -> Callable:
        run = with_original_restored(original) if name == SDPA else original
        wanted = wants_weights if name == "multi_head_attention_forward" else None

        def stand_in(*args, **kwargs):
            if wanted is not None and not wanted(*args, **kwargs):
                return run(*args, **kwargs)
            return self._run_and_record(
                run, functools.partial(make_record, original), *args, **kwargs
            )

        return stand_in

    def _own(self, capture: CallCapture) -> dispatcher.Observer:
        """The observer of fastattn's own calls."""

        def observe(run, *call):
            return self._run_and_record(run, functools.partial(capture.own, run), *call)

        return observe

    def _run_and_record(
        self, run: Callable, make_record: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `run(*args, **kwargs)` and record it as the `CallRecord` that `make_record` makes. A
        call inside a call that is recorded is run, but not recorded."""
        here = self._here
        if here.inside:
            return run(*args, **kwargs)
        here.inside = True
        try:
            began = clock()
            out = run(*args, **kwargs)
            seconds = clock() - began
            call = make_record(*args, **kwargs)
        finally:
            here.inside = False
        with self._lock:
            call = self._add(call, seconds)
        _note_backward(call, out)
        return out

    def _add(self, call: CallRecord, seconds: float) -> CallRecord:
        """Add a call to the calls of its kind, and return the one that represents them."""
        modules = self._here.modules
        module = call.module or (modules[-1] if modules else self.owner)
        path = "" if module is None else self.names.get(id(module), type(module).__name__)
        call.path = re.sub(r"(?<![a-zA-Z\d])\d+", "*", path)  # but attn1 and attn2 differ
        call.of_multihead, call.fewest = isinstance(module, nn.MultiheadAttention), call.k[-2]
        kind: tuple = call.function, call.path, call.q, call.dtype, call.options, call.runs
        # Calls that backward recomputes are kept apart from those that it differentiates.
        kind += bool(call.leaves), torch._C._current_graph_task_id() != -1
        key = *kind, call.k, call.mask, call.mask_structure and call.mask_structure.what
        self._watch_growth(call, kind, (id(module), *kind))
        grows = kind in self._growing
        key = kind if grows else key
        kept = self.calls.get(key)
        if kept is None or (grows and call.k[-2] >= kept.k[-2]):  # the longest represents all
            self.calls[key] = call
            _inherit(call, kept)
        else:
            kept.fewest = min(call.fewest, kept.fewest)
        self.calls[key].where[path] += 1
        self.calls[key].seconds += seconds
        return self.calls[key]

    def _watch_growth(self, call: CallRecord, kind: tuple, by: tuple) -> None:
        """Find kinds of calls with growing keys: a call has one row, or the module's next call has
        one key more (grouped heads may be passed as rows)."""
        last, self._last[by] = self._last.get(by), call.k[-2]
        if kind in self._growing or not (call.q[-2] == 1 or last == call.k[-2] - 1):
            return
        self._growing.add(kind)
        before = [x for x, y in self.calls.items() if x[: len(kind)] == kind and y.k[-2] == last]
        for key in before:
            kept = self.calls.pop(key)
            _inherit(kept, self.calls.get(kind))
            self.calls[kind] = kept


def _inherit(call: CallRecord, kept: CallRecord | None) -> None:
    if kept is not None:
        call.where.update(kept.where)
        call.seconds += kept.seconds
        call.fewest = min(call.fewest, kept.fewest)
        call.backward |= kept.backward


def _note_backward(call: CallRecord, out) -> None:
    out = out[0] if isinstance(out, tuple) else out
    if isinstance(out, Tensor) and out.requires_grad and not out.is_nested:

        def note(_) -> None:
            call.backward = True

        out.register_hook(note)


def clock() -> float:
    """The time in seconds, after the GPU has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
