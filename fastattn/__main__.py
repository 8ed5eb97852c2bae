"""python -m fastattn [check | tune | --json | --support]: what is here, what is not, and why.

`python -m fastattn check --help` lists the options of a command.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from typing import Any

import torch

from . import __version__
from .backends.base import available_backends
from .backends.native import libraries
from .backends.native.cuda import lacks_sm_90
from .backends.preference import Rule, committed, rules
from .backends.shared import gpu
from .inspection.explain_call import support_table
from .namespace import PACKAGE

COMMANDS = ("check", "tune")


def report() -> dict[str, Any]:
    """Everything that decides how a call runs on this machine."""
    cpu_down, cuda_down = libraries.cpu_unavailable(), libraries.cuda_unavailable()
    return {
        "fastattn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": libraries.get_num_threads(),
        "cpu": None
        if cpu_down
        else {
            "isa": libraries.cpu_isa(),
            "isas": libraries.cpu_isas(),
            "why": libraries.cpu_isa_reason(),
            "units": libraries.cpu_units(),
            "library": str(libraries.cpu().path),
        },
        "cuda": None
        if cuda_down
        else {"library": str(libraries.cuda().path), "lacks_sm_90": lacks_sm_90()},
        "extension": _status(libraries.extension_unavailable()),
        "backends": {name: _status(reason) for name, reason in available_backends().items()},
        "rules": [f"{x} ({x.source})" if x.source else str(x) for x in _rules()],
    }


def _rules() -> tuple[Rule, ...]:
    """Those of the GPU here; without one, those that come with the package."""
    usable = not gpu.unavailable()
    return rules(torch.device("cuda", torch.cuda.current_device())) if usable else committed()


def _status(reason: str | None) -> dict:
    return {"available": reason is None, "reason": reason}


def show(facts: dict[str, Any]) -> str:
    lines = [f"{name:10} {facts[name]}" for name in ("fastattn", "torch", "python", "machine")]
    lines.append(f"{'gpu':10} {facts['gpu'] or 'none that torch sees'}")
    lines.append(f"{'threads':10} {facts['threads']}")
    if cpu := facts["cpu"]:
        lines.append(f"{'cpu isa':10} {cpu['isa']} (of {', '.join(cpu['isas'])})")
        lines.append(f"{'':10} {cpu['why']}")
        for dtype, units in cpu["units"].items():
            lines.append(f"{'':10} {dtype}: {_by_unit(units)}")
        lines.append(f"{'library':10} {cpu['library']}")
    if cuda := facts["cuda"]:
        lines.append(f"{'cuda':10} {cuda['library']}")
        lacks = cuda["lacks_sm_90"]
        kinds = f"of sm_80; none of sm_90: {lacks}" if lacks else "of sm_80 and of sm_90"
        lines.append(f"{'':10} kernels {kinds}")
    if why := facts["extension"]["reason"]:
        lines.append(f"{'extension':10} none, tiny calls take longer: {why}")
    lines.append("backends, in order of preference:")
    for name, status in facts["backends"].items():
        verdict = "available" if status["available"] else f"not available: {status['reason']}"
        lines.append(f"  {name:10} {verdict}")
    lines += [f"  {rule}" for rule in facts["rules"]]
    return "\n".join(lines)


def _by_unit(units: dict[str, str]) -> str:
    """The usual instruction set, then the calls that use another: "avx512, one row avx512_bf16"."""
    usual = units["many rows"]
    others = [f"{name} {unit}" for name, unit in units.items() if unit != usual]
    return ", ".join([usual, *others])


def main(arguments: list[str] | None = None) -> int:
    """The exit status. A command gets the arguments that follow its name."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given and given[0] in COMMANDS else ""
    module: Any = importlib.import_module(f"{PACKAGE}.commands.{name}") if name else None
    parser = argparse.ArgumentParser(
        prog=f"python -m fastattn {name}".strip(),
        description=module.__doc__ if name else __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name:
        module.add_options(parser)
        chosen = parser.parse_args(given[1:])
        try:
            return module.command(chosen)
        except ValueError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
    if given and not given[0].startswith("-"):
        parser.error(f"got {given[0]!r}, expected one of {', '.join(COMMANDS)}, or an option")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--support", action="store_true", help="print the README's support table")
    chosen = parser.parse_args(given)
    if chosen.support:
        print(support_table())
    elif chosen.json:
        print(json.dumps(report(), indent=2))
    else:
        print(show(report()))
    return 0


if __name__ == "__main__":
    try:
        exit_status: int = main()
        sys.stdout.flush()
        sys.exit(exit_status)
    except BrokenPipeError:  # as after `| head`; the flush at exit must not raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
