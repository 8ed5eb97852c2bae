"""`make wheels` for each processor: its parts agree, and dist/ may hold the wheels of both."""

import platform
import re
import runpy
import shlex
import shutil
import subprocess

import pytest

from tests.arm import environment
from tests.support.checkout import ROOT

SCRIPT = runpy.run_path(str(ROOT / ".ci" / "wheels.py"))
NAMES = {
    "x86_64": "fastattn-0.1.0-cp310-abi3-manylinux_2_27_x86_64.whl",
    "aarch64": "fastattn-0.1.0-cp310-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl",
}


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("given, arch", [((), platform.machine()), (("ARCH=aarch64",), "aarch64")])
def test_make_gives_the_script_the_processor(given, arch):
    command = ["make", "-n", "-o", "setup", "wheels", "ARCH=", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [x for x in done.stdout.splitlines() if "wheels.py" in x]
    words = shlex.split(line.partition("wheels.py")[2])
    assert SCRIPT["processor"](words) == arch


def test_another_processor_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        SCRIPT["processor"](["--arch", "riscv64"])
    said = capsys.readouterr().err
    assert "riscv64" in said and "aarch64" in said and platform.machine() in said


def test_the_toolchain_is_for_the_processor_that_names_the_wheel():
    found = re.search(r"CMAKE_SYSTEM_PROCESSOR (\w+)", environment.TOOLCHAIN.read_text())
    assert found[1] == SCRIPT["ARM"]


@pytest.mark.parametrize("arch", NAMES)
def test_what_a_run_replaces_is_of_its_processor(tmp_path, monkeypatch, arch):
    monkeypatch.setitem(SCRIPT["wheels"].__globals__, "DIST", tmp_path)
    for name in (*NAMES.values(), "fastattn-0.1.0.tar.gz"):
        (tmp_path / name).touch()
    assert SCRIPT["wheel"](arch).name == NAMES[arch]
    assert SCRIPT["build_sdist"] not in SCRIPT["CROSS_STEPS"]
