"""Tests on a GPU survive new warnings of torch and Triton, but not ours. Others survive neither."""

import os
import subprocess
import sys

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import warnings
import pytest, torch

torch.cuda.is_available = lambda: True  # or the marked ones are skipped
gpu = pytest.mark.GPU

def of(module, level):
    code = f"import warnings\\ndef call(): warnings.warn('new', stacklevel={level})"
    names = {"__name__": module}
    exec(code, names)
    return names["call"]

foreign = pytest.mark.parametrize("module", ["torch.cuda", "triton", "triton.runtime.jit"])
OWN = ["fastattn.api", "fastattn", "torches", "bench.measure.run"]
own = pytest.mark.parametrize("module", OWN)
levels = pytest.mark.parametrize("level", [1, 2])

@gpu
@foreign
@levels
def test_foreign_on_a_gpu(module, level):
    of(module, level)()

@gpu
@own
@levels
def test_own_on_a_gpu(module, level):
    of(module, level)()

@foreign
@levels
def test_foreign_elsewhere(module, level):
    of(module, level)()

@gpu
def test_cpp_on_a_gpu():
    torch.range(0, 1)

def test_cpp_elsewhere():
    torch.range(0, 1)

@gpu
def test_awaited_on_a_gpu():
    with pytest.warns(UserWarning, match="new"):
        of("torch.cuda", 1)()
    with pytest.raises(UserWarning):
        warnings.warn("of the test's own")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(the verdict on each test of PROGRAM, the output of the run)"""
    file = tmp_path_factory.mktemp("foreign") / "test_inner.py"
    file.write_text(PROGRAM.replace("GPU", "gpu"))
    options = ["-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", "-v"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    verdicts = {}
    for line in done.stdout.splitlines():
        test, _, rest = line.partition("::")[2].partition(" ")
        if rest.startswith(("PASSED", "FAILED")):
            verdicts.setdefault(test.partition("[")[0], []).append(rest.split()[0])
    return verdicts, done.stdout


def test_foreign_warnings_are_no_errors_in_gpu_tests(found):
    verdicts, said = found
    assert verdicts["test_foreign_on_a_gpu"] == ["PASSED"] * 6, said
    assert verdicts["test_cpp_on_a_gpu"] == ["PASSED"], said
    assert "UserWarning: new" in said and "torch.range is deprecated" in said  # they are reported


def test_our_own_warnings_stay_errors(found):
    verdicts, said = found
    assert verdicts["test_own_on_a_gpu"] == ["FAILED"] * 8, said
    assert verdicts["test_awaited_on_a_gpu"] == ["PASSED"], said


def test_foreign_warnings_stay_errors_in_other_tests(found):
    verdicts, said = found
    assert verdicts["test_foreign_elsewhere"] == ["FAILED"] * 6, said
    assert verdicts["test_cpp_elsewhere"] == ["FAILED"], said
