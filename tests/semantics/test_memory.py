"""Peak memory is linear in the sequence length, also with dropout and a bias gradient.

The operating system measures it: the peak resident size of a fresh process, reset before the call
(/proc/self/clear_refs). The allocator returns freed memory, there are no huge pages, and all
scratch memory is written (poisoned), even where a kernel would not touch it.
"""

import ctypes
import functools
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fastattn import distributed
from fastattn.backends.native import libraries
from tests.support import ranks
from tests.support.backends import every_backend, not_interpreted

pytestmark = [not_interpreted, pytest.mark.slow]

PROC = Path("/proc/self/clear_refs")
needs_proc = pytest.mark.skipif(
    not os.access(PROC, os.W_OK), reason=f"{PROC} cannot be written: no way to reset the peak"
)

MEASURE = """
    import ctypes, dataclasses, sys, torch, fastattn
    from fastattn import api
    from fastattn.backends.native import libraries
    from fastattn.call.validation import describe
    from fastattn.call.spec import Tangents
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
    torch.use_deterministic_algorithms(True, warn_only=True)
    libraries.poison(True)
    torch.set_num_threads(2)
    backend = sys.argv[1]

    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(x.split()[1]) for x in lines if x.startswith(field)) * 1024

    def call(kind, n, heads=2, dim=64):
        "Everything but the call itself, so that inputs are there before the peak is reset."
        g = torch.Generator().manual_seed(0)
        kwargs = dict(backend=backend)
        grad = kind in ("backward", "everything")
        q, k, v = (torch.randn(1, heads, n, dim, generator=g).requires_grad_(grad) for _ in "qkv")
        leaves = [q, k, v]
        if kind in ("dropout", "everything"):
            kwargs |= dict(dropout_p=0.1, seed=1)
        if kind == "padding":
            kwargs |= dict(mask=torch.rand(1, 1, 1, n, generator=g) < 0.9)
        if kind == "everything":
            bias = torch.randn(1, 1, 1, n, generator=g).requires_grad_()
            leaves.append(bias)
            kwargs |= dict(mask=bias, causal=True, softcap=9.0, window=(n // 2, None))
        dout = torch.randn(q.shape, generator=g) if grad else None
        if kind == "second":
            return second(q, k, v)

        def run():
            out = fastattn.attention(q, k, v, **kwargs)
            return torch.autograd.grad(out, leaves, dout) if grad else out

        return run

    def second(q, k, v):
        "jvp, and the tangent of backward."
        t, options = api.prepare(q, k, v, {})
        spec = dataclasses.replace(describe(t, options), tangents=True)
        passes, moves = fastattn.backends.base.get(backend), Tangents(k, v, q)

        def run():
            outs = passes.jvp(spec, t, moves)
            return outs, passes.second(spec, t, moves, outs, (q, None, k, None), ("q", "k", "v"))

        return run

    for case in sys.argv[2:]:
        kind, n, heads = case.split(":")
        call(kind, 256)()  # threads, caches, lazily loaded code
        run = call(kind, int(n), int(heads))
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = status("VmRSS:")
        run()
        print(status("VmHWM:") - before)
        del run
"""
KINDS = ("forward", "dropout", "padding", "backward", "everything", "second")
MEGABYTE = 1 << 20
# The operating system counts resident pages on each CPU and folds them in 32 at a time, so a
# reading is off by a few hundred kilobytes. The sizes measured are much larger than that.
RESOLUTION = MEGABYTE // 2
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@functools.cache
def extra(name, kinds, sizes, heads):
    """{(kind, n): bytes that the call adds to the process at its peak, results included}."""
    cases = [(kind, n) for kind in kinds for n in sizes]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(MEASURE),
            name,
            *(f"{k}:{n}:{heads}" for k, n in cases),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | ALLOCATOR,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, (int(x) for x in done.stdout.split()), strict=True))


@needs_proc
@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_peak_memory_is_linear(name, kind):
    found = extra(name, KINDS, (2048, 4096), heads=8)
    small, large = found[kind, 2048], found[kind, 4096]
    output = 8 * 4096 * 64 * 4
    assert large > output - RESOLUTION, "the measurement sees at least the output"
    assert large <= 2.2 * small, f"{small / MEGABYTE:.1f} MB, then {large / MEGABYTE:.1f} MB"


@needs_proc
@every_backend
@pytest.mark.parametrize("kind", ["dropout", "everything"])
def test_dropout_at_4096_stays_under_20_megabytes(name, kind):
    """24 MB if AMX multiplies float32: Q and dO are then stored as planes of 1.5 times the size,
    twice: once for each side of a product."""
    found = extra(name, ("dropout", "everything"), (4096,), heads=2)[kind, 4096]
    on_tiles = name == "cpu" and libraries.cpu_units()["float32"]["many rows"].startswith("amx")
    limit = 24 if on_tiles else 20
    assert found < limit * MEGABYTE, f"{found / MEGABYTE:.1f} MB, not {limit}"


@needs_proc
def test_the_measurement_detects_a_quadratic_buffer():
    found = extra("reference", ("forward",), (1024, 2048), heads=2)
    assert found["forward", 2048] > 3 * found["forward", 1024]


# -- over ranks ------------------------------------------------------------------------------------


def peak_of_a_rank(group, rows, strategy):
    """Peak bytes that a rank's part adds: causal attention and its backward pass."""

    def resident(field):
        with open("/proc/self/status") as lines:
            return next(int(x.split()[1]) for x in lines if x.startswith(field)) * 1024

    def call(rows):
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 16, rows, 64, generator=g).requires_grad_() for _ in "qkv")
        given = dict(group=group, strategy=strategy, layout="zigzag", causal=True)

        def run():
            out = distributed.attention(q, k, v, **given)
            return out, torch.autograd.grad(out, (q, k, v), q.detach())

        return run

    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
    libraries.poison(True)
    call(64)()
    run = call(rows)
    PROC.write_text("5")
    before = resident("VmRSS:")
    found = run()
    extra = resident("VmHWM:") - before
    del found
    return extra


@needs_proc
def test_memory_of_a_ring_falls_with_the_number_of_ranks():
    """A rank's peak is linear in N / P: the same for equally long parts on more ranks, twice as
    much for parts of twice the length. It needs three ranks, which wait for keys and gradients at
    once. `gather`, where each rank has all keys, shows that one rank's memory is measured. The peak
    depends on which rank waits for which, so the highest of several calls counts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALLOCATOR.items():
            patch.setenv(name, value)
        with ranks.ranks(4) as four:

            def most(count, rows, strategy="ring", calls=3):
                peaks = (four.run(count, peak_of_a_rank, rows, strategy) for _ in range(calls))
                return max(itertools.chain(*peaks)) / MEGABYTE

            part, long, more = most(3, 1024), most(3, 2048), most(4, 1024)
            some, all_ = (most(count, 1024, "gather", calls=1) for count in (3, 4))
    print(f"{part:.1f}, {long:.1f} and {more:.1f} MB; gather {some:.1f} and {all_:.1f}")
    one = 16 * 1024 * 64 * 4 / MEGABYTE  # of q, k or v
    assert abs(more - part) < one
    assert 1.6 * part < long < 2.1 * part
    assert all_ > some + 1.5 * one
