"""Compile the CUDA kernels with no GPU, and judge the machine code.

    python -m bench.static_gpu.ptxas

It reads the objects of csrc/cuda in build/cuda: those of sm80/ for sm_80 and sm_90, those of sm90/
for sm_90a. These are faults:

    a kernel that does not compile
    spilled registers in a plain kernel of head dims up to 128, for sm_90a of all head dims; in
    others, more bytes than ptxas_budget.json says: {arch: {kernel: bytes}}
    a kernel of matrix products without the tensor-core instructions of its architecture
    a warning of ptxas that it serialises products of warpgroups, each then waits for the last
    a kernel of sm90/ without sm90 in its name: sources of sm80/ may have the same one, for other
    chips, and the library would launch one of the two
    more shared memory than a block may have: on sm_86 and sm_89 for code of sm_80, which they run

Each folder has a listing and a report; --of names one folder, and only its sources are compiled.
The listing, one line per kernel, is printed, and written to bench/results/local, which git ignores.
Its summary, one line per template and dtype, is the report in bench/results, with the listing's
hash: --check fails if any number of the listing has changed. --accept writes the report and the
budget. All depend on the version of nvcc, which their first line names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import cuda_library
from .aot import digest, nvidia_tool

HERE = Path(__file__).resolve().parent
BUDGET = HERE / "ptxas_budget.json"
RESULTS = HERE.parent / "results"
REPORTS = {"sm80": "cuda-ptxas.txt", "sm90": "cuda-ptxas-sm90.txt"}
# By folder of csrc/cuda, what its sources are compiled for.
OF_FOLDER = {"sm80": ("sm_80", "sm_90"), "sm90": ("sm_90a",)}
ARCHS = tuple(arch for archs in OF_FOLDER.values() for arch in archs)
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 99 << 10, "sm_90a": 227 << 10}
PRODUCTS = {"sm_80": "HMMA", "sm_90": "HMMA", "sm_90a": "HGMMA"}
PROBE = "probe"  # a source with kernels that are no passes
NO_CLASS = "its name has no sm90"
# Plain kernels may not spill up to these head dims.
WITHOUT_SPILLS = {"sm_80": 128, "sm_90": 128, "sm_90a": 256}
WITHOUT_PRODUCTS = r"(delta|combine|sink_gradient|query_gradient|mask_tiles|shown_tiles)_kernel"


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: registers per thread, most bytes of shared memory at a launch (all of it
    dynamic), bytes spilled in stores and loads, the number of matrix instructions, and what it may
    not have: C7510 and its neighbours, ptxas's warnings that these are serialised; NO_CLASS."""

    arch: str
    name: str
    registers: int
    shared: int
    spilled: int
    products: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        memory = f"{self.shared:5d} bytes shared  {self.spilled:4d} bytes spilled"
        products = f"{self.products:4d} {PRODUCTS[self.arch]}"
        counts = f"{self.registers:3d} registers  {memory}  {products}"
        return "  ".join((self.arch, counts, self.name, *self.warnings))


def nvcc() -> str:
    if found := find_nvcc():
        return found
    raise SystemExit("bench.static_gpu.ptxas needs nvcc, of the CUDA toolkit 12.8 or newer")


def find_nvcc() -> str | None:
    """Find nvcc in the same places as csrc/cuda/nvcc.cmake."""
    if named := os.environ.get("CUDACXX"):
        return named
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] * bool(home) + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def version() -> str:
    """nvcc's version, as in the first line of the reports."""
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", said)
    return f"nvcc {found[1] if found else 'unknown'}"


def shared_memory(of_sm90: Iterable[str] = ()) -> dict[str, int]:
    """Bytes per block of each kernel, by its template argument with the namespace, as in
    sm80::Forward<...>, or by its name. of_sm90: such arguments of kernels of csrc/cuda/sm90."""
    emulator = HERE.parents[1] / "tests" / "gpu_emulation" / "emu"
    flags = ["-std=c++17", "-DFA_EMULATED", "-Wno-unknown-pragmas", f"-I{emulator}"]
    flags += [f"-I{cuda_library.SOURCES}", "-include", str(emulator / "emu.h")]
    with tempfile.TemporaryDirectory() as folder:
        program, instances = Path(folder) / "shared_memory", Path(folder) / "instances.inc"
        instances.write_text("".join(f"tell<{x}>();\n" for x in of_sm90))
        compiler = os.environ.get("CXX", "c++").split()
        source = str(HERE / "shared_memory.cpp")
        command = [*compiler, *flags, f"-I{folder}", source, "-o", str(program)]
        subprocess.run(command, check=True)
        sizes = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    names = subprocess.run(["c++filt", "-t"], input=sizes, capture_output=True, text=True).stdout
    lines = (line.split(maxsplit=1) for line in names.splitlines())
    return {qualified(name): int(size) for size, name in lines}


def qualified(name: str) -> str:
    """`plain`, but with the namespace of the class of kernels."""
    found = re.match(r"(?:fa::)?(sm\d+::)", name)
    return (found[1] if found else "") + plain(name)


def read_one(made: Path, arch: str, folder: str, shared: dict[str, int]) -> list[Kernel]:
    """The kernels of one object for one architecture. folder: that of its source."""
    code = nvidia_tool("cuobjdump", "--dump-sass", f"--gpu-architecture={arch}", str(made))
    functions = re.findall(r"Function : (\w+)(.*?)(?=Function : |\Z)", code, re.DOTALL)
    products = {name: text.count(f"{PRODUCTS[arch]}.") for name, text in functions}
    said = cuda_library.ptxas_output(made)
    compiled = re.findall(
        rf"Compiling entry function '(\S+)' for '{arch}'.*?(\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        said,
        re.DOTALL,
    )
    serialised = serialisations(said)
    found = []
    for mangled, stores, loads, used in compiled:
        name = readable(mangled)
        kind, _, instance = name.partition("<")
        found_by = (f"{folder}::{kind}", kind, f"{folder}::{instance[:-1].rstrip()}")
        size = next(shared[x] for x in found_by if x in shared)
        spilled = int(stores) + int(loads)
        counts = int(used), size, spilled, products[mangled]
        stray = (NO_CLASS,) * (folder == "sm90" and folder not in mangled)
        found.append(Kernel(arch, name, *counts, (*serialised.get(mangled, ()), *stray)))
    return found


def instances(made: Iterable[Path]) -> list[str]:
    """The template arguments of the kernels of csrc/cuda/sm90 in these objects, in full."""
    mangled = "\n".join(x for path in made for x in entries(cuda_library.ptxas_output(path)))
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True).stdout
    return sorted(set(re.findall(r"^void fa::sm90::\w+<(fa::sm90::.*>) >\(", names, re.M)))


def entries(said: str) -> list[str]:
    return re.findall(r"Compiling entry function '(\S+)'", said)


def serialisations(said: str) -> dict[str, tuple[str, ...]]:
    """By mangled name, the warnings of ptxas that it serialises a kernel's products of warpgroups:
    C7510 and its neighbours. Each then waits for the one before."""
    found: dict[str, tuple[str, ...]] = {}
    for code, name in re.findall(r"\((C75\d\d)\)[^\n]*'(\w+)'", said):
        found[name] = (*found.get(name, ()), code)
    return found


def readable(mangled: str) -> str:
    """Demangle a name, as in forward_kernel<Forward<BF16, 64, 64, false> >."""
    run = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True)
    return plain(re.sub(r"\([^()]*\)$|^void ", "", run.stdout.strip()))


def plain(name: str) -> str:
    """Drop namespaces and the types of constants from a name."""
    return re.sub(r"\((?:bool|int|\w*Gradient)\)", "", re.sub(r"\w+::", "", name))


def compile_all(folder: str, jobs: int | None) -> list[Kernel]:
    """Every kernel of a folder, sorted by architecture and name."""
    sources = cuda_library.objects().items()
    objects = [y for x, y in sources if x.parent.name == folder and x.stem != PROBE]
    cuda_library.build(jobs, objects)
    shared = shared_memory(instances(objects))
    kernels = [
        kernel
        for made in objects
        for arch in OF_FOLDER[folder]
        for kernel in read_one(made, arch, folder, shared)
    ]
    return sorted(kernels, key=lambda k: (k.arch, k.name))


def may_not_spill(kernel: Kernel) -> bool:
    """Is it plain, with head dims up to WITHOUT_SPILLS? Its last flag says if it is general, in
    forward the first one."""
    sizes = [int(x) for x in re.findall(r"\b\d+\b", kernel.name)[:2]]
    flags = re.findall(r"\b(?:true|false)\b", kernel.name)
    plain = flags[0 if kernel.name.startswith("forward_kernel") else -1 :][:1] == ["false"]
    return plain and all(x <= WITHOUT_SPILLS[kernel.arch] for x in sizes)


def faults(kernels: list[Kernel], budget: dict[str, dict[str, int]]) -> list[str]:
    found = []
    for kernel in kernels:
        allowed = 0 if may_not_spill(kernel) else budget.get(kernel.arch, {}).get(kernel.name, 0)
        if kernel.spilled > allowed:
            found.append(f"{kernel}: expected at most {allowed} bytes spilled")
        if not kernel.products and not re.match(WITHOUT_PRODUCTS, kernel.name):
            found.append(f"{kernel}: expected {PRODUCTS[kernel.arch]}")
        if kernel.warnings:
            found.append(f"{kernel}: expected no such warning")
        limit = SHARED_LIMIT[kernel.arch]
        if kernel.shared > limit:
            found.append(f"{kernel}: expected at most {limit} bytes shared")
    return found


def listing(kernels: list[Kernel]) -> str:
    return "".join(f"{line}\n" for line in (version(), *kernels))


def summary(folder: str, kernels: list[Kernel]) -> str:
    """One line for the kernels of each architecture, template and dtype: their number, the most
    registers, shared memory and spills, and the fewest and most matrix instructions."""
    lines = [version(), f"sha256 of local/{REPORTS[folder]}: {digest(listing(kernels))}"]
    alike: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        alike.setdefault((kernel.arch, without_constants(kernel.name)), []).append(kernel)
    for (arch, name), group in alike.items():
        registers, shared, spilled = (
            max(getattr(k, x) for k in group) for x in ("registers", "shared", "spilled")
        )
        products = [k.products for k in group]
        lines.append(
            f"{arch}  {len(group):2d} kernels  {registers:3d} registers  {shared:5d} bytes shared  "
            f"{spilled:4d} bytes spilled  {min(products):3d} to {max(products):3d} "
            f"{PRODUCTS[arch]}  {name}"
        )
    return "".join(f"{line}\n" for line in lines)


def without_constants(name: str) -> str:
    """A name without the numbers and switches among its template arguments."""
    return re.sub(r", (?:\d+|true|false)\b", "", name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.static_gpu.ptxas", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--accept", action="store_true", help="write the budget and the report")
    parser.add_argument("--check", action="store_true", help="fail if the report is stale")
    parser.add_argument("--jobs", type=int, help="compilers at a time, else two")
    parser.add_argument("--of", choices=OF_FOLDER, help="one folder of csrc/cuda, else all")
    options = parser.parse_args(arguments)
    folders = [options.of] if options.of else list(OF_FOLDER)
    return max([judge(folder, options) for folder in folders])


def judge(folder: str, options: argparse.Namespace) -> int:
    """Compile the kernels of a folder, and print their listing and faults. Returns 1 for any."""
    kernels, report = compile_all(folder, options.jobs), RESULTS / REPORTS[folder]
    full = RESULTS / "local" / REPORTS[folder]
    full.parent.mkdir(exist_ok=True)
    full.write_text(listing(kernels))
    budget = json.loads(BUDGET.read_text())
    if options.accept:
        for arch in OF_FOLDER[folder]:
            budget[arch] = {k.name: k.spilled for k in kernels if k.arch == arch and k.spilled}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
        report.write_text(summary(folder, kernels))
    print(listing(kernels), end="")
    wrong = faults(kernels, budget)
    if options.check and report.read_text() != summary(folder, kernels):
        wrong.append(f"{report} is stale: --accept writes it anew")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    spilled = sum(kernel.spilled for kernel in kernels)
    print(f"{folder}: {len(kernels)} kernels, {spilled} bytes spilled, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
