"""Calls that fail, for lack of memory or by an interruption: the next call is right."""

import subprocess
import sys

import pytest

from tests.support.backends import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")

COMMON = """
import torch, fastattn
torch.set_num_threads(THREADS)

def pass_over(*sizes, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*sizes, generator=g, dtype=dtype).requires_grad_() for _ in "qkv"]
    out = fastattn.attention(*leaves, causal=True, backend="cpu")
    return [out, *(torch.autograd.grad(out.sum(), leaves) if BACKWARD else ())]

def is_right(found, *sizes):
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*sizes, generator=g, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    out = fastattn.reference.attention(*leaves, causal=True)
    exact = [out, *torch.autograd.grad(out.sum(), leaves)]
    for x, y in zip(found, exact):
        torch.testing.assert_close(x, y)
"""

# Blocks use up the remaining address space; then every second block of 64 KB is freed. Each can
# hold the result of a few rows, none the half megabyte of scratch.
NO_MEMORY = """
import resource
pass_over(1, 1, 3, 8)  # loads what is loaded late
SIZES = 1, 1, 40, 512
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
q, k, v = (torch.randn(*SIZES, dtype=torch.float64) for _ in "qkv")
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), hard))
blocks = []
for size in (1 << 20, 1 << 16, 1 << 12):
    try:
        while True:
            blocks.append(bytearray(size))
    except MemoryError:
        pass
blocks[:] = [x for at, x in enumerate(blocks) if len(x) != 1 << 16 or at % 2]
try:
    fastattn.attention(q[:, :, :5], k, v, backend="cpu")
except MemoryError as error:
    said = str(error)
else:
    said = "nothing"
blocks.clear()
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
print(said)
is_right(pass_over(*SIZES), *SIZES)
"""

# The signal arrives during a call, since calls are repeated until it arrives.
INTERRUPTED = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
SIZES = 1, 2, 3000, 64
started = threading.Event()

def interrupt():
    started.wait()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    while True:
        started.set()
        pass_over(*SIZES)
except KeyboardInterrupt:
    print("interrupted")
is_right(pass_over(2, 2, 70, 16), 2, 2, 70, 16)
"""


def output_of(program, **constants):
    """What a fresh process prints; it must exit with status 0."""
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    code = "\n".join([*lines, COMMON, program])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_no_memory_is_a_memory_error():
    found = output_of(NO_MEMORY, THREADS=1, BACKWARD=False)
    assert found == "the CPU kernels could not allocate their scratch memory"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_interrupted_process_continues(threads, backward):
    assert output_of(INTERRUPTED, THREADS=threads, BACKWARD=backward) == "interrupted"
