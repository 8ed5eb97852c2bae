"""profile: what the attention of a model costs, what its masks really are, what it could gain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import api
from ..backends.base import choose
from ..call.validation import describe
from ..dispatch import dispatcher
from ..dropin import patching
from .call_record import CallRecord, State
from .capture import converted
from .recorder import Recorder, clock
from .report import Measured, ModelTimes, Profile
from .restore_state import Inputs, need_initialised, tensors_in, unchanged

# A budget for the runs of the whole model, and as much again for its calls. It is exceeded if the
# smallest number of runs takes longer.
SECONDS = 10.0
MOST = 12  # kinds of calls that are timed, the most expensive ones


def profile(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Profile:
    """Run a model a few times, and report what its attention costs and what fastattn would gain.

    In training mode, with gradients enabled, forward and backward are timed; otherwise forward
    alone. Put `torch.no_grad()` or autocast around this call as around the model. Compiled code
    runs eagerly.

    It records calls of `torch.nn.functional.scaled_dot_product_attention`, of nn.MultiheadAttention
    with weights, of the inference paths of nn.MultiheadAttention and nn.TransformerEncoderLayer,
    and of fastattn. It does not record matrices that a model multiplies itself, traced or scripted
    code, nor names that `from torch.nn.functional import ...` bound.

    The whole model is timed as it is, and under `fastattn.sdpa()` with `fastattn.convert`. Each
    kind of call is also timed as `fastattn.attention` with arguments in place of its mask, if the
    mask's structure is known.

    The model's mode, gradients, buffers, hooks and classes, torch's functions and generators, and
    the input tensors are as before, also after an exception.

    Args:
        model: A torch.nn.Module, or a method of one (`model.generate`).
        *inputs: The model's arguments.
        **kwargs: The model's arguments by name.

    Returns:
        A Profile: `str()` of it is the text; it has `json()` and `plot(path)`.

    Raises:
        ValueError: The model has a lazy module that has not run yet, so its class would change.
        Exception: Any exception of the model.

    Example:
        >>> import torch
        >>> import fastattn
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> report = fastattn.profile(model, torch.randn(1, 16, 32))
        >>> report.step
        'forward and backward'
        >>> [kind.call.path for kind in report.calls]
        ['self_attn']
    """
    target = getattr(model, "_orig_mod", model)  # inside a compiled module
    owner = target if isinstance(target, nn.Module) else getattr(model, "__self__", None)
    owner = owner if isinstance(owner, nn.Module) else None
    need_initialised(owner)
    observer = Recorder(owner)
    with unchanged(owner), Inputs(inputs, kwargs) as given, _eager():
        run = _Runner(target, owner, given)
        with observer.watching():
            run()
        given.look()
        calls = sorted(observer.calls.values(), key=lambda call: -call.seconds)
        rounds = _whole(run, owner)
        measured = [_measured(call) for call in calls[:MOST]]
        measured += [Measured(call) for call in calls[MOST:]]
    called = type(target).__name__ if target is owner else getattr(target, "__qualname__", "model")
    library = any(x.__name__ == "PreTrainedModel" for x in type(owner).__mro__)
    step = "forward and backward" if run.backward else "forward"
    return Profile(called, library, step, torch.get_num_threads(), rounds, measured)


@contextmanager
def _eager() -> Generator[None]:
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


class _Runner:
    """Runs the model again; in training also backward, through all of its outputs."""

    def __init__(self, target: Callable[..., Any], owner: nn.Module | None, given: Inputs):
        self.target, self.owner, self.given = target, owner, given
        self.leaves = [] if owner is None else [x for x in owner.parameters() if x.requires_grad]
        self.training = owner is not None and owner.training and torch.is_grad_enabled()
        name = getattr(target, "__name__", "")
        # A method is looked up at each run: `convert` changes the class that has it.
        self.method = name if target is not owner and getattr(owner, name, None) == target else ""
        self.backward = False

    def __call__(self) -> None:
        args, named = self.given.fresh()
        out = (getattr(self.owner, self.method) if self.method else self.target)(*args, **named)
        if not (self.training and self.leaves):
            return
        out = [x for x in tensors_in(out) if x.requires_grad]
        if out:
            self.backward = True
            ones = [torch.ones_like(x) for x in out]
            torch.autograd.grad(out, self.leaves, ones, allow_unused=True)


# --------------------------------------------------------------------------------- the whole model


@contextmanager
def _replaced(owner: nn.Module | None) -> Generator[tuple[str, ...]]:
    """In the block, the model runs on fastattn: torch's function is patched, modules converted."""
    with patching.sdpa(), nullcontext(()) if owner is None else converted(owner) as swapped:
        yield swapped


def _whole(run: Callable[[], None], owner: nn.Module | None) -> list[ModelTimes]:
    """Time the model as it is, and on fastattn, in turn. The first round is a warm-up."""

    def timed() -> float:
        began = clock()
        run()
        return clock() - began

    def both() -> ModelTimes:
        now = timed()
        with _replaced(owner) as swapped:
            return ModelTimes(now, timed(), bool(swapped))

    first = both()
    rounds = int(SECONDS / (first.now + first.ours + 1e-9))
    return [both() for _ in range(max(3, min(40, rounds)))]


# --------------------------------------------------------------------------------- one kind of call


def _measured(call: CallRecord) -> Measured:
    """Time each way to run a call, and measure its memory, in the state that the call ran in."""
    measured = Measured(call)
    outside = State.of(call.state.device)
    with patching.sdpa(), call.state.entered():
        ways: dict[str, Callable[[], Any]] = {}
        ways["now"] = _differentiated(call, call.run_original, outside)
        if call.not_converted_because:
            measured.ours_runs = f"torch: {call.not_converted_because}"
        if call.ours is not None:
            measured.ours_runs = _backend(call)
            ways["sdpa"] = _differentiated(call, call.ours, outside)
        if structured := _structured(call):
            ways["shown"] = _differentiated(call, structured, outside)
        for name, way in list(ways.items()):
            try:
                measured.bytes[name] = _peak_bytes(way)
            except (RuntimeError, ValueError, TypeError) as error:
                measured.trouble[name] = str(error).partition("\n")[0]
                del ways[name]
        measured.seconds = _seconds(ways)
    return measured


def _differentiated(call: CallRecord, way: Callable[[], Any], outside: State) -> Callable[[], Any]:
    """`way` with backward, if the call had one; that runs in `outside`, the state of the model."""
    if not (call.backward and call.leaves):
        return way

    def both():
        out = way()
        out = out[0] if isinstance(out, tuple) else out
        with outside.entered():
            return torch.autograd.grad(out, call.leaves, torch.ones_like(out), allow_unused=True)

    return both


def _structured(call: CallRecord) -> Callable[[], Any] | None:
    """The call as `attention` with arguments in place of the mask, if its structure is known."""
    a = call.arguments
    structure = call.mask_structure
    if not a or structure is None or structure.arguments is None or a["is_causal"]:
        return None
    if a["query"].ndim != 4 or a["query"].shape[0] != a["key"].shape[0]:
        return None
    given = {x: y for x, y in structure.arguments.items() if x != "key_lengths"}
    if (lengths := structure.arguments.get("key_lengths")) is not None:
        given["key_lengths"] = lengths.expand(a["query"].shape[0]).contiguous()
    given |= dict(dropout_p=a["dropout_p"], scale=a.get("scale"))
    return lambda: api.attention(a["query"], a["key"], a["value"], **given)


def _backend(call: CallRecord) -> str:
    """The backend that runs the call in a patched model, or why torch still runs it."""
    ran = []

    def note(run, op, t, o):
        ran.append(choose(describe(t, o), o.backend, t.q.device).name)
        return run(op, t, o)

    try:
        assert call.ours is not None
        with dispatcher.observed(note):
            call.ours()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"raises: {error}".partition("\n")[0]
    if ran:
        return f"fastattn {ran[-1]}"
    a = call.arguments
    if not a:
        return "torch"
    why = patching.why_torchs(a["query"], a["key"], a["value"], a["attn_mask"])
    return f"torch: {why or _refusal(a)}"


def _refusal(arguments: dict[str, Any]) -> str:
    try:
        patching._ours(**arguments)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).partition("\n")[0]
    return "fastattn was not called"


def _seconds(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The shortest time of each way, in interleaved rounds."""
    best = dict.fromkeys(ways, float("inf"))
    began, rounds = clock(), 0
    while rounds < 2 or (rounds < 50 and clock() - began < SECONDS / MOST):
        for name, way in ways.items():
            start = clock()
            way()
            best[name] = min(best[name], clock() - start)
        rounds += 1
    return best


class _Storages(TorchDispatchMode):
    """Finds the peak bytes of tensors made in the block. Memory that kernels allocate internally is
    not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _storage(x) not in given | self.alive.keys():
                storage = x.untyped_storage()
                self.alive[_storage(x)] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {at: kept for at, kept in self.alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _peak_bytes(way: Callable[[], Any]) -> int:
    with _Storages() as storages:
        way()
    return storages.most
