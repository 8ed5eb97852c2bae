"""A chip that has less shared memory than a tile needs gets the next smaller tile that fits. A stub
replaces Triton's call of the driver, and a formula what a compiled kernel says of itself: real ones
run in gpu_emulation/tests/test_ptx_triton.py."""

import math

import pytest
import torch

from fastattn.backends.triton import autotune, job, runtime, tile_configs
from tests.support import launch_stub
from tests.triton.test_triton_launch import described, forward, train

pytestmark = pytest.mark.skipif(
    launch_stub.why_no_triton() is not None, reason=str(launch_stub.why_no_triton())
)
KB = 1 << 10
BY_KEYS = dict(D=64, M=100, N=300)


def needed(tile, stages):
    """Bytes: about what Triton allocates for four tiles of operands, and for scores."""
    return 4 * tile.BD * (tile.BM + stages * tile.BN) + 4 * tile.BM * tile.BN


@pytest.fixture
def chip(monkeypatch):
    """A function that makes an sm_89, which has no table, with so much shared memory. It returns
    the launches: (kernel, T, stages, grid)."""
    from triton.runtime import driver

    made, launched = [], []
    with launch_stub.stubbed(89) as stub:

        def fits(room, kernel, grid, *args, T, num_stages, **options):
            made.append((kernel.__name__, T, num_stages))
            return needed(T, num_stages) <= room

        def run(kernel, grid, *args, **options):
            launched.append((kernel.__name__, options["T"], options["num_stages"], grid[0]))
            return runtime.run(kernel, grid, *args, **options)

        monkeypatch.setattr(job, "fits", fits)
        monkeypatch.setattr(job, "run", run)

        def of(room):
            limits = {"max_shared_mem": room}
            monkeypatch.setattr(stub.utils, "get_device_properties", lambda device: limits)
            assert driver.active is stub and job.shared_memory() == room
            return launched

        of.compiled = made
        yield of


@pytest.mark.parametrize("kb", [32, 48, 64, 99, 100, 228])
def test_each_launch_is_of_the_largest_tile_that_fits(chip, kb):
    launched = chip(kb * KB)
    s, t = described(**BY_KEYS)
    train(s, t)
    assert {name for name, *_ in launched} >= {"forward_kernel", "dq_kernel", "dkv_kernel"}
    for name, which in dict(forward_kernel="forward", dq_kernel="dq", dkv_kernel="dkv").items():
        ((_, T, stages, _),) = (x for x in launched if x[0] == name)
        assert needed(T, stages) <= kb * KB
        tile = tile_configs.config(which, 89, 2, 64, ("narrow",))
        wanted = [tile]
        while wanted[-1]:
            wanted.append(tile_configs.smaller(which, wanted[-1]))
        first = next(x for x in wanted if needed(T._replace(BM=x.BM, BN=x.BN), x.stages) <= kb * KB)
        assert (T.BM, T.BN, stages) == (first.BM, first.BN, first.stages)
    if kb >= 228:
        assert [x[1:3] for x in launched] == [x[1:] for x in chip.compiled]


def test_a_second_call_looks_no_more(chip):
    launched = chip(48 * KB)
    s, t = described(**BY_KEYS)
    train(s, t)
    again, seen = list(launched), len(chip.compiled)
    assert seen > len(again)
    train(s, t)
    assert len(chip.compiled) == seen and launched == again  # kept launches run by themselves


def test_another_layout_of_a_kind_looks_for_itself(chip):
    launched = chip(48 * KB)
    s, t = described(**BY_KEYS)
    forward(s, t)
    seen = len(chip.compiled)
    s, t = described(layouts=(dict(first=1), {}, {}), **BY_KEYS)
    forward(s, t)
    assert len(chip.compiled) > seen and len(launched) == 2


def test_the_grid_is_that_of_the_smaller_tile(chip):
    """Of the mask's gradient too: its parts are allocated before its tile is known."""
    launched = chip(40 * KB)
    mask = torch.zeros(1, 1, 100, 300, dtype=torch.bfloat16)
    s, t = described(tensors=dict(mask=mask), **BY_KEYS)
    train(s, t, ("q", "k", "v", "mask"))
    found = {name: (T, grid) for name, T, _, grid in launched}
    T, grid = found["dmask_kernel"]
    first = tile_configs.config("dmask", 89, 2, 64, ("mask",))
    assert T.BM * T.BN < first.BM * first.BN
    assert grid % (math.ceil(100 / T.BM) * math.ceil(300 / T.BN)) == 0
    T, grid = found["forward_kernel"]
    assert grid == math.ceil(100 / T.BM) * s.B * s.H


def test_row_invariant_has_one_tile_whatever_a_layout_needs(chip):
    launched = chip(98 * KB)
    for layouts in (({}, {}, {}), (dict(first=1), {}, {})):
        for rows in (1, 100):
            s, t = described(layouts, row_invariant=True, **BY_KEYS | dict(M=rows))
            forward(s, t)
    assert {(T.BM, T.BN, stages) for _, T, stages, _ in launched} == {(8, 16, 1)}


def test_where_no_tile_fits_the_error_says_what_the_gpu_has(chip):
    chip(4 * KB)
    s, t = described(**BY_KEYS)
    said = r"forward_kernel: got a GPU with 4096 bytes .+: expected more, .+ backend=\"reference\""
    with pytest.raises(RuntimeError, match=said):
        forward(s, t)


def test_what_is_compiled_is_what_runs(monkeypatch):
    """`fits` asks Triton about the kernel that `run` launches: nothing is compiled again."""
    with launch_stub.stubbed(80) as stub:
        s, t = described()
        wanted = []
        monkeypatch.setattr(
            job, "fits", lambda *a, **k: wanted.append(runtime.fits(*a, **k)) or wanted[-1]
        )
        stub.launched = lambda metadata, *args: wanted.append(metadata.shared)
        forward(s, t)
    assert wanted == [True, 0]
    kernel = job.kernels().forward.forward_kernel
    (kept,) = kernel.device_caches[stub.device][0].values()
    assert kept.metadata.shared == 0


def test_a_search_takes_no_smaller_tile_for_a_candidate(chip, monkeypatch):
    """What the driver would refuse raises, as for a chip of the table; the found tile fits."""
    chip(48 * KB)
    s, t = described(**BY_KEYS)
    default = tile_configs.config("forward", 89, 2, 64, ("narrow",))
    small = tile_configs.smallest("forward", default)
    monkeypatch.setattr(tile_configs, "candidates", lambda which, tile: [small])
    raised = {}

    def chosen(key, launches):
        for tile, launch in launches.items():
            try:
                launch()
                raised[tile] = ""
            except RuntimeError as error:
                raised[tile] = str(error)
        return small

    found = {}
    for _ in range(2):  # in the second call a smaller tile is kept for the default
        found.clear()
        with autotune.searching(chosen, found):
            forward(s, t)
        assert [*found.values()] == [small]
        assert "got a GPU with 49152 bytes" in raised[default] and not raised[small]
        forward(s, t)


MASKED = dict(D=64, M=1024, N=2048, H=32)


def masked():
    return described(**MASKED, tensors=dict(mask=torch.zeros(1, 1, 1024, 2048, dtype=torch.bool)))


def test_a_second_call_reads_a_mask_for_its_last_tile_alone(chip, monkeypatch):
    launched = chip(24 * KB)
    monkeypatch.setattr(job, "fits", fits_but_for_masks)
    s, t = masked()
    forward(s, t)
    asked, block_mask = [], job.Job.block_mask

    def spied(self, side, c):
        asked.append((c.BM, c.BN))
        return block_mask(self, side, c)

    monkeypatch.setattr(job.Job, "block_mask", spied)
    (T,) = (T for name, T, *_ in launched if name == "forward_kernel")
    forward(s, t)
    assert asked == [(T.BM, T.BN)]


def test_the_kernel_that_reads_a_mask_takes_no_smaller_tile(chip):
    """Its lists are of the tiles of the pass."""
    chip(24 * KB)
    s, t = masked()
    with pytest.raises(RuntimeError, match="block_mask_kernel: got a GPU with 24576 bytes"):
        forward(s, t)


def fits_but_for_masks(room, kernel, grid, *args, T, num_stages, **options):
    return "mask_kernel" in kernel.__name__ or needed(T, num_stages) <= room
