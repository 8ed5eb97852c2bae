"""What a score_mod and a mask_mod amount to, kept from one call to the next.

To trace two functions and to lower their programs takes some hundred microseconds. The result is
kept by all that the functions use: their code, the numbers and strings in their closures, defaults
and globals, the functions that they call, and the dtypes and shapes of the tensors that they
capture; also those in tuples, lists and dicts, as they are at the call. The elements of tensors are
read anew in each call. Where they decide more than numbers of the program (lengths and slopes that
are recognised, classes of blocks), a copy of them is kept, and what was found serves calls with
equal ones.

Nothing is kept of functions that use anything else (an object, a module that is not torch's or
Python's) or more than MOST_USED objects, that change a list or a dict, that look at an element of a
captured tensor while they are traced, or that capture a tensor with a gradient.
"""

from __future__ import annotations

import dis
import functools
import math
import operator
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.spec import MaskMod, ScoreMod
from .bounds import Ints, extremes
from .lowering import Begin, Lowered, joined
from .mod_call import ModCall, Rest
from .recognition import Shape
from .registry import FUNCTIONS
from .tracing import MAKERS, Fixed, Mod, trace_mask_mod, trace_score_mod

MOST = 512  # calls that are kept; then all are forgotten
MOST_NUMBERS = 1 << 16  # of the tensors that are kept for a call
MOST_USED = 256  # objects that functions use; more take longer to look at than to trace
# Modules that a function may use.
MODULES = frozenset((torch, F, torch.special, math, operator, sys.modules["_operator"]))
BUILTINS = frozenset((abs, bool, divmod, float, int, isinstance, len, max, min, pow, range, round))
BUILTINS |= frozenset((all, any, enumerate, list, map, reversed, sum, tuple, zip))
# Names that a function may look up beside its globals: functions of torch that act on symbols or
# make numbers, and attributes of tensors, all of which tracing sees; members of math and operator.
KNOWN = frozenset(("nn", "functional", "special", "inf", "nan", "pi", "e", "finfo", "iinfo"))
KNOWN |= {"eps", "tiny", "smallest_normal", "bits", "Tensor", "dtype", "device", *MAKERS}
KNOWN |= {"get", "items", "keys", "values"}  # of dicts
KNOWN |= {name for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
KNOWN |= {x for y in (Tensor, math, operator) for x in dir(y) if not x.startswith("_")}
KNOWN = KNOWN - {"attrgetter", "methodcaller"} | {x.__name__ for x in BUILTINS}
# What may change a list or a dict: instructions, and names among the known ones.
WRITES = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"))
CHANGING = frozenset(("setitem", "delitem", "iadd", "iconcat", "imul", "ior", "sort"))


class Made(NamedTuple):
    """The programs of a call, what is left of them beside arguments, and that as kernels run it."""

    call: ModCall
    rest: Rest
    lowered: Lowered | None


class About(NamedTuple):
    """What a call says of itself."""

    sizes: Shape
    dtype: torch.dtype  # of scores
    device: torch.device
    begin: Begin | None  # None if it is no part of another
    softcap: float | None  # after the score_mod
    runs: bool  # whether kernels run programs
    in_parts: bool


class _Kept(NamedTuple):
    """A call without the tensors that its functions capture: a user may want their memory back."""

    made: Made
    places: tuple[int, ...]  # of the call's tensors among those that the functions use
    joins: tuple[int, ...]  # the call's tensors that `lowered` has, in order
    extremes: Ints  # of these
    elements: tuple[Tensor, ...]  # copies of the call's tensors, if all must be the same
    held: list[object]  # the key has their addresses


_kept: dict[Any, _Kept] = {}


def mod_call(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, about: About, plain: bool
) -> Made:
    """Trace the functions and lower their programs, or take what is kept of them.

    plain: whether nothing in torch sees or transforms operations. Else nothing is kept.
    """
    # After a break of its graph torch.compile may begin with this very function.
    keeps = plain and not torch.compiler.is_compiling() and not about.in_parts
    uses = _Uses.of(score_mod, mask_mod) if keeps else None
    if uses is None:
        return _make(score_mod, mask_mod, about, keeps=False)[0]
    key = uses.key, about, torch.get_default_dtype(), torch.is_inference_mode_enabled()
    kept = _kept.get(key)
    if kept is not None:
        made = _again(kept, uses, about)
        if made is not None:
            return made
    made, fixed = _make(score_mod, mask_mod, about, keeps=True)
    kept = _keep(made, uses) if fixed else None
    if kept is not None:
        if len(_kept) >= MOST:
            _kept.clear()
        _kept[key] = kept
    return made


def _make(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, about: About, keeps: bool
) -> tuple[Made, bool]:
    """Also whether the programs are the same for other elements of captured tensors, and in each
    call, if it `keeps` any."""
    sizes, dtype, device, begin, softcap, runs, in_parts = about
    before = torch.get_rng_state() if keeps else None
    score = None if score_mod is None else trace_score_mod(score_mod, device=device, dtype=dtype)
    mask = None if mask_mod is None else trace_mask_mod(mask_mod, device=device)
    drawn = before is not None and not torch.equal(before, torch.get_rng_state())
    call = ModCall.of(score, mask, sizes, dtype, device, begin)
    rest = call.rest(softcap)
    lowered = call.lowered(rest, in_parts) if runs else None
    fixed = all(x is None or isinstance(x, Fixed) for x in (score, mask))
    return Made(call, rest, lowered), fixed and not drawn


def _keep(made: Made, uses: _Uses) -> _Kept | None:
    """None if captured tensors may be views of one, or what would be kept is large."""
    call, rest, lowered = made
    found = [uses.place(x) for x in call.tensors]
    places = tuple(x for x in found if x is not None)
    starts = {x.data_ptr() for x in uses.tensors}
    if len(places) < len(found) or len(starts) < len(uses.tensors):  # views may have been merged
        return None
    structure = call.structure
    constants = structure.alibi, structure.key_lengths, lowered and lowered.blocks
    decide = structure.of_elements or any(x is not None for x in constants)
    decided = call.tensors if decide else ()
    if sum(x.numel() for x in (*constants, *decided) if x is not None) > MOST_NUMBERS:
        return None
    values = (x for p in (rest.score, rest.mask) if p is not None for x in p.values)
    joins = sorted({x.tensor for x in values if x.tensor is not None}) if lowered else []
    of_joins = extremes({x: call.tensors[x] for x in joins})
    if lowered is not None and joins:
        lowered = lowered._replace(floats=None, ints=None)
    bare = Made(call._replace(tensors=()), rest, lowered)
    elements = tuple(x.clone() for x in decided)
    return _Kept(bare, places, tuple(joins), of_joins, elements, uses.held)


def _again(kept: _Kept, uses: _Uses, about: About) -> Made | None:
    """What is kept, with the elements that captured tensors have now. None if they do not fit."""
    (call, rest, lowered), places, joins, of_joins, elements, _ = kept
    if not places:
        return kept.made
    tensors = tuple(uses.tensors[x] for x in places)
    if not all(map(_same_bits, tensors, elements)):
        return None
    if of_joins and extremes({x: tensors[x] for x in joins}) != of_joins:
        return None
    if lowered is not None:
        floats, ints = joined([tensors[x] for x in joins], about.dtype)
        lowered = lowered._replace(floats=floats, ints=ints)
    return Made(call._replace(tensors=tensors), rest, lowered)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Both have one shape and dtype. Bits, because 0.0 equals -0.0 and NaN not itself."""
    if x.is_floating_point():
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        x, y = x.view(bits), y.view(bits)
    return torch.equal(x, y)


class _NotKnown(Exception):
    """A function uses what may change unseen."""


class _Uses:
    """All that functions use: a key of it, and the tensors among it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.held: list[object] = []  # the key has their addresses
        self.functions: list[FunctionType] = []
        self.changeable: list[list | dict] = []
        self.changes = False  # a function may change one of these
        self.count = 0
        self.key: Any = None

    @classmethod
    def of(cls, *functions: Callable | None) -> _Uses | None:
        """None if they use anything that may change unseen."""
        uses = cls()
        try:
            uses.key = tuple(map(uses.part, functions))
            if uses.changeable and uses.changes:
                raise _NotKnown
        except (_NotKnown, ValueError, RecursionError):  # a cell of a closure is empty; many cells
            return None
        return uses

    def place(self, x: Tensor) -> int | None:
        return next((at for at, y in enumerate(self.tensors) if y is x), None)

    def part(self, x: Any) -> Any:
        """The key of an object."""
        self.count += 1
        if self.count > MOST_USED:
            raise _NotKnown
        kind = type(x)
        if x is None or kind in (bool, int, str):
            return kind, x
        if kind is float:
            return kind, x.hex()  # -0.0 equals 0.0
        if kind is FunctionType:
            return self.function(x)
        if kind is Mod:
            return self.part(x.fn)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self.tensor(x)
        if kind is tuple:
            return tuple, *map(self.part, x)
        if kind is list or kind is dict:
            return self.changeable_part(x)
        if kind is torch.dtype or kind is torch.device:
            return x
        if _is_fixed(x):
            self.changes |= x.__name__.strip("_") in CHANGING
            return self.address(x)
        raise _NotKnown

    def changeable_part(self, x: list | dict) -> Any:
        """The key of what is in a list or a dict now, and which of those of the functions it is."""
        at = next((at for at, y in enumerate(self.changeable) if y is x), None)
        if at is not None:
            return type(x), at
        self.changeable.append(x)
        return type(x), self.part(tuple(x.items() if type(x) is dict else x))

    def address(self, x: object) -> int:
        self.held.append(x)
        return id(x)

    def tensor(self, x: Tensor) -> Any:
        if x.requires_grad or x.device.type != "cpu" or x.layout != torch.strided or x.__dict__:
            raise _NotKnown
        if x.is_neg() or x.is_conj():  # its bits are not its elements
            raise _NotKnown
        at = self.place(x)
        if at is not None:
            return Tensor, at
        self.tensors.append(x)
        return Tensor, x.dtype, *x.shape

    def function(self, fn: FunctionType) -> Any:
        if fn in self.functions:  # it calls itself, or two use it
            return FunctionType, self.functions.index(fn)
        self.functions.append(fn)
        code, known = fn.__code__, fn.__globals__
        names = _names(code)
        if names is None or fn.__dict__ or not all(map(_is_known, names.attributes)):
            raise _NotKnown
        if not all(x in known or _is_known(x) for x in names.looked_up):
            raise _NotKnown
        self.changes |= names.changes
        cells = tuple(x.cell_contents for x in fn.__closure__ or ())
        named = (
            *((x, known[x]) for x in names.looked_up if x in known),
            *(fn.__kwdefaults__ or {}).items(),
        )
        return self.address(code), self.part(cells), self.part(fn.__defaults__), self.part(named)


def _is_fixed(x: Any) -> bool:
    """True for Python's and torch's modules and functions that have no state."""
    if type(x) is ModuleType:
        return x in MODULES
    if type(x) is type:
        return x in BUILTINS
    if type(x) is not BuiltinFunctionType:
        return False
    of_module = any(x.__self__ is module for module in MODULES)
    of_torch = x is getattr(torch, x.__name__, None) and x.__name__.strip("_") in FUNCTIONS
    return of_module or x in BUILTINS or of_torch


def _is_known(name: str) -> bool:
    return name in KNOWN or name.strip("_") in FUNCTIONS


def _is_in_place(x: dis.Instruction) -> bool:
    """True of +=, which adds to a list in place: BINARY_OP, or INPLACE_ADD of Python 3.10."""
    return x.opname.startswith("INPLACE_") or (x.opname == "BINARY_OP" and "=" in x.argrepr)


class _Names(NamedTuple):
    """What a function, and the functions in it, look up."""

    looked_up: tuple[str, ...]  # among globals
    attributes: tuple[str, ...]
    changes: bool  # they may change a list or a dict


@functools.lru_cache(maxsize=MOST)
def _names(code: CodeType) -> _Names | None:
    """None for a function that imports, or writes variables that are not its own."""
    looked_up, attributes, changes = [], [], False
    for x in dis.get_instructions(code):
        outside = x.opname == "STORE_DEREF" and x.argval in code.co_freevars
        if outside or x.opname in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            return None
        changes |= x.opname in WRITES or _is_in_place(x)
        if x.opcode in dis.hasname:
            of_globals = x.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            (looked_up if of_globals else attributes).append(x.argval)
    for x in code.co_consts:
        if isinstance(x, CodeType):
            inner = _names(x)
            if inner is None:
                return None
            looked_up += inner.looked_up
            attributes += inner.attributes
            changes |= inner.changes
    changes |= any(x.strip("_") in CHANGING for x in (*looked_up, *attributes))
    return _Names(tuple(looked_up), tuple(attributes), changes)
