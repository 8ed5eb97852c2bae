"""Seeded faults in the modules that trace, evaluate and classify functions of flex_attention: each
must fail a test of the file that is named."""

import os
import subprocess
import sys

import pytest

from tests.mutation.test_cpu_mutants import edits
from tests.support.backends import INTERPRETED
from tests.support.checkout import ROOT

pytestmark = pytest.mark.skipif(INTERPRETED, reason="no test of Triton")

# Title: module: test file; then the code, and the fault.
FAULTS = r"""
division of ints rounds towards zero: operators: program
-whole = torch.div(a, _nonzero(b), rounding_mode="floor")
+whole = torch.div(a, _nonzero(b), rounding_mode="trunc")
remainders have the sign of the dividend: operators: tracing
-rest = torch.remainder(a, _nonzero(b))
+rest = torch.fmod(a, _nonzero(b))
differences are reversed: operators: tracing
-"sub": Op(_NUMERIC, torch.sub,
+"sub": Op(_NUMERIC, torch.rsub,
a row does not see its own key: operators: tracing
-"ge": Op(_COMPARE, torch.ge,
+"ge": Op(_COMPARE, torch.gt,
the larger for the smaller: operators: tracing
-"minimum": Op(_NUMERIC, torch.minimum,
+"minimum": Op(_NUMERIC, torch.maximum,
floats are rounded to ints: operators: tracing
-lambda x: x.to(torch.int64), int
+lambda x: x.round().to(torch.int64), int
truncation rounds down: operators: tracing
-"trunc": Op(_FLOAT, torch.trunc)
+"trunc": Op(_FLOAT, torch.floor)
constants are folded with the other rounding: operators: program
-lambda a, b: a // b if b else 0
+lambda a, b: int(a / b) if b else 0
negative indices are clamped: evaluate: tracing
-x = torch.where(x < 0, x + size, x)
+pass
negative indices are refused: evaluate: tracing
-outside = (x < -size) |
+outside = (x < 0) |
an index of the size passes: evaluate: program
-(x >= size)
+(x > size)
hidden pairs are checked: evaluate: program
-outside = outside & seen
+pass
gradients of tables are summed in their own dtype: evaluate: program
-x = x.to(floats)  # its
+pass  # its
at most means less: intervals: intervals
-return Interval(x.hi <= y.lo, ~(x.lo > y.hi))
+return Interval(x.hi < y.lo, ~(x.lo > y.hi))
less means at most: intervals: intervals
-return Interval(x.hi < y.lo, ~(x.lo >= y.hi))
+return Interval(x.hi <= y.lo, ~(x.lo >= y.hi))
ranges that touch may be less: intervals: intervals
-~(x.lo >= y.hi)
+~(x.lo > y.hi)
ranges with one number in common are equal: intervals: intervals
-sure = (x.lo == x.hi) & (y.lo == y.hi) &
+sure =
ranges that overlap differ: intervals: intervals
-~((x.lo > y.hi) | (x.hi < y.lo))
+~((x.lo > y.lo) | (x.hi < y.lo))
what may be false is false: intervals: intervals
-return Interval(~x.hi, ~x.lo)
+return Interval(~x.hi, ~x.hi)
what may be is both: intervals: intervals
-Interval(x.lo | y.lo, x.hi | y.hi)
+Interval(x.lo | y.lo, x.hi & y.hi)
exclusive or of two unknown ones is false: intervals: intervals
-~((x.lo & y.lo) | (~x.hi & ~y.hi))
+~((x.hi & y.hi) | (~x.hi & ~y.hi))
a size of a range around zero is its ends': intervals: intervals
-torch.zeros_like(low), torch.minimum(low, high))
+torch.minimum(low, high), torch.minimum(low, high))
differences of like ends: intervals: intervals
-"sub": lambda x, y: Interval(x.lo - y.hi, x.hi - y.lo,
+"sub": lambda x, y: Interval(x.lo - y.lo, x.hi - y.hi,
a negative range keeps its order: intervals: intervals
-"neg": lambda x: Interval(-x.hi, -x.lo, x.size)
+"neg": lambda x: Interval(-x.lo, -x.hi, x.size)
products of the low ends and the high ends: intervals: intervals
-else Interval(*_corners(torch.mul, x, y), x.size * y.size)
+else Interval(x.lo * y.lo, x.hi * y.hi, x.size * y.size)
a choice that is not known is its first: intervals: intervals
-torch.where(c.hi, torch.minimum(x.lo, y.lo), y.lo)
+torch.where(c.hi, x.lo, y.lo)
divisors may pass zero: intervals: intervals
-torch.where(spans, -most, lo), torch.where(spans, most, hi), x.size + 1
+lo, hi, x.size + 1
remainders do not wrap: intervals: intervals
-& (y.lo != 0) & (_floor(x.lo, d) == _floor(x.hi, d))
+& (y.lo != 0)
bits are a remainder by one less: intervals: intervals
-_point(m.lo + 1, mask + 1)
+_point(m.lo, mask + 1)
the last block is whole: intervals: intervals
-(lo + (block - 1)).clamp(max=max(count - 1, 0))
+lo + (block - 1)
sums of infinities are numbers: intervals: intervals
-torch.where(finite, lo, nan), torch.where(finite, hi, nan)
+lo, hi
huge numbers are known: intervals: intervals
-if value.kind == "int" and results[-1].size >= BIG:
+if False:
ranges of a table lack their first element: range_tables: intervals
-lo[here], hi[here] - (1 << k) + 1
+hi[here] - (1 << k) + 1, hi[here] - (1 << k) + 1
negative ranges of a table do not wrap: range_tables: intervals
-wraps = (lo < 0) & (hi >= 0)
+wraps = (lo < 0) & (hi < lo)
a table is not transposed with its indices: range_tables: intervals
-table, left = table.T, left[::-1]
+left = left[::-1]
minima are not doubled: range_tables: intervals
-torch.minimum(low[..., :-step], low[..., step:])
+low[..., step:]
greater is at least in bands: recognition: recognition
-c = form[2] - strict
+c = form[2]
a band of both sides ignores less: recognition: recognition
-limit - strict
+limit
bands look to the other side: recognition: recognition
-(None, c) if form[0] == 1 else (c, None)
+(c, None) if form[0] == 1 else (None, c)
the opposite of at least is at most: recognition: recognition
-{"ge": "lt", "gt": "le"
+{"ge": "le", "gt": "le"
slopes by place without causal: recognition: recognition
-return float(form[0]) if causal else None
+return float(form[0])
any quotient is a cap: recognition: recognition
-and numbers[1] == c:
+and numbers[1]:
values of trained tensors are constants: recognition: recognition
-tensor.device.type != "cpu" or tensor.requires_grad
+tensor.device.type != "cpu"
any mask of keys is of lengths: recognition: recognition
-return lengths if torch.equal(seen, j < lengths[:, None]) else None
+return lengths
documents may come back: recognition: recognition
-if torch.unique(x).numel() != starts.numel() + 1:
+if False:
what is true of the first pair is always: recognition: recognition
-form[0] >= 0 and form[1] >= 0 and form[2]
+form[2]
a bias that is subtracted is added: additive: additive
-terms.append(emit("neg", args[1]))
+terms.append(args[1])
what a choice hides is shown: additive: additive
-shown = args.index(own[0]) == 1
+shown = args.index(own[0]) == 2
finite floors hide: additive: additive
-if other.op != "constant" or other.number != HIDDEN:
+if other.op != "constant":
a second term is dropped: additive: additive
-while len(found) > 1:
+while len(found) > 2:
a smaller of unlike numbers moves along: diagonals: diagonals
-return known[0] if same else None
+return known[0]
comparisons of unlike numbers stay: diagonals: diagonals
-return 0 if same else None
+return 0
a product moves as its number: diagonals: diagonals
-return step * number
+return step
diagonals are not turned: diagonals: diagonals
-values.unfold(-1, keys, 1).flip(-2)
+values.unfold(-1, keys, 1)
sums of the next rows are one place off: diagonals: diagonals
-(rows - end, begin)
+(rows - end - 1, begin + 1)
rows are added unturned: diagonals: diagonals
-x.narrow(-2, begin, count).flip(-2)
+x.narrow(-2, begin, count)
the slope of a tanh grows: derivatives: program_derivatives
-d.emit("sub", d.number(1.0), d.emit("mul", at, at))
+d.emit("add", d.number(1.0), d.emit("mul", at, at))
a derivative is selected before it is multiplied: derivatives: program_derivatives
-return Unselected(at, x.taken)
+return Unselected(self.emit("mul", factor, self.selected(x)), self.builder.constant(True))
a branch that is taken hides the other: derivatives: program_derivatives
-self.emit("or", x.taken, other), self.emit("or", y.taken, test)
+self.emit("and", x.taken, other), self.emit("or", y.taken, test)
a sum counts where both of its terms do: derivatives: program_derivatives
-self.emit("or", x.taken, y.taken))
+self.emit("and", x.taken, y.taken))
a magnitude has itself for a slope: derivatives: program_derivatives
-d.emit("sign", x)),
+d.emit("abs", x)),
equal operands count twice: derivatives: program_derivatives
-d.mul(d.number(0.5), d.add(dx, dy))
+d.add(dx, dy)
a divisor's derivative is of the dividend: derivatives: program_derivatives
-d.div(d.mul(at, dy), y)
+d.div(d.mul(args[0], dy), y)
powers keep their exponent: derivatives: program_derivatives
-less = d.emit("pow", x, d.emit("sub", y, one))
+less = d.emit("pow", x, y)
a cosine rises: derivatives: program_derivatives
-d.emit("neg", d.emit("sin", x))
+d.emit("sin", x)
what is subtracted adds to the derivative: derivatives: program_derivatives
-"sub": lambda d, at, args, moves: d.add(moves[0], d.neg(moves[1])),
+"sub": lambda d, at, args, moves: d.add(moves[0], moves[1]),
both branches add: derivatives: program_derivatives
-"where": lambda d, at, args, moves: d.where(args[0], *moves[1:]),
+"where": lambda d, at, args, moves: d.add(*moves[1:]),
a difference is bounded by like ends: bounds: bounds
-"sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
+"sub": lambda x, y: (x[0] - y[0], x[1] - y[1]),
a remainder is small: bounds: bounds
-max(y[1] - 1, 0)
+max(y[1] - 2, 0)
a magnitude may be 0 at least: bounds: bounds
-return 0 if x[0] <= 0 <= x[1] else min(low, high), max(low, high)
+return min(low, high), max(low, high)
bits are those of the first: bounds: bounds
-return (0, min(tops)) if tops else _bits(x, y)
+return (0, max(0, x[1] // 2)) if tops else _bits(x, y)
an index below the table is in range: lowering: lowering
-if lo < -size or hi >= size:
+if hi >= size:
an index from the end is not turned: lowering: lowering
-if lo < 0:
+if hi < 0:
columns are as long as rows: lowering: lowering
-step *= size
+step += size
tables begin at 0: lowering: lowering
-index = builder.constant(self.first[tensor])
+index = builder.constant(0)
numbers of 33 bits are narrow: lowering: lowering
-or found[1] >= INT32.stop:
+or found[1] >= INT32.stop * 2:
a mask with a gradient is copied: lowering: lowering
-return x.requires_grad or x.numel()
+return x.numel()
blocks of a part begin at its first row: lowering: lowering
-row=begin.row,
+row=0,
blocks of all heads are those of the first: lowering: lowering
-h=begin.head + head,
+h=begin.head,
one program's indices are checked: lowering: lowering
-both = Value("or", (first - 1, first + len(moved) - 1), "bool")
+both = Value("or", (first - 1, first - 1), "bool")
results are freed at once: score_mod_code: cpu/test_score_mods
-last |= {x: len(kept) for output in outputs for x in output[2:] if x in last}
+pass
a value of rows and keys is of keys: score_mod_code: cpu/test_score_mods
-of |= found[y]
+of = max(of, found[y])
gradients of loads are their indices: derivatives: cpu/test_score_mods
-found = [(index, self.by(x, result)) for x, index in loads]
+found = [(index, self.by(index, result)) for x, index in loads]
the second derivative is the first: partial_derivatives: torch_api/test_functions_of_attention
-moved = products_t * self._at(self.derived.bend)
+moved = products_t * self._at(self.derived.slope)
tangents of gradients are gradients: partial_derivatives: torch_api/test_functions_of_attention
-found = self.gradient(g_t)
+found = self.gradient(g)
"""


FAULT = {tuple(x.split(": ")): edit for x, edit in edits(FAULTS).items()}
CASES = [(module, tests, *edit) for (_, module, tests), edit in FAULT.items()]


@pytest.mark.parametrize("module, tests, old, new", CASES, ids=[title for title, *_ in FAULT])
def test_a_fault_is_detected(module, tests, old, new):
    folder = "backends.native" if module == "score_mod_code" else "score_mods"
    name = f"fastattn.{folder}.{module}"
    file = f"tests/{tests}.py" if "/" in tests else f"tests/score_mods/test_{tests}.py"
    run = [sys.executable, "-m", "tests.support.altered_module", name, old, new, file]
    done = subprocess.run(
        [*run, "-m", ""],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout + done.stderr
