"""Run a slice of the tests with several versions of torch and of Python, each with its own Triton;
or the tests of models with several versions of transformers.

python -m tests.torch_versions 2.8 2.10      these versions of torch, with this Python
    --pythons python3.10 python3.13          with each of these Pythons
    -m slow                                  the slow tests
    --save                                   add the outcomes to results.md
python -m tests.torch_versions --transformers      all supported versions of transformers
    5.24                                     this one

The wheel is installed into each environment of a torch, so the tests run what a user would install.
The environments of transformers share this Python's other packages. Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from fastattn.integrations.transformers_forms import VERSIONS
from tests.torch_versions.environment import ROOT, Environment, NotServed, OfTransformers, wheel

RESULTS = Path(__file__).with_name("results.md")
ENVIRONMENT = re.compile(r"\|.*?\| (?:x86_64|aarch64).*?\|")  # the cells of a row that name it
# Tests of the checkout itself, or of tools that these environments do not have.
LEFT_OUT = ("tests/package", "tests/cuda", "tests/gpu_emulation", "tests/mutants")
LEFT_OUT += ("tests/sanitize_cpu", "tests/bench", "tests/gpu", "tests/distributed")
# Tests of models of transformers: their outputs, gradients and tokens are those of eager attention.
OF_MODELS = ("test_integration_transformers*", "test_transformers_*", "test_latent_models*")
OF_MODELS += ("test_flex_transformers*", "test_flash_attn_models*", "test_flash_attn_install*")


class Outcome(NamedTuple):
    """What a run of the tests gave.

    declined: the reasons of tests that did not run, and how many had each.
    """

    passed: int
    failed: list[str]
    declined: Counter[str]
    seconds: float

    @property
    def counts(self) -> tuple[int, int, int]:
        """Of tests that passed, failed and did not run."""
        return self.passed, len(self.failed), sum(self.declined.values())


def run(environment: Environment, marks: str, workers: int, tests: list[str]) -> Outcome:
    """Run the slice of these tests against the installed fastattn.

    The working folder has links to the tests and to bench, and no fastattn that would hide the
    installed one.
    """
    tree = environment.folder / "tree"
    tree.mkdir(exist_ok=True)
    for name in ("tests", "bench"):
        if not (tree / name).is_symlink():
            (tree / name).symlink_to(ROOT / name)
    report = environment.folder / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-m", marks]
    options += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    options += ["-o", f"pythonpath={tree}"]
    options += [f"-n{workers}", "--dist=worksteal"] if workers > 1 else []
    start = time.monotonic()
    command = [environment.python, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    (environment.folder / "log.txt").write_text(done.stdout + done.stderr)
    if not report.exists():
        raise RuntimeError(f"pytest stopped: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read(report, time.monotonic() - start)


def read(report: Path, seconds: float) -> Outcome:
    """The outcome that a JUnit report has."""
    passed, failed, declined = 0, [], Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skipped := case.find("skipped")) is not None:
            declined[skipped.get("message", "")] += 1
        else:
            passed += 1
    return Outcome(passed, failed, declined, seconds)


def summary(outcome: Outcome) -> str:
    """The counts of an outcome in a line."""
    return "{} passed, {} failed, {} declined in {:.0f} s".format(*outcome.counts, outcome.seconds)


def row(about: dict, outcome: Outcome) -> str:
    """A line of the table."""
    triton = re.sub(r"torch sees no .*|no NVIDIA .*", "no GPU here", about["backends"]["triton"])
    cells = about["torch"], about["python"], about["architecture"]
    cells += about["backends"]["cpu"], about["extension"], f"{about['triton']}: {triton}"
    return f"| {' | '.join(map(str, cells + outcome.counts))} |"


def row_of_transformers(about: dict, outcome: Outcome) -> str:
    """A line of the table of transformers."""
    cells = about["transformers"], about["torch"], about["python"], about["architecture"]
    return f"| {' | '.join(map(str, cells + outcome.counts))} |"


HEADER = """# Versions of torch, of Python and of transformers that were tested

Written by `make test-torch SAVE=1`, and by `make test-arm ARGS=--save`, which runs a smaller slice.
Each row is one environment with the same abi3 wheel; on aarch64 with the cross-compiled library.
"Declined" counts tests that did not run; a run prints the reasons.

| torch | Python | architecture | CPU kernels | extension | Triton | passed | failed | declined |
|---|---|---|---|---|---|---|---|---|
"""


OF_TRANSFORMERS = """
`make test-transformers SAVE=1` runs the tests of models with each minor version of transformers
that `fastattn.integrations.transformers` accepts: outputs, gradients and generated tokens are those
of eager attention.

| transformers | torch | Python | architecture | passed | failed | declined |
|---|---|---|---|---|---|---|
"""


def save(rows: list[str]) -> None:
    """Add these rows to the page, each in the place of the one of the same environment."""
    kept = [x for x in RESULTS.read_text().splitlines() if ENVIRONMENT.match(x)]
    by_environment = {ENVIRONMENT.match(x)[0]: x for x in kept + rows}
    numbers = {x: [*map(int, re.findall(r"\d+", name))] for name, x in by_environment.items()}
    every = sorted(numbers, key=numbers.__getitem__)
    columns = HEADER.splitlines()[-1].count("|")
    of_torch = [f"{x}\n" for x in every if x.count("|") == columns]
    of_transformers = [f"{x}\n" for x in every if x.count("|") < columns]
    RESULTS.write_text("".join((HEADER, *of_torch, OF_TRANSFORMERS, *of_transformers)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_versions", description=__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable])
    parser.add_argument("-m", dest="marks")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    if not (versions := options.versions or (VERSIONS if options.transformers else ())):
        parser.error("versions: got none, expected those of torch, such as 2.8")
    kind, make_row, marks = Environment, row, options.marks or "not slow"
    tests = [f"--ignore={ROOT / name}" for name in LEFT_OUT] + [str(ROOT / "tests")]
    if options.transformers:
        kind, make_row = OfTransformers, row_of_transformers
        marks = options.marks or ""  # all
        tests = [str(x) for y in OF_MODELS for x in sorted(ROOT.glob(f"tests/integrations/{y}.py"))]
    built = None if options.transformers else wheel()
    rows, bad = [], 0
    for version in versions:
        for interpreter in options.pythons:
            environment = kind(version, interpreter)
            try:
                environment.make(built)
            except NotServed as why:
                print(f"{version}, {interpreter}: not run: {why}", flush=True)
                continue
            about = environment.about()
            outcome = run(environment, marks, options.workers, tests)
            name = f"torch {about['torch']}, Python {about['python']}"
            if options.transformers:
                name = f"transformers {about['transformers']}, {name}"
            rows.append(make_row(about, outcome))
            bad += len(outcome.failed)
            print(f"{name}: {summary(outcome)}", flush=True)
            for test in outcome.failed:
                print(f"  failed: {test}", flush=True)
            for reason, count in outcome.declined.most_common():
                print(f"  {count} declined: {reason}", flush=True)
    if options.save:
        save(rows)
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
