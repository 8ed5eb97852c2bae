"""Count what the CPU kernels execute on 64-bit Arm, under qemu: `make instructions-arm`.

A case of instructions.c that executes more than 2% more instructions of a call than the record,
arm.json, is a fault; --accept records the counts. qemu's processor has no caches and no time:
counts show neither misses nor the latency of an instruction.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.arm import environment

from . import x86

HERE = Path(__file__).resolve().parent
RECORD = HERE / "arm.json"
ISAS = ("sve256", "neon_bf16", "generic")


def build(folder: Path) -> tuple[Path, Path]:
    """qemu's plugin, and the program that runs one case, linked with the library for Arm."""
    plugin, program = folder / "qemu_counter.so", folder / "instructions"
    compiler = x86.c_compiler() or "cc"
    x86.run(compiler, "-O2", "-shared", "-fPIC", HERE / "qemu_counter.c", "-o", plugin)
    linked = (environment.LIBRARY, f"-Wl,-rpath,{environment.LIBRARY.parent}", "-lm")
    include = f"-I{environment.ROOT / 'csrc'}"
    x86.run("aarch64-linux-gnu-gcc", include, HERE / "instructions.c", *linked, "-o", program)
    return plugin, program


def executed(command: Sequence[str]) -> int:
    """What the whole program executes."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [x for x in done.stderr.splitlines() if x.startswith("instructions ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return int(lines[-1].split()[1])


def counted() -> x86.Counts:
    """What a call executes: the difference between two calls and one."""
    plugin, program = build(environment.FOLDER)
    found = {}
    for case in x86.run(*environment.emulated(program)).splitlines():
        for isa in ISAS:
            command = environment.emulated(program, isa, case, plugin=("-plugin", plugin))
            one, two = (executed([*command, str(n)]) for n in (1, 2))
            found[f"{isa} {case}"] = two - one
    return x86.Counts(x86.compiler_of(environment.LIBRARY), found)


def check(accepted: bool = False) -> int:
    """As `x86.check`."""
    if reason := environment.unavailable():
        raise ValueError(f"instructions --arm: {reason}")
    environment.make()
    return x86.judged([counted()], RECORD, accepted)
