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

# Each kind of call that takes seconds, and the time from Ctrl-C to its exception. One key that is
# read at many places makes a call long without memory, and one task of it.
INTERRUPTED = """
import os, signal, threading, time
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
g = torch.Generator().manual_seed(1)

def draw(*sizes):
    return torch.randn(*sizes, generator=g)

def capped(score, b, h, i, j):
    return 9 * torch.tanh(torch.sin(score) * torch.exp(-(i - j) * (i - j) / 1e6))

def backward(*tensors, **arguments):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = fastattn.attention(*leaves, **arguments)
    return lambda: torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)

def selected(n):
    leaves = [draw(1, 2, n, 64).requires_grad_() for _ in "qkv"]
    blocks = torch.arange(n)[:, None] // 32 - torch.arange(24) * 4
    out = fastattn.attention_selected(*leaves, blocks.clamp(min=-1).int()[None, None], block=32)
    return lambda: torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)

def operator(*tensors):
    with FlopCounterMode(display=False):
        return fastattn.attention(*tensors)

def forward_mode(q, k, v):
    with forward_ad.dual_level():
        return fastattn.attention(forward_ad.make_dual(q, q), k, v)

def one_key(n, *sizes):
    return [draw(*sizes[:-2], 1, sizes[-1]).expand(*sizes[:-2], n, sizes[-1]) for _ in "kv"]

def kinds(n, keys):
    q, k, v = (draw(1, 4, n, 64) for _ in "qkv")
    small = max(64, n // 8)
    few = [x[:, :, :small] for x in (q, k, v)]
    return {
        "forward": lambda: fastattn.attention(q, k, v),
        "operator": lambda: operator(q, k, v),
        "backward": backward(*few, causal=True),
        "of a score_mod": lambda: fastattn.attention(q, k, v, score_mod=capped),
        "backward of a score_mod": backward(*few, score_mod=capped),
        "gradient of a mask": backward(*few, mask=draw(1, 1)),
        "forward mode": lambda: forward_mode(q, k, v),
        "mean weights": lambda: fastattn.attention_weights(
            q[:, :1, :64].expand(1, n, 64, 64), k[:, :1], average_heads=True
        ),
        "selected": selected(small),
        "packed": lambda: fastattn.attention_packed(
            *(x[0].transpose(0, 1) for x in (q, k, v)),
            *(torch.tensor([0, n // 3, n], dtype=torch.int32),) * 2,
        ),
        "lightning_index": lambda: fastattn.lightning_index(
            q[:, :, :, :32], k[:, 0, :, :32], q[..., 0], 16
        ),
        "one row": lambda: fastattn.attention(draw(1, 8, 1, 64), *one_key(keys, 1, 1, 1, 64)),
        "one task": lambda: fastattn.attention(draw(1, 1, 64, 64), *one_key(keys, 1, 1, 1, 64)),
    }

def interrupted(call):
    # Seconds of CPU from the signal to its exception.
    started, sent = threading.Event(), []

    def interrupt():
        started.wait()
        time.sleep(0.1)
        sent.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        while True:  # a call that ends before the signal comes is repeated
            started.set()
            call()
    except KeyboardInterrupt:
        return time.process_time() - sent[0]

def results(made):
    for name, call in made.items():
        g.manual_seed(2)
        found = call()
        yield name, found if isinstance(found, tuple) else (found,)

def differ(one, other):
    same = lambda xs, ys: all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
    return [name for name in one if not same(one[name], other[name])]
"""

EVERY_KIND = """
from fastattn.backends.native import libraries

# Tiles multiply a copy of all keys, of which 50 million would not fit.
keys = 3_000_000 if libraries.cpu_isa().startswith("amx") else 50_000_000
short = kinds(300, 5000)
before = dict(results(short))
slow = {}
for name, call in kinds(30_000, keys).items():
    seconds = interrupted(call)
    if seconds > THREADS:
        slow[name] = seconds
    if changed := differ(before, dict(results(short))):
        print("after", name, "these differ:", changed)
print(slow or "all")
"""

# A handler that returns: the call goes on, though the handler calls the library on the same thread,
# with more scratch memory. Nor is a call of another thread interrupted.
NOT_INTERRUPTED = """
made, long = {}, {x: kinds(8000, 3_000_000)[x] for x in ("forward", "backward", "one task")}
wide = [torch.randn(1, 1, 200, 512) for _ in "qkv"]
expected, of_wide = dict(results(long)), fastattn.attention(*wide)
nested, over, ready = [], threading.Event(), threading.Event()

def handler(*_):
    nested.append(torch.equal(fastattn.attention(*wide), of_wide))
    ready.set()

def send():
    while not over.wait(0.05):
        ready.clear()
        os.kill(os.getpid(), signal.SIGINT)
        ready.wait()

signal.signal(signal.SIGINT, handler)
sender = threading.Thread(target=send, daemon=True)
sender.start()
found = dict(results(long))
over.set()
sender.join()
print(differ(expected, found), len(nested) > 1 and all(nested))

signal.signal(signal.SIGINT, signal.default_int_handler)
thread = threading.Thread(target=lambda: made.update(results(long)))
thread.start()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    thread.join()
print(differ(expected, made))
"""

# Meanwhile a handler makes a smaller call, with memory of its own.
A_SMALL_CALL = """
import signal
small, long = (torch.randn(1, 1, n, 64) for n in (3, 16000))
expected, of_long = (fastattn.attention(x, x, x) for x in (small, long))
made = []

def handler(*_):
    made.append(torch.equal(fastattn.attention(small, small, small), expected))

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
found = fastattn.attention(long, long, long)
signal.setitimer(signal.ITIMER_REAL, 0)
print(torch.equal(found, of_long), len(made) > 1 and all(made))
"""


# The process ends while a thread that Python does not wait for is inside of a call: a long one, as
# C++ ends a process in which such a thread is between two calls, in one of torch's functions.
ENDED = """
import itertools, threading, time
q = torch.randn(1, 1, 16000, 64)
calls = itertools.count()

def loop():
    while True:
        next(calls)
        fastattn.attention(q, q, q, backend="cpu")

threading.Thread(target=loop, daemon=True).start()
while next(calls) < 3:
    time.sleep(0.1)
print("ends")
"""


def output_of(program, **constants):
    """What a fresh process prints; it must exit with status 0."""
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    code = "\n".join([*lines, COMMON, program])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_no_memory_is_a_memory_error():
    found = output_of(NO_MEMORY, THREADS=1, BACKWARD=False)
    assert found == "the CPU kernels could not allocate their scratch memory"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such timer")
def test_a_handler_makes_a_small_call():
    assert output_of(A_SMALL_CALL, THREADS=2, BACKWARD=False) == "True True"


# The extension, and ctypes.
PATHS = pytest.mark.parametrize(("threads", "extension"), [(2, "on"), (1, "off")])


@pytest.mark.slow
@PATHS
def test_an_interrupt_ends_a_call(threads, extension, monkeypatch):
    monkeypatch.setenv("FASTATTN_EXTENSION", extension)
    assert output_of(INTERRUPTED + EVERY_KIND, THREADS=threads, BACKWARD=False) == "all"


@pytest.mark.slow
@PATHS
def test_other_signals_and_threads_do_not(threads, extension, monkeypatch):
    monkeypatch.setenv("FASTATTN_EXTENSION", extension)
    found = output_of(INTERRUPTED + NOT_INTERRUPTED, THREADS=threads, BACKWARD=False)
    assert found.splitlines() == ["[] True", "[]"]


@pytest.mark.slow
@PATHS
def test_the_process_ends_during_a_call(threads, extension, monkeypatch):
    monkeypatch.setenv("FASTATTN_EXTENSION", extension)
    assert output_of(ENDED, THREADS=threads, BACKWARD=False) == "ends"
