"""Every example runs as a user would run it, proves what it claims and saves its picture."""

import importlib
import importlib.util
import math
import os
import pkgutil
import subprocess
import sys

import pytest
import torch

import fastattn.examples
from fastattn.examples import char_lm, common, complexity, long_context, memory, serve
from tests.support.backends import INTERPRETED
from tests.support.marks import parametrize

EXAMPLES = [
    module.name
    for module in pkgutil.iter_modules(fastattn.examples.__path__)
    if hasattr(importlib.import_module(f"fastattn.examples.{module.name}"), "main")
]
NEEDS = {"digits_vit": "sklearn"}
HAS_PLOTS = importlib.util.find_spec("matplotlib") is not None
pytestmark = pytest.mark.skipif(INTERPRETED, reason="hours in the interpreter")


def test_the_package_lists_its_examples():
    for name in EXAMPLES:
        assert f"python -m fastattn.examples.{name} " in fastattn.examples.__doc__
    assert fastattn.examples.__doc__.count("python -m fastattn.examples.") == len(EXAMPLES) == 10


TIMES = ": time "  # marks claims about time only


@parametrize("name", EXAMPLES, fast=1)
def test_example(name, tmp_path, record_property):
    """Run on one thread that sleeps when it waits, because other tests run at the same time. For
    the same reason a failed claim about time is only reported."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    picture = tmp_path / "picture.png"
    done = subprocess.run(
        [sys.executable, "-m", f"fastattn.examples.{name}", *["--plot", picture] * HAS_PLOTS],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    claims = [line for line in done.stdout.split("\n") if line.startswith(("proved", "FAILED"))]
    failed = [line for line in claims if line.startswith("FAILED")]
    disturbed = [line for line in failed if TIMES in line]
    for line in disturbed:
        record_property("notice", f"{name}: {line}")
    assert done.returncode == bool(failed), done.stdout + done.stderr
    assert len(claims) >= 2 and failed == disturbed, done.stdout + done.stderr
    assert not HAS_PLOTS or picture.stat().st_size > 10_000


@pytest.mark.slow
def test_ranks_of_torchrun(tmp_path):
    """Ranks started by torchrun work like those that the example starts, with another strategy."""
    ours = "fastattn.examples.long_context --ranks 9 --steps 2 --length 512 --strategy usp"
    run = f"-m torch.distributed.run --standalone --nproc-per-node 2 -m {ours} --layout zigzag"
    done = subprocess.run(
        [sys.executable, *run.split()], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    claims = [line for line in done.stdout.split("\n") if line.startswith("proved")]
    assert done.returncode == 0 and len(claims) == 4, done.stdout + done.stderr
    assert "512 tokens on 2 ranks by usp, zigzag" in done.stdout


def test_an_impossible_number_of_ranks_raises_at_once(capsys):
    with pytest.raises(SystemExit):
        long_context.main(["--ranks", "3"])
    assert "3 ranks can take gather, ring" in capsys.readouterr().err


def by_the_paper(cases, spoiled=()):
    """Seconds that grow as the table states, except in disturbed cases."""
    found = {}
    for case in cases:
        sizes = [getattr(case, x) ** p for x, p in complexity.TABLE[case.layer].time.items()]
        found[case] = math.prod(sizes) * (9 if case in spoiled else 1)
    return found


@pytest.mark.parametrize("disturbed", [0, 3, complexity.ATTEMPTS])
def test_disturbed_timings_are_measured_again(disturbed):
    """Up to the number of attempts, and only cases with unexpected times."""
    every = {case for cases in complexity.TIME.values() for case in cases}
    last = complexity.TIME[complexity.RESTRICTED, "r"][-1]
    asked = []

    def measured_at(cases):
        asked.append(set(cases))
        return by_the_paper(cases, {last} if len(asked) <= disturbed else ())

    found = complexity.times(measured_at)
    attempts = min(disturbed + 1, complexity.ATTEMPTS)
    assert asked[0] == every and len(asked) == attempts
    assert all(last in cases and len(cases) == 3 for cases in asked[1:])
    near = {key: complexity.is_near(*key, curve.slope()) for key, curve in found.items()}
    wrong = disturbed == complexity.ATTEMPTS
    assert [key for key, ok in near.items() if not ok] == [(complexity.RESTRICTED, "r")] * wrong


@pytest.mark.parametrize("wrong", [0, 1, common.ATTEMPTS])
def test_times_are_the_least_of_rounds_until_they_are_as_expected(wrong, monkeypatch, threads):
    """A call takes 2 or 3 seconds, and in every second round 10 more."""
    threads(2)
    clock, made, asked = [0.0], [], []

    def call(name, seconds):
        made.append((name, torch.get_num_threads()))
        clock[0] += seconds + 10 * ((len(made) - 1) // 2 % 2)

    def expected(seconds):
        asked.append(dict(seconds))
        return len(asked) > wrong

    monkeypatch.setattr(common.time, "thread_time", lambda: clock[0])
    calls = {"a": lambda: call("a", 2), "b": lambda: call("b", 3)}
    found = common.least_seconds(calls, 4, expected, "racing")
    attempts = min(wrong + 1, common.ATTEMPTS)
    assert found == {"a": 2, "b": 3} and len(asked) == attempts and len(made) == 8 * attempts
    assert "".join(name for name, _ in made[:8]) == "abbaabba"
    assert {count for _, count in made} == {1} and torch.get_num_threads() == 2


@pytest.mark.slow
def test_continuous_batching_that_is_slower_fails_the_command(monkeypatch, capsys):
    asked = [serve.Request([65, 66], n) for n in (2, 9, 2, 9, 2)]
    model = serve.LanguageModel().eval()
    seconds = {serve.CONTINUOUS: 1.1, serve.PADDED: 1.0, serve.ALONE: 9.0}
    for name, value in {
        "SLOTS": 2,
        "train": lambda text: (model, [1.0]),
        "requests": lambda text: asked,
        "least_seconds": lambda *given: seconds,
    }.items():
        monkeypatch.setattr(serve, name, value)
    assert serve.main([]) == 1
    (failed,) = (x for x in capsys.readouterr().out.split("\n") if x.startswith("FAILED"))
    assert TIMES in failed and "continuous batching 22, padded batches 24" in failed
    seconds[serve.CONTINUOUS] = 0.9
    assert serve.main([]) == 0


@pytest.mark.parametrize(
    "seconds, expected",
    [((2, 1, 4, 3), True), ((2, 3, 4, 2.9), False), ((5, 1, 4, 3), False), ((2, 1, 4, 5), False)],
    ids=["as it is", "fused", "torch's", "fused over torch's"],
)
def test_dropout_that_makes_a_step_faster_is_noticed(seconds, expected):
    assert char_lm.in_order(dict(zip(char_lm.COMPARED, seconds))) == expected


@pytest.mark.slow
def test_times_of_dropout_out_of_order_fail_the_command(monkeypatch, capsys):
    """As claims about time, which `test_example` only reports."""
    slow = {(name, p, n): (1.0 + p, 1.0) for name, p in char_lm.COMPARED for _, n in char_lm.SIZES}
    monkeypatch.setattr(char_lm, "STEPS", 1)
    monkeypatch.setattr(char_lm, "compare", lambda text: slow)
    assert char_lm.main([]) == 1
    failed = [x for x in capsys.readouterr().out.split("\n") if x.startswith("FAILED")]
    assert sum(TIMES in line for line in failed) == len(char_lm.SIZES)


# --- shared helpers -------------------------------------------------------------------------------


def test_a_failed_claim_is_printed_and_the_status_is_1(capsys):
    claims = common.Claims()
    claims.prove("one is one", 1 == 1)
    assert claims.status() == 0
    claims.prove("one is two", 1 == 2)
    assert claims.status() == 1 and claims.failed == ["one is two"]
    assert capsys.readouterr().out == "proved  one is one\nFAILED  one is two\n"


def test_a_picture_that_cannot_be_drawn_raises_at_once(monkeypatch, capsys):
    made = common.parser("translate", "doc")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert common.parse(made, []).plot is None
    with pytest.raises(SystemExit):
        common.parse(made, ["--plot"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_picture_is_named_after_the_example():
    pytest.importorskip("matplotlib")
    made = common.parser("translate", "doc")
    assert common.parse(made, ["--plot"]).plot.name == "translate.png"
    assert common.parse(made, ["--plot", "x/y.png"]).plot.as_posix() == "x/y.png"


@pytest.mark.parametrize("total", [0, 1, 7, 10, 25, 1000])
def test_progress_without_a_terminal_is_ten_lines_at_most(total, capsys):
    assert list(common.progress(range(total), "training")) == list(range(total))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == min(total, 10)
    assert not total or lines[-1] == f"training: {total}/{total}"


def make_bytes(count):
    """For the memory probe: a call that fills so many bytes."""
    return lambda: bytearray(b"x" * count)


def test_memory_of_a_fresh_process():
    found = memory.extra_bytes(make_bytes, (64 << 20,), (1,))
    assert 64 << 20 <= found < 160 << 20  # the bytes, and their copy in a bytearray
    before = memory.reset_peak()
    kept = bytearray(b"x" * (32 << 20))
    assert memory.peak_bytes() - before >= 30 << 20 and kept
