"""Evaluate integer and predicate instructions on known operands. Each function returns the values
of the registers and predicates written, by name; None or a missing name means unknown."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Callable, Sequence

from .sass import Instruction
from .sass_values import ASSUMED, PREDICATE, REGISTER, WORD, State, forget, width

COMPARE = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip

Values = dict[str, "int | bool | None"]


def _parts(x: Instruction) -> tuple[list[str], str, list[str]]:
    """The predicates written, the register written, and the operands read."""
    before = list(itertools.takewhile(PREDICATE.match, x.operands))
    to, *reads = x.operands[len(before) :]
    carries = list(itertools.takewhile(PREDICATE.match, reads))
    return before + carries, to, reads[len(carries) :]


def _sum(state: State, x: Instruction) -> Values:
    carries, to, reads = _parts(x)
    terms = [state.integer(y) for y in reads if not PREDICATE.match(y)]
    if ".X" in x.opcode:
        terms += [state.predicate(y) for y in reads if PREDICATE.match(y)]
    known = [int(x) for x in terms if x is not None]
    if len(known) < len(terms):
        return {}
    total = sum(known)
    carries_known = len(carries) == 1 or total < WORD  # with two carries it is unknown which is set
    return {to: total} | dict.fromkeys(carries if carries_known else (), total >= WORD)


def _product(state: State, x: Instruction) -> Values:
    parts, (_, to, reads) = x.opcode.split("."), _parts(x)
    if "HI" in parts:
        return {}
    a, b = (state.word(y) for y in reads[:2])
    negative = reads[0].startswith("-") != reads[1].startswith("-")
    wide, signed = "WIDE" in parts, "U32" not in parts
    product = 0 if 0 in (a, b) else None
    if a is not None and b is not None:
        product = _signed(a) * _signed(b) if wide and signed else a * b
        product = -product if negative else product
    low = state.integer(reads[2])
    high = state.word(reads[2], 1) if wide else 0
    carry = int(state.predicate(reads[3]) or 0) if "X" in parts and len(reads) > 3 else 0
    if "X" in parts and len(reads) > 3 and state.predicate(reads[3]) is None:
        return {}
    if product is None or low is None:
        return {}
    if not wide:
        return {to: product + low + carry}
    if high is None:
        return {to: product + low}
    total = product + low + (high << 32)
    return {to: total, _next(to): total >> 32}


def _lea(state: State, x: Instruction) -> Values:
    parts, (carries, to, reads) = x.opcode.split("."), _parts(x)
    a, b = state.integer(reads[0]), state.integer(reads[1])
    if a is None or b is None:
        return {}
    if "HI" not in parts:
        total = (a << int(reads[2], 0)) % WORD + b
        return {to: total} | dict.fromkeys(carries[:1], total >= WORD)
    short = "SX32" in parts
    top = (WORD - 1) * (a >> 31 & 1) if short else state.integer(reads[2])
    shift, carry = int(reads[2 if short else 3], 0), 0
    if "X" in parts:
        carry = state.predicate(reads[-1])
    if top is None or carry is None:
        return {}
    return {to: (((top << 32 | a) << shift) >> 32) % WORD + b + int(carry)}


def _logic(state: State, x: Instruction) -> Values:
    predicates, to, _ = _parts(x)
    known, value = _bits(state, x)
    values: Values = {to: value} if known == WORD - 1 else {}
    if known == WORD - 1 or value:
        values |= dict.fromkeys(predicates[:1], value != 0)
    return values


def _packed(state: State, x: Instruction) -> Values:
    """P2R: write the predicates of a mask as bits of a register; its other bits stay."""
    to, _, rest, mask = x.operands
    value, bits = state.word(rest), int(mask, 0)
    for k in range(7):
        if bits >> k & 1:
            one = state.predicate(f"P{k}")
            if one is None or value is None:
                return {}
            value = value & ~(1 << k) | one << k
    return {to: value}


def _bits(state: State, x: Instruction) -> tuple[int, int]:
    """Which bits that LOP3 writes are known, and their values. ptxas stores predicates as bits of a
    register if it runs out of predicate registers."""
    _, _, reads = _parts(x)
    guesses, table, found = [], int(reads[3], 0), []
    for known, value in map(state.some_bits, reads[:3]):
        guesses.append({value, value | (WORD - 1 - known)})
    for guess in itertools.product(*guesses):
        words = [(WORD - 1 - v, v) for v in guess]
        found.append(
            sum_or(
                words[0][k >> 2 & 1] & words[1][k >> 1 & 1] & words[2][k & 1]
                for k in range(8)
                if table >> k & 1
            )
        )
    differ = sum_or(x ^ found[0] for x in found)
    return WORD - 1 - differ, found[0] & ~differ


def sum_or(words) -> int:
    value = 0
    for word in words:
        value |= word
    return value


def _shift(state: State, x: Instruction) -> Values:
    parts, (_, to, reads) = x.opcode.split("."), _parts(x)
    low, by, high = (state.word(y) for y in reads[:3])
    if by is None:
        return {}
    if "L" in parts and "HI" not in parts:
        return {} if low is None else {to: low << by}
    if "R" in parts and "HI" in parts:
        signed = "S32" in parts or "S64" in parts
        return {} if high is None else {to: (_signed(high) if signed else high) >> by}
    if low is None or high is None:
        return {}
    pair = high << 32 | low
    if "L" in parts:
        return {to: pair << by >> 32}
    return {to: (pair - (pair >> 63 << 64) if "S64" in parts else pair) >> by}


def _select(state: State, x: Instruction) -> Values:
    _, to, reads = _parts(x)
    first = state.predicate(reads[2])
    options = [state.integer(y) for y in reads[:2]]
    if first is None:
        return {to: options[0]} if options[0] == options[1] else {}
    return {to: options[not first]}


def _move(state: State, x: Instruction) -> Values:
    _, to, reads = _parts(x)
    words, values = width(x), {}
    if x.base in ("LDC", "ULDC", "LDCU") and x.opcode.split(".")[-1] in ("U8", "S8", "U16", "S16"):
        return {}
    for k in range(words):
        values[to] = state.word(reads[0], k) if k else state.integer(reads[0])
        to = _next(to)
    return values


def _compare(state: State, x: Instruction) -> Values:
    parts, (to, _, a, b, other, *below) = x.opcode.split("."), x.operands
    first, second = state.integer(a), state.integer(b)
    test = COMPARE[parts[1]]
    if first is None or second is None:
        both = REGISTER.match(a.removesuffix(".reuse")) and REGISTER.match(b.removesuffix(".reuse"))
        both_unknown = first is None and second is None and both and parts[1] in ("EQ", "NE")
        if both_unknown and "EX" not in parts:
            guess = _joined(parts, parts[1] == "NE", state.predicate(other))
            return {ASSUMED + to: guess}
        result = None
    elif "EX" in parts and first == second:
        result = state.predicate(below[0])
    elif "U32" in parts:
        result = test(first % WORD, second % WORD)
    else:
        result = test(_signed(first), _signed(second))
    return {to: _joined(parts, result, state.predicate(other))}


def _compare_reals(state: State, x: Instruction) -> Values:
    parts, (to, _, a, b, other, *_) = x.opcode.split("."), x.operands
    first, second = (state.real(y, x.base == "DSETP") for y in (a, b))
    test = COMPARE.get(parts[1][:2])  # suffix U: true for a NaN too
    if first is None or second is None or not test:
        return {}
    result = test(first, second)
    if parts[1].endswith("U") and (math.isnan(first) or math.isnan(second)):
        result = True
    return {to: _joined(parts, result, state.predicate(other))}


def _joined(parts: Sequence[str], a: bool | None, b: bool | None) -> bool | None:
    if "OR" in parts:
        return True if True in (a, b) else None if None in (a, b) else False
    return False if False in (a, b) else None if None in (a, b) else True


def _predicates(state: State, x: Instruction) -> Values:
    to, _, *reads, table, _ = x.operands
    values = [state.predicate(y) for y in reads]
    guesses = itertools.product(*[(v,) if v is not None else (False, True) for v in values])
    found = {int(table, 0) >> (4 * a + 2 * b + c) & 1 for a, b, c in guesses}
    return {to: bool(found.pop())} if len(found) == 1 else {}


def _narrow(state: State, x: Instruction) -> Values:
    _, to, reads = _parts(x)
    if x.opcode != "F2F.F32.F64" or (value := state.real(reads[0], True)) is None:
        return {}
    return {to: struct.unpack("<I", struct.pack("<f", value))[0]}


def _signed(value: int) -> int:
    value %= WORD
    return value - WORD if value >> 31 & 1 else value


def _next(register: str) -> str:
    found = REGISTER.match(register)
    return f"{found[1]}R{int(found[2]) + 1}" if found else register


OPERATIONS: dict[str, Callable[[State, Instruction], Values]] = {
    **dict.fromkeys(("IADD", "IADD3", "VIADD"), _sum),
    **dict.fromkeys(("MOV", "LDC", "LDCU", "CS2R", "R2UR"), _move),
    "IMAD": _product,
    "LEA": _lea,
    "LOP3": _logic,
    "P2R": _packed,
    "SHF": _shift,
    "SEL": _select,
    "ISETP": _compare,
    **dict.fromkeys(("FSETP", "DSETP"), _compare_reals),
    "PLOP3": _predicates,
    "F2F": _narrow,
}


def _bits_after(state: State, x: Instruction, guard: bool | None) -> tuple[int, int]:
    """As `_bits`. If it is unknown whether LOP3 runs: the bits that it does not change."""
    known, value = _bits(state, x)
    if guard is None:
        before, old = state.some_bits(_parts(x)[1])
        known &= before & ~(value ^ old)
    return known, value & known


def execute(state: State, x: Instruction) -> None:
    """Compute values that may decide branches; any other written value becomes unknown."""
    guard = state.predicate(x.guard) if x.guard else True
    if guard is False:
        return
    known = OPERATIONS.get(x.base.removeprefix("U"))
    values = known(state, x) if known and guard else None
    bits = _bits_after(state, x, guard) if known is _logic else (0, 0)
    forget(state, x)
    if bits[0]:
        state.bits[_parts(x)[1]] = bits
    for name, value in (values or {}).items():
        if value is None or name in ("PT", "UPT", "RZ", "URZ"):
            continue
        if name.startswith(ASSUMED):
            state.assumed[name.removeprefix(ASSUMED)] = bool(value)
            continue
        if PREDICATE.match(name):
            state.predicates[name] = bool(value)
        else:
            state.registers[name] = value % WORD
