"""`python -m tests.fuzz`: one minute of it, the errors that it notices, and its reports."""

import argparse
import re
import signal
import subprocess
import sys

import pytest
import torch

from fastattn.backends.native.cpu import Cpu
from fastattn.dispatch import fast_path
from tests.fuzz import __main__ as command
from tests.fuzz import parts, watch
from tests.support.checkout import ROOT

LAST = re.compile(r"fuzz: (\d+) s, ([\d,]+) cases, (\d+) findings \(seed \d+\)")


def fuzz(*arguments):
    given = [sys.executable, "-m", "tests.fuzz", *map(str, arguments)]
    return subprocess.run(given, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_half_a_minute_of_random_calls():
    """The same calls on every commit, as many as the machine makes; `make fuzz` varies seeds."""
    found = fuzz("--minutes", 0.5, "--workers", 1, "--seed", 1)
    assert found.returncode == 0, found.stdout
    seconds, cases, findings = LAST.fullmatch(found.stdout.splitlines()[-1]).groups()
    assert int(seconds) < 66 and int(cases.replace(",", "")) > 10 and findings == "0"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--case", "dense:x"), "expected PART:NUMBER"),
        (("--parts", "dense,nothing"), "expected one of dense, packed"),
        (("--minutes", "nan"), "expected a number above 0"),
        (("--workers", "0"), "expected at least 1"),
    ],
    ids=" ".join,
)
def test_arguments_that_mean_nothing(arguments, expected, capfd):
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert error.value.code == 2 and expected in capfd.readouterr().err


PASSES = {"weights": "weights", "passes_with_tangents": "jvp"}  # of a part; or forward


@pytest.mark.parametrize("name", sorted(set(parts.PARTS) - {"wrong_shapes"}))
def test_a_part_detects_a_wrong_result(name, monkeypatch):
    which = PASSES.get(name, "forward")
    monkeypatch.setattr(parts, "variants", lambda name, dtype: [None])
    right = getattr(Cpu, which)

    def wrong(self, spec, *given):
        found = right(self, spec, *given)
        factor = 1.02 + 0.01 * spec.B  # vmap's one call has another B than each separate call
        return (
            found * factor if isinstance(found, torch.Tensor) else tuple(x * factor for x in found)
        )

    monkeypatch.setattr(Cpu, which, wrong)
    monkeypatch.setattr(fast_path, "attend", lambda *given: None)  # that runs kernels by itself
    assert any(fails(name, number) for number in range(12))


def fails(name, number):
    try:
        command.make(name, number)
    except AssertionError:
        return True
    return False


WORKERS = {  # the lines that a worker prints, and its end
    "right": ("begin dense:1000000", "end", "sys.exit(0)"),
    "wrong": ("begin dense:1000000", "end AssertionError: out", "sys.exit(0)"),
    "killed": ("begin dense:1000000", "os.abort()"),
    "endless": ("begin dense:1000000", "time.sleep(60)"),
    "broken": ("sys.exit(3)",),
    "idle": ("sys.exit(0)",),
    "interrupted": (
        "begin dense:1000000",
        "end",
        "time.sleep(1); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)",
    ),
}
EXPECTED = {  # (exit status, output)
    "right": (0, "fuzz: . s, 1 cases, 0 findings"),
    "wrong": (1, "FOUND AssertionError: out\n  repeat it: .* --case dense:1000000\n"),
    "killed": (1, "FOUND the process ended with SIGABRT.*\n  repeat it: .* dense:1000000\n"),
    "endless": (1, "FOUND no end within 1 s\n  repeat it: .* --case dense:1000000\n"),
    "broken": (1, "FOUND a worker ended with status 3"),
    "idle": (1, "fuzz: . s, 0 cases, 0 findings"),
    "interrupted": (130, "fuzz: . s, 1 cases, 0 findings"),
}


@pytest.mark.parametrize("kind", WORKERS)
def test_workers_report_their_results(kind, monkeypatch, capfd, tmp_path):
    """After a case that killed its process, fuzz goes on with the next, which is right here."""
    *lines, end = WORKERS[kind]
    body = [*(f"print({line!r}, flush=True)" for line in lines), end]
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "if sys.argv[sys.argv.index('--worker') + 1] != '0': sys.exit(0)\n" + "\n".join(body)
    )
    monkeypatch.setattr(watch, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(watch, "LONGEST", 1)
    # A job in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = command.main(["--minutes", "0.2", "--workers", "1"])
    finally:
        signal.signal(signal.SIGINT, before)
    expected, text = EXPECTED[kind]
    assert status == expected and re.search(text, capfd.readouterr().out)


def test_a_case_is_rebuilt_with_the_same_settings(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FASTATTN_FLOAT32", "vector")
    options = argparse.Namespace(minutes=1, workers=1)
    watch.Watch(options).report("dense:1000000", "AssertionError: out")
    (command,) = capsys.readouterr().out.splitlines()[1:]
    assert command.endswith("python -m tests.fuzz --case dense:1000000")
    assert "TRITON_INTERPRET=1 " in command and "FASTATTN_FLOAT32=vector " in command
