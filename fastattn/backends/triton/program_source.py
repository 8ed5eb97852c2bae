"""A score_mod and a mask_mod as source of Triton functions, which kernels/score.py calls.

    score_mod(s, b, h, i, j, captured)  the score, and its derivative by s
    bend(s, b, h, i, j, captured)       the second derivative
    mask_mod(b, h, i, j, captured)      whether the pair is seen
    outside(b, h, i, j, captured)       whether an index is out of range: `ModText`
    scatter(s, b, h, i, j, captured, ds, sums, SHIFT)   adds to the gradients of captured numbers

Each value of a program is one line. Whole numbers have 32 bits where the bounds of the program
prove that they fit, and 64 bits elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import linecache
import math
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ...call.spec import AttentionSpec
from ...namespace import PACKAGE
from ...score_mods.bounds import Bounds, bounds
from ...score_mods.derivatives import Derivative, Differentiation
from ...score_mods.mod_text import CAPTURED, ModText
from ...score_mods.program import Program, Value, needed

INT32 = range(-(2**31), 2**31)
TILE = 256  # at least the rows and keys of a tile: indices may be that far past the end


class Functions(NamedTuple):
    """Triton functions of a call, or None. Fields of score.Flags have these names."""

    score_mod: Any = None
    bend: Any = None
    mask_mod: Any = None
    outside: Any = None
    scatter: Any = None


def functions(spec: AttentionSpec) -> Functions:
    """The functions of a call's programs. Calls of similar sizes have the same."""
    if not spec.score_mod:
        return Functions()
    sizes = dict(
        b=spec.at_item + spec.B,
        h=spec.at_head + spec.H,
        i=spec.at_row + spec.M + TILE,
        j=spec.at_key + spec.N + TILE,
    )
    most = tuple((name, max(1 << 16, 1 << (n - 1).bit_length())) for name, n in sizes.items())
    return functions_of(spec.score_mod, most)


@functools.lru_cache(maxsize=512)
def is_sum(text: str) -> bool:
    """True if the score_mod of a text adds to the score what does not depend on it."""
    program = ModText.parse(text).score
    if program is None:
        return False
    d = Differentiation(program.values)
    slope, _ = d.by_score(len(program.values) - 1)
    return d.is_one(slope)


@functools.lru_cache(maxsize=512)
def functions_of(text: str, most: tuple[tuple[str, int], ...]) -> Functions:
    """most: above the largest index of each kind."""
    name, source = module_of(text, dict(most))
    path = f"<{name}>"
    namespace = {"__name__": f"{PACKAGE}.kernels.{name}", "lines": _Lines.of(path, source)}
    exec(compile(source, path, "exec"), namespace)
    compiled = (namespace.get(f"{x}_{name}") for x in Functions._fields)
    return Functions(*compiled)


class _Lines:
    """The source of a module in linecache, where Triton reads it: as long as this object lives,
    which the functions of the module keep."""

    alive: ClassVar[weakref.WeakValueDictionary[str, _Lines]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, path: str, source: str) -> _Lines:
        """path: names the source by its digest, so that modules with one path have one source."""
        lines = cls.alive.get(path)
        if lines is None:
            lines = cls.alive[path] = cls()
            linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
            weakref.finalize(lines, linecache.cache.pop, path, None).atexit = False
        return lines


def module_of(text: str, most: dict[str, int]) -> tuple[str, str]:
    """The name and the source of the module with a call's functions.

    The name has a digest of the source and of the functions that it calls: Triton names a function
    by it in the keys of its cache. most: above the largest index of each kind: b, h, i and j.
    """
    programs = ModText.parse(text)
    inputs = {x: (0, n - 1) for x, n in most.items()}
    parts = []
    if programs.score is not None:
        d = Differentiation(programs.score.values)
        result = len(programs.score.values) - 1
        slope, bend = d.by_score(result)
        parts.append(_function("score_mod", "s, ", d.values, (result, slope), inputs))
        parts.append(_function("bend", "s, ", d.values, (bend,), inputs))
        if terms := d.by_loads(result):
            parts.append(_scatter(d.values, terms, inputs))
    for which, program in (("mask_mod", programs.mask), ("outside", programs.outside)):
        if program is not None:
            own = program.values
            parts.append(_function(which, "", own, (len(own) - 1,), inputs))
    called = inspect.getsource(importlib.import_module(f"{PACKAGE}.kernels.program_functions"))
    body = "\n\n".join(parts)
    name = f"program_{hashlib.sha256((called + body).encode()).hexdigest()[:16]}"
    return name, _HEAD + body.replace(_NAME, name)


_NAME = "NAME"
_HEAD = f"""import triton
import triton.language as tl

from {PACKAGE}.kernels import program_functions as of


"""


def _function(
    name: str,
    first: str,
    values: Sequence[Value],
    results: Sequence[Derivative],
    inputs: dict[str, tuple[int, int]],
) -> str:
    """The source of a function that returns these values. None: 0."""
    body = _lines(values, [x for x in results if x is not None], inputs)
    words = ("0.0" if x is None else _result(values[x], x) for x in results)
    head = f"@triton.jit\ndef {name}_{_NAME}({first}b, h, i, j, captured):\n"
    return f"{head}{body}    return {', '.join(words)}\n"


def _scatter(
    values: Sequence[Value],
    terms: Sequence[tuple[int, int]],
    inputs: dict[str, tuple[int, int]],
) -> str:
    """The source of the function that adds to gradients of captured numbers.

    terms: the values of an index and of the derivative by the number there.
    """
    given = "s, b, h, i, j, captured, ds, sums, SHIFT: tl.constexpr"
    lines = [f"@triton.jit\ndef scatter_{_NAME}({given}):\n"]
    lines.append(_lines(values, [x for term in terms for x in term], inputs))
    for index, slope in terms:
        term = "ds" if values[slope].number == 1.0 else f"of.term_of(ds, v{slope})"
        lines.append(f"    of.add_to_sums(sums, captured.n_floats, v{index}, {term}, SHIFT)\n")
    return "".join(lines)


def _lines(
    values: Sequence[Value], wanted: Sequence[int], inputs: dict[str, tuple[int, int]]
) -> str:
    """A line for each of these values and for each that they need."""
    given = tuple(values)
    known = bounds(Program(given, CAPTURED), inputs, {})
    kept = needed(given, *wanted)
    widths = {x: _width(given[x], known[x]) for x in kept}
    return "".join(f"    v{x} = {_line(given, x, widths, known)}\n" for x in kept)


def _result(value: Value, at: int) -> str:
    # A slope of one is a number of Python, which costs no instruction.
    is_one = value.op == "constant" and value.kind == "float" and value.number == 1.0
    return "1.0" if is_one else f"v{at}"


def _width(value: Value, limits: Bounds) -> int:
    if value.kind != "int":
        return 32
    fits = limits is not None and limits[0] >= INT32.start and limits[1] < INT32.stop
    return 32 if fits else 64


def _line(values: Sequence[Value], x: int, widths: dict[int, int], known: list[Bounds]) -> str:
    value = values[x]
    op, args = value.op, value.args
    names = [f"v{y}" for y in args]
    if op == "score":
        return "s"
    if op in ("b", "h", "i", "j"):
        return f"tl.cast({op}, tl.int{widths[x]}) + tl.full([1, 1], 0, tl.int{widths[x]})"
    if op == "constant":
        return _constant(value, widths[x])
    if op == "load":
        of = "floats" if value.kind == "float" else "ints"
        code = f"of.element(captured.{of}, captured.n_{of}, {names[0]})"
        return code if widths[x] == 64 or value.kind == "float" else f"{code}.to(tl.int32)"
    kind = values[args[-1]].kind
    if kind != "int":
        return FORMS[f"{op}:{kind[0]}"].format(*names)
    # Whole numbers are computed in the widest type of the operands and the result.
    wide = max([widths[y] for y in args] + [widths[x]])
    if op.startswith("shift_"):
        wide = 64
    names = [
        f"{name}.to(tl.int64)" if values[y].kind == "int" and widths[y] < wide else name
        for name, y in zip(names, args)
    ]
    form = FORMS[f"{op}:i"]
    if op in POSITIVE and _is_positive(known, args):
        form = POSITIVE[op]
    code = form.format(*names)
    narrows = value.kind == "int" and widths[x] < wide
    return f"({code}).to(tl.int32)" if narrows else code


def _is_positive(known: list[Bounds], args: Sequence[int]) -> bool:
    (x, y) = (known[z] for z in args)
    return x is not None and y is not None and x[0] >= 0 and y[0] > 0


def _constant(value: Value, width: int) -> str:
    number = value.number
    if value.kind == "float":
        rounded = torch.tensor(number, dtype=torch.float32).item()
        word = repr(rounded) if math.isfinite(rounded) else f'float("{rounded}")'
        return f"tl.full([1, 1], {word}, tl.float32)"
    if value.kind == "bool":
        return f"tl.full([1, 1], {int(bool(number))}, tl.int1)"
    return f"tl.full([1, 1], {number}, tl.int{width})"


# Those of kernels/program_functions.py with one operand.
OF_ONE = ("exp", "log", "log2", "log1p", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf")
FORMS: dict[str, str] = {
    "add:f": "{} + {}",
    "sub:f": "{} - {}",
    "mul:f": "of.product({}, {})",
    "neg:f": "-{}",
    "abs:f": "tl.abs({})",
    "minimum:f": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "maximum:f": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "where:f": "tl.where({}, {}, {})",
    "floor_div:f": "of.floor_div_of_float({}, {})",
    "remainder:f": "of.remainder_of_float({}, {})",
    "sign:f": "of.sign_of_float({})",
    "div:f": "tl.div_rn({}, {})",
    "pow:f": "of.power({}, {})",
    "sqrt:f": "tl.sqrt_rn({})",
    "floor:f": "tl.floor({})",
    "ceil:f": "tl.ceil({})",
    "trunc:f": "of.truncated({})",
    "round:f": "of.rounded({})",
    **{f"{x}:f": f"of.{x}({{}})" for x in OF_ONE},
    "exp2:f": "tl.exp2({})",
    "add:i": "{} + {}",
    "sub:i": "{} - {}",
    "mul:i": "{} * {}",
    "neg:i": "-{}",
    "abs:i": "tl.abs({})",
    "minimum:i": "tl.minimum({}, {})",
    "maximum:i": "tl.maximum({}, {})",
    "where:i": "tl.where({}, {}, {})",
    "floor_div:i": "of.floor_div_of_int({}, {})",
    "remainder:i": "of.remainder_of_int({}, {})",
    "sign:i": "of.sign_of_int({})",
    "shift_left:i": "{} << of.shift_amount({})",
    "shift_right:i": "{} >> of.shift_amount({})",
    "bit_and:i": "{} & {}",
    "bit_or:i": "{} | {}",
    "bit_xor:i": "{} ^ {}",
    "bit_not:i": "~{}",
    "and:b": "{} & {}",
    "or:b": "{} | {}",
    "xor:b": "{} ^ {}",
    "not:b": "{} == 0",
    **{
        f"{name}:{kind}": f"{{}} {sign} {{}}"
        for name, sign in dict(ge=">=", gt=">", le="<=", lt="<", eq="==", ne="!=").items()
        for kind in "fi"
    },
    "to_float:i": "{}.to(tl.float32)",
    "to_float:b": "{}.to(tl.float32)",
    "to_int:f": "of.as_int({})",
    "to_int:b": "{}.to(tl.int32)",
    "to_bool:f": "{} != 0",
    "to_bool:i": "{} != 0",
}
POSITIVE = {"floor_div": "{} // {}", "remainder": "{} % {}"}  # of numbers from 0, by others above 0
