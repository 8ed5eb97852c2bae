"""Symbols: what a traced function gets in place of a score and of indices."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from .program import Builder

HERE = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)
DTYPES = {"int": torch.int64, "bool": torch.bool}
ORDER = {"bool": 0, "int": 1, "float": 2}


def line_of_user() -> str:
    """The file and line of the innermost call that is neither torch's nor of this folder."""
    if torch.compiler.is_dynamo_compiling():  # it shows the line itself
        return "in compiled code"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((HERE, TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


def refused(error: type[Exception], sentence: str) -> Exception:
    """The exception with the line of the user's code before the sentence."""
    return error(f"{line_of_user()}: {sentence}")


def kind_of(dtype: torch.dtype) -> str:
    """The kind of a dtype of torch."""
    if dtype.is_complex:
        raise refused(TypeError, f"a score_mod or mask_mod computes no {dtype}: use real numbers")
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "int"


class Trace:
    """Collects one program while a function runs on symbols."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.builder: Builder = Builder()
        self.device: torch.device = device  # of symbols
        self.dtype: torch.dtype = dtype  # of float symbols
        self.tensors: list[Tensor] = []
        self.reads: bool = False  # an element of a tensor that the function did not make
        self.literals: list[Tensor] = []  # 0-d tensors that the function made itself

    def symbol(self, at: int) -> Symbol:
        return Symbol(self, at, self.builder.values[at].kind)

    def emit(self, op: str, *args: Symbol) -> Symbol:
        return self.symbol(self.builder.emit(op, *[x.at for x in args]))

    def constant(self, number: int | float | bool) -> Symbol:
        if type(number) is int:
            number = operator.index(number)  # in compiled code it may be a symbol
        return self.symbol(self.builder.constant(number))

    def capture(self, tensor: Tensor) -> int:
        """The number of a captured tensor. The same object has one number."""
        # Compiled code that asked for id(tensor) would be compiled anew for each tensor.
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def is_literal(self, x: Tensor) -> bool:
        """True for a 0-d tensor that the function made itself: a number of the program."""
        return any(x is known for known in self.literals)

    def load(self, tensor: Tensor, index: tuple[Symbol, ...] = ()) -> Symbol:
        if not index and self.is_literal(tensor):
            return self.constant(tensor.item())
        kind = kind_of(tensor.dtype)
        args = tuple(x.at for x in index)
        return self.symbol(self.builder.load(self.capture(tensor), kind, args))

    def number(self, x: Any) -> float:
        """The value of an argument that a program has as a number, which a tensor may be."""
        self.reads |= isinstance(x, Tensor)
        return float(x)

    def lift(self, x: object, name: str = "the result") -> Symbol:
        """The symbol of an operand: a symbol, a number, or a captured tensor of one element."""
        if isinstance(x, Symbol):
            if x.trace is not self:
                raise refused(ValueError, "a symbol of another call was kept: return it instead")
            return x
        if isinstance(x, (bool, int, float)):
            return self.constant(x)
        if isinstance(x, PARTS):
            raise refused(TypeError, f"{name} got {x.described()}: give an index for each")
        if isinstance(x, Tensor):
            if x.dim() == 0:
                return self.load(x)
            shape = tuple(x.shape)
            raise refused(
                TypeError,
                f"{name} got a captured tensor of shape {shape}: index it by b, h, i or j first, "
                "as in bias[h, i, j]",
            )
        raise refused(TypeError, f"{name} got {type(x).__name__}: give a number or a tensor")

    def cast(self, x: Symbol, kind: str) -> Symbol:
        return x if x.kind == kind else self.emit(f"to_{kind}", x)

    def promoted(self, *args: Symbol, least: str = "bool") -> tuple[Symbol, ...]:
        """The operands, cast to the kind that torch promotes them to."""
        kind = least
        for x in args:
            if ORDER[x.kind] > ORDER[kind]:
                kind = x.kind
        return tuple([x if x.kind == kind else self.cast(x, kind) for x in args])


class Symbol:
    """Stands for a 0-d tensor inside a traced function: a score, an index or a value of them."""

    __slots__ = ("at", "kind", "trace")
    trace: Trace
    at: int
    kind: str
    requires_grad = False
    ndim = 0
    shape: torch.Size = torch.Size(())

    def __init__(self, trace: Trace, at: int, kind: str) -> None:
        self.trace, self.at, self.kind = trace, at, kind

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.kind) or self.trace.dtype

    @property
    def device(self) -> torch.device:
        return self.trace.device

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reached only without the mode of `tracing`, which handles all of torch's functions.
        raise refused(
            TypeError, f"{f.__name__} got a symbol outside of tracing: return it, do not keep it"
        )

    def __bool__(self) -> bool:
        raise refused(
            TypeError,
            "a score_mod or mask_mod cannot branch on an index or a score (if, and, or, not, "
            "min(), max()): use torch.where(condition, x, y), & | ~, torch.minimum, torch.maximum",
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    def dim(self) -> int:
        return 0

    def numel(self) -> int:
        return 1

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        return self.kind == "float"

    def __repr__(self) -> str:
        return f"<{self.trace.builder.values[self.at].op} of kind {self.kind}>"

    def __hash__(self) -> int:  # == makes a symbol
        return id(self)


def _needs_number(name: str) -> Callable[..., NoReturn]:
    def method(self: Symbol, *args: object) -> NoReturn:
        raise refused(
            TypeError,
            f"{name} needs the value of an index or a score, which is not known when a score_mod "
            "or mask_mod is traced: use torch's operators on it, such as torch.floor or .to(dtype)",
        )

    return method


for _method, _name in {
    "__int__": "int()",
    "__float__": "float() or a function of math",
    "__index__": "an index of a list, a slice or range()",
    "__complex__": "complex()",
    "__len__": "len()",
    "__iter__": "iteration",
    "__round__": "round()",
    "__floor__": "math.floor()",
    "__ceil__": "math.ceil()",
    "__trunc__": "math.trunc()",
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
}.items():
    setattr(Symbol, _method, _needs_number(_name))


class Table:
    """Stands for a captured tensor that lacks some of its indices, as bias[b] does."""

    __slots__ = ("index", "tensor", "trace")
    trace: Trace
    tensor: Tensor  # a view of the captured tensor
    index: tuple[Symbol | None, ...]  # for each dimension; None for those that have none yet

    def __init__(self, trace: Trace, tensor: Tensor, index: tuple[Symbol | None, ...]) -> None:
        self.trace, self.tensor, self.index = trace, tensor, index

    @property
    def free(self) -> list[int]:
        return [at for at, x in enumerate(self.index) if x is None]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.tensor.shape[at] for at in self.free)

    @property
    def ndim(self) -> int:
        return len(self.free)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def described(self) -> str:
        shape, given = tuple(self.tensor.shape), len(self.index) - self.ndim
        return f"a captured tensor of shape {shape} with {given} of its {len(self.index)} indices"

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refused(TypeError, f"{f.__name__} got a part of a captured tensor outside of tracing")

    def __getitem__(self, key: Any) -> Symbol | Table:
        return indexed(self.trace, self.tensor, self.index, key)

    def __iter__(self) -> Iterator[Symbol | Table]:
        # By symbols: all elements are of the one captured tensor.
        return iter([self[self.trace.constant(x)] for x in range(len(self))])

    def __bool__(self) -> bool:
        raise refused(TypeError, f"a branch on {self.described()}: use torch.where")

    def __len__(self) -> int:
        return self.shape[0]

    def __hash__(self) -> int:  # == makes symbols
        return id(self)


class Elements:
    """Stands for a small tensor inside a traced function: a symbol for each of its elements, as
    pos[i] - pos[j] is. It has at least one dimension and one element."""

    __slots__ = ("shape", "symbols", "trace")
    trace: Trace
    shape: torch.Size
    symbols: list[Symbol]  # the last dimension varies fastest

    def __init__(self, trace: Trace, shape: Sequence[int], symbols: list[Symbol]) -> None:
        self.trace, self.shape, self.symbols = trace, torch.Size(shape), symbols

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return len(self.symbols)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        return self.symbols[0].dtype

    @property
    def device(self) -> torch.device:
        return self.trace.device

    def described(self) -> str:
        return f"a tensor of shape {tuple(self.shape)}"

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refused(TypeError, f"{f.__name__} got a part of a captured tensor outside of tracing")

    def __getitem__(self, key: Any) -> Symbol | Elements:
        axes: list[tuple[int, Sequence[int]]] = []
        shape = []
        dims = iter(zip(self.shape, steps_of(self.shape)))
        for x in _whole_key(key, self.shape):
            if x is None:
                shape.append(1)
                continue
            size, step = next(dims)
            if isinstance(x, slice):
                chosen = range(size)[x]
                shape.append(len(chosen))
            elif type(x) is int:
                if not -size <= x < size:
                    raise refused(IndexError, f"index {x} of {self.described()}")
                chosen = (x % size,)
            else:
                raise refused(
                    TypeError,
                    f"an index of {self.described()} is a number, got {type(x).__name__}: index "
                    "captured tensors by b, h, i and j before they are operands",
                )
            axes.append((step, chosen))
        if 0 in shape:
            raise refused(IndexError, f"an index of {self.described()} that takes no element")
        found = [self.symbols[x] for x in places(axes)]
        return Elements(self.trace, shape, found) if shape else found[0]

    def __iter__(self) -> Iterator[Symbol | Elements]:
        return iter([self[x] for x in range(len(self))])

    def __bool__(self) -> bool:
        raise refused(TypeError, f"a branch on {self.described()}: use torch.where")

    def __len__(self) -> int:
        return self.shape[0]

    def __hash__(self) -> int:  # == makes symbols
        return id(self)


PARTS = (Table, Elements)  # stand for a tensor of more dimensions than a symbol's none


def steps_of(shape: Sequence[int]) -> list[int]:
    """How far apart the neighbours in each dimension are among the symbols of `Elements`."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return steps[::-1]


def places(axes: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """The places of these positions among the symbols. axes: a step, and the positions."""
    found = [0]
    for step, positions in axes:
        found = [x + step * y for x in found for y in positions]
    return found


def _whole_key(key: Any, shape: Sequence[int]) -> list:
    """An index as a list with a number, a symbol or a slice for each dimension, and None."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(x is not None and x is not Ellipsis for x in keys)
    if taken > len(shape):
        raise refused(
            IndexError,
            f"too many indices: {taken} for a captured tensor of shape {tuple(shape)}, which has "
            f"{len(shape)} dimensions",
        )
    if sum(x is Ellipsis for x in keys) > 1:
        raise refused(IndexError, "an index has at most one '...'")
    at = next((at for at, x in enumerate(keys) if x is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (len(shape) - taken)
    return keys


def indexed(
    trace: Trace, tensor: Tensor, index: tuple[Symbol | None, ...], key: Any
) -> Symbol | Table:
    """tensor[key], where `index` has the symbols of dimensions that an earlier index took."""
    keys = _whole_key(key, [tensor.shape[at] for at, x in enumerate(index) if x is None])
    # torch applies slices, None and plain ints to the tensor now; symbols are kept.
    symbols = [_as_symbol(trace, x) for x in keys]
    plain = iter(zip(keys, symbols))
    full: list = []
    new: list[Symbol | None] = []

    def pass_taken(dim: int) -> int:
        while dim < len(index) and index[dim] is not None:
            full.append(slice(None))
            new.append(index[dim])
            dim += 1
        return dim

    dim = 0
    for x, symbol in plain:
        if x is None:
            full.append(None)
            new.append(None)
            continue
        dim = pass_taken(dim)
        if symbol is not None:
            full.append(slice(None))
            new.append(symbol)
        else:
            full.append(x)
            if isinstance(x, slice):
                new.append(None)
        dim += 1
    pass_taken(dim)
    if any(x is None or x != slice(None) for x in full):
        tensor = tensor[tuple(full)]
    if any(x is None for x in new):
        return Table(trace, tensor, tuple(new))
    return trace.load(tensor, tuple(x for x in new if x is not None))


def _as_symbol(trace: Trace, x: object) -> Symbol | None:
    """The int symbol of one index, or None if it is plain."""
    if x is None or (isinstance(x, (slice, int)) and not isinstance(x, bool)):
        if isinstance(x, slice):
            for bound in (x.start, x.stop, x.step):
                if isinstance(bound, (Symbol, Table, Elements)):
                    raise refused(TypeError, "a slice by an index: use a number, or torch.where")
                trace.reads |= isinstance(bound, Tensor)
        return None
    symbol = trace.lift(x, "an index of a captured tensor")
    if symbol.kind != "int":
        how = "use torch.where" if symbol.kind == "bool" else "write .to(torch.int64)"
        raise refused(
            IndexError, f"an index of a captured tensor is an int, not a {symbol.kind}: {how}"
        )
    return symbol
