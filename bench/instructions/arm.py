"""Count what the CPU kernels execute on 64-bit Arm, under qemu: `make instructions-arm`.

One line per instruction set and case of instructions.c: the instructions of a call, and in the
inner loops of products the instructions per product (an FMLA of one vector, or a BFMMLA). Beside it
what AVX2 executes, as recorded in x86.json, and what torch's own kernel for Arm does with
the same call, through Python: with SVE of 256 bits, which its BLAS uses, and without SVE.

A case that executes more than 2% more than the record, arm.json, is a fault; --accept
records the counts. qemu's processor has no caches and no time: counts show neither misses nor the
latency of an instruction.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.arm import environment

from . import x86
from .x86 import Counts, compare

HERE = Path(__file__).resolve().parent
RECORD = HERE / "arm.json"
ISAS = ("sve256", "neon_bf16", "generic")
# Of torch: case of instructions.c, dtype, causal, and whether the gradient is taken too.
TORCH = {
    "forward full": ("float32", False, False),
    "forward causal": ("float32", True, False),
    "forward bfloat16": ("bfloat16", False, False),
    "forward float16": ("float16", False, False),
    "backward full": ("float32", False, True),
}
SCRIPT = """
import sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
dtype, causal, backward = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v, g = (torch.randn(1, 2, 200, 64, dtype=getattr(torch, dtype)) for _ in "qkvg")
for x in (q, k, v):
    x.requires_grad_(backward)
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    for _ in range(int(sys.argv[4])):
        if backward:
            torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
        else:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
"""


class Count(NamedTuple):
    """Instructions of one call: all, those of inner loops of products, and the products in them."""

    all: int
    in_loops: int
    products: int

    @property
    def per_product(self) -> float | None:
        return self.in_loops / self.products if self.products else None


def build(folder: Path) -> tuple[Path, Path]:
    """qemu's plugin, and the program that runs one case, linked with the library for Arm."""
    plugin, program = folder / "qemu_counter.so", folder / "instructions"
    compiler = x86.c_compiler() or "cc"
    x86.run(compiler, "-O2", "-shared", "-fPIC", HERE / "qemu_counter.c", "-o", plugin)
    linked = (environment.LIBRARY, f"-Wl,-rpath,{environment.LIBRARY.parent}", "-lm")
    include = f"-I{environment.ROOT / 'csrc'}"
    x86.run("aarch64-linux-gnu-gcc", include, HERE / "instructions.c", *linked, "-o", program)
    return plugin, program


def executed(command: Sequence[str], **more) -> Count:
    """What the whole program executes."""
    done = subprocess.run(command, capture_output=True, text=True, **more)
    lines = [x for x in done.stderr.splitlines() if x.startswith("instructions ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return Count(*map(int, lines[-1].split()[1:]))


def per_call(command: Sequence[str], calls: int, **more) -> Count:
    """What a call executes: the difference between 1 + `calls` calls and one."""
    one, many = (executed([*command, str(n)], **more) for n in (1, 1 + calls))
    return Count(*((b - a) // calls for a, b in zip(one, many)))


def of_torch(plugin: Path, case: str, cpu: str) -> Count:
    """The same call by torch's flash kernel, with what Python and torch's dispatch add."""
    arguments = ("-c", SCRIPT, *map(str, TORCH[case]))
    command = environment.python(*arguments, plugin=("-plugin", plugin), cpu=cpu)
    return per_call(command, 4, env=environment.environment_of_python())


def counted() -> tuple[Counts, dict[str, float | None], dict[str, int]]:
    """Counts by "<instruction set> <case>", instructions per product, and torch's counts."""
    plugin, program = build(environment.FOLDER)
    cases = x86.run(*environment.emulated(program)).splitlines()
    found = {
        f"{isa} {case}": per_call(
            environment.emulated(program, isa, case, plugin=("-plugin", plugin)), 1
        )
        for isa in ISAS
        for case in cases
    }
    torch = {
        f"{isa} {case}": of_torch(plugin, case, cpu).all
        for isa, cpu in (("sve256", environment.CPU), ("neon_bf16", "max,sve=off"))
        for case in TORCH
    }
    compiler = x86.compiler_of(environment.LIBRARY)
    counts = Counts(compiler, {name: x.all for name, x in found.items()})
    return counts, {name: x.per_product for name, x in found.items()}, torch


def table(counts: Counts, per_product: dict[str, float | None], torch: dict[str, int]) -> str:
    """A line for each case."""
    avx2 = x86.recorded().instructions
    lines = [f"{'case':32} {'instructions':>12} {'a product':>9} {'avx2':>10} {'torch':>10}"]
    for name, count in counts.instructions.items():
        case = name.partition(" ")[2]
        ratio = f"{per_product[name]:.3f}" if per_product[name] else "-"
        others = (avx2.get(f"avx2 {case}", "-"), torch.get(name, "-"))
        lines.append(f"{name:32} {count:>12} {ratio:>9} " + " ".join(f"{x:>10}" for x in others))
    return "\n".join(lines)


def check(accepted: bool = False) -> int:
    """As `x86.check`."""
    if reason := environment.unavailable():
        raise ValueError(f"instructions --arm: {reason}")
    environment.make()
    counts, per_product, torch = counted()
    print(table(counts, per_product, torch))
    if accepted:
        record = {**counts._asdict(), "per_product": per_product, "torch": torch}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        return 0
    before = json.loads(RECORD.read_text())
    verdicts = compare(counts, Counts(before["compiler"], before["instructions"]))
    wrong = [x for x in verdicts if x.word in x86.FAULTS]
    print(*wrong, f"{len(wrong)} faults beside the record", sep="\n")
    return int(bool(wrong))
