"""Count what the CPU kernels execute, and compare with the record: `make instructions`.

Unlike seconds, instruction counts do not depend on the load or the speed of the machine. callgrind
counts them within one call of each small case in instructions.c, on one thread, for AVX2 and for
plain vectors; valgrind does not support AVX-512. The record, x86.json, names the compiler
that built the counted library. These are faults:

    a case that executes more than 2% more instructions than recorded
    a case without a record, and a record without a case

A case that executes more than 2% fewer is reported, but is not a fault: --accept records it. Code
depends on the compiler: against the record of another compiler the ratios are printed, and the
tolerance is 25% (Clang 14 executes from 7% fewer to 22% more than GCC 12).

Counts do not show the cost of an instruction (cache misses, dependent chains): run `make bench`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fastattn.backends.native import libraries

from ..static_gpu import budgets

HERE = Path(__file__).resolve().parent
RECORD = HERE / "x86.json"
ISAS = ("avx2", "generic")
SAME_COMPILER, OTHER_COMPILER = 0.02, 0.25  # tolerances


class Counts(NamedTuple):
    compiler: str
    instructions: dict[str, int]  # by "<instruction set> <case>"


# -------------------------------------------------------------------------------------- the counts


def unavailable() -> str | None:
    """Why nothing can be counted here, or None."""
    if reason := libraries.cpu_unavailable():
        return reason
    if "avx2" not in libraries.cpu_isas():
        return f"no AVX2, in this machine or build: {', '.join(libraries.cpu_isas())}"
    needed = {"valgrind": shutil.which("valgrind"), "a C compiler": c_compiler()}
    missing = [what for what, path in needed.items() if not path]
    return f"not found: {', '.join(missing)}" if missing else None


def c_compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build(library: Path, folder: Path) -> Path:
    """The program that runs one case of `library`, built in `folder`."""
    program = folder / "instructions"
    source, include = HERE / "instructions.c", HERE.parents[1] / "csrc"
    linked = (library, f"-Wl,-rpath,{library.parent}", "-lm")
    run(c_compiler() or "cc", f"-I{include}", source, *linked, "-o", program)
    return program


def count(program: Path, isa: str, case: str) -> int:
    """Instructions executed within the one call that the program makes for a case."""
    callgrind = ("valgrind", "--tool=callgrind", "--toggle-collect=counted")
    text = run(*callgrind, "--callgrind-out-file=/dev/null", program, isa, case)
    found = re.search(r"Collected : ([1-9]\d*)", text)
    if not found:
        raise RuntimeError(f"callgrind: got {text!r}, expected 'Collected : <count>' in it")
    return int(found[1])


def run(*command: str | Path, **more) -> str:
    """Run a command; return its output, or raise RuntimeError with it if it fails."""
    text = [*map(str, command)]
    done = subprocess.run(text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(text)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def counted() -> Counts:
    """Count every case in the library in use."""
    library = libraries.cpu().path.resolve()
    with tempfile.TemporaryDirectory() as folder:
        program = build(library, Path(folder))
        pairs = [(isa, case) for case in run(program).splitlines() for isa in ISAS]
        found = {f"{isa} {case}": count(program, isa, case) for isa, case in pairs}
    return Counts(compiler_of(library), found)


def compiler_of(library: Path) -> str:
    """Name and version of the compiler, as it wrote them into the library.

    Clang is tried first: its libraries also name the GCC that compiled libc's start-up code.
    """
    code = library.read_bytes()
    for name, pattern in (("clang", rb"clang version ([\d.]+)"), ("GCC", rb"GCC: .*?([\d.]+)\0")):
        if found := re.search(pattern, code):
            return f"{name} {found[1].decode()}"
    return "unknown"


# ------------------------------------------------------------------------------------ the verdicts


class Verdict(NamedTuple):
    case: str
    got: int | None
    recorded: int | None
    word: str  # ok, more, fewer, no record, no case

    def __str__(self) -> str:
        numbers = " ".join(f"{x if x is not None else '-':>12}" for x in self[1:3])
        ratio = f"{self.got / self.recorded:.4f}" if self.got and self.recorded else "-"
        return f"{self.case:32} {numbers} {ratio:>8}  {self.word}"


HEAD = f"{'case':32} {'got':>12} {'recorded':>12} {'ratio':>8}"
FAULTS = ("more", "no record", "no case")


def tolerance(got: Counts, recorded: Counts) -> float:
    return SAME_COMPILER if got.compiler == recorded.compiler else OTHER_COMPILER


def compare(got: Counts, recorded: Counts) -> list[Verdict]:
    """A verdict on every case that was counted or recorded, in that order."""
    verdicts, allowed = [], tolerance(got, recorded)
    for case in got.instructions | recorded.instructions:
        new, old = got.instructions.get(case), recorded.instructions.get(case)
        verdicts.append(Verdict(case, new, old, judge(new, old, allowed)))
    return verdicts


def judge(new: int | None, old: int | None, allowed: float) -> str:
    if old is None:
        return "no record"
    if new is None:
        return "no case"
    if abs(new - old) <= allowed * old:
        return "ok"
    return "more" if new > old else "fewer"


def recorded(compiler: str, record: Path) -> Counts:
    """The record of this compiler, or of another version of it, or else of any."""
    every = {tuple(x.split(": ")): y for x, y in budgets.read(record).items()}
    versions = sorted({x for x, _ in every})
    near = [x for x in versions if x.split()[0] == compiler.split()[0]]
    found = compiler if compiler in versions else next(iter(near), "none")
    names = {f"{x} {y}": n for (v, x), of in every.items() if v == found for y, n in of.items()}
    return Counts(found, names)


def accept(every: Iterable[Counts], record: Path) -> None:
    """Write the counts as the record: a line for each compiler and instruction set or chip."""
    groups: budgets.Groups = {}
    for counts in every:
        for name, n in counts.instructions.items():
            where, _, case = name.partition(" ")
            groups.setdefault(f"{counts.compiler}: {where}", {})[case] = n
    budgets.write(record, groups)


def judged(every: Sequence[Counts], record: Path, accepted: bool) -> int:
    """Print the verdicts, and make the counts the record if they are accepted. Status 1 if there is
    a fault."""
    olds = [recorded(counts.compiler, record) for counts in every]
    faults = changes = 0
    for got, old in zip(every, olds, strict=True):
        verdicts = compare(got, old)
        wrong = sum(v.word in FAULTS for v in verdicts)
        changed = sum(v.word == "fewer" for v in verdicts)
        print(HEAD, *verdicts, sep="\n")
        print(f"compiled by {got.compiler}, the record's by {old.compiler}")
        allowed = tolerance(got, old)
        print(f"{wrong} faults, {changed} with fewer instructions; tolerance {allowed:.0%}")
        faults, changes = faults + wrong, changes + changed
    if accepted:
        accept(every, record)
        return 0
    if faults or changes:
        print(f"If the change is meant, --accept writes these counts to {record}.")
    return int(bool(faults))


def check(accepted: bool = False) -> int:
    """Raises ValueError if nothing can be counted here."""
    if reason := unavailable():
        raise ValueError(f"instructions: {reason}")
    return judged([counted()], RECORD, accepted)
