"""A process that makes calls, under a sanitizer that ends it at the first finding."""

import sys
import time

from tests.support.workers import fill_with_nan, in_one_line

from .parts import PARTS, name_of


def run(options):
    """Print a line before and after each call: its number among those of a seed, and why it failed.
    --first: the number to begin with."""
    import torch

    fill_with_nan()
    torch.set_num_threads(1)
    name = options.worker.partition(":")[0]
    part = PARTS[name]
    part.prepare(options.libraries)
    calls = part.calls(options.seed)
    numbers = range(options.first, len(calls), options.workers)
    if options.case:
        numbers = [i for i, x in enumerate(calls) if f"{name}:{name_of(x)}" == options.case]
        if not numbers:
            sys.exit(f"--case: got {options.case}, expected one such as {name}:{name_of(calls[0])}")
    for number in numbers:
        if time.time() > options.until and not options.case:
            return 0
        print("begin", number, f"{name}:{name_of(calls[number])}", flush=True)
        why = ""
        try:
            part.make(calls[number], options.seed)
        except Exception as error:
            why = in_one_line(error)
        print("end", why, flush=True)
    print("done", flush=True)
    return 0
