"""How evenly the blocks of a persistent forward pass of sm_90 share its tasks, by the kernel's own
schedule, and without a GPU."""

import ctypes
import functools
import heapq

import pytest
import torch

from fastattn.backends.native import libraries
from fastattn.call.spec import AttentionSpec
from tests.gpu_emulation.emulator import EMULATOR, compiled, linked, needs_emulator

pytestmark = needs_emulator
MULTIPROCESSORS = 132
KIND = dict(dtype=torch.bfloat16, device="cuda", scale=1.0)
FIXED = 4  # what a task costs beside its tiles, in tiles of 64 keys: 3 to 4 us on an H100


FAR = 1 << 40
ROWS = {64: 192, 96: 128, 128: 128, 192: 128, 256: 128}  # of a task: tiles.h
LEAST = 4 * MULTIPROCESSORS  # fewer tasks cannot be shared evenly


class Cost(ctypes.Structure):
    """`Cost` in emu/forward_schedule.cu."""

    _fields_ = [("place", ctypes.c_int64), ("cost", ctypes.c_double)]


@functools.cache
def entry():
    hidden = ("-include", str(EMULATOR / "emu.h"), "-x", "c++")
    path = linked([compiled(EMULATOR / "forward_schedule.cu", *hidden)])
    found = ctypes.CDLL(str(path)).forward_loads
    found.argtypes = ctypes.c_char_p, ctypes.c_int64, ctypes.c_double, *[ctypes.c_void_p] * 2
    found.restype = ctypes.c_int64
    return found


def loads_and_costs(D, N, heads, **sizes):
    """What each block has to do, and what each task costs. Every task is some block's."""
    spec = AttentionSpec(B=2, H=heads // 2, Hk=heads // 2, M=N, N=N, D=D, Dv=D, **KIND, **sizes)
    blocks = (ctypes.c_double * MULTIPROCESSORS)()
    tasks = heads * -(-N // ROWS[D])
    costs = (Cost * tasks)()
    assert entry()(libraries.form(spec), MULTIPROCESSORS, FIXED, blocks, costs) == tasks
    assert sorted(x.place for x in costs) == list(range(tasks))
    return list(blocks), [x.cost for x in costs]


def greedy(costs):
    """What the busiest block has, if whichever is free takes the longest task that is left."""
    found = [0.0] * MULTIPROCESSORS
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(found, found[0] + cost)
    return max(found)


def usual(D, N):
    return max(1, 16384 // N) * (2048 // D) // 2 * 2


CAUSAL, WINDOW = dict(left=FAR, right=0), dict(left=1024, right=0)


@pytest.mark.parametrize("N", [4096, 8192, 16384, 32768])
@pytest.mark.parametrize("D", ROWS)
def test_all_blocks_have_about_as_much_to_do(D, N):
    """Causal calls: their sections alternate. For 16,384 rows of 2,048 columns, and other heads."""
    for heads, bound in ((usual(D, N), 1.03), *((x, 1.06) for x in (16, 24, 40, 64, 100))):
        blocks, costs = loads_and_costs(D, N, heads, **CAUSAL)
        if len(costs) >= LEAST:
            assert max(blocks) <= bound * max(sum(blocks) / MULTIPROCESSORS, greedy(costs)), heads


@pytest.mark.parametrize("band", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("N", [1024, 2048, 4096])
@pytest.mark.parametrize("D", ROWS)
def test_short_calls_and_windows(D, N, band):
    """Here few tasks are much shorter than others; static sections come less near to even."""
    for heads in (usual(D, N), 32, 40, 64, 96):
        blocks, costs = loads_and_costs(D, N, heads, **band)
        if len(costs) >= LEAST:
            assert max(blocks) <= 1.2 * greedy(costs), heads
