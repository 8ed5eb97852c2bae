"""Parse PTX: the kernels of a module, and of each its parameters, bounds and instructions.

Unknown text is refused by name and line, never ignored: a directive may have a meaning.
"""

import re
from dataclasses import dataclass, field, replace


class Refused(Exception):
    """PTX that is not supported here."""


def refuse(line, what):
    raise Refused(f"line {line}: {what}")


@dataclass(frozen=True)
class Instruction:
    line: int
    guard: str  # the predicate's register, with ! before it where it must be false; "" for none
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    line: int
    name: str


@dataclass(frozen=True)
class Memory:
    """A variable in shared or local memory; of 0 bytes if the launch says how many."""

    align: int
    bytes: int


@dataclass
class Kernel:
    name: str
    line: int
    target: int  # 80 of sm_80
    parameters: dict[str, int]  # bytes of each
    aligns: dict[str, int]  # of each parameter
    shared: dict[str, Memory]  # of the module, and of the kernel
    most: tuple[int, ...] = ()  # .maxntid
    exactly: tuple[int, ...] = ()  # .reqntid
    blocks: int = 0  # .minnctapersm
    most_registers: int = 0  # .maxnreg
    registers: dict[str, str] = field(default_factory=dict)  # by name, the type
    local: dict[str, Memory] = field(default_factory=dict)
    body: list[Instruction | Label] = field(default_factory=list)


SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
SIZES |= {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 1}

NAME = r"[%$\w]+"
ENTRY = re.compile(rf"(?:\.visible\s+)?\.entry\s+({NAME})\s*\(([^()]*)\)([^{{]*)\{{")
# Parts of a module that have no meaning for a kernel, and data that none of ours reads. (A kernel
# that names it is refused, as the operand is unknown.)
IDLE = (r"\.version\s+[\d.]+", r"\.address_size\s+64", r"\.file\s[^\n]*")
IDLE += (rf"\.global\s+\.align\s+\d+\s+\.b8\s+{NAME}\[\d+\]\s*=\s*\{{[^}}]*\}}\s*;",)
IDLE += (r"\.section\s+\.debug_\w+\s*\{[^}]*\}",)
VARIABLE = rf"\.align\s+(\d+)\s+\.(\w+)\s+({NAME})(?:\[(\d*)\])?"


def without_comments(text):
    """The same lines, without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda x: "\n" * x[0].count("\n"), text, flags=re.S)


def kernels(text):
    """The kernels of a module, by name."""
    text = without_comments(text)
    found, target, shared, at = {}, 0, {}, 0
    while rest := re.compile(r"\S").search(text, at):
        at, line = rest.start(), text.count("\n", 0, rest.start()) + 1
        if idle := next((x for p in IDLE if (x := re.compile(p).match(text, at))), None):
            at = idle.end()
        elif arch := re.compile(r"\.target\s+sm_(\d+)a?[^\n]*").match(text, at):
            target, at = int(arch[1]), arch.end()
        elif memory := re.compile(rf"(?:\.extern\s+)?\.shared\s+{VARIABLE}\s*;").match(text, at):
            name, variable = variable_of(memory)
            shared, at = shared | {name: variable}, memory.end()
        elif entry := ENTRY.match(text, at):
            kernel = Kernel(entry[1], line, target, *parameters(entry[2], line), shared)
            bounds(kernel, entry[3], line)
            at = read_body(kernel, text, entry.end())
            found[kernel.name] = kernel
        else:
            refuse(line, f"{text[at:].splitlines()[0]!r}, expected an entry or shared memory")
    return found


def variable_of(found):
    align, kind, name, count = found.groups()
    return name, Memory(int(align), SIZES[kind] * (1 if count is None else int(count or 0)))


def parameters(text, line):
    """Bytes of each parameter, and the alignment of each."""
    found, aligns = {}, {}
    for each in filter(None, (x.strip() for x in text.split(","))):
        pointer = r"(?:\s+\.ptr(?:\s+\.global)?(?:\s+\.align\s+\d+)?)?"
        one = re.fullmatch(
            rf"\.param(?:\s+\.align\s+(\d+))?\s+\.(\w+){pointer}\s+({NAME})(?:\[(\d+)\])?", each
        )
        if not one or one[2] not in SIZES:
            refuse(line, f"parameter {each!r}")
        align, kind, name, count = one.groups()
        found[name] = SIZES[kind] * int(count or 1)
        aligns[name] = int(align or SIZES[kind])
    return found, aligns


def bounds(kernel, text, line):
    """Launch bounds."""
    for name, numbers in re.findall(r"\.(\w+)([^.]*)", text):
        values = tuple(map(int, re.findall(r"\d+", numbers)))
        if name == "maxntid":
            kernel.most = values
        elif name == "reqntid":
            kernel.exactly = values
        elif name == "minnctapersm":
            kernel.blocks = values[0]
        elif name == "maxnreg":
            kernel.most_registers = values[0]
        else:
            refuse(line, f"directive .{name}")


def read_body(kernel, text, at):
    """Read statements until the brace that ends the kernel; return the position after it. A scope
    has separate registers: each gets a name that no other has."""
    scopes, begun = [{}], []  # for each inner scope, what it began with, and where
    line, seen = text.count("\n", 0, at) + 1, at
    while True:
        at = re.compile(r"\s*").match(text, at).end()
        line, seen = line + text.count("\n", seen, at), at
        if at >= len(text):
            refuse(kernel.line, f"{kernel.name} has no end")
        if text[at] in "{}":
            if text[at] == "{":
                scopes.append({})
                begun.append((len(kernel.body), line))
            else:
                scopes.pop()
                if not scopes:
                    return at + 1
                own_labels(kernel.body, *begun.pop())
            at += 1
        elif label := re.compile(rf"({NAME})\s*:(?!:)").match(text, at):
            kernel.body.append(Label(line, label[1]))
            at = label.end()
        elif where := re.compile(r"\.loc\s[^\n]*").match(text, at):
            at = where.end()
        else:
            end = text.index(";", at)
            statement(kernel, " ".join(text[at:end].split()), line, scopes)
            at = end + 1


def own_labels(body, first, line):
    """Give labels of the scope from `first` on names that no other has."""
    inside = body[first:]
    own = {x.name: f"{x.name}_{line}" for x in inside if isinstance(x, Label)}
    for i, each in enumerate(inside if own else (), first):
        if isinstance(each, Label):
            body[i] = replace(each, name=own[each.name])
        elif each.opcode.startswith("bra"):
            body[i] = replace(each, operands=tuple(own.get(x, x) for x in each.operands))


def statement(kernel, text, line, scopes):
    if registers := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
        if registers[1] not in SIZES:
            refuse(line, f"registers of type .{registers[1]}")
        for each in registers[2].split(","):
            name, count = re.fullmatch(rf"({NAME})(?:<(\d+)>)?", each.strip()).groups()
            for own in [name] if count is None else [f"{name}{i}" for i in range(int(count))]:
                scopes[-1][own] = own if len(scopes) == 1 else f"{own}_{line}"
                kernel.registers[scopes[-1][own]] = registers[1]
    elif memory := re.fullmatch(rf"\.(shared|local) {VARIABLE}", text):
        name, variable = variable_of(re.fullmatch(VARIABLE, text.partition(" ")[2]))
        if memory[1] == "shared":
            kernel.shared = kernel.shared | {name: variable}
        else:
            kernel.local[name] = variable
    elif not re.fullmatch(r'\.pragma "(nounroll|used_bytes_mask (0x[0-9a-f]+|\d+))"', text):
        kernel.body.append(instruction(text, line, scopes))


def instruction(text, line, scopes):
    found = re.fullmatch(rf"(?:@(!?{NAME}) )?([a-z][\w.:]*)\s*(.*)", text)
    if not found:
        refuse(line, f"{text!r} is no instruction")

    def own(name):
        return next((x[name] for x in reversed(scopes) if name in x), name)

    def renamed(operand):
        return re.sub(NAME, lambda x: own(x[0]), operand) if len(scopes) > 1 else operand

    guard, opcode, operands = found.groups()
    return Instruction(line, renamed(guard or ""), opcode, tuple(map(renamed, split(operands))))


def split(text):
    """Operands, at the commas outside brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [x.strip() for x in parts if x.strip()]
