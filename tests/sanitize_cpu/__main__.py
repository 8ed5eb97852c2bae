"""Run random calls of the native libraries under sanitizers: `python -m tests.sanitize_cpu`.

address   the CPU kernels, under AddressSanitizer and UndefinedBehaviorSanitizer
threads   the CPU kernels, under ThreadSanitizer
emulator  the CUDA kernels on the emulator, under AddressSanitizer and UndefinedBehaviorSanitizer

Without --minutes every call is made once, or as many as come in 19 minutes, builds included. With
it, they are made anew with other values until the time is over.

The exit status is 1 if there is a finding, or no case. The last line gives seconds, cases and
findings.
"""

import argparse
import os
import sys

USUAL = 19.0


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize_cpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, help="in total, builds included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--parts", default="address,threads,emulator", help="names separated by commas"
    )
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--libraries", help="use the libraries in this folder; build none")
    parser.add_argument("--case", help="run one call of a finding: PART:CALL")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # part:index
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # seconds since 1970
    options = parser.parse_args(argv)
    known = ("address", "threads", "emulator")
    if wrong := set(options.parts.split(",")) - set(known):
        parser.error(f"--parts: got {', '.join(sorted(wrong))}, expected some of {known}")
    if options.worker:
        from . import worker

        return worker.run(options)
    from . import watch

    return watch.run(options, USUAL)


if __name__ == "__main__":
    sys.exit(main())
