"""Trace a score_mod or mask_mod to a program, by calling it once with symbols.

A symbol stands for the score or an index. Its operators, its methods and torch's functions of it
append values to the program; a mode of `__torch_function__` sees captured tensors that a symbol
indexes. Tracing takes microseconds, so nothing is cached.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .operators import OPERATORS, canonical, kind_of
from .program import BOOL, FLOAT, INPUTS, INT, Builder, Program, Value

HERE, TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
DTYPES = {FLOAT: torch.float32, INT: torch.int32, BOOL: torch.bool}
INDICES = ("b", "h", "i", "j")


class Traced(NamedTuple):
    """A program, and the tensors that its function captured."""

    program: Program
    tensors: tuple[Tensor, ...]


def trace_score_mod(function: Callable[..., Any], device: torch.device | None = None) -> Traced:
    """Trace score_mod(score, b, h, i, j) -> score.

    Args:
        function: A function of one number for each argument. It may capture tensors, which it
            indexes by b, h, i, j and by expressions of them.
        device: What the arguments say of their device.

    Returns:
        The program and the captured tensors.

    Raises:
        TypeError: It branches on an argument, takes other arguments, or returns no number.
        NotImplementedError: It uses an operation that programs do not have.
        IndexError: A constant index is out of range.
    """
    return _trace(function, ("score", *INDICES), FLOAT, device)


def trace_mask_mod(function: Callable[..., Any], device: torch.device | None = None) -> Traced:
    """Trace mask_mod(b, h, i, j) -> bool, True where row i may attend to key j; see
    `trace_score_mod`."""
    return _trace(function, INDICES, BOOL, device)


def merge(*all_traced: Traced | None) -> tuple[list[Program | None], tuple[Tensor, ...]]:
    """Give several programs one list of captured tensors, each tensor once."""
    tensors: list[Tensor] = []
    numbered = []
    for traced in all_traced:
        numbers = {}
        for old, x in enumerate(traced.tensors if traced else ()):
            same = [at for at, y in enumerate(tensors) if y is x]
            numbers[old] = same[0] if same else len(tensors)
            if not same:
                tensors.append(x)
        numbered.append(numbers)
    captured = tuple((kind_of(x), x.ndim) for x in tensors)
    programs = [
        traced and Program(tuple(_renumbered(v, numbers) for v in traced.program.values), captured)
        for traced, numbers in zip(all_traced, numbered)
    ]
    return programs, tuple(tensors)


def _renumbered(value: Value, numbers: dict[int, int]) -> Value:
    return value if value.tensor is None else value._replace(tensor=numbers[value.tensor])


def _trace(
    function: Callable[..., Any], inputs: tuple[str, ...], kind: str, device: torch.device | None
) -> Traced:
    what = "score_mod" if kind == FLOAT else "mask_mod"
    expected = f"expected {what}({', '.join(inputs)})"
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{what}: got a call inside of torch.compile, expected one outside: put "
            "torch.compiler.disable around it"
        )
    try:
        inspect.signature(function).bind(*inputs)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: got {function!r}, {expected}: {error}") from None
    trace = Trace(what, device or torch.device("cpu"))
    symbols = [Symbol(trace, trace.builder.add(Value(x, (), INPUTS[x]))) for x in inputs]
    with _Mode(trace):
        result = function(*symbols)
    at = trace.result(result, kind)
    captured = tuple((kind_of(x), x.ndim) for x in trace.tensors)
    return Traced(trace.builder.program(at, captured), tuple(trace.tensors))


class Trace:
    """One tracing: the values so far, and the captured tensors."""

    def __init__(self, what: str, device: torch.device):
        self.what, self.device = what, device
        self.builder = Builder()
        self.tensors: list[Tensor] = []

    def fail(self, error: type[Exception], said: str) -> NoReturn:
        """Raise an error that names the line of the user's code."""
        raise error(f"{self.what}{_place()}: {said}")

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Append torch's function or method of this name. It has a symbol among its arguments."""
        name, swapped = canonical(name)
        if name == "getitem":
            return self.index(*args)
        operator = OPERATORS.get(name)
        if name in ("item", "tolist", "numpy"):
            self.fail(TypeError, f"got {name}(), expected arithmetic: no value is known yet")
        if name.endswith("_"):
            self.fail(NotImplementedError, f"got {name}, which works in place; expected x = ...")
        if operator is None:
            self.fail(
                NotImplementedError,
                f"got {name}, which programs do not have; expected arithmetic, comparisons, logic, "
                f"torch.where, or one of {', '.join(sorted(OPERATORS))}",
            )
        if swapped:
            args = (args[1], args[0])
        try:
            found = operator(self, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next is None:  # its arguments
                self.fail(TypeError, f"{name} got arguments that programs do not have: {error}")
            raise
        return Symbol(self, found) if isinstance(found, int) else found

    def value(self, x: Any) -> int:
        """The number of an operand's value: a symbol, a Python number or a tensor of one number."""
        if isinstance(x, Symbol):
            return x._at
        if isinstance(x, Rows):
            left = x._indices.count(None)
            self.fail(TypeError, f"got a captured tensor with {left} dimensions left to index")
        if isinstance(x, Tensor):
            if x.ndim:
                self.fail(
                    TypeError,
                    f"got a tensor of shape {tuple(x.shape)} as an operand, expected one number: "
                    "index it by b, h, i and j",
                )
            return self.load(x, ())
        if isinstance(x, (bool, int, float)):
            return self.builder.constant(x)
        if hasattr(x, "item") and not getattr(x, "shape", ()):  # a numpy scalar
            return self.builder.constant(x.item())
        self.fail(TypeError, f"got {type(x).__name__} as an operand, expected a number")

    def kind(self, at: int) -> str:
        return self.builder.values[at].kind

    def load(self, x: Tensor, indices: tuple[int, ...]) -> int:
        if x.is_complex() or x.layout != torch.strided:
            self.fail(TypeError, f"got a captured tensor of {x.dtype}, expected dense real numbers")
        same = [at for at, y in enumerate(self.tensors) if y is x]
        if not same:
            self.tensors.append(x)
        number = same[0] if same else len(self.tensors) - 1
        return self.builder.add(Value("load", indices, kind_of(x), tensor=number))

    def index(self, x: Any, index: Any) -> Any:
        """Index a captured tensor, or what is left of one."""
        if isinstance(x, Symbol):
            self.fail(TypeError, "got an index of a number; only captured tensors have indices")
        rows = x if isinstance(x, Rows) else Rows(self, x, (None,) * x.ndim)
        items = list(index) if isinstance(index, tuple) else [index]
        free = [at for at, known in enumerate(rows._indices) if known is None]
        if Ellipsis in [item for item in items if not isinstance(item, (Symbol, Tensor))]:
            at = next(at for at, item in enumerate(items) if item is Ellipsis)
            items[at : at + 1] = [slice(None)] * (len(free) - len(items) + 1)
        if len(items) > len(free):
            shape = tuple(rows._tensor.shape)
            self.fail(IndexError, f"got {len(items)} indices for {len(free)} dimensions of {shape}")
        indices = list(rows._indices)
        for dim, item in zip(free, items):
            if isinstance(item, slice) and item == slice(None):
                continue
            indices[dim] = self._index(item, rows._tensor.shape[dim])
        if None in indices:
            return Rows(self, rows._tensor, tuple(indices))
        return Symbol(self, self.load(rows._tensor, tuple(x for x in indices if x is not None)))

    def _index(self, item: Any, size: int) -> int:
        if isinstance(item, (bool, slice)) or item is None:
            self.fail(TypeError, f"got the index {item!r}, expected a whole number or ':'")
        if isinstance(item, int):
            if not -size <= item < size:
                self.fail(IndexError, f"got the index {item}, expected one in [{-size}, {size})")
            item %= size
        at = self.value(item)
        if self.kind(at) != INT:
            self.fail(TypeError, f"got an index of kind {self.kind(at)}, expected a whole number")
        return at

    def result(self, x: Any, kind: str) -> int:
        if x is None:
            self.fail(TypeError, f"got None as its result, expected a {kind}")
        at = self.value(x)
        if kind == BOOL and self.kind(at) != BOOL:
            self.fail(TypeError, f"got a result of kind {self.kind(at)}, expected bool")
        return self.builder.cast(at, kind)


class _Mode(TorchFunctionMode):
    """Sees torch's functions of symbols, captured tensors that symbols index among them."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if _mentions(args) or (kwargs and _mentions(tuple(kwargs.values()))):
            return self.trace.call(func.__name__, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _mentions(args: tuple) -> bool:
    return any(
        isinstance(x, (Symbol, Rows)) or (isinstance(x, (tuple, list)) and _mentions(tuple(x)))
        for x in args
    )


class _Traced:
    """What symbols and partly indexed tensors share: operators, methods, torch's functions."""

    _trace: Trace

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, _Traced)]
        if not found:  # inside of a list
            raise NotImplementedError(f"{func.__name__} of a list of symbols")
        return found[0]._trace.call(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in OPERATORS or name.endswith("_") or name in ("item", "tolist", "numpy"):
            return lambda *args, **kwargs: self._trace.call(name, (self, *args), kwargs)
        self._trace.fail(NotImplementedError, f"got the attribute {name}, which symbols lack")

    def __getitem__(self, index: Any) -> Any:
        return self._trace.index(self, index)

    def __bool__(self) -> bool:
        self._refuse(
            "a branch on an index or a score", "torch.where, or & and | between conditions"
        )

    def __int__(self) -> int:
        self._refuse("an index or a score as a Python int", "arithmetic on it")

    __index__ = __int__

    def __float__(self) -> float:
        self._refuse("an index or a score as a Python float", "torch's functions, not math's")

    def __len__(self) -> int:
        self._refuse("len() of a number", "sizes of captured tensors")

    def __iter__(self):
        self._refuse("a loop over a number", "a loop over a Python range")

    def _refuse(self, got: str, expected: str) -> NoReturn:
        self._trace.fail(TypeError, f"got {got}, expected {expected}: no value is known yet")

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._trace.call(name, (self, *args), {})


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BINARY += ("and", "or", "xor", "lshift", "rshift")
for _name in _BINARY:
    setattr(_Traced, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(_Traced, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ["ge", "gt", "le", "lt", "eq", "ne", "neg", "invert", "abs", "pos"]:
    setattr(_Traced, f"__{_name}__", _operator(f"__{_name}__"))


class Symbol(_Traced):
    """A number that is not known yet: value `at` of a trace."""

    def __init__(self, trace: Trace, at: int):
        self._trace, self._at = trace, at

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self._trace.kind(self._at)]

    @property
    def device(self) -> torch.device:
        return self._trace.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size()

    ndim, requires_grad = 0, False

    def __repr__(self) -> str:
        return f"<a number of kind {self._trace.kind(self._at)} in a {self._trace.what}>"


class Rows(_Traced):
    """A captured tensor of which some dimensions are indexed."""

    def __init__(self, trace: Trace, tensor: Tensor, indices: tuple[int | None, ...]):
        self._trace, self._tensor, self._indices = trace, tensor, indices

    @property
    def shape(self) -> torch.Size:
        sizes = zip(self._tensor.shape, self._indices)
        return torch.Size(size for size, index in sizes if index is None)


def _place() -> str:
    """ " at file:line" of the innermost frame outside of this package and torch."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((HERE, TORCH)):
            return f" at {file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
