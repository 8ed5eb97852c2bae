"""The CUDA kernels under AddressSanitizer: they access no global memory but their arguments.

Each allocation of torch gets a guard zone before and after it. Other emulator tests check shared
memory; here the kernels are compiled to check global memory instead.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_emulation.emulator import compiler, needs_emulator

pytestmark = [needs_emulator, pytest.mark.slow]
HERE = Path(__file__).parent
PAST_THE_END = """
import numpy as np
from tests.gpu_emulation.emulator import EMULATOR, KERNELS, Emulator, aligned
emulator = Emulator(KERNELS / "probe.cu", EMULATOR / "misuse.cu")
arrays = aligned(256, np.uint32), aligned(64, np.uint32)
assert not emulator.run("misuse_reversed", *arrays).count
print("nothing yet", flush=True)
emulator.run("past_the_end", *arrays)
"""


def under_address_sanitizer(*arguments):
    named = subprocess.run(
        [*compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True
    )
    library = Path(named.stdout.strip())
    if not library.is_absolute():
        pytest.skip("this compiler has no AddressSanitizer")
    environment = os.environ | {
        "FASTATTN_EMULATOR": "address",
        "LD_PRELOAD": str(library.resolve()),
        # AddressSanitizer's copies of stack frames do not work with the stacks of fibers.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True
    )


def test_an_access_past_the_end_is_caught():
    done = under_address_sanitizer("-c", PAST_THE_END)
    assert done.returncode and "nothing yet" in done.stdout, done.stdout + done.stderr
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr


@pytest.mark.parametrize("kernels, tests", [("rows", "test_rows"), ("weights", "test_features")])
def test_every_feature_stays_within_its_buffers(kernels, tests):
    """In forward and backward."""
    file = HERE / f"test_cuda_{kernels}.py"
    chosen = ["-k", tests, "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = under_address_sanitizer("-m", "pytest", "-q", str(file), *chosen)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    assert " failed" not in done.stdout and "AddressSanitizer" not in done.stderr
