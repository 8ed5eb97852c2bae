"""python -m bench ledger: count the instructions of the GPU kernels' main loops, without a GPU.

Kernels are compiled (ledger_code.py), their loops are read (sass.py, sass_walk.py) and counted per
64 x 64 scores, and the busiest unit is found (ledger_model.py). If a kernel has two main loops, or
a second path with masks through its only one, the shorter is the main one, and the longer handles
tiles with hidden pairs. These are faults:

    a count of ledger_budget.json that has grown: {compiler: {kernel: {count: most}}}
    a kernel without a budget
    a loop that cannot be read: no loop, an unknown opcode, fewer products than the pass has
    an order or registers that a kernel of csrc/cuda/sm90 must not have (ledger_gates.py)

FlashAttention's kernels, from ledger_peers.json, are listed beside ours. The report of each
architecture is bench/results/ledger-sm_<arch>.txt; the same with all counts of each kernel is
bench/results/local/ledger-sm_<arch>.txt, which git ignores. A partial report is only printed.
Counts depend on the compiler: if the budget is for another version, there are no faults.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import (
    ledger_code,
    ledger_compilers,
    ledger_gates,
    ledger_model,
    ledger_page,
    ledger_picture,
    sass,
    sass_walk,
)
from .ledger_cases import Compiled, LedgerCase, cases
from .ledger_model import Tile
from .ledger_page import Row

HERE = Path(__file__).resolve().parent
BUDGET = HERE / "ledger_budget.json"
RESULTS = HERE.parent / "results"


def count(kernel: Compiled) -> Row:
    """Count a kernel. Raises ValueError if its loops cannot be read."""
    codes = [x for name, x in sass.read(kernel.listing).items() if "4tile" not in name]
    code = max(codes, key=lambda x: len(x.instructions))
    case, loaded_side = kernel.case, kernel.keys
    if case.name in ("dqkv", "dkv", "dk", "dv"):
        loaded_side = kernel.rows
    tile = Tile(kernel.rows, kernel.keys, loaded_side, case.head_dim, kernel.warps, kernel.stages)
    known = ledger_compilers.constants(case, kernel.parameters)
    loops = code.main_loops()
    if not loops:
        raise ValueError("got no loop with products and exponentials, expected one")
    ways = [sass_walk.iteration(code, x, known) for x in loops]
    if len(loops) == 1:
        ways.append(sass_walk.iteration(code, loops[0], known, dear=True))
    ways.sort(key=len)
    read = [ledger_model.loop(way, tile, case.arch, case.name) for way in ways]
    stages = f" s{kernel.stages}"
    launched = kernel.launched or kernel.warps
    room = (kernel.registers, kernel.shared, launched, kernel.tensor, case.arch)
    return Row(
        case,
        f"{kernel.rows}x{kernel.keys} w{kernel.warps}{stages}",
        kernel.registers,
        kernel.shared,
        ledger_model.blocks(*room),
        read[0],
        read[-1],
        ledger_gates.order(ways[0]),
        ledger_gates.limits(code.instructions),
        tuple(ledger_gates.faults(kernel, code, ways)),
    )


def chosen(options: Any) -> list[LedgerCase]:
    """The cases that the options select."""
    selection = [options.compilers, options.archs, options.passes, options.dims, options.features]
    found = [
        case
        for case in cases()
        if all(
            not x or getattr(case, y) in x
            for x, y in zip(selection, LedgerCase._fields, strict=True)
        )
    ]
    if not found:
        raise ValueError("got options that together select no kernel; leave one out")
    return found


def count_all(every: Sequence[LedgerCase], workers: int = 2) -> tuple[list[Row], list[str]]:
    """The rows, and what is wrong with kernels that could not be read, or have a wrong order."""
    started, done = time.perf_counter(), 0
    rows, wrong = [], []
    for kernel in ledger_code.compiled(every, workers):
        try:
            rows.append(count(kernel))
            wrong += [f"{kernel.case}: {x}" for x in rows[-1].wrong]
        except ValueError as error:
            wrong.append(f"{kernel.case}: {error}")
        done, elapsed = done + 1, time.perf_counter() - started
        if done % 20 == 0:
            print(f"[{elapsed:4.0f}s] {done} of {len(every)} kernels", file=sys.stderr, flush=True)
    return rows, wrong


# --------------------------------------------------------------------------------------- the budget


def budgets() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(BUDGET.read_text()) if BUDGET.exists() else {}


def faults(rows: Iterable[Row], versions: dict[str, str]) -> list[str]:
    """Counts over the budget; rows of a compiler without a budget are skipped."""
    found, every = [], budgets()
    for row in rows:
        if (of_compiler := every.get(versions[row.case.compiler])) is None:
            continue
        if (allowed := of_compiler.get(str(row.case))) is None:
            found.append(f"{row.case}: got no budget, expected one: --accept records it")
            continue
        found += [
            f"{row.case}: {name}: got {n}, expected at most {allowed.get(name, 0)}"
            for name, n in row.counts().items()
            if n > allowed.get(name, 0)
        ]
    return found


def accept(rows: Iterable[Row], versions: dict[str, str]) -> None:
    """Write these counts as the budget of their compilers. Budgets of other versions of these
    compilers, and of kernels that no longer exist, are removed."""
    names, known = {x.split()[0] for x in versions.values()}, set(map(str, cases()))
    every = {
        compiler: {x: counts for x, counts in kernels.items() if x in known}
        for compiler, kernels in budgets().items()
        if compiler.split()[0] not in names or compiler in versions.values()
    }
    for row in rows:
        every.setdefault(versions[row.case.compiler], {})[str(row.case)] = row.counts()
    lines = [
        f" {json.dumps(compiler)}: {{\n"
        + ",\n".join(f"  {json.dumps(x)}: {json.dumps(n)}" for x, n in sorted(kernels.items()))
        + "\n }"
        for compiler, kernels in sorted(every.items())
    ]
    BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# -------------------------------------------------------------------------------------- the command


def run(options: Any) -> int:
    every, versions, complete = chosen(options), {}, chosen(options) == list(cases())
    for compiler in dict.fromkeys(case.compiler for case in every):
        if reason := ledger_code.unavailable(compiler):
            print(f"not counted, {compiler}: {reason}")
            every, complete = [x for x in every if x.compiler != compiler], False
        else:
            versions[compiler] = ledger_code.version(compiler)
    if not every:
        return 2

    rows, wrong = count_all(every, options.workers)
    for arch in dict.fromkeys(row.case.arch for row in rows):
        text = ledger_page.report(rows, arch, versions)
        print(text)
        of_arch = [x for x in cases() if x.arch == arch]
        if not wrong and [x.case for x in rows if x.case.arch == arch] == of_arch:
            name, short = f"ledger-sm_{arch}.txt", ledger_page.report(rows, arch, versions, False)
            (RESULTS / "local").mkdir(exist_ok=True)
            (RESULTS / "local" / name).write_text(text)
            (RESULTS / name).write_text(short)
    if complete and not wrong:
        print(*ledger_picture.draw(rows, RESULTS / "ledger.png"), sep="\n")
    if options.accept:
        accept(rows, versions)
    for compiler, name in versions.items():
        if name not in budgets():
            print(f"there is no budget for {name}: {compiler}'s kernels are not judged")
    wrong += faults(rows, versions)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(rows)} kernels, {len(wrong)} faults")
    return int(bool(wrong))
