"""Run the CPU kernels for 64-bit Arm under qemu: `make test-arm`.

python -m tests.arm                    a slice of the tests, on every instruction set of Arm
    --tier test                        a larger slice: tests/README.md
    --tests tests/semantics/test_x.py  these files or folders, in place of the slice
    --cpu neoverse-n1                  another processor of qemu: this one has no bfloat16
    --library libfastattn_cpu.so       another build of the kernels for Arm, such as a wheel's
    -k, --workers                      of pytest; processes side by side

What it needs is made in build/arm (environment.py). Tests run some fifty times slower than on the
machine itself. Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.arm import environment

SEMANTICS = (
    "accuracy decode derivatives dropout features layouts orders packed paged paged_gradients"
)
SEMANTICS += " row_invariant selected selection special_values storage subnormals weights"
SEMANTICS += " wide_head_dims"
SLICE = [f"tests/semantics/test_{name}.py" for name in SEMANTICS.split()]
SLICE += ["tests/cpu/test_cpu_vectors.py", "tests/score_mods", "tests/nn"]
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist")


def run(tests: str, options: Sequence[str], cpu: str, library: Path) -> tuple[str, int, str]:
    """Run one file or folder: its name, pytest's status, and what it printed."""
    command = environment.python("-m", "pytest", *OPTIONS, *options, tests, cpu=cpu)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=environment.ROOT,
        env=environment.environment_of_python(library),
    )
    return tests, done.returncode, done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.arm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tier", default="check")
    parser.add_argument("--tests", nargs="+", default=SLICE)
    parser.add_argument("--cpu", default=environment.CPU)
    parser.add_argument("--library", type=Path, default=environment.LIBRARY)
    parser.add_argument("-k", default="", dest="keyword")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(argv)
    if reason := environment.unavailable():
        parser.error(reason)

    start = time.monotonic()
    library = options.library.resolve()
    if options.library == environment.LIBRARY:
        environment.make()
    else:
        environment.make_python()
    print(f"build/arm: made in {time.monotonic() - start:.0f} s", flush=True)
    given = [f"--tier={options.tier}", *(["-k", options.keyword] if options.keyword else [])]
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    with ThreadPoolExecutor(options.workers) as pool:
        for tests, status, printed in pool.map(
            lambda tests: run(tests, given, options.cpu, library), options.tests
        ):
            lines = printed.splitlines() or [f"status {status}"]
            print(f"{Path(tests).name}: {lines[-1]}", flush=True)
            for number, what in re.findall(r"(\d+) (passed|failed|skipped)", lines[-1]):
                counts[what] += int(number)
            if status not in (0, 5):  # 5: no test of this file is in the tier
                failed.append(tests)
                print(printed)
    seconds = time.monotonic() - start
    print(f"arm, {options.cpu}: {', '.join(f'{n} {what}' for what, n in counts.items())}", end="")
    print(f"; {len(failed)} files with failures, {seconds:.0f} s")
    return bool(failed or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
