"""Make random calls and check them against the oracle: `python -m tests.fuzz --minutes 60`.

The name of a part and a number determine a call: `--case packed:1000017` makes it again. Worker
processes make the calls. A process that dies and a call that does not end are findings too. With
TRITON_INTERPRET=1 the calls run on Triton's kernels, in its interpreter.

The exit status is 1 if there is a finding, 2 for arguments that mean nothing, and 130 after Ctrl-C.
The last line gives seconds, cases and findings.
"""

import argparse
import contextlib
import math
import os
import random
import sys
import time


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
    parser.add_argument("--case", help="run only this call: PART:NUMBER")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        return work(options)
    if why := refusal(options):
        parser.error(why)
    if options.case:
        prepare()
        name, _, number = options.case.partition(":")
        make(name, int(number))
        print(f"{options.case}: right")
        return 0
    from . import watch

    return watch.run(options)


def refusal(options):
    """What is wrong with the arguments; None if nothing is."""
    if not 0 < options.minutes < math.inf:
        return f"--minutes: got {options.minutes}, expected a number above 0"
    if options.workers < 1:
        return f"--workers: got {options.workers}, expected at least 1"
    name, _, number = (options.case or "").partition(":")
    if options.case and not number.isdecimal():
        return f"--case: got {options.case}, expected PART:NUMBER, as dense:1000000"
    names = [name] if options.case else options.parts.split(",") if options.parts else []
    if names:  # importing the parts takes seconds
        from .parts import PARTS

        if wrong := [x for x in names if x not in PARTS]:
            return f"got no part {wrong[0]!r}, expected one of {', '.join(PARTS)}"
    return None


def prepare():
    """Fill uninitialised memory with NaN, as conftest.py does for the tests."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    from fastattn.backends.native import libraries
    from fastattn.backends.triton.backend import interpreted
    from tests.support.workers import fill_with_nan

    fill_with_nan()
    if interpreted():
        from tests.conftest import quicken_interpreter

        quicken_interpreter()
    else:
        libraries.poison(True)


def make(name, number):
    from .parts import PARTS, NoBackend

    with contextlib.suppress(NoBackend):
        PARTS[name](random.Random(f"{name}:{number}"))


def work(options):
    """Make cases. Print a line before and after each. Every part gets the same time."""
    end = time.monotonic() + 60 * options.minutes
    prepare()
    from tests.support.workers import in_one_line

    from . import NUMBERS
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


if __name__ == "__main__":
    sys.exit(main())
