"""Compile the CUDA kernels with no GPU, and judge the machine code.

    python -m bench.static_gpu.ptxas

It reads the objects of csrc/cuda in build/cuda: those of sm80/ for sm_80 and sm_90, those of sm90/
for sm_90a. These are faults:

    a kernel that does not compile
    spilled registers in a plain kernel of head dims up to 128, for sm_90a of all head dims; in
    others, more bytes than ptxas_budget.json says: {arch and template: {constants: bytes}}
    a kernel of matrix products without the tensor-core instructions of its architecture
    a warning of ptxas that it serialises products of warpgroups, each then waits for the last
    a kernel of sm90/ without sm90 in its name: sources of sm80/ may have the same one, for other
    chips, and the library would launch one of the two
    in a main loop of sm90/: other waits for products than those of WAITS, an exponential that no
    product runs under, or more barriers than BARRIERS

--of names one folder, and only its sources are compiled. The listing has a line for each kernel;
it is written to bench/results/local, which git ignores. --accept writes the budget. Both depend on
the version of nvcc, which the first line names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..measure.machine import RESULTS
from . import cuda_library, sass
from .budgets import nvidia_tool, read, write

HERE = Path(__file__).resolve().parent
BUDGET = HERE / "ptxas_budget.json"
# By folder of csrc/cuda, what its sources are compiled for.
OF_FOLDER = {"sm80": ("sm_80", "sm_90"), "sm90": ("sm_90a",)}
PRODUCTS = {"sm_80": "HMMA", "sm_90": "HMMA", "sm_90a": "HGMMA"}
PROBE = "probe"  # a source with kernels that are no passes
NO_CLASS = "its name has no sm90"
# Plain kernels may not spill up to these head dims.
WITHOUT_SPILLS = {"sm_80": 128, "sm_90": 128, "sm_90a": 256}
WITHOUT_PRODUCTS = r"(delta|combine|sink_gradient|query_gradient|mask_tiles|shown_tiles)_kernel"
# Of sm90/, by kernel: how many groups of products may run after each wait, plain and with features;
# and the most barriers of an iteration. What ptxas makes of the source decides it, and no run of
# PTX shows it.
WAITS = {"forward_kernel": ((1, 0), (1, 0)), "backward_kernel": ((1, 1, 1, 0), (0, 1, 0))}
BARRIERS = {"forward_kernel": 2, "backward_kernel": 3}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: registers per thread, bytes spilled in stores and loads, the number of
    matrix instructions, what it may not have: C7510 and its neighbours, ptxas's warnings that these
    are serialised; NO_CLASS. `loops` are counts of its main loops, the shortest first."""

    arch: str
    name: str
    registers: int
    spilled: int
    products: int
    warnings: tuple[str, ...] = ()
    loops: tuple[sass.Counts, ...] = ()

    def __str__(self) -> str:
        products = f"{self.products:4d} {PRODUCTS[self.arch]}"
        counts = f"{self.registers:3d} registers  {self.spilled:4d} bytes spilled  {products}"
        return "  ".join((self.arch, counts, self.name, *map(str, self.loops[:1]), *self.warnings))

    @property
    def template(self) -> str:
        """The architecture and the name without numbers and switches."""
        return f"{self.arch} {re.sub(r', (?:[0-9]+|true|false)(?![0-9a-z])', '', self.name)}"

    @property
    def constants(self) -> str:
        return ", ".join(re.findall(r"(?<![\w])(?:\d+|true|false)(?![\w])", self.name))


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
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", said)
    return f"nvcc {found[1] if found else 'unknown'}"


def read_one(made: Path, arch: str, folder: str) -> list[Kernel]:
    """The kernels of one object for one architecture. folder: that of its source."""
    codes, said = disassembled(made, arch), cuda_library.ptxas_output(made)
    compiled = re.findall(
        rf"Compiling entry function '(\S+)' for '{arch}'.*?(\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        said,
        re.DOTALL,
    )
    serialised = serialisations(said)
    found = []
    for mangled, stores, loads, used in compiled:
        name, code = readable(mangled), codes[mangled]
        products = sum(x.base == PRODUCTS[arch] for x in code.instructions)
        stray = (NO_CLASS,) * (folder == "sm90" and folder not in mangled)
        warnings = (*serialised.get(mangled, ()), *stray)
        counts = int(used), int(stores) + int(loads), products
        found.append(Kernel(arch, name, *counts, warnings, tuple(code.counts())))
    return found


def disassembled(made: Path, arch: str) -> dict[str, sass.Code]:
    """The code of each kernel of an object, by its mangled name."""
    found: dict[str, sass.Code] = {}
    with tempfile.TemporaryDirectory() as folder:
        nvidia_tool("cuobjdump", "--extract-elf", "all", str(made), cwd=folder)
        for cubin in Path(folder).glob(f"*.{arch}.cubin"):
            found |= sass.read(nvidia_tool("nvdisasm", "-c", str(cubin)))
    return found


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


def compile_all(folder: str, jobs: int | None = None) -> list[Kernel]:
    """Every kernel of a folder, sorted by architecture and name."""
    sources = cuda_library.objects().items()
    objects = [y for x, y in sources if x.parent.name == folder and x.stem != PROBE]
    cuda_library.build(jobs, objects)
    kernels = [
        kernel
        for made in objects
        for arch in OF_FOLDER[folder]
        for kernel in read_one(made, arch, folder)
    ]
    return sorted(kernels, key=lambda k: (k.arch, k.name))


def is_general(kernel: Kernel) -> bool:
    """Has it code for features? Its last flag says so, in forward the first one."""
    flags = re.findall(r"\b(?:true|false)\b", kernel.name)
    return flags[0 if kernel.name.startswith("forward_kernel") else -1 :][:1] != ["false"]


def may_not_spill(kernel: Kernel) -> bool:
    """Is it plain, with head dims up to WITHOUT_SPILLS?"""
    sizes = [int(x) for x in re.findall(r"\b\d+\b", kernel.name)[:2]]
    return not is_general(kernel) and all(x <= WITHOUT_SPILLS[kernel.arch] for x in sizes)


def faults(kernels: list[Kernel], budget: dict[str, dict[str, int]]) -> list[str]:
    found = []
    for kernel in kernels:
        recorded = budget.get(kernel.template, {}).get(kernel.constants, 0)
        allowed = 0 if may_not_spill(kernel) else recorded
        rules = [
            (kernel.spilled <= allowed, f"expected at most {allowed} bytes spilled"),
            (
                kernel.products or re.match(WITHOUT_PRODUCTS, kernel.name),
                f"expected {PRODUCTS[kernel.arch]}",
            ),
            (not kernel.warnings, "expected no such warning"),
        ]
        texts = [text for ok, text in rules if not ok] + order_faults(kernel)
        found += [f"{kernel}: {text}" for text in texts]
    return found


def order_faults(kernel: Kernel) -> list[str]:
    """What is wrong with the order of the main loops of a kernel of sm90/."""
    name = kernel.name.partition("<")[0]
    if kernel.arch != "sm_90a" or name not in WAITS or not kernel.loops:
        return []
    expected, most = WAITS[name][is_general(kernel)], BARRIERS[name]
    found = []
    for loop in dict.fromkeys(kernel.loops):
        if loop.waits != expected:
            found.append(f"expected waits {expected}, got {loop.waits}")
        if loop.between < loop.exponentials:
            found.append("expected a product under every exponential")
    if kernel.loops[0].barriers > most:
        found.append(f"expected at most {most} barriers, got {kernel.loops[0].barriers}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.static_gpu.ptxas", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--accept", action="store_true", help="write the budget")
    parser.add_argument("--jobs", type=int, help="compilers at a time, else two")
    parser.add_argument("--of", choices=OF_FOLDER, help="one folder of csrc/cuda, else all")
    options = parser.parse_args(arguments)
    folders = [options.of] if options.of else list(OF_FOLDER)
    return max([judge(folder, options) for folder in folders])


def judge(folder: str, options: argparse.Namespace) -> int:
    """Compile the kernels of a folder, and print their listing and faults. Returns 1 for any."""
    kernels, budget = compile_all(folder, options.jobs), read(BUDGET)
    listing = "".join(f"{line}\n" for line in (version(), *kernels))
    full = RESULTS / "local" / f"cuda-{folder}.txt"
    full.parent.mkdir(exist_ok=True)
    full.write_text(listing)
    if options.accept:
        budget = {x: y for x, y in budget.items() if x.split()[0] not in OF_FOLDER[folder]}
        for kernel in kernels:
            if kernel.spilled:
                budget.setdefault(kernel.template, {})[kernel.constants] = kernel.spilled
        write(BUDGET, budget | {"nvcc": {"version": version()}})
    print(listing, end="")
    wrong = faults(kernels, budget)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    spilled = sum(kernel.spilled for kernel in kernels)
    print(f"{folder}: {len(kernels)} kernels, {spilled} bytes spilled, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
