"""Tracing: run a score_mod or mask_mod once on symbols, and keep what it did as a program."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .functions import call
from .program import Program, Value, without_unused
from .symbols import PARTS, Symbol, Trace, indexed, kind_of, refused

SCORE_MOD, MASK_MOD = ("score", "b", "h", "i", "j"), ("b", "h", "i", "j")
GETITEM = torch.Tensor.__getitem__
SETITEM = torch.Tensor.__setitem__
# What these return of a tensor does not depend on its elements.
OF_SHAPES = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
    )
)
# A 0-d tensor that these make inside of the function is a number of the program.
MAKERS = frozenset(("tensor", "scalar_tensor", "full", "zeros", "ones", "as_tensor", "asarray"))


class Traced(NamedTuple):
    """A traced function: what it does, and the tensors that it captures, as `Program.captured`."""

    program: Program
    tensors: tuple[Tensor, ...]


class Fixed(Traced):
    """One that is the same for other elements of these tensors: tracing has read none."""

    __slots__ = ()


class Mod:
    """State a score_mod or a mask_mod that was traced before torch.compile meets it.

    `fastattn.flex_attention` and `attention` trace plain functions inside of compiled code, too.
    Where torch.compile cannot (~ and @ in torch 2.13, for which torch.logical_not and torch.matmul
    can be written; inside of torch.utils.checkpoint; functions that call what it cannot follow), it
    raises or breaks the graph: make a Mod of the function outside, and pass the Mod.

    In compiled code a Mod has the numbers and the objects that the function used when the Mod was
    made; the elements of captured tensors are read at each call. Elsewhere it is its function.

    Args:
        fn: A score_mod (score, b, h, i, j) -> score or a mask_mod (b, h, i, j) -> bool.

    Raises:
        TypeError, NotImplementedError, IndexError: No program has what the function does; the
            message has its line.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 2, 9, 16)
        >>> causal = fastattn.Mod(lambda b, h, i, j: i >= j)
        >>> def model(q, k, v):
        ...     return fastattn.flex_attention(q, k, v, mask_mod=causal)
        >>> torch.compile(model, backend="eager", fullgraph=True)(q, k, v).shape
        torch.Size([1, 2, 9, 16])
    """

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        score = _takes(fn, SCORE_MOD)
        self._name = "score_mod" if score else "mask_mod"
        tracer = trace_score_mod if score else trace_mask_mod
        traced = tracer(fn)
        if traced.tensors and traced.tensors[0].device.type != "cpu":
            traced = tracer(fn, device=traced.tensors[0].device)
        # As text: compiled code may take the numbers of an object for symbols.
        self._text, self._tensors = traced.program.text(), traced.tensors

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.fn(*args)

    def __repr__(self) -> str:
        return f"Mod({self.fn!r})"

    def __deepcopy__(self, memo: Any) -> Mod:
        return self  # a copied function keeps what it captures, too

    def _traced_as(self, name: str) -> Traced:
        if name != self._name:
            raise TypeError(f"{name}: got {self!r} of a {self._name}")
        return Traced(Program.parse(self._text), self._tensors)


def _takes(fn: Callable, names: tuple[str, ...]) -> bool:
    try:
        inspect.signature(fn).bind(*names)
    except (TypeError, ValueError):
        return False
    return True


class _Mode(TorchFunctionMode):
    """Takes torch's functions that get a symbol. All others run as they are."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is GETITEM or func is operator.getitem:
            tensor, key = args[0], args[1]
            if isinstance(tensor, Tensor) and _symbolic(key):
                return indexed(self.trace, tensor, (None,) * tensor.dim(), key)
            self.trace.reads |= any(True for _ in _tensors((key,), {}))
            return func(*args)
        if Symbol in types or _symbolic(args) or _symbolic(kwargs.values()):
            if func is SETITEM:
                raise refused(TypeError, "a score_mod or mask_mod may not change a captured tensor")
            return call(self.trace, func.__name__, args, kwargs)
        if func not in OF_SHAPES and not all(map(self.trace.is_literal, _tensors(args, kwargs))):
            self.trace.reads = True
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dim() == 0:
            self._literal(func, (*args, *kwargs.values()), result)
        return result

    def _literal(self, f: Callable, args: tuple, result: Tensor) -> None:
        trace = self.trace
        tensors = [x for x in args if isinstance(x, Tensor)]
        made = not tensors and getattr(f, "__name__", "") in MAKERS
        derived = bool(tensors) and all(trace.is_literal(x) for x in tensors)
        if (made or derived) and result.device.type == "cpu" and not result.requires_grad:
            trace.literals.append(result)
        else:  # changed in place, by a captured tensor
            trace.literals = [x for x in trace.literals if x is not result]


def _tensors(args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors among the arguments, and in lists and slices among them."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(tuple(x), {})
        elif isinstance(x, slice):
            yield from _tensors((x.start, x.stop, x.step), {})


def _symbolic(args: Any) -> bool:
    """Whether a symbol or a part of a captured tensor is among the arguments."""
    if isinstance(args, (Symbol, *PARTS)):
        return True
    if isinstance(args, Tensor):
        return False
    try:
        return any(
            isinstance(x, (Symbol, *PARTS)) or (isinstance(x, (tuple, list)) and _symbolic(x))
            for x in args
        )
    except TypeError:
        return False


def trace_score_mod(
    fn: Callable | Traced, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Traced:
    """A score_mod (score, b, h, i, j) -> score of 0-d tensors as a program, with the tensors that
    it captures. One that is traced is returned.

    device, dtype: those of symbols, and of the score. Errors have the line of the function:
    TypeError if it branches on an index or a score, takes other arguments, or returns no single
    number; IndexError for too many indices; NotImplementedError for an operator of no program.
    """
    if isinstance(fn, Traced):
        return fn
    if isinstance(fn, Mod) and torch.compiler.is_dynamo_compiling():
        return fn._traced_as("score_mod")
    trace, result = _run(fn, SCORE_MOD, device, dtype)
    return _traced(trace, trace.cast(_returned(trace, fn, result), "float"))


def trace_mask_mod(fn: Callable | Traced, *, device: torch.device | str = "cpu") -> Traced:
    """A mask_mod (b, h, i, j) -> bool, True where a row sees a key, likewise. TypeError, too, if it
    returns no bool."""
    if isinstance(fn, Traced):
        return fn
    if isinstance(fn, Mod) and torch.compiler.is_dynamo_compiling():
        return fn._traced_as("mask_mod")
    trace, result = _run(fn, MASK_MOD, device, torch.float32)
    symbol = _returned(trace, fn, result)
    if symbol.kind != "bool":
        raise TypeError(
            f"{_where(fn)}: a mask_mod returns a bool (True: seen), got a value of kind "
            f"{symbol.kind}: write a comparison, such as (x != 0)"
        )
    return _traced(trace, symbol)


def _run(fn: Callable, names: tuple[str, ...], device: Any, dtype: Any) -> tuple[Trace, object]:
    trace = Trace(torch.device(device), dtype)
    inputs = [trace.emit(name) for name in names]
    with _Mode(trace):
        try:
            return trace, fn(*inputs)
        except TypeError as error:
            _check_arguments(fn, names, error)
            raise


def need_arguments(score_mod: Callable | None, mask_mod: Callable | None) -> None:
    """Raise TypeError, as tracing does, for a function that takes other arguments: before it is
    part of another function, which takes these."""
    for fn, names in ((score_mod, SCORE_MOD), (mask_mod, MASK_MOD)):
        if fn is not None:
            _check_arguments(fn, names)


def _check_arguments(fn: Callable, names: tuple[str, ...], error: TypeError | None = None) -> None:
    """Raise with a sentence if the function does not take `names`."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError:
        what = "score_mod" if names[0] == "score" else "mask_mod"
        wanted = ", ".join(names)
        raise TypeError(
            f"{_where(fn)}: a {what} takes ({wanted}), got a function of {signature}"
        ) from error


def _where(fn: Callable) -> str:
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)


def _returned(trace: Trace, fn: Callable, result: object) -> Symbol:
    """The symbol of what the function returned."""
    if isinstance(result, (Symbol, bool, int, float)):
        return trace.lift(result)
    if isinstance(result, Tensor) and result.dim() == 0:
        return trace.load(result)
    got = type(result).__name__
    if isinstance(result, Tensor):
        got = f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, PARTS):
        got = result.described()
    raise TypeError(
        f"{_where(fn)}: a score_mod or mask_mod returns one value for one pair of a row and a key, "
        f"got {got}: return a 0-d result, and index captured tensors by b, h, i or j in every "
        "dimension"
    )


def _traced(trace: Trace, result: Symbol) -> Traced:
    captured = tuple((kind_of(x.dtype), x.dim()) for x in trace.tensors)
    program = trace.builder.program(result.at, captured)
    kind = Traced if trace.reads else Fixed
    return kind(*without_unused(program, tuple(trace.tensors)))


def merge(
    score: Traced | None, mask: Traced | None
) -> tuple[Program | None, Program | None, tuple[Tensor, ...]]:
    """The score_mod's program, the mask_mod's, and one list of captured tensors, which both have as
    their `captured`. A tensor that both capture is there once: the same object, or the same part of
    a storage where neither requires a gradient."""
    tensors: list[Tensor] = []
    numbers: list[list[int]] = []
    for traced in (score, mask):
        mine = []
        for x in traced.tensors if traced else ():
            at = next((at for at, y in enumerate(tensors) if _is_same(x, y)), len(tensors))
            if at == len(tensors):
                tensors.append(x)
            mine.append(at)
        numbers.append(mine)
    captured = tuple((kind_of(x.dtype), x.dim()) for x in tensors)
    programs = [
        traced and Program(_renamed(traced.program.values, mine), captured)
        for traced, mine in zip((score, mask), numbers)
    ]
    return programs[0], programs[1], tuple(tensors)


def _renamed(values: Sequence[Value], numbers: list[int]) -> tuple[Value, ...]:
    return tuple(x if x.tensor is None else x._replace(tensor=numbers[x.tensor]) for x in values)


def _is_same(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    if torch.compiler.is_compiling():
        return False
    if x.requires_grad or y.requires_grad or x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.device != y.device or x.stride() != y.stride():
        return False
    try:
        return x.data_ptr() == y.data_ptr() != 0
    except RuntimeError:  # a tensor without data, or one that torch wraps
        return False
