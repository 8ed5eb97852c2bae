"""Run a slice of the tests with several versions of torch and of Python, each with its own Triton;
or the tests of models with several versions of transformers.

python -m tests.torch_versions 2.8 2.10      these versions of torch, with this Python
    --pythons python3.10 python3.13          with each of these Pythons
    -m slow                                  the slow tests
    --save                                   add the outcomes to results.md and results.json
python -m tests.torch_versions --transformers      all supported versions of transformers
    5.24                                     this one

The wheel is installed into each environment of a torch, so the tests run what a user would install.
The environments of transformers share this Python's other packages. Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import json
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

RESULTS = Path(__file__).with_name("results.json")  # of all runs; results.md is made from it
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
    options += [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-o",
        f"pythonpath={tree}",
    ]
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
    counts = outcome.passed, len(outcome.failed), sum(outcome.declined.values())
    return "{} passed, {} failed, {} declined in {:.0f} s".format(*counts, outcome.seconds)


def row(about: dict, outcome: Outcome) -> str:
    """A line of the table."""
    triton = re.sub(r"torch sees no .*|no NVIDIA .*", "no GPU here", about["backends"]["triton"])
    cells = (
        about["torch"],
        about["python"],
        about["architecture"],
        about["backends"]["cpu"],
        about["extension"],
        f"{about['triton']}: {triton}",
        str(outcome.passed),
        str(len(outcome.failed)),
        str(sum(outcome.declined.values())),
    )
    return f"| {' | '.join(cells)} |"


def row_of_transformers(about: dict, outcome: Outcome) -> str:
    """A line of the table of transformers."""
    cells = about["transformers"], about["torch"], about["python"], about["architecture"]
    counts = len(outcome.failed), sum(outcome.declined.values())
    return f"| {' | '.join(map(str, (*cells, outcome.passed, *counts)))} |"


HEADER = """# Versions of torch, of Python and of transformers that were tested

Written by `make test-torch SAVE=1`, and by `make test-arm ARGS=--save`, which runs a smaller slice.
Each row is one environment with the same abi3 wheel; on aarch64 with the cross-compiled library.
"Declined" counts tests that did not run; the reasons are below.

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


def table(rows: list[str], declined: dict[str, Counter[str]]) -> str:
    """The page of results. Rows belong to the names of `declined`, in order."""
    text, names = HEADER, list(declined)
    for title, wanted in (("", False), (OF_TRANSFORMERS, True)):
        here = [x for x, name in zip(rows, names) if name.startswith("transformers") == wanted]
        text += title * bool(here) + "".join(f"{x}\n" for x in here)
    for name, reasons in declined.items():
        text += f"\n## Declined with {name}\n\n"
        text += "".join(f"- {count}: {reason}\n" for reason, count in reasons.most_common())
    return text


def save(rows: list[str], declined: dict[str, Counter[str]]) -> None:
    """Add these outcomes to those of other versions that are kept, and write the page of all."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for line, (name, reasons) in zip(rows, declined.items(), strict=True):
        kept[name] = dict(row=line, declined=dict(reasons))
    kept = dict(sorted(kept.items(), key=lambda x: (x[0].partition(" ")[0], _numbers(x[0]))))
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    every = {name: Counter(each["declined"]) for name, each in kept.items()}
    page = table([each["row"] for each in kept.values()], every)
    RESULTS.with_suffix(".md").write_text(page)


def _numbers(name: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", name.replace("cu", " "))]


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
    rows, declined, bad = [], {}, 0
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
            declined[name] = outcome.declined
            bad += len(outcome.failed)
            print(f"{name}: {summary(outcome)}", flush=True)
            for test in outcome.failed:
                print(f"  failed: {test}", flush=True)
    if options.save:
        save(rows, declined)
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
