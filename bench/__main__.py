"""python -m bench [COMMAND]: verify, time, print, and keep the numbers.

With no command, sweep. python -m bench COMMAND --help lists a command's options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from . import commands
from .benchmarks import gpu_session, short_calls, storage_error, subnormal_cost, whole_module
from .cases import DTYPES, PASSES
from .cpu_engines import command as engine_command
from .masks import MASKS
from .measure.machine import avoid_refused_tiles
from .peers.registry import PEERS
from .static_gpu import ledger_cases

Command = Callable[[argparse.Namespace], int]


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser, names = _parser()
    if not given or (given[0] not in names and given[0] not in ("-h", "--help")):
        given = ["sweep", *given]
    options = parser.parse_args(given)
    if note := avoid_refused_tiles():
        print(note, file=sys.stderr)
    try:
        return options.command(options)
    except BrokenPipeError:  # the reader closed the pipe
        sys.stdout = None
        return 0
    except (ValueError, OSError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench", description=__doc__, formatter_class=raw)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    names = []

    def add(name: str, text: str, command: Command | None = None) -> argparse.ArgumentParser:
        found = subparsers.add_parser(name, help=text, description=text)
        found.set_defaults(command=command or getattr(commands, name))
        names.append(name)
        return found

    _add_measurements(add)
    _add_others(add)
    return parser, names


Add = Callable[..., argparse.ArgumentParser]


def _add_measurements(add: Add) -> None:
    sweep = add("sweep", "every length, head dim, mask, dtype and pass of a grid")
    size = sweep.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under two minutes; the default")
    size.add_argument("--full", action="store_true", help="every length and head dim")
    sweep.add_argument("--dims", type=int, nargs="+", metavar="D")
    sweep.add_argument("--masks", nargs="+", choices=tuple(MASKS))
    sweep.add_argument("--passes", nargs="+", choices=PASSES)
    sweep.add_argument("--sweep-only", action="store_true", help="no overhead, no memory")

    decode = add("decode", "a few rows on long keys; GB/s of keys and values")
    decode.add_argument("--rows", type=int, nargs="+", metavar="M")

    few_rows = add("few_rows", "forward and backward of one to three rows, beside torch")

    mha = add("mha", "nn.MultiheadAttention as a whole against its conversion")
    mha.add_argument("--modes", nargs="+", choices=tuple(whole_module.MODES))
    mha.add_argument("--length", type=int, default=whole_module.LENGTH, metavar="N")

    overhead = add("overhead", "a call with almost nothing to compute; lengths 1-64")

    tiny = add("tiny", "thread time of calls of 1 to 8 rows and keys, beside torch's function")

    memory = add("memory", "extra bytes at the peak, against length")
    memory.add_argument("--masks", nargs="+", choices=tuple(MASKS), default=["full", "dropout"])

    targets = add("targets", "what is aimed at: measured, target, met or not")
    targets.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="names with TEXT")
    targets.add_argument("--list", action="store_true", help="print the names, measure nothing")
    targets.add_argument("--strict", action="store_true", help="status 1 if one is not met")

    subnormals = add("subnormals", "what they cost: as it is, over flushed to zero by hand")
    subnormals.add_argument("--masks", nargs="+", choices=subnormal_cost.MASKS)

    serving = add("serving", "packed batches and pages: beside padding, torch, contiguous keys")

    flex = add("flex", "score_mod and mask_mod: beside no function, a dense mask, compiled flex")
    flex.add_argument("--compiled", action="store_true", help="race torch's compiled function, too")

    latent = add("latent", "latent attention (MLA): beside matrix products, keys of heads, torch")

    selected = add("selected", "keys that rows select: beside gathered keys, a mask, products")

    engines = add("engines", "beside vLLM, SGLang, OpenVINO, ONNX Runtime and ggml, on the CPU")
    engine_command.add_options(engines)

    models = add("models", "whole models, fastattn beside sdpa: Llama, Mistral, ViT, an encoder")
    models.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="names with TEXT")

    derivatives = add("derivatives", "jvp and double backward: beside forward, backward and torch")

    distributed = add("distributed", "over ranks: measured with gloo, simulated on a cluster")
    distributed.add_argument("--ranks", type=int, nargs="+", metavar="P", help="default: 2 and 4")
    distributed.add_argument("--simulate", action="store_true", help="only the simulation")
    distributed.add_argument("--plot", action="store_true", help="draw where each strategy wins")

    scaling = add("scaling", "calls on the cores of servers: simulated from measured tasks")
    scaling.add_argument("--measure", action="store_true", help="time the tasks here: minutes")
    scaling.add_argument("--plot", action="store_true", help="draw speed against cores")

    rows, racing = (
        (decode, few_rows),
        (*(tiny, serving, flex, latent, selected, models, derivatives, distributed, engines),),
    )
    for measuring in (sweep, *rows, mha, overhead, memory, targets, subnormals, scaling, *racing):
        measuring.add_argument("--save", action="store_true", help="save in bench/results/")
        measuring.add_argument("--output", type=Path, metavar="DIR", help="write there instead")
    for measuring in (sweep, *rows, mha, overhead, memory):
        measuring.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if usable")
    for measuring in (sweep, *rows, mha, overhead, models):
        measuring.add_argument("--threads", type=int, nargs="+", help="default: 1 and all")
    for measuring in (sweep, *rows, mha, overhead, subnormals, *racing):
        measuring.add_argument("--seconds", type=float, help="timing budget of a cell and count")
    for measuring in (sweep, *rows, overhead, memory):
        measuring.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=[])
    for measuring in (sweep, decode, memory, models, derivatives, distributed):
        measuring.add_argument("--lengths", type=int, nargs="+", metavar="N")
    for measuring in (sweep, *rows, tiny, subnormals, serving, flex, latent, selected, models):
        measuring.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES))
    tiny.set_defaults(dtypes=["float32"])


def _add_others(add: Add) -> None:
    ledger = add("ledger", "what the GPU kernels' main loops issue, with no GPU")
    ledger.add_argument("--compilers", nargs="+", choices=tuple(ledger_cases.COMPILERS))
    ledger.add_argument("--archs", type=int, nargs="+", choices=ledger_cases.COMPILERS["triton"])
    ledger.add_argument("--passes", nargs="+", choices=ledger_cases.PASSES)
    ledger.add_argument("--dims", type=int, nargs="+", metavar="D")
    ledger.add_argument("--features", nargs="+", choices=tuple(ledger_cases.FEATURES))
    ledger.add_argument("--workers", type=int, default=2, help="compilers at a time (default: 2)")
    ledger.add_argument("--accept", action="store_true", help="make these counts the budget")

    errors = "outputs of keys and values in eight and four bits, beside ggml's and KIVI's"
    storage = add("storage_error", errors, storage_error.command)
    storage.add_argument("--save", action="store_true", help="save in bench/results/")

    gpu = add("gpu", "the first hour with a GPU: build, tests, sanitizers, measurements, one page")
    gpu.add_argument(
        "--rehearse", action="store_true", help="run without a GPU; the default if there is none"
    )
    gpu.add_argument("--only", nargs="+", metavar="TEXT", help="parts with TEXT in their names")
    gpu.add_argument("--minutes", type=float, default=gpu_session.MINUTES, help="time limit")
    gpu.add_argument("--output", type=Path, metavar="DIR", help="default: bench/results/gpu")

    text = "short self-attention: causal over full, and beside torch"
    short = add("short", text, short_calls.command)
    short.add_argument("--lengths", type=int, nargs="+", metavar="N")
    short.add_argument("--dims", type=int, nargs="+", metavar="D")
    short.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES))
    short.add_argument("--seconds", type=float, help="timing budget of a line")

    compare = add("compare", "two result files, regressions first")
    compare.add_argument("first", type=Path, metavar="A.json")
    compare.add_argument("second", type=Path, metavar="B.json")
    compare.add_argument("--fail-under", type=float, metavar="RATIO", help="status 1 below it")

    plot = add("plot", "draw a result file's pictures")
    plot.add_argument("file", type=Path)
    plot.add_argument("--output", type=Path, metavar="DIR", help="default: beside the file")

    report = add("report", "write the results page's tables, and the pictures")
    report.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="default: all of bench/results"
    )
    report.add_argument(
        "--pages",
        type=Path,
        nargs="+",
        metavar="README.md",
        help="write there; default: the pages of bench/results from all files beside them, "
        "only print the tables of files that are named",
    )


if __name__ == "__main__":
    sys.exit(main())
