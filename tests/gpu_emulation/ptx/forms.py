"""The known forms of instructions, each with its operands and its meaning in C++.

A form is a whole opcode: <T:u32|s32> stands for one of these types, [.ftz] for an optional
modifier. An opcode that matches no form is refused: no modifier is ignored. An operand's kind is a
type; T, that of the opcode; B, the unsigned type with T's bits; W and WB, the same with twice the
bits. {a} is an operand's value as C++ (machine.h has the types and functions), {T} a type.

With .ftz, subnormal float32 operands and results are zeros; with .sat, the result is in [0, 1].
"""

import re
from dataclasses import dataclass

from . import blackwell, hopper, memory
from .text import refuse

SETS = {
    "INT": "u16|u32|u64|s16|s32|s64",
    "INT32": "u32|s32",
    "WIDE": "u32|u64|s32|s64",
    "NARROW": "u16|u32|s16|s32",
    "BIT": "b16|b32|b64",
    "SIGNED": "s16|s32|s64",
    "WHOLE": "u8|u16|u32|u64|s8|s16|s32|s64",
    "ANY": "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64",
    "MOVED": "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64",
}


@dataclass(frozen=True)
class Form:
    name: str
    pattern: re.Pattern
    kinds: tuple[str, ...]
    code: object  # the result as C++, or a function that gives the statement


def form(name, kinds, code):
    pattern = ""
    for part in re.split(r"(<[^>]*>|\[[^]]*\])", name):
        if part.startswith("<"):
            group, _, types = part[1:-1].partition(":")
            pattern += f"(?P<{group}>{SETS.get(types, types)})"
        elif part.startswith("["):
            modifier = part[1:-1]
            pattern += f"(?P<{re.sub(r'[.:]+', '', modifier)}>{re.escape(modifier)})?"
        else:
            pattern += re.escape(part)
    return Form(name, re.compile(pattern), tuple(kinds.split()), code)


COMPARE = {"eq": "{a} == {b}", "ne": "{a} != {b}", "lt": "{a} < {b}", "le": "{a} <= {b}"}
COMPARE |= {"gt": "{a} > {b}", "ge": "{a} >= {b}"}
# Of floats: false if one is NaN. With u, true then: the negation of the opposite comparison.
ORDERED = COMPARE | {"ne": "({a} < {b} || {a} > {b})", "num": "({a} == {a} && {b} == {b})"}
OPPOSITE = {
    "equ": "ne",
    "neu": "eq",
    "ltu": "ge",
    "leu": "gt",
    "gtu": "le",
    "geu": "lt",
    "nan": "num",
}
ORDERED |= {name: f"!({ORDERED[other]})" for name, other in OPPOSITE.items()}
COMBINE = {"and": "&", "or": "|", "xor": "^"}


def compare(table):
    def code(write, groups, operands, place):
        """p, and q if it is given: the comparison and its opposite, each combined with c."""
        to, (a, b, *rest) = operands[0], operands[1:]
        kind = groups["T"]
        flush = bool(groups.get("ftz"))
        values = [write.value(x, kind, flush=flush) for x in (a, b)]
        found = table[groups["cmp"]].format(a=values[0], b=values[1])
        if bool(groups.get("bool")) != bool(rest):
            refuse(write.line, f"{len(operands)} operands")
        results = [found, f"!({found})"]
        if rest:
            c = write.value(rest[0], "pred")
            results = [f"(({x}) {COMBINE[groups['bool']]} {c})" for x in results]
        names = to.split("|")
        if len(names) == 1:
            return write.result(to, "pred", results[0])
        both = " ".join(write.result(x, "pred", f"x[{i}]") for i, x in enumerate(names))
        return f"{{ const bool x[2] = {{{results[0]}, {results[1]}}}; {both} }}"

    return code


def setp(types, table, ftz=""):
    """With a predicate to combine with, and without."""
    names = "|".join(table)
    return [
        form(f"setp.<cmp:{names}>.<bool:and|or|xor>{ftz}.<T:{types}>", "", compare(table)),
        form(f"setp.<cmp:{names}>{ftz}.<T:{types}>", "", compare(table)),
    ]


ARITHMETIC = [
    # Whole numbers: overflow wraps.
    form("add.<T:INT>", "B B B", "{a} + {b}"),
    form("sub.<T:INT>", "B B B", "{a} - {b}"),
    form("mul.lo.<T:INT>", "B B B", "u64({a}) * {b}"),
    form("mul.hi.<T:NARROW>", "T T T", "({W}({a}) * {W}({b})) >> {bits}"),
    form("mul.hi.<T:u64|s64>", "T T T", "({W}({a}) * {W}({b})) >> {bits}"),
    form("mul.wide.<T:NARROW>", "W T T", "{W}({a}) * {W}({b})"),
    form("mad.lo.<T:INT>", "B B B B", "u64({a}) * {b} + {c}"),
    form("mad.wide.<T:NARROW>", "WB T T WB", "{WB}({W}({a}) * {W}({b})) + {c}"),
    form("div.<T:INT>", "T T T", "quotient<{T}>({a}, {b})"),
    form("rem.<T:INT>", "T T T", "remainder<{T}>({a}, {b})"),
    form("min.<T:INT>", "T T T", "{a} < {b} ? {a} : {b}"),
    form("max.<T:INT>", "T T T", "{a} > {b} ? {a} : {b}"),
    form("min.relu.<T:s32>", "T T T", "{a} < 0 || {b} < 0 ? 0 : {a} < {b} ? {a} : {b}"),
    form("max.relu.<T:s32>", "T T T", "{a} > 0 && {a} > {b} ? {a} : {b} > 0 ? {b} : 0"),
    form("neg.<T:SIGNED>", "B B", "-u64({a})"),
    form("abs.<T:SIGNED>", "B T", "{a} < 0 ? -u64({a}) : u64({a})"),
    # Bits.
    form("and.<T:BIT>", "T T T", "{a} & {b}"),
    form("or.<T:BIT>", "T T T", "{a} | {b}"),
    form("xor.<T:BIT>", "T T T", "{a} ^ {b}"),
    form("not.<T:BIT>", "T T", "~{a}"),
    form("and.<T:pred>", "T T T", "{a} & {b}"),
    form("or.<T:pred>", "T T T", "{a} | {b}"),
    form("xor.<T:pred>", "T T T", "{a} ^ {b}"),
    form("not.<T:pred>", "T T", "!{a}"),
    form("shl.<T:BIT>", "T T u32", "left<{T}>({a}, {b})"),
    form("shr.<T:b16|b32|b64|u16|u32|u64|s16|s32|s64>", "T T u32", "right<{T}>({a}, {b})"),
    form("bfe.<T:WIDE>", "T T u32 u32", "field<{T}>({a}, {b}, {c})"),
    form("bfi.<T:b32|b64>", "T T T u32 u32", "inserted<{T}>({a}, {b}, {c}, {d})"),
    form("prmt.<T:b32>", "T T T T", "permuted({a}, {b}, {c})"),
    # Floats. .rn, to nearest even, is what C++ does; other roundings are other forms.
    form("add[.rn][.ftz][.sat].<T:f32>", "T T T", "{a} + {b}"),
    form("sub[.rn][.ftz][.sat].<T:f32>", "T T T", "{a} - {b}"),
    form("mul[.rn][.ftz][.sat].<T:f32>", "T T T", "{a} * {b}"),
    form("fma.rn[.ftz][.sat].<T:f32>", "T T T T", "fused({a}, {b}, {c})"),
    form("div.rn[.ftz].<T:f32>", "T T T", "{a} / {b}"),
    form("div.full[.ftz].<T:f32>", "T T T", "approximate_quotient({a}, {b})"),
    form("rcp.rn[.ftz].<T:f32>", "T T", "1 / {a}"),
    form("rcp.approx.ftz.<T:f32>", "T T", "approximate_quotient(1, {a})"),
    form("ex2.approx.ftz.<T:f32>", "T T", "approximate_exp2({a}, true)"),
    form("lg2.approx.ftz.<T:f32>", "T T", "approximate_log2({a}, true)"),
    form("ex2.approx.<T:f32>", "T T", "approximate_exp2({a}, false)"),
    form("lg2.approx.<T:f32>", "T T", "approximate_log2({a}, false)"),
    form("min[.ftz].<T:f32>", "T T T", "least<f32>({a}, {b})"),
    form("max[.ftz].<T:f32>", "T T T", "most<f32>({a}, {b})"),
    form("min[.ftz].<T:f32>", "T T T T", "least<f32>(least<f32>({a}, {b}), {c})"),
    form("max[.ftz].<T:f32>", "T T T T", "most<f32>(most<f32>({a}, {b}), {c})"),
    form("abs[.ftz].<T:f32>", "T T", "__builtin_fabsf({a})"),
    form("neg[.ftz].<T:f32>", "T T", "-{a}"),
    form("copysign.<T:f32>", "T T T", "__builtin_copysignf({b}, {a})"),
    form("add[.rn].<T:f64>", "T T T", "{a} + {b}"),
    form("sub[.rn].<T:f64>", "T T T", "{a} - {b}"),
    form("mul[.rn].<T:f64>", "T T T", "{a} * {b}"),
    form("fma.rn.<T:f64>", "T T T T", "fused({a}, {b}, {c})"),
    form("div.rn.<T:f64>", "T T T", "{a} / {b}"),
    form("rcp.rn.<T:f64>", "T T", "1 / {a}"),
    form("neg.<T:f64>", "T T", "-{a}"),
    form("abs.<T:f64>", "T T", "__builtin_fabs({a})"),
    # Choices.
    *setp("u16|u32|u64|s16|s32|s64", COMPARE),
    *setp("b16|b32|b64", {x: COMPARE[x] for x in ("eq", "ne")}),
    *setp("f64", ORDERED),
    *setp("f32", ORDERED, "[.ftz]"),
    form("selp.<T:MOVED>", "T T T pred", "{c} ? {a} : {b}"),
]


def narrow_pair(kind):
    return f"narrowed({{b}}, {kind}) | narrowed({{a}}, {kind}) << 16"  # the first is the upper half


def mixed(opcode, kinds, code, narrow):
    """Of bfloat16 and of float16: the operands named in `narrow` have 16 bits, the others 32."""
    for kind, bfloat16 in (("bf16", "true"), ("f16", "false")):
        wide = {x: f"widened({{{x}}}, {bfloat16})" if x in narrow else f"{{{x}}}" for x in "abc"}
        yield form(f"{opcode}.{kind}", kinds, code.format(**wide))


CONVERSIONS = [
    # A source or a result may be in a wider register: kinds in brackets.
    form("cvt.<T:WHOLE>.<S:WHOLE>", "[T] [S]", "{a}"),
    form("cvt.rn.<T:f32|f64>.<S:WHOLE>", "T [S]", "{a}"),
    form("cvt.rzi[.ftz].<T:f32>.f32", "T T", "__builtin_truncf({a})"),
    form("cvt.rni[.ftz].<T:f32>.f32", "T T", "__builtin_rintf({a})"),
    form("cvt.rmi[.ftz].<T:f32>.f32", "T T", "__builtin_floorf({a})"),
    form("cvt.rpi[.ftz].<T:f32>.f32", "T T", "__builtin_ceilf({a})"),
    form(
        "cvt.rzi[.ftz].<T:WHOLE>.<S:f32>",
        "[T] S",
        "whole<{T}>(__builtin_truncf({a}), {bits} == 64)",
    ),
    form(
        "cvt.rni[.ftz].<T:WHOLE>.<S:f32>", "[T] S", "whole<{T}>(__builtin_rintf({a}), {bits} == 64)"
    ),
    form("cvt.rzi.<T:WHOLE>.<S:f64>", "[T] S", "whole<{T}>(__builtin_trunc({a}), true)"),
    form("cvt.rn.<T:f32>.<S:f64>", "T S", "{a}"),
    form("cvt.<T:f64>.<S:f32>", "T S", "{a}"),
    form("cvt.f32.bf16", "f32 b16", "widened({a}, true)"),
    form("cvt.f32.f16", "f32 b16", "widened({a}, false)"),
    form("cvt.rn.bf16.f32", "b16 f32", "narrowed({a}, true)"),
    form("cvt.rn.f16.f32", "b16 f32", "narrowed({a}, false)"),
    form("cvt.rn.bf16x2.f32", "b32 f32 f32", narrow_pair("true")),
    form("cvt.rn.f16x2.f32", "b32 f32 f32", narrow_pair("false")),
    # Of one float32 and numbers of 16 bits, rounded once.
    *mixed("fma.rn.f32", "f32 b16 b16 f32", "fused({a}, {b}, {c})", "ab"),
    *mixed("add.rn.f32", "f32 b16 f32", "{a} + {b}", "a"),
    # Addresses: those of global memory and of parameters are generic ones.
    form("cvta.to.global.u64", "u64 u64", "{a}"),
    form("cvta.global.u64", "u64 u64", "{a}"),
    form("cvta.param.u64", "u64 u64", "{a}"),
    form("cvta.local.u64", "u64 u64", "{a}"),
    form("cvta.shared.u64", "u64 u64", "of_shared({a})"),
    form("cvta.to.shared.u64", "u64 u64", "to_shared({a})"),
]

OTHERS = (*memory.FORMS, *hopper.FORMS, *blackwell.FORMS)
FORMS = [*ARITHMETIC, *CONVERSIONS, *(form(*each) for each in OTHERS)]
BY_NAME = {}
for each in FORMS:
    BY_NAME.setdefault(each.name.partition(".")[0].partition("[")[0], []).append(each)


def known(opcode, line, operands=None):
    """The form of an opcode, and the values of its named groups. Where several differ by the number
    of their operands, that of so many."""
    alike = BY_NAME.get(opcode.partition(".")[0], ())
    matching = [(x, found) for x in alike if (found := x.pattern.fullmatch(opcode))]
    for each, found in [x for x in matching if len(x[0].kinds) == operands] or matching:
        return each, found.groupdict() | {"ftz": "ftz" in opcode.split(".")}
    near = ", ".join(x.name for x in alike)
    refuse(line, f"{opcode} is no form that is known" + (f"; known are {near}" if near else ""))
