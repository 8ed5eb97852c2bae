"""The page of the ledger: our kernels beside the peers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import ledger_model
from .ledger_cases import LedgerCase
from .ledger_gates import Order
from .ledger_model import Loop

PEERS = Path(__file__).resolve().parent / "ledger_peers.json"
PARTS = dict.fromkeys(("dqkv", "dq", "dkv", "dk", "dv"), "backward")
LIMITED = ("instructions", "mufu", "shared", "global", "barrier", "wait", "branch", "spill")


class Row(NamedTuple):
    """The counts of a kernel."""

    case: LedgerCase
    tile: str
    registers: int
    shared: int
    blocks: int  # that fit on a multiprocessor
    main: Loop
    masked: Loop
    order: Order  # of the main loop
    limits: tuple[int, ...]  # of registers, which warps set
    wrong: tuple[str, ...]  # by ledger_gates.py

    def counts(self) -> dict[str, int]:
        """The counts that the budget limits."""
        limited = {name: self.main.counts.get(name, 0) for name in LIMITED}
        return limited | {"masked": self.masked.counts["instructions"]}


COUNTS = (
    "fp32",
    "int",
    "move",
    "mufu",
    "LDSM",
    "shared",
    "global",
    "barrier",
    "wait",
    "branch",
    "spill",
)
UNITS = ("tensor", "mufu", "fp32", "shared", "issue")


def head(order: str = "") -> str:
    counts = "".join(f"{x:>8}" for x in ("instr", "masked", "product", *COUNTS))
    cycles = "".join(f"{x:>8}" for x in UNITS)
    own = f"{'regs':>5}{'bytes':>8}{'blocks':>7}"
    bound = f"{'bound':7}{'peak':>5}"
    flight = f"{'ex2 in flight':19}products, mufu"
    return f"{'kernel':31}{'tile':14}{counts}  |{cycles}  {bound}  |{own}{order}  {flight}"


def line(row: Row, order: str = "") -> str:
    """Counts, cycles, a block's resources, the order, exponentials while products and copies are in
    flight, and the opcodes of products and functions."""
    n = row.main.counts
    first = (n["instructions"], row.masked.counts["instructions"], f"{row.main.products:g}")
    counts = "".join(f"{x:>8}" for x in (*first, *(n.get(x, 0) for x in COUNTS)))
    flight = f"{row.main.under_products}, {row.main.under_copies} of {row.main.exponentials}"
    own = f"{row.registers:>5}{row.shared:>8}{row.blocks:>7}"
    kinds = ", ".join(f"{x.removeprefix('MUFU.')} {n}" for x, n in row.main.opcodes.items())
    name = str(row.case).partition(" ")[2]
    cycles = _cycles(row.main.cycles)
    return f"{name:31}{row.tile:14}{counts}{cycles}  |{own}{order}  {flight:19}{kinds}"


def _cycles(cycles: dict[str, float]) -> str:
    unit, most = max(cycles.items(), key=lambda x: x[1])
    text = "".join(f"{cycles.get(x, 0):>8.0f}" for x in UNITS)
    return f"  |{text}  {unit:7}{cycles['tensor'] / most:>5.0%}"


def short_head(order: str = "") -> str:
    columns = "".join(f"{x:>8}" for x in ("instr", "masked", "LDSM", "spill", "regs", "blocks"))
    return f"{'kernel':31}{'tile':14}{columns}  {'bound':7}{'cycles':>7}{'peak':>5}{order}"


ORDER = ("waits", "overlap", "barriers", "setmaxnreg")  # further columns where there is wgmma


def order_head() -> str:
    return "".join(f"{x:>11}" for x in ORDER)


def order_line(row: Row) -> str:
    """Of an iteration: how many groups of products may run after each wait for them; the
    exponentials after the first wait and before the last, of all; the barriers. Then the limits of
    registers that the warps of a block set."""
    limits = "/".join(map(str, row.limits)) or "-"
    return "".join(f"{x:>11}" for x in (*row.order.text, limits))


def short_line(row: Row, order: str = "") -> str:
    """What bounds the main loop, and its instructions; `line` has all counts."""
    n = row.main.counts
    first = (n["instructions"], row.masked.counts["instructions"], n.get("LDSM", 0))
    counts = "".join(f"{x:>8}" for x in (*first, n.get("spill", 0), row.registers, row.blocks))
    unit, most = row.main.bound
    name, percent = str(row.case).partition(" ")[2], row.main.cycles["tensor"] / most
    return f"{name:31}{row.tile:14}{counts}  {unit:7}{most:>7.0f}{percent:>5.0%}{order}"


def compared(rows: Sequence[Row], arch: int) -> list[dict[str, Any]]:
    """One record for forward and one for all kernels of backward, of our plain calls and of the
    peers. The peers' exponentials are assumed: 64 x 64, which MUFU computes 16 per cycle."""
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    for row in rows:
        if row.case.arch != arch or row.case.feature != "plain" or row.case.name == "decode":
            continue
        what = PARTS.get(row.case.name, row.case.name)
        key = row.case.head_dim, what, row.case.compiler
        record = found.setdefault(
            key,
            {"pass": what, "head_dim": key[0], "who": key[2], "tile": "", "instructions": 0}
            | {"int_move": 0, "LDSM": 0, **dict.fromkeys(UNITS, 0.0), "bound": 0.0},
        )
        n = row.main.counts
        record["tile"] = " ".join(filter(None, (record["tile"], row.tile)))
        record["instructions"] += n["instructions"]
        record["int_move"] += n.get("int", 0) + n.get("move", 0)
        record["LDSM"] += n.get("LDSM", 0)
        for unit in UNITS:
            record[unit] += row.main.cycles[unit]
        record["bound"] += row.main.bound[1]
    for peer in json.loads(PEERS.read_text())["loops"]:
        if peer["arch"] == arch:
            units = {"mufu": 256.0} | {x: float(peer[x]) for x in ("tensor", "shared", "issue")}
            key = peer["head_dim"], peer["pass"], peer["who"]
            found[key] = peer | units | {"bound": max(units.values())}
    order = {"forward": 0, "backward": 1}
    return [found[x] for x in sorted(found, key=lambda x: (order[x[1]], x[0], x[2]))]


def peak(record: dict[str, Any], arch: int) -> float:
    """Percent of the tensor cores' peak at the bound, counting only needed products."""
    needed = ledger_model.NEEDED[record["pass"]] * ledger_model.UNIT * record["head_dim"]
    return 100 * needed / ledger_model.CHIPS[arch].tensor / record["bound"]


def comparison_table(records: Sequence[dict[str, Any]], arch: int) -> list[str]:
    columns = ("instr", "int+mov", "LDSM", *UNITS, "bound", "peak")
    lines = [f"{'pass':10}{'D':>4} {'':9}" + "".join(f"{x:>9}" for x in columns) + "  tile"]
    for x in records:
        keys = ("instructions", "int_move", "LDSM", *UNITS, "bound")
        numbers = [f"{x[k]:.0f}" if k in x else "-" for k in keys] + [f"{peak(x, arch):.0f}%"]
        text = "".join(f"{n:>9}" for n in numbers)
        lines.append(f"{x['pass']:10}{x['head_dim']:>4} {x['who']:9}{text}  {x['tile']}")
    return lines


OF_SM90 = (
    "# What FA3 copies to shared memory is not in its figures. cuda: kernels of csrc/cuda/sm90; "
    "cuda_sm80: those of csrc/cuda/sm80, which run what the former decline.",
)


def report(rows: Sequence[Row], arch: int, versions: dict[str, str], full: bool = True) -> str:
    """The report of one architecture; with `full`, all counts of each kernel."""
    chip = ledger_model.CHIPS[arch]
    of_arch = [row for row in rows if row.case.arch == arch]
    used = ", ".join(dict.fromkeys(versions[row.case.compiler] for row in of_arch))
    peers = json.loads(PEERS.read_text())["versions"]
    rest = "" if full else f" local/ledger-sm_{arch}.txt has all counts."
    lines = [
        f"# sm_{arch} ({chip.name}), {used}: python -m bench ledger. Per 64 x 64 scores of the "
        f"main loop; cycles are of one multiprocessor.{rest}",
        "# bench/static_gpu/ledger_model.py says what is counted and what the bound leaves out. "
        + "; ".join(f"{x}: {y}" for x, y in peers.items()),
        *(OF_SM90 if arch == 90 else []),
        *comparison_table(compared(of_arch, arch), arch),
        "",
        (head if full else short_head)(order_head() if arch == 90 else ""),
        *((line if full else short_line)(x, order_line(x) if arch == 90 else "") for x in of_arch),
    ]
    return "\n".join(x.rstrip() for x in lines) + "\n"
