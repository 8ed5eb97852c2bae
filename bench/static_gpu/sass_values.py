"""The known values of a thread (integers of 32 bits, and predicates), and the operands that an
instruction reads and writes."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .sass import NEVER, Instruction

WORD = 1 << 32
ASSUMED = "assumed "
PREDICATE = re.compile(r"!?U?P(?:\d|T)$")
REGISTER = re.compile(r"(U?)R(\d+)$")
CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]$")


@dataclass
class State:
    """The known values: words of constant bank 0, registers and predicates."""

    constants: dict[int, int]
    registers: dict[str, int] = field(default_factory=dict)
    bits: dict[str, tuple[int, int]] = field(default_factory=dict)  # some known bits: mask, value
    predicates: dict[str, bool] = field(default_factory=dict)
    assumed: dict[str, bool] = field(
        default_factory=dict
    )  # guesses for unknown ones; they decide no branch

    def predicate(self, text: str) -> bool | None:
        name = text.lstrip("!")
        value = True if name in ("PT", "UPT") else self.predicates.get(name)
        return value if value is None or not text.startswith("!") else not value

    def word(self, text: str, offset: int = 0) -> int | None:
        """The value of an operand, or of the word `offset` after it, without its sign."""
        text = text.removesuffix(".reuse").lstrip("-~|").removesuffix("|")
        if text in ("RZ", "URZ", "SRZ"):
            return 0
        if found := REGISTER.match(text):
            return self.registers.get(f"{found[1]}R{int(found[2]) + offset}")
        if found := CONSTANT.match(text):
            return self.constants.get(int(found[1], 16) + 4 * offset)
        with_value = re.fullmatch(r"0x[0-9a-f]+|\d+", text)
        return None if not with_value else int(text, 0) if not offset else 0

    def some_bits(self, text: str) -> tuple[int, int]:
        """Which bits of an operand are known, and their values."""
        if (value := self.word(text)) is not None:
            return WORD - 1, value
        return self.bits.get(text.removesuffix(".reuse"), (0, 0))

    def integer(self, text: str) -> int | None:
        """The value with its sign. -0 is 2^32, so that a sum has the carry of a subtraction."""
        value = self.word(text)
        if value is None or text[0] not in "-~":
            return value
        return WORD - value if text[0] == "-" else WORD - 1 - value

    def real(self, text: str, double: bool) -> float | None:
        if re.fullmatch(r"[+-]?(\d+\.?\d*(e[+-]?\d+)?|INF|QNAN)", text):
            return float(text.replace("QNAN", "nan"))
        words = [self.word(text, k) for k in range(1 + double)]
        if None in words:
            return None
        (value,) = struct.unpack("<d" if double else "<f", struct.pack(f"<{len(words)}I", *words))
        value = abs(value) if "|" in text else value
        return -value if text.startswith("-") else value


# ------------------------------------------------------------------------------- what is written


def written(x: Instruction) -> tuple[list[str], list[str]]:
    """The predicates and the registers that an instruction writes."""
    if x.jumps or x.base in ("EXIT", "STG", "STS", "STL", "ST", "RED", "CALL", "RET"):
        return [], []
    if x.base == "R2P":
        return [f"P{k}" for k in range(7)], []
    operands, predicates, registers = list(x.operands), [], []
    while operands and PREDICATE.match(operands[0]):
        predicates.append(operands.pop(0))
    if x.base.endswith(("SETP", "SETP2")) or x.base.endswith("PLOP3"):
        return predicates[:2], []
    if operands and (found := REGISTER.match(operands.pop(0))):
        registers = [f"{found[1]}R{int(found[2]) + k}" for k in range(width(x))]
    while operands and PREDICATE.match(operands[0]) and not operands[0].startswith("!"):
        predicates.append(operands.pop(0))
    return predicates, registers


def width(x: Instruction) -> int:
    """How many registers an instruction writes."""
    parts = x.opcode.split(".")
    if x.base == "HGMMA":
        return int(parts[1].split("x")[1]) // 2
    if x.base in ("LDTM", "LDSM") and (found := re.fullmatch(r"x?(\d+)", parts[-1])):
        return int(found[1])
    if x.base in ("HMMA", "IMMA") or "128" in parts:
        return 4
    pairs = x.base in ("DADD", "DMUL", "DFMA", "FADD2", "FMUL2", "FFMA2")
    two = pairs or {"64", "WIDE", "F64", "S64", "U64"} & set(parts)
    two = two or (x.base == "CS2R" and "32" not in parts)
    return 2 if two and "HI" not in parts else 1


def forget(state: State, x: Instruction) -> None:
    """Mark all that an instruction writes as unknown."""
    predicates, registers = written(x)
    for name in predicates:
        state.predicates.pop(name, None)
        state.assumed.pop(name, None)
    for name in registers:
        state.registers.pop(name, None)
        state.bits.pop(name, None)


def condition(state: State, x: Instruction) -> bool | None:
    """Is a branch taken? None: unknown."""
    given = [x.guard] * bool(x.guard) + [y for y in x.operands[:-1] if PREDICATE.match(y)]
    values = [state.predicate(y) for y in given]
    return False if False in values else None if None in values or not given else True


def runs(state: State, x: Instruction) -> bool:
    """Does the guard let an instruction run? True if unknown."""
    name = x.guard.lstrip("!")
    if not x.guard or state.predicate(x.guard) or name not in state.predicates | state.assumed:
        return x.guard not in NEVER
    return (state.predicates | state.assumed)[name] != x.guard.startswith("!")
