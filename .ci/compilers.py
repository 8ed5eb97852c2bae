"""Compile the CPU kernels with compilers other than GCC, and for other systems: `make compilers`.

Every instruction set is compiled as far as the compiler's front end goes (-fsyntax-only), with
-std=c++17 -Wall -Wextra -Werror: by Clang with libc++, as on macOS; by Clang for 64-bit Arm; by
mingw, for Windows. Nothing of it is linked or run. A compiler that is not here is named with
Debian's package that has it. Exits with 1 if one finds a fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CPU = Path(__file__).resolve().parents[1] / "csrc" / "cpu"
FLAGS = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
X86 = {
    "generic": (),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
}
AMX = {
    "amx_bf16": (*AVX512, "-DFA_AMX"),
    "amx_model": (*AVX512, "-DFA_AMX", "-DFA_AMX_MODEL"),
}
ARM = {"generic": (), "neon_bf16": ("-march=armv8.2-a+bf16",)}


class Compiler(NamedTuple):
    """A compiler for a system: its command, its flags, Debian's packages, the instruction sets."""

    name: str
    command: str
    flags: tuple[str, ...]
    packages: str
    isas: dict[str, tuple[str, ...]]


COMPILERS = (
    Compiler(
        "Clang, libc++",
        "clang++-19",
        ("-std=c++17", "-stdlib=libc++"),
        "clang-19 libc++-19-dev libc++abi-19-dev",
        X86 | AMX,
    ),
    Compiler(
        "Clang, 64-bit Arm",
        "clang++-19",
        ("-std=c++17", "--target=aarch64-linux-gnu"),
        "clang-19 g++-aarch64-linux-gnu",
        ARM,
    ),
    Compiler(  # GCC's vectors need GNU's dialect; the warnings are false alarms in intrinsics
        "mingw, Windows",
        "x86_64-w64-mingw32-g++-posix",
        ("-std=gnu++17", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
        "g++-mingw-w64-x86-64-posix",
        X86,
    ),
)


def commands(compiler: Compiler) -> Iterator[tuple[str, list[str]]]:
    """What is compiled, and the command: the kernels of each instruction set, then the library."""
    start = [compiler.command, *compiler.flags, *FLAGS]
    for isa, flags in compiler.isas.items():
        yield isa, [*start, *flags, f"-DFA_ISA={isa}", str(CPU / "unit.cpp")]
    built = "-DFA_ISAS(ISA)=" + " ".join(f"ISA({x},{x})" for x in compiler.isas)
    for name in ("library", "kernel_choice"):
        yield name, [*start, built, str(CPU / "runtime" / f"{name}.cpp")]


def compiled(command: list[str]) -> str:
    """What the compiler complains of."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode or done.stderr else ""


def main() -> int:
    faults = 0
    for compiler in COMPILERS:
        if not shutil.which(compiler.command):
            print(f"{compiler.name}: not here (apt-get install {compiler.packages})")
            continue
        names, each = zip(*commands(compiler))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, complaint in zip(names, pool.map(compiled, each)):
                print(f"{compiler.name}: {name}: {complaint or 'no warning'}")
                faults += bool(complaint)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
