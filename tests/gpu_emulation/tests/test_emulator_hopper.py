"""The source of a kernel for sm_90 on the emulator: boxes by maps of the host, products of
warpgroups, registers that warpgroups exchange, and bulk copies to global memory.
"""

import re

import numpy as np
import pytest
import torch

from tests.gpu_emulation.emulator import EMULATOR, SCHEDULES, Emulator, aligned, needs_emulator

pytestmark = needs_emulator
named = pytest.mark.parametrize
WAYS = [(schedule, lazy) for schedule in SCHEDULES for lazy in (False, True)]


@pytest.fixture(scope="module")
def emulator():
    return Emulator(EMULATOR / "hopper.cu")


def run(emulator, rows=200, times=1, **options):
    """(the findings of the last launch, out, its expected value, sums, theirs). Numbers are whole
    and small, so every sum is exact."""
    g = torch.Generator().manual_seed(rows)
    a, b = (torch.randint(-3, 4, (n, 64), generator=g) for n in (rows, 64))
    given = []
    for x in (a, b):
        memory = aligned(x.numel(), np.uint16)
        memory[:] = x.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel()
        given.append(memory)
    out, sums = aligned(rows * 64, np.float32), aligned(128 * 64, np.float32)
    for _ in range(times):
        found = emulator.run("product_of_boxes", *given, out, sums, rows, **options)
    right = (a @ b.T).numpy()
    tiles = np.zeros((-(-rows // 128) * 128, 64), np.int64)
    tiles[:rows] = right
    of_sums = times * tiles.reshape(-1, 128, 2, 32).sum(0).swapaxes(0, 1)
    return found, out.reshape(rows, 64), right, sums.reshape(2, 128, 32), of_sums


@named("rows", [1, 128, 200, 300])
def test_products_of_boxes(emulator, rows):
    for schedule, lazy in WAYS:
        found, out, right, sums, of_sums = run(emulator, rows, schedule=schedule, lazy=lazy)
        found.none()
        assert np.array_equal(out, right) and np.array_equal(sums, of_sums)


def test_sums_add_to_what_is_there(emulator):
    found, _, _, sums, of_sums = run(emulator, times=3)
    found.none()
    assert np.array_equal(sums, of_sums)


# {site: what its absence leads to}
SITES = {
    "initialised": "no mbarrier at shared byte|RACE",
    "the mbarrier": "no mbarrier at shared byte",
    "fewer": "DEADLOCK.*256 at more.* 0 registers .* are free, 8 warps wait for 18432",
    "bytes": "whose phase is over|that nobody expected|READ IN FLIGHT",
    "asked": "DEADLOCK.*at loaded",
    "A": "DEADLOCK.*at loaded",
    "loaded": "READ IN FLIGHT|NO PROXY FENCE|UNINITIALISED|RACE",
    "the products": "exits with products of its warp in flight",
    "products end": "exits with products of its warp in flight|UNINITIALISED",
    "stored": "NO PROXY FENCE at shared byte .* a bulk copy of thread 128",
    "all stored": "RACE|NO PROXY FENCE|UNINITIALISED",
    "all out": "exits with bulk copies that no group holds",
    "read": "(out|sums): its thread exits before it has read shared memory",
}


@named("site", SITES)
def test_every_site_is_needed(emulator, site):
    for schedule, lazy in WAYS:
        found, *_ = run(emulator, disabled=site, schedule=schedule, lazy=lazy)
        assert found.count and re.search(SITES[site], found.first), found.first


def test_sites_that_change_values_alone(emulator):
    for site in ("out", "sums", "a product"):
        found, out, right, sums, of_sums = run(emulator, disabled=site)
        assert found.count or not (np.array_equal(out, right) and np.array_equal(sums, of_sums))
