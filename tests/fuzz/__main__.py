"""Make random calls and check them against the oracle: `python -m tests.fuzz --minutes 60`.

The name of a part and a number determine a call: `--case packed:1000017` makes it again. Worker
processes make the calls. A process that dies and a call that does not end are findings too. With
TRITON_INTERPRET=1 the calls run on Triton's kernels, in its interpreter.

The exit status is 1 if there is a finding, and 130 after an interrupt. The last line gives seconds,
cases and findings.
"""

import argparse
import os
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests import their helpers by name
NUMBERS = 1_000_000  # of a seed


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="in total, imports included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", help="names separated by commas; all by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", help="make this call alone: PART:NUMBER")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        return work(options)
    if options.case:
        prepare()
        name, _, number = options.case.partition(":")
        make(name, int(number))
        print(f"{options.case}: right")
        return 0
    from . import watch

    return watch.run(options)


def prepare():
    """Fill uninitialised memory with NaN, as conftest.py does for the tests."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    import torch

    from fastattn import native
    from fastattn.backends.triton import interpreted

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if interpreted():
        from conftest import quicken_interpreter

        quicken_interpreter()
    else:
        native.poison(True)


def make(name, number):
    from .parts import PARTS

    PARTS[name](random.Random(f"{name}:{number}"))


def work(options):
    """Make cases. Print a line before and after each. Every part gets the same time."""
    end = time.monotonic() + 60 * options.minutes
    prepare()
    from .parts import PARTS

    names = options.parts.split(",") if options.parts else list(PARTS)
    spent = dict.fromkeys(names, 0.0)
    number = options.seed * NUMBERS + options.worker
    while time.monotonic() < end:
        name = min(spent, key=spent.__getitem__)
        print("begin", f"{name}:{number}", flush=True)
        begun, why = time.monotonic(), ""
        try:
            make(name, number)
        except Exception as error:
            why = in_one_line(error)
        spent[name] += time.monotonic() - begun
        print("end", why, flush=True)
        number += options.workers
    return 0


def in_one_line(error):
    """What an exception says, where it was raised, and what was noted (PEP 678)."""
    notes = " ".join(getattr(error, "__notes__", ()))
    where = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(where.filename).name}:{where.lineno}"
    return " ".join(f"{type(error).__name__}: {error} {notes} ({at})".split())


if __name__ == "__main__":
    sys.exit(main())
