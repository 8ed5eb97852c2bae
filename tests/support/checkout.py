"""The checkout that the tests are in, and configurations of its native build."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def configured(folder, *more, **environment):
    """cmake's run that configures a build in this folder, without CUDA. more: further arguments.
    Skips the test if a tool is missing."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=tools)
    if not cmake or not shutil.which("ninja", path=tools):
        pytest.skip("building needs cmake and ninja")
    return subprocess.run(
        [cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), "-GNinja", *more],
        env=os.environ | dict(PATH=tools, FASTATTN_CUDA="off") | environment,
        capture_output=True,
        text=True,
    )
