"""python -m bench [COMMAND]: verify, time, print, and keep the numbers.

With no command, sweep. python -m bench COMMAND --help lists a command's options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from . import commands, gpu, instructions
from .cases import DTYPES, PASSES
from .cpu_engines.environments import ENVIRONMENTS, WHOLE
from .masks import MASKS
from .measure.machine import avoid_refused_tiles
from .peers.registry import PEERS
from .races import random_calls
from .races.tables import TABLES
from .serving.engine import NAMES

Command = Callable[[argparse.Namespace], int]
COMMANDS: dict[str, tuple[str, Command]] = {
    "sweep": ("every length, head dim, mask, dtype and pass of a grid", commands.sweep),
    "race": ("rows of a table, each beside another way to the same numbers", commands.race),
    "random": ("calls that a seed draws, and what is slower than torch", commands.random),
    "models": ("whole models beside sdpa: Llama, BERT, ViT, Whisper, DiT, …", commands.models),
    "engines": ("beside vLLM, SGLang, OpenVINO, ONNX Runtime, ggml", commands.engines),
    "serving": ("vLLM and SGLang with our attention and with theirs", commands.serving),
    "memory": ("extra bytes at the peak, against length", commands.memory),
    "gpu": ("all work that needs a GPU: tests, sanitizers, timings", gpu.command),
    "report": ("tables and pictures of result files; two files compared", commands.report),
    "instructions": ("what kernels execute, held against the record", instructions.command),
}


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0] not in (*COMMANDS, "-h", "--help"):
        given = ["sweep", *given]
    options = parser().parse_args(given)
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


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("python -m bench", description=__doc__, formatter_class=raw)
    subparsers = made.add_subparsers(metavar="COMMAND", required=True)
    of = {}
    for name, (text, command) in COMMANDS.items():
        tables = "".join(f"\n  {x:14} {y.text}" for x, y in TABLES.items()) * (name == "race")
        described = text + (f"\n\ntables:{tables}" if tables else "")
        of[name] = subparsers.add_parser(
            name, help=text, description=described, formatter_class=raw
        )
        of[name].set_defaults(command=command)
    _measuring(of)
    _serving(of["serving"])
    gpu.add_options(of["gpu"])
    instructions.add_options(of["instructions"])
    _report(of["report"])
    return made


def _measuring(of: dict[str, argparse.ArgumentParser]) -> None:
    names = "sweep", "race", "random", "models", "engines", "memory"
    sweep, race, random, models, engines, memory = (of[name] for name in names)
    random.add_argument("--cells", type=int, default=300, help="how many (default: 300)")
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--dtypes", nargs="+", choices=tuple(random_calls.DTYPES))
    sweep.add_argument("--full", action="store_true", help="every length and head dim")
    sweep.add_argument("--dims", type=int, nargs="+", metavar="D")
    sweep.add_argument("--masks", nargs="+", choices=tuple(MASKS))
    sweep.add_argument("--passes", nargs="+", choices=PASSES)
    sweep.add_argument("--sweep-only", action="store_true", help="no memory")
    race.add_argument("tables", nargs="+", choices=tuple(TABLES), metavar="TABLE")
    memory.add_argument("--masks", nargs="+", choices=tuple(MASKS), default=["full", "dropout"])
    engines.add_argument(
        "--install",
        nargs="*",
        choices=(*ENVIRONMENTS, *WHOLE),
        help="make these environments in build/engines, by default those that are absent; "
        "measure nothing",
    )
    engines.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="rows with TEXT")
    engines.add_argument("--engines", nargs="+", default=[], metavar="NAME", help="beside these")
    engines.add_argument("--quick", action="store_true", help="a row of each class")
    engines.add_argument("--threads", type=int, default=1, help="of every engine (default: 1)")
    for one in (race, models):
        one.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="names with TEXT")
        one.add_argument("--scale", type=float, default=1.0, help="a factor of all lengths")
    for one in (sweep, race, random, models, engines, memory):
        one.add_argument("--save", action="store_true", help="save in bench/results/")
        one.add_argument("--output", type=Path, metavar="DIR", help="write there instead")
    for one in (sweep, race, memory):
        one.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if usable")
        one.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=[])
    for one in (sweep, race, models):
        one.add_argument("--threads", type=int, nargs="+", help="default: 1 and all")
        one.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES))
    for one in (sweep, race, random, models, engines):
        one.add_argument("--seconds", type=float, help="timing budget of a cell and count")
    for one in (sweep, models, memory):
        one.add_argument("--lengths", type=int, nargs="+", metavar="N")


def _serving(serving: argparse.ArgumentParser) -> None:
    serving.add_argument("--engines", nargs="+", choices=NAMES, default=NAMES)
    serving.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    serving.add_argument("--rounds", type=int, default=9, help="of each request (default: 9)")


def _report(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="default: all of bench/results"
    )
    report.add_argument(
        "--pages", type=Path, nargs="+", metavar="PAGE.md", help="write the tables there"
    )
    report.add_argument("--compare", action="store_true", help="two files, regressions first")
    report.add_argument("--fail-under", type=float, metavar="RATIO", help="status 1 below it")


if __name__ == "__main__":
    sys.exit(main())
