"""Run the CPU kernels for 64-bit Arm under qemu: `make test-arm`.

python -m tests.arm                    a slice of the tests, on every instruction set of Arm
    -m slow                            the slow ones of these tests
    --tests tests/semantics/test_x.py  these files or folders, in place of the slice
    --cpu neoverse-n1                  another processor of qemu: this one has no bfloat16
    --library libfastattn_cpu.so       another build of the kernels for Arm, such as a wheel's
    -k, --workers                      of pytest; processes side by side
    --save                             add the outcome to tests/torch_versions/results.md

What it needs is made in build/arm (environment.py). Tests run some fifty times slower than on the
machine itself, and those on SVE several times slower than that: `--cpu max,sve=off` leaves it out.
Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.arm import environment
from tests.torch_versions.__main__ import Outcome, read, row, save, summary
from tests.torch_versions.environment import ABOUT

SEMANTICS = "accuracy decode derivatives dropout features layouts orders packed paged"
SEMANTICS += " row_invariant selected selection special_values storage subnormals weights"
SEMANTICS += " wide_head_dims"
SLICE = [f"tests/semantics/test_{name}.py" for name in SEMANTICS.split()]
SLICE += ["tests/cpu/test_cpu_vectors.py", "tests/score_mods", "tests/nn"]
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
# They start another Python for Arm, which this machine's kernel cannot execute.
STARTING = ("tests/semantics/test_selection.py::test_memory_is_that_of_the_choice",)
STARTING += ("tests/nn/test_examples.py::test_memory_of_a_fresh_process",)
OPTIONS += tuple(f"--deselect={x}" for x in STARTING)


class Run(NamedTuple):
    """A file or folder of tests that ran."""

    tests: str
    status: int
    printed: str
    outcome: Outcome


def run(tests: str, options: argparse.Namespace, library: Path) -> Run:
    """Run one file or folder."""
    report = environment.FOLDER / "reports" / f"{Path(tests).stem}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    given = ["-m", options.marks, *(["-k", options.keyword] if options.keyword else [])]
    command = ["-m", "pytest", *OPTIONS, f"--junitxml={report}", *given, tests]
    start = time.monotonic()
    done = subprocess.run(
        environment.python(*command, cpu=options.cpu),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=environment.ROOT,
        env=environment.environment_of_python(library),
    )
    empty = Outcome(0, [], Counter(), 0.0)
    outcome = read(report, time.monotonic() - start) if report.exists() else empty
    status = 0 if done.returncode == 5 else done.returncode  # 5: no test of it has these marks
    return Run(tests, status, done.stdout, outcome)


def total(runs: Sequence[Run], seconds: float) -> Outcome:
    """The outcome of all."""
    outcomes = [x.outcome for x in runs]
    failed = [name for x in outcomes for name in x.failed]
    declined = sum((x.declined for x in outcomes), Counter())
    return Outcome(sum(x.passed for x in outcomes), failed, declined, seconds)


def keep(outcome: Outcome, cpu: str, library: Path) -> None:
    """Add the outcome to the table of versions, tests/torch_versions/results.md."""
    command = environment.python("-c", ABOUT, cpu=cpu)
    own = environment.environment_of_python(library)
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    about = json.loads(done.stdout.splitlines()[-1])
    about["architecture"] += f" (qemu, {cpu})"
    save([row(about, outcome)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.arm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-m", dest="marks", default="not slow")
    parser.add_argument("--tests", nargs="+", default=SLICE)
    parser.add_argument("--cpu", default=environment.CPU)
    parser.add_argument("--library", type=Path, default=environment.LIBRARY)
    parser.add_argument("-k", default="", dest="keyword")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true")
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
    runs = []
    with ThreadPoolExecutor(options.workers) as pool:
        for one in pool.map(lambda tests: run(tests, options, library), options.tests):
            runs.append(one)
            print(f"{Path(one.tests).name}: {summary(one.outcome)}", flush=True)
            if one.status:
                print(one.printed)
    outcome = total(runs, time.monotonic() - start)
    print(f"arm, {options.cpu}: {summary(outcome)}")
    if options.save:
        keep(outcome, options.cpu, library)
    return int(any(x.status for x in runs) or not outcome.passed)


if __name__ == "__main__":
    sys.exit(main())
