"""Compile every kernel of the tuning tables with no GPU, and judge the code: `make aot`.

The launcher itself selects the kernels: Triton gets a driver for an absent GPU, the tensors are on
torch's meta device, and each launch is replaced by a compilation. The binaries are read with
cuobjdump and nvdisasm from Triton's wheel. These are faults:

    a kernel that does not compile
    spilled registers beyond aot_budget.json: {group: {kernel: instructions}}
    more shared or tensor memory than a block of the chip may have
    16-bit products on sm_90 without wgmma, if the tile has enough rows for it

The listing, one line per kernel, is bench/results/local/aot-triton-<version>.txt, which git
ignores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastattn.backends.triton import tile_configs

from ..measure.machine import RESULTS
from . import sass
from .budgets import nvidia_tool, read, write

BUDGET = Path(__file__).with_name("aot_budget.json")

ARCHS = (75, 80, 90, 100, 120)
DTYPES = ("bfloat16", "float32")  # float16 shares bfloat16's tiles and instructions
HEAD_DIMS = (64, 128, 256)

# Most bytes of shared memory that a block may opt in to, and columns of tensor memory.
SHARED = {arch: kb << 10 for arch, kb in {**tile_configs.SHARED, 89: 99}.items()}
TENSOR_COLUMNS = 512
WGMMA_ROWS = 64
NO_PRODUCTS = ("delta", "combine", "rates", "block_mask", "block_mask keys")
BY_KEYS = ("dkv", "dk", "dv")
BY_KEYS += tuple(f"{name}_t" for name in BY_KEYS)


class KernelCase(NamedTuple):
    """A kind of call: every kernel it needs is compiled."""

    arch: int
    dtype: str
    head_dim: int
    variant: str  # of VARIANTS

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.dtype} D{self.head_dim} {self.variant}"


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel, and figures of its code."""

    case: KernelCase
    name: str
    tile: str  # rows x keys, warps, stages
    rows: int = 0  # of its matrix products; 0 without any
    registers: int = 0  # per thread
    spills: int = 0  # instructions that store or load a spilled register
    in_loops: int = 0  # those in loops over tiles
    loop: int = 0  # instructions of an iteration of the shortest main loop
    shared: int = 0  # bytes per block
    tensor: int = 0  # columns of tensor memory per block
    mix: Counter[str] = dataclasses.field(default_factory=Counter)  # opcode: instructions
    error: str = ""

    def __str__(self) -> str:
        return f"{self.case} {self.name}"

    @property
    def short(self) -> str:
        """Its name within the group of its budget."""
        return f"{self.case.variant} {self.name}"


# ------------------------------------------------------------------------------------ what to call


class Variant(NamedTuple):
    """`options` are those of spec.Options and of spec.Tensors; and Hk, `precision` of float32
    products, `packed`, the keys of a `page`, and by how much rows are `short` of the head dim."""

    options: dict[str, Any]
    kernels: tuple[str, ...] = ()  # the kernels that the options change; () for all
    tangents: bool = False  # run only the passes that take tangents


PAIR = ("forward", "dq", *BY_KEYS)
MOVED = ("jvp", "rates", "dq_t", *BY_KEYS)
B, H, N = 2, 8, 4096  # of every call

empty = functools.partial(torch.empty, device="meta")
CAUSAL: dict[str, Any] = dict(causal="top_left", Hk=2)
MASK = empty((B, H, N, N))
ONE: dict[str, dict[str, Any]] = {  # each feature alone
    "mask": dict(mask=MASK.to(torch.bfloat16)),
    "alibi": dict(alibi_slopes=empty((B, H))),
    "softcap": dict(softcap=30.0),
    "dropout": dict(dropout_p=0.1, seed=empty(1, dtype=torch.int64)),
}
EVERYTHING: dict[str, Any] = dict(
    Hk=2,
    causal="bottom_right",
    left=1000,
    **ONE["alibi"],
    **ONE["softcap"],
    **ONE["dropout"],
    mask=MASK,
    key_lengths=empty(B, dtype=torch.int64),
    sinks=empty(H),
)
# One mask for all items and heads: a block mask is computed from it first.
SHARED_MASK = empty((1, 1, N, N), dtype=torch.bfloat16)
VARIANTS = {
    "plain": Variant({}),
    "causal": Variant(CAUSAL, PAIR),
    **{x: Variant(options, PAIR) for x, options in ONE.items()},
    "block mask": Variant(dict(mask=SHARED_MASK), (*PAIR, "block_mask", "block_mask keys")),
    "everything": Variant(EVERYTHING, (*PAIR, "dmask", "split", "weights average")),
    "packed": Variant(dict(causal="bottom_right", Hk=2, packed=True), (*PAIR, "split")),
    # Pages with fewer keys than a tile: their rows are gathered.
    "paged": Variant(dict(causal="bottom_right", Hk=2, page=16), ("forward", "split")),
    # Rows that no tensor descriptor can read: their size is not a multiple of 16 bytes.
    "strided": Variant(CAUSAL | dict(short=4), (*PAIR, "split")),
    "tf32": Variant(CAUSAL | dict(precision="tf32"), PAIR),
    "ieee": Variant(CAUSAL | dict(precision="ieee"), PAIR),
    "tangents": Variant(CAUSAL, MOVED, True),
    "tangents-all": Variant(EVERYTHING, (*MOVED, "dmask_t"), True),
}
SIXTEEN_BITS = (*ONE, "block mask", "packed", "paged")


def cases(
    archs: Iterable[int] = ARCHS,
    dtypes: Iterable[str] = DTYPES,
    variants: Iterable[str] = tuple(VARIANTS),
) -> Iterator[KernelCase]:
    for case in map(KernelCase._make, itertools.product(archs, dtypes, HEAD_DIMS, variants)):
        if case.variant not in absent(case) and not (
            VARIANTS[case.variant].tangents and rare(case)
        ):
            yield case


def absent(case: KernelCase) -> tuple[str, ...]:
    """The variants that calls of this dtype, chip and head dim do not have, or that have the tiles
    and products of others: on sm_75 features change neither."""
    if case.arch < tile_configs.TENSOR_CORES:
        return tuple({*VARIANTS} - {"plain", "causal", "everything", "tangents"})
    if case.dtype != "float32":
        return ("tf32", "ieee")
    in_parts = case.arch in tile_configs.PARTS and case.head_dim <= 128
    # IEEE products have the same tiles for every feature. Without parts, they are in all variants.
    return tuple({*SIXTEEN_BITS} - {*ONE}) if in_parts else (*SIXTEEN_BITS, "ieee")


def rare(case: KernelCase) -> bool:
    """Is it a case of tangents that is skipped to save minutes?"""
    newer = case.variant.startswith("tangents-") and case.arch > 90
    return newer or case.dtype == "float32" or case.head_dim > 128


def call(case: KernelCase) -> None:
    """Run every pass of the launcher on meta tensors of this case."""
    from fastattn.backends.triton.backend import Triton
    from fastattn.call import spec, validation

    dtype = getattr(torch, case.dtype)
    o = dict(VARIANTS[case.variant].options)
    Hk, D = o.pop("Hk", H), case.head_dim - o.pop("short", 0)
    precision = o.pop("precision", "none")  # torch's default
    tensors = ("mask", "key_lengths", "alibi_slopes", "sinks", "seed")
    extras = {x: o.pop(x) for x in tensors if x in o}
    if case.dtype == "float32" and "mask" in extras:
        extras["mask"] = extras["mask"].float()
    meta = functools.partial(torch.empty, device="meta", dtype=dtype)
    items, rows, max_q = B, N, None
    page = o.pop("page", 0)
    packed = o.pop("packed", False) or page
    if packed:  # B sequences, concatenated
        items, rows, max_q = 1, B * N, 1
        extras |= {x: meta(B + 1, dtype=torch.int32) for x in ("cu_q", "cu_k")}
        o |= dict(max_q=N, max_k=N)
    keys = items, Hk, rows, D
    if page:
        keys = B * N // page, Hk, page, D
        extras |= dict(block_table=meta(B, N // page, dtype=torch.int32), cu_k=None)
        extras |= dict(key_lengths=meta(B, dtype=torch.int64))
    options = spec.Options(**o)
    attention = spec.Tensors(meta(items, H, rows, D), meta(*keys), meta(*keys), **extras)
    normaliser = meta(2, items, H, rows, dtype=torch.float32)
    weights = attention._replace(v=None, normaliser=normaliser)
    few = {} if "mask" not in extras else {"mask": extras["mask"][:, :, :1]}
    decode = attention._replace(q=attention.q[:, :, : rows // N], **few)
    needs_grad = ["q", "k", "v", *(x for x in ("mask", "sinks") if x in extras)]
    describe = validation.describe
    backend = Triton()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        s = describe(attention, options)
        out = backend.forward(s, attention)
        if VARIANTS[case.variant].tangents:
            moves = (x for x in spec.DIFFERENTIABLE if x != "captured_floats")
            moved = spec.Tangents(**{x: getattr(attention, x) for x in moves})
            outs = backend.jvp(s, attention, moved, out)
            q, lse = attention.q, normaliser[0]
            backend.second(s, attention, moved, outs, (q, lse, q, lse), needs_grad)
            return
        if not page:  # pages have no gradient
            backend.backward(s, attention, out, (attention.q, normaliser[0]), needs_grad)
        backend.forward(describe(decode, options._replace(max_q=max_q)), decode)
        if packed:  # packed calls have no weights
            return
        for average in (False, True):
            s = describe(weights, options._replace(average_heads=average))
            dweights = backend.weights(s, weights)
        backend.weights_backward(s, weights, dweights, [x for x in needs_grad if x != "v"])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# ------------------------------------------------------------------------------------- compilation


class Absent:
    """A Triton driver for an absent GPU."""

    def __init__(self, arch: int):
        from triton.backends.compiler import GPUTarget

        self.arch, self.target = arch, GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.arch  # Triton caches compiled kernels per device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def pretend(arch: int, launched: Callable) -> None:
    """Make the launcher see a GPU of `arch`, and call `launched` instead of launching a kernel.
    This cannot be undone: call it only in processes that do nothing else.
    """
    from triton.runtime import driver

    from fastattn.backends.triton import job as launcher

    absent: Any = Absent(arch)  # has only the methods that compilation calls
    driver.set_active(absent)
    vars(launcher).update(
        architecture=lambda device: arch,
        processors=lambda device: 132,
        shared_memory=lambda: max(SHARED.values()),  # tiles are judged, not replaced
        run=launched,
    )


def name_of(kernel: Any, args: Sequence[Any]) -> str:
    """The name of a launch: a dkv kernel that computes only dk or dv is named dk or dv."""
    name = kernel.__name__.removesuffix("_kernel")
    given = dict(zip(kernel.arg_names, args))
    if name in ("dkv", "dkv_t"):
        dk, dv = name.replace("dkv", "dk"), name.replace("dkv", "dv")
        name = dv if given[dk] is None else dk if given[dv] is None else name
    return name


def compiled(case: KernelCase) -> list[CompiledKernel]:
    """The kernels of a case, in launch order."""
    names = VARIANTS[case.variant].kernels
    found: dict[str, CompiledKernel] = {}

    def launched(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        flags = [x.lower() for x, on in options.items() if on is True and x.isupper()]
        name = " ".join([name_of(kernel, args), *flags])
        tile, warps, stages = (options[x] for x in ("T", "num_warps", "num_stages"))
        if name in found or (names and name not in names):
            return
        result = CompiledKernel(
            case,
            name,
            f"{tile.BM}x{tile.BN} w{warps} s{stages}",
            0 if name in NO_PRODUCTS else tile.BN if name.split()[0] in BY_KEYS else tile.BM,
        )
        try:
            binary = kernel.warmup(*args, grid=grid, **options)
        except Exception as e:  # any error of a compiler is reported
            found[name] = dataclasses.replace(result, error=f"{type(e).__name__}: {_last(str(e))}")
        else:
            found[name] = dataclasses.replace(result, **inspect(binary))

    pretend(case.arch, launched)
    call(case)
    return list(found.values())


def _last(text: str) -> str:
    return ([""] + [line.strip() for line in text.splitlines() if line.strip()])[-1]


def inspect(binary: Any) -> dict[str, Any]:
    """The fields of a Kernel that are read from its binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = nvidia_tool("cuobjdump", "--dump-resource-usage", file.name)
        listing = nvidia_tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    code = max(sass.read(listing).values(), key=lambda x: len(x.instructions))
    operations = Counter(x.base for x in code.instructions)
    return dict(
        registers=int(registers[1]),
        spills=sass.spills(code.instructions),
        in_loops=code.spills_in_loops(),
        loop=min((x.instructions for x in code.counts()), default=0),
        shared=binary.metadata.shared,
        tensor=getattr(binary.metadata, "tmem_size", None) or 0,
        mix=Counter(
            wgmma=operations["HGMMA"],
            tcgen05=operations["UTCHMMA"],
            mma=operations["HMMA"],
            tma=operations["UTMALDG"],
            cp_async=operations["LDGSTS"],
            exp2=sum(x.opcode == "MUFU.EX2" for x in code.instructions),
            ffma=operations["FFMA"],
        ),
    )


# ------------------------------------------------------------------------------------ the verdicts


def faults(kernel: CompiledKernel, budget: dict[str, int] | None) -> list[str]:
    """The faults of a kernel; `budget` is None if this version of Triton has none."""
    if kernel.error:
        return [kernel.error]
    limit, arch = SHARED[kernel.case.arch], kernel.case.arch
    allowed = kernel.spills if budget is None else budget.get(str(kernel), 0)
    wide = arch == 90 and kernel.case.dtype != "float32" and kernel.rows >= WGMMA_ROWS
    rules = [
        (kernel.spills <= allowed, f"{kernel.spills} spill instructions, {allowed} allowed"),
        (kernel.shared <= limit, f"{kernel.shared} bytes of shared memory, sm_{arch} has {limit}"),
        (
            kernel.tensor <= TENSOR_COLUMNS,
            f"{kernel.tensor} columns of tensor memory, sm_{arch} has {TENSOR_COLUMNS}",
        ),
        (
            not wide or (kernel.mix["wgmma"] and not kernel.mix["mma"]),
            f"{kernel.mix['wgmma']} wgmma and {kernel.mix['mma']} mma.sync, wgmma expected for "
            f"products of {kernel.rows} rows",
        ),
    ]
    return [reason for ok, reason in rules if not ok]


def group_of(version: str, case: KernelCase) -> str:
    return f"{version} sm_{case.arch} {case.dtype} D{case.head_dim}"


def budget_of(version: str) -> dict[str, int] | None:
    """By kernel, the spills that this version of Triton may make."""
    groups = {x: y for x, y in read(BUDGET).items() if x.split()[0] == version}
    found = {f"{x.partition(' ')[2]} {y}": n for x, of in groups.items() for y, n in of.items()}
    return found if groups else None


# -------------------------------------------------------------------------------------- the reports

NUMBERS = ("registers", "spills", "in_loops", "loop", "shared", "tensor")
MIX = ("wgmma", "tcgen05", "mma", "tma", "cp_async", "exp2", "ffma")


def listing(version: str, kernels: Iterable[CompiledKernel]) -> str:
    """One line per kernel, in the given order. Columns have fixed widths, so diffs are small."""
    titles = "".join(f"{x:>10}" for x in (*NUMBERS, *MIX))
    lines = [f"# Triton {version}: make aot", f"{'kernel':48} {'tile':14}{titles}"]
    for k in kernels:
        values = (*(getattr(k, x) for x in NUMBERS), *(k.mix[x] for x in MIX))
        lines.append(f"{k!s:48} {k.tile:14}{k.error or ''.join(f'{x:>10}' for x in values)}")
    return "\n".join(lines) + "\n"


def compile_all(every: Iterable[KernelCase], workers: int = 2) -> Iterator[list[CompiledKernel]]:
    """The kernels of each case in turn, compiled by `workers` processes."""
    context = multiprocessing.get_context("spawn")  # each process sets its own driver
    with context.Pool(workers) as pool:
        yield from pool.imap(compiled, every)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.static_gpu.aot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=tuple(VARIANTS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--accept", action="store_true", help="write the budget from what is found")
    options = parser.parse_args(argv)

    import triton

    version, started = triton.__version__, time.perf_counter()
    every = list(cases(options.arch, options.dtype, options.variant))
    complete = every == list(cases())
    if not complete and options.accept:
        parser.error("--accept needs every arch, dtype and variant")
    found: list[CompiledKernel] = []
    for case, kernels in zip(every, compile_all(every, workers=options.workers)):
        elapsed = time.perf_counter() - started
        spilled = sum(k.spills for k in kernels)
        text = f"[{elapsed:4.0f}s] {case}: {len(kernels)} kernels, {spilled} spill instructions"
        print(text, file=sys.stderr, flush=True)
        found += kernels
    if options.accept:
        accept(version, found)
    budget = budget_of(version)
    wrong = [f"{k} ({k.tile}): {fault}" for k in found for fault in faults(k, budget)]
    text = listing(version, found)
    if complete:
        (RESULTS / "local").mkdir(exist_ok=True)
        (RESULTS / "local" / f"aot-triton-{version}.txt").write_text(text)
    else:
        print(text)
    print(f"Triton {version}: {len(found)} kernels, {len(wrong)} faults")
    print("".join(f"  {line}\n" for line in wrong), end="")
    return bool(wrong)


def accept(version: str, found: Iterable[CompiledKernel]) -> None:
    """Write the spills that were found as the budget of this version of Triton."""
    every = {x: y for x, y in read(BUDGET).items() if x.split()[0] != version}
    for kernel in found:
        if kernel.spills:
            every.setdefault(group_of(version, kernel.case), {})[kernel.short] = kernel.spills
    write(BUDGET, every)


if __name__ == "__main__":
    sys.exit(main())
