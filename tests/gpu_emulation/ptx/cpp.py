"""A kernel of PTX as C++: registers are variables, labels are labels, each instruction a statement.

Registers that are never written are poison, all ones. What an instruction does is in forms.py.
"""

import math
import re

from . import forms, hopper
from .text import NAME, SIZES, Instruction, refuse

HERE = re.compile(r"%(tid|ntid|ctaid|nctaid)\.([xyz])")
NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")
FLOAT = {"f32": re.compile(r"0[fF]([0-9a-fA-F]{8})"), "f64": re.compile(r"0[dD]([0-9a-fA-F]{16})")}
WINDOW = 1024  # where shared memory begins in its window, as in emu

# In KB: what a kernel may have of static shared memory and of local memory, and what an
# architecture lets a block have of shared memory. Local memory is on the stack of a thread of the
# emulator.
STATIC, LOCAL = 48, 64
# Registers of a multiprocessor, and how many a thread may have, by eights. Each of its four parts
# has a quarter of them, and a quarter of the warps of all blocks.
REGISTERS, MOST_REGISTERS, BY, QUARTERS = 64 << 10, 256, 8, 4
LIMITS = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def source(kernels):
    """C++ of kernels, which register themselves when they are loaded."""
    return '#include "machine.h"\nusing namespace ptx;\n' + "".join(
        f"namespace kernel_{i} {{\n{one(kernel)}}}\n" for i, kernel in enumerate(kernels)
    )


def one(kernel):
    if kernel.target not in LIMITS:
        refuse(kernel.line, f"target sm_{kernel.target}, expected one of {[*LIMITS]}")
    writer = Writer(kernel)
    body = [x for each in kernel.body for x in writer.statement(each)]
    sizes, aligns = (
        ", ".join(map(str, [*x.values(), 0])) for x in (kernel.parameters, kernel.aligns)
    )
    at, align = writer.static, max([16, *(x.align for x in kernel.shared.values() if not x.bytes)])
    if at > STATIC << 10:
        refuse(kernel.line, f"{at} bytes of static shared memory, expected at most {STATIC} KB")
    if (bytes := sum(x.bytes for x in kernel.local.values())) > LOCAL << 10:
        refuse(kernel.line, f"{bytes} bytes of local memory, expected at most {LOCAL} KB")
    lines = [
        "extern const emu::Compiled kernel;",
        "static void body(Parameters P) {",
        "const Special S = special();",
        *writer.declarations(),
        *body,
        "return;",
        "}",
        f"const size_t bytes[] = {{{sizes}}}, aligns[] = {{{aligns}}};",
        f'const emu::Compiled kernel = {{"{kernel.name}", body, {len(kernel.parameters)}, bytes,',
        f"aligns, {{{three(kernel.most)}}}, {{{three(kernel.exactly)}}},",
        f"{at}, {align}, {LIMITS[kernel.target] << 10}, {registers(kernel)}}};",
        "const struct Register {",
        "Register() { emu::add(&kernel); }",
        "} registered;",
    ]
    return "".join(f"{x}\n" for x in lines)


def registers(kernel):
    """Registers of each thread at a launch: with setmaxnreg, ptxas uses all that .maxnreg or
    .minnctapersm give. 0 if there is neither."""
    if kernel.most_registers:
        return min(MOST_REGISTERS, -(-kernel.most_registers // BY) * BY)
    warps = -(-math.prod(kernel.exactly or kernel.most or (0,)) // 32) * kernel.blocks
    of_quarter = -(-warps // QUARTERS)
    return warps and min(MOST_REGISTERS, REGISTERS // QUARTERS // 32 // of_quarter // BY * BY)


def three(shape):
    return ", ".join(map(str, (*shape, 1, 1)[:3] if shape else (0, 0, 0)))


def unsigned(kind):
    return "pred" if kind == "pred" else f"u{8 * SIZES[kind]}"


def doubled(kind):
    return f"{kind[0]}{2 * int(kind[1:])}"


class Writer:
    """Writes the statements of one kernel."""

    def __init__(self, kernel):
        self.kernel, self.line, self.shared, self.static = kernel, kernel.line, {}, 0
        found = re.search(r"[a-z]+(_[a-z]+)*_kernel", kernel.name)  # of a mangled name
        self.name = found[0] if found else kernel.name
        self.labels = {x.name for x in kernel.body if not isinstance(x, Instruction)}
        self.used = groups_of(hopper.wgmma_registers, kernel.body)
        for name, variable in sorted(kernel.shared.items(), key=lambda x: x[1].bytes == 0):
            self.shared[name] = self.static = -(-self.static // variable.align) * variable.align
            self.static += variable.bytes

    def declarations(self):
        groups = sorted(set(self.used.values()))
        uses = "".join(f", used_{i} = 0, as_{i} = 0, as_{i}_at = 0" for i in groups)
        yield f"u32 fenced = 0{uses};"
        for name, kind in self.kernel.registers.items():
            ones = "true" if kind == "pred" else f"BITS({self.type(kind)}, u{8 * SIZES[kind]}(-1))"
            yield f"{self.type(kind)} {self.register(name)} = {ones};"
        for name, variable in self.kernel.local.items():
            yield f"alignas({variable.align}) u8 {self.plain(name)}[{variable.bytes}];"
            yield f"__builtin_memset({self.plain(name)}, 0xFF, {variable.bytes});"

    def statement(self, each):
        if not isinstance(each, Instruction):
            return [f"{self.label(each.name)}:;"]
        self.each, self.line = each, each.line
        found, groups = forms.known(each.opcode, each.line, len(each.operands))
        self.counted(each, found.kinds)
        place = f'"{each.opcode} in line {each.line} of {self.name}"'
        if callable(found.code):
            code = found.code(self, groups, each.operands, place)
        else:
            code = self.expression(each, found, groups)
        if each.guard:
            code = f"if ({self.value(each.guard, 'pred')}) {{ {code} }}"
        return [code]

    def counted(self, each, kinds):
        """Check the number of operands; a * at the end of a form's kinds is an optional one."""
        most = len(kinds)
        if kinds and not least_of(kinds) <= len(each.operands) <= most:
            refuse(each.line, f"{each.opcode} with {len(each.operands)} operands, expected {most}")

    def expression(self, each, found, groups):
        """The result of operands a, b, ..."""
        kinds, wider = [], []
        for kind in found.kinds:
            wider.append(kind.startswith("["))
            kinds.append(self.kind(kind.strip("[]"), groups))
        flush = bool(groups.get("ftz"))
        names = {
            name: self.value(x, kind, wider=wide, flush=flush and kind == "f32")
            for name, x, kind, wide in zip("abcd", each.operands[1:], kinds[1:], wider[1:])
        }
        for name in ("T", "W", "B", "WB"):
            if "T" in groups and not (name[0] == "W" and groups["T"] in ("f32", "f64", "pred")):
                names[name] = self.type(self.kind(name, groups))
        if "T" in groups:
            names["bits"] = 8 * SIZES[groups["T"]]
        code = found.code.format(**names)
        if groups.get("sat"):
            code = f"saturated({code})"
        if flush and kinds[0] == "f32":
            code = f"ftz({code})"
        return self.result(each.operands[0], kinds[0], code, wider=wider[0])

    def kind(self, name, groups):
        own = groups.get("T")
        if name == "B":
            return unsigned(own)
        if name in ("W", "WB"):
            return doubled(own if name == "W" else unsigned(own))
        return groups.get(name) or name

    # -- operands --------------------------------------------------------------------------------

    def type(self, kind):
        return {"pred": "bool"}.get(kind, kind.replace("b", "u"))

    def plain(self, name):
        return re.sub(r"\W", "_", name.replace("$", "D"))

    def register(self, name):
        return "r_" + self.plain(name)

    def label(self, name):
        if name not in self.labels:
            refuse(self.line, f"label {name}")
        return "L_" + self.plain(name)

    def value(self, operand, kind, wider=False, flush=False):
        """The operand as C++ of that type; of a register that may be wider, its low bits."""
        if flush:
            return f"ftz({self.value(operand, kind, wider)})"
        type = self.type(kind)
        if operand.startswith("!") and kind == "pred":
            return f"!{self.value(operand[1:], kind)}"
        if operand in self.kernel.registers:
            own = self.kernel.registers[operand]
            self.fits(operand, own, kind, wider)
            return cast(type, self.type(own), self.read(operand))
        return f"{type}({self.other(operand, kind)})"

    # -- registers that products use in flight: how many wgmma.fences preceded their last use by
    # other instructions, and by products? And their role then: A (1), or D of so many columns --

    def use(self, register):
        return f"used_{self.used[register]} = fenced"

    def read(self, register):
        plain = self.register(register)
        return f"({self.use(register)}, {plain})" if register in self.used else plain

    def ordered(self, uses):
        """C++: was there a fence since their last use? And what records this use. uses: (one
        register of each list, its role)."""
        groups = [(self.used[register], what) for register, what in uses]
        fenced = " && ".join(
            f"used_{i} < fenced && (as_{i} == {what} || as_{i}_at < fenced)" for i, what in groups
        )
        return fenced, "".join(f" as_{i} = {what}; as_{i}_at = fenced;" for i, what in groups)

    def four_bytes(self, operand):
        own = self.kernel.registers.get(operand)
        if own is None or SIZES[own] != 4:
            refuse(self.line, f"{operand}, expected a register of 32 bits")
        return self.register(operand)

    def other(self, operand, kind):
        """An operand that is not a register."""
        if found := HERE.fullmatch(operand):
            return f"S.{found[1]}[{'xyz'.index(found[2])}]"
        if operand == "%laneid":
            return "S.laneid"
        if operand == "%globaltimer":
            return "emu::nanoseconds()"
        if operand in self.shared:
            return f"{WINDOW + self.shared[operand]}u"
        if operand in self.kernel.local:
            return f"u64({self.plain(operand)})"
        if operand in self.kernel.parameters:
            return f"u64(P[{[*self.kernel.parameters].index(operand)}])"
        for float_kind, pattern in FLOAT.items():
            if found := pattern.fullmatch(operand):
                bits = 8 * SIZES[float_kind]
                number = f"u{bits}(0x{found[1]}ull)"
                if 8 * SIZES[kind] != bits:
                    refuse(self.line, f"{operand} as .{kind}")
                return f"BITS({kind}, {number})" if kind[0] == "f" else number
        if NUMBER.fullmatch(operand) and kind[0] != "f":
            return self.number(operand, kind)
        refuse(self.line, f"operand {operand} as .{kind}")

    def number(self, operand, kind):
        value = self.constant(operand)
        if kind == "pred":
            return "true" if value else "false"
        if not -(2**63) <= value < 2**64:
            refuse(self.line, f"operand {operand} as .{kind}")
        return f"0x{value % 2**64:x}ull"

    def constant(self, operand):
        found = NUMBER.fullmatch(operand)
        if not found:
            refuse(self.line, f"operand {operand}, expected a number")
        digits = found[2]
        octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "xXbB"
        return int(found[1] + digits, 8 if octal else 0)

    def result(self, operand, kind, code, wider=False):
        """The statement that assigns it to a register, which may be wider: the value is
        extended."""
        if operand not in self.kernel.registers:
            refuse(self.line, f"result {operand}, expected a register")
        own = self.kernel.registers[operand]
        self.fits(operand, own, kind, wider)
        to, type = self.type(own), self.type(kind)
        given = f"{self.register(operand)} = {cast(to, type, f'{type}({code})')};"
        return f"{given} {self.use(operand)};" if operand in self.used else given

    def fits(self, operand, own, kind, wider):
        same = SIZES[own] == SIZES[kind] and (own == "pred") == (kind == "pred")
        if not same and not (wider and SIZES[own] > SIZES[kind] and "pred" not in (own, kind)):
            refuse(self.line, f"{operand} is .{own}, expected .{kind}")

    def vector(self, operand):
        if not operand.startswith("{"):
            refuse(self.line, f"{operand}, expected registers in braces")
        return [x.strip() for x in operand[1:-1].split(",")]

    def registers(self, operand, count, kind):
        found = self.vector(operand) if operand.startswith("{") else [operand]
        if len(found) * SIZES[kind] > 16:
            refuse(self.line, f"{len(found)} elements of .{kind}, expected at most 16 bytes")
        if len(found) != int(count or 1):
            refuse(self.line, f"{len(found)} registers, expected {count or 1}")
        return found

    def base(self, operand):
        """The base of an address, and the offset."""
        found = re.fullmatch(rf"\[\s*({NAME}|\d+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if not found:
            refuse(self.line, f"address {operand}")
        return found[1], self.constant(found[2]) if found[2] else 0

    def address(self, operand, kind):
        base, offset = self.base(operand)
        at = self.value(base, kind, wider=kind == "u32")  # of shared memory: its low bits
        return f"{at} + {self.type(kind)}({offset})" if offset else at


def groups_of(lists_of, body):
    """For each register of a list, the number of its group: lists that share registers are one."""
    found = {}
    lists = [x for each in body if isinstance(each, Instruction) for x in lists_of(each)]
    for number, names in enumerate(lists):
        merged = {found[x] for x in names if x in found}
        found |= dict.fromkeys(names, number)
        found = {x: number if i in merged else i for x, i in found.items()}
    return found


def least_of(kinds):
    return sum(x != "*" for x in kinds)


def cast(to, own, code):
    """From one C++ type to another: the same bits, or whole numbers of another size."""
    if to == own:
        return code
    floats = [x[0] == "f" for x in (to, own)]
    if any(floats):
        return f"BITS({to}, {code})"
    return f"{to}({code})"
