"""Tuning: tables of tiles, splits of keys, and the search for better tiles."""

import itertools
import math
import os
import stat
import threading

import pytest
import torch

from fastattn.backends.triton import autotune, tile_configs
from fastattn.backends.triton.tile_configs import Config
from fastattn.call.spec import AttentionSpec

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120, 121)
HEAD_DIMS = (1, 64, 65, 128, 129, 256)
PRECISIONS = ("ieee", "tf32", *tile_configs.PARTS.values())
BUSY = ((), *((x,) for x in tile_configs.FEATURES), ("narrow",), ("given",), ("mask", "softcap"))


# --------------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
@pytest.mark.parametrize("which", tile_configs.PASSES)
def test_every_tile_is_one_that_kernels_take(which, arch):
    for itemsize, head_dim, busy, precision in itertools.product(
        (2, 4), HEAD_DIMS, BUSY, PRECISIONS
    ):
        tile = tile_configs.config(which, arch, itemsize, head_dim, busy, precision)
        for n in tile[:3]:
            assert n & (n - 1) == 0, "a power of two"
        summed, other = tile[:2] if which.startswith(("dk", "dv")) else tile[1::-1]
        assert 16 <= summed <= 128 and 8 <= other <= 128
        assert tile.warps in (2, 4, 8) and tile.stages >= 1


@pytest.mark.parametrize("which", tile_configs.PASSES)
def test_the_interpreter_has_one_small_tile(which):
    assert tile_configs.config(which, 0, 4, 64, ("mask",)) == tile_configs.INTERPRETED


@pytest.mark.parametrize(
    "arch, like",
    [(75, 75), (80, 80), (86, 86), (87, 86), (89, 86), (103, 100), (121, 120), (999, 120)],
)
def test_a_chip_without_a_table_uses_the_nearest_lower_one(arch, like):
    for which in tile_configs.PASSES:
        for itemsize in (2, 4):
            mine, its = (tile_configs.config(which, a, itemsize, 128, ()) for a in (arch, like))
            assert mine == its


def test_features_have_tiles_of_their_own():
    """A single feature uses its tile in the table; several, or an unknown one, share another."""
    table = {("dq", 64): tile_configs.Row(*(Config(n, 32, 8, 2) for n in (128, 64, 32, 16)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tile_configs.TABLES, 90, table)
        found = [tile_configs.config("dq", 90, 2, 64, busy).BM for busy in BUSY]
    assert found == [128, 16, 64, 64, 64, 64, 32, 32]


def test_masks_are_analysed_if_enough_heads_share_them():
    """It depends on the rows, on the heads that share a mask plane, and on the work to save."""
    assert tile_configs.structured(heads=4, planes=1, M=2048, N=2048)
    assert tile_configs.structured(heads=96, planes=8, M=2048, N=2048)  # 12 heads per mask plane
    assert not tile_configs.structured(heads=3, planes=1, M=4096, N=4096)
    assert not tile_configs.structured(heads=32, planes=32, M=4096, N=4096)
    assert not tile_configs.structured(heads=4, planes=1, M=2047, N=2048)
    assert not tile_configs.structured(heads=64, planes=1, M=tile_configs.DECODE_ROWS, N=1 << 20)


def test_dk_and_dv_are_made_apart_where_the_table_has_tiles_for_them():
    assert tile_configs.apart(90, 2, 256) and tile_configs.apart(90, 2, 129)
    assert not tile_configs.apart(90, 2, 128) and not tile_configs.apart(90, 4, 256)
    assert not tile_configs.apart(80, 2, 256) and not tile_configs.apart(0, 2, 256)
    dkv = [tile_configs.config("dkv", 90, 2, d, ()) for d in (64, 128)]
    assert dkv == [tile_configs.config("dk", 90, 2, d, ()) for d in (64, 128)]


@pytest.mark.parametrize("arch, precision", tile_configs.OF_PRECISION, ids=str)
def test_a_table_of_a_precision_has_every_pass_of_plain_calls(arch, precision):
    def found(which, head_dim, itemsize=4):
        about = which, arch, itemsize, head_dim, (), precision
        tile = tile_configs.of_precision(*about)
        assert tile_configs.config(*about) == tile or tile is None
        return tile

    for head_dim in (1, 64, 65, 128):
        apart = tile_configs.apart(arch, 4, head_dim, (), precision)
        passes = "forward", "dq", *(("dk", "dv") if apart else ("dkv", "dk", "dv"))
        assert all(found(x, head_dim) for x in passes)
        assert not found("forward", head_dim, itemsize=2)
        assert not any(found(x, head_dim) for x in ("weights", "dmask", "jvp", "dq_t", "dkv_t"))
    assert not any(found(x, 129) for x in tile_configs.PASSES)


@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
def test_a_pass_without_tiles_of_parts_has_ieee_products(arch):
    mine = tile_configs.PARTS.get(arch, "ieee")
    assert tile_configs.precision(arch, "parts") == mine
    assert tile_configs.precision(arch, "tf32") == ("ieee" if arch == 75 else "tf32")
    for which, head_dim in itertools.product(("forward", "dq", "dkv", "jvp"), (64, 256)):
        about = which, arch, 4, head_dim, ()
        parts = which != "jvp" and head_dim == 64
        assert tile_configs.products(*about, mine) == (mine if parts else "ieee")
        assert tile_configs.products(*about, "tf32") == "tf32"
        ieee = tile_configs.config(*about)
        assert mine == "ieee" or (tile_configs.config(*about, mine) == ieee) == (not parts)


def test_older_than_every_table_is_an_error():
    with pytest.raises(ValueError, match="arch: got 70, expected 75 or newer"):
        tile_configs.config("forward", 70, 2, 64, ())


@pytest.mark.parametrize("which", tile_configs.PASSES)
def test_sm_75_has_its_own_tiles_for_every_dtype(which):
    """Its cores multiply numbers of 16 bits as they do float32: by multiply-adds."""
    for head_dim, busy in itertools.product(HEAD_DIMS, BUSY):
        tile, narrow = (tile_configs.config(which, 75, n, head_dim, busy) for n in (4, 2))
        assert tile == narrow
        assert which in tile_configs.WITHOUT_PRODUCTS or tile.stages == 1
    assert tile_configs.config("forward", 80, 4, 128, ()) == tile_configs.config(
        "forward", 120, 4, 128, ()
    )


# ------------------------------------------------------------------- chips with less shared memory


@pytest.mark.parametrize("which", ["forward", "dq", "dkv", "dv_t", "decode", "dmask"])
@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
def test_smaller_tiles_end_at_the_smallest_that_kernels_take(which, arch):
    tile = tile_configs.config(which, arch, 2, 128, ())
    steps = [tile]
    while below := tile_configs.smaller(which, steps[-1]):
        assert below.warps == tile.warps
        assert math.prod(below) < math.prod(steps[-1])
        assert sum(x != y for x, y in zip(below, steps[-1])) == 1, "one thing at a time"
        steps.append(below)
    summed, other = (16, 8) if which.startswith("d") and which[1] in "kv" else (8, 16)
    assert steps[-1][:2] == (summed, other) and steps[-1].stages == 1
    assert tile_configs.smallest(which, tile) == steps[-1]
    assert len({x.stages for x in steps if max(x[:2]) > 32}) <= 2  # loads stay in flight


@pytest.mark.parametrize("arch", tile_configs.TABLES, ids="sm_{}".format)
def test_the_chip_of_a_table_has_room_for_it(arch):
    mine = tile_configs.SHARED[arch] << 10
    assert not tile_configs.lacks_room(arch, mine) and tile_configs.lacks_room(arch, mine - 16)


@pytest.mark.parametrize("kb", [32, 48, 64, 99, 100, 228])
def test_a_chip_without_a_table_has_the_room_that_it_says(kb):
    assert tile_configs.lacks_room(89, kb << 10) == (kb < 99)
    assert tile_configs.lacks_room(103, kb << 10) == (kb < 227)
    assert tile_configs.lacks_room(76, kb << 10) == (kb < 64)


@pytest.mark.parametrize(
    "which, tile", [("forward", Config(128, 64, 8, 2)), ("decode", Config(16, 64, 2, 3))]
)
def test_candidates_are_a_few_other_tiles(which, tile):
    found = tile_configs.candidates(which, tile)
    assert 2 <= len(found) <= 8 and tile not in found and len(set(found)) == len(found)
    for c in found:
        assert 16 <= c.BM <= 128 and 16 <= c.BN <= 128 and c.warps in (2, 4, 8) and c.stages >= 1
    assert Config(128, 64, 4, 2) in tile_configs.candidates("forward", Config(128, 128, 8, 3))
    assert Config(64, 64, 4, 2) in tile_configs.candidates("dkv", Config(64, 128, 8, 3))
    assert tile_configs.candidates("dmask", tile) == []  # its buffers are sized for one tile


# ------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("processors", [1, 8, 108, 132])
@pytest.mark.parametrize("blocks", [1, 4, 5, 16, 97, 1024])
@pytest.mark.parametrize("programs", [1, 2, 7, 32, 105, 131, 132, 1000])
def test_no_part_of_a_split_is_empty(programs, blocks, processors):
    parts = tile_configs.splits(programs, blocks, processors)
    assert 1 <= parts <= blocks
    share = math.ceil(blocks / parts)
    assert (parts - 1) * share < blocks  # the last part has a block


@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
def test_a_multiprocessor_decodes_as_many_programs_as_it_has_memory_for(arch):
    kilobytes = {80: 164, 90: 228, 100: 228, 103: 228}.get(arch, 100)
    tile = tile_configs.config("decode", arch, 2, 128, ())
    each = 1 + 2 * tile.BN * 128 * 2 * (tile.stages - 1) // 1024 + 4  # keys, values and queries
    assert 1 <= tile_configs.decoding(arch) <= kilobytes // each
    assert tile_configs.decoding(0) == 1


def test_busy_processors_are_not_split():
    assert tile_configs.splits(105, 1000, 132) > 1
    assert tile_configs.splits(106, 1000, 132) == 1  # 80% of 132


@pytest.mark.parametrize("programs", [1, 2, 8, 16, 64])
def test_idle_processors_get_a_split(programs):
    parts = tile_configs.splits(programs, 4096, 132)
    waves = programs * parts / 132
    assert waves / math.ceil(waves) > 0.75


# ------------------------------------------------------------------------------------------- search

SLOW, QUICK, QUICKEST = Config(64, 64, 4, 2), Config(128, 64, 8, 2), Config(128, 128, 8, 3)
TIMES = {SLOW: 3.0, QUICK: 2.0, QUICKEST: 1.0}
KEY = autotune.Key(
    device="A GPU",
    triton="3.9.0",
    which="forward",
    dtype="torch.bfloat16",
    D=64,
    Dv=64,
    flags=("scaled=True",),
    group=1,
    M=1024,
    N=1024,
    heads=16,
    window=1024,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, on disk and in memory; `forget()` clears the memory."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tmp_path / "cache"


def forget():
    autotune._known.clear()


class Timer:
    """A timer with times from a table. It records the tiles; a tile not in the table fails."""

    def __init__(self, times=TIMES):
        self.times, self.asked = times, []

    def __call__(self, config):
        self.asked.append(config)
        if config not in self.times:
            raise RuntimeError("out of resource: shared memory")
        return self.times[config]


def search(timer, key=KEY, default=SLOW, candidates=(QUICK, QUICKEST)):
    return autotune.best(key, default, candidates, timer)


def test_the_fastest_wins_and_each_is_timed_once():
    timer = Timer()
    assert search(timer, candidates=(QUICK, QUICKEST, QUICK, SLOW)) == QUICKEST
    assert timer.asked == [SLOW, QUICK, QUICKEST]


def test_the_winner_is_remembered_here_and_in_the_next_process(cache):
    search(Timer())
    again = Timer()
    assert search(again) == QUICKEST and not again.asked
    (file,) = cache.iterdir()
    forget()
    assert search(again) == QUICKEST and not again.asked
    file.unlink()
    forget()
    search(again)
    assert again.asked


def test_failed_candidates_are_skipped():
    assert search(Timer({SLOW: 3.0, QUICK: 2.0})) == QUICK


def test_one_choice_needs_no_search(cache):
    timer = Timer()
    assert search(timer, candidates=(SLOW,)) == SLOW
    assert not timer.asked and not cache.exists()


def test_if_all_candidates_fail_the_default_runs_and_raises(cache):
    assert search(Timer({})) == SLOW
    assert not cache.exists()
    assert search(Timer()) == SLOW  # this process does not search again
    forget()
    assert search(Timer()) == QUICKEST  # the next process may search


@pytest.mark.parametrize("field", autotune.Key._fields)
def test_each_field_of_the_key_starts_a_new_search(field):
    search(Timer())
    was = getattr(KEY, field)
    other = {int: 7, str: "other", tuple: ("dropout=True",)}[type(was)]
    for _ in range(2):  # from the memory of the process, then from the disk
        timer = Timer({SLOW: 1.0, QUICK: 2.0})
        assert search(timer, KEY._replace(**{field: other})) == SLOW
        assert search(Timer({})) == QUICKEST
        forget()


def spec(**sizes):
    given = dict(B=2, H=8, Hk=2, M=1000, N=1025, D=64, Dv=32) | sizes
    return AttentionSpec(**given, dtype=torch.bfloat16, device="cuda", scale=0.125)


def test_a_key_names_the_call(monkeypatch):
    pytest.importorskip("triton")
    from fastattn.kernels import score

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    flags, gpu = score.Flags(scaled=None), torch.device("cuda")
    key = autotune.key("dq", spec(), gpu, F=flags, GIVEN=False)
    assert (key.device, key.which, key.dtype) == ("A GPU", "dq", "torch.bfloat16")
    assert (key.D, key.Dv, key.group, key.M, key.N, key.heads) == (64, 32, 4, 1024, 2048, 16)
    for name in score.Flags._fields:
        other = autotune.key("dq", spec(), gpu, F=flags._replace(**{name: 1}), GIVEN=False)
        assert other.flags != key.flags
    assert autotune.key("dq", spec(), gpu, F=flags, GIVEN=True).flags != key.flags


@pytest.mark.parametrize("n, rounded", [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_sizes_are_rounded_up_to_powers_of_two(n, rounded):
    assert autotune.bucket(n) == rounded


DAMAGE = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2],
    "a list": lambda text: b"[]",
    "null": lambda text: b"null",
    "no text": lambda text: b"\xff\xfe\x00",
    "other fields": lambda text: text.replace(b'"BM"', b'"rows"'),
    "other key": lambda text: text.replace(b"A GPU", b"Another"),  # in this key's file
    "other tile": lambda text: text.replace(b'"warps": 8', b'"warps": 6'),  # no candidate of ours
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_replaced_after_a_new_search(cache, damage):
    search(Timer())
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert file.read_bytes() != whole
    forget()
    timer = Timer()
    assert search(timer) == QUICKEST and timer.asked
    assert file.read_bytes() == whole


@pytest.mark.parametrize("what", ["a file in its place", "no permission"])
def test_a_folder_that_cannot_be_written_costs_a_search_in_each_process(cache, what):
    if what == "a file in its place":
        cache.write_text("")
    else:
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere")
        cache.mkdir()
        cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    autotune._tell_unwritable.cache_clear()
    first, second, later = Timer(), Timer(), Timer()
    with pytest.warns(UserWarning, match=r"cannot be kept \(.+\): .+ FASTATTN_CACHE_DIR names"):
        assert search(first) == QUICKEST and first.asked
    assert search(second) == QUICKEST and not second.asked
    forget()
    assert search(later) == QUICKEST and later.asked


def test_an_interrupted_write_leaves_the_old_file(cache, monkeypatch):
    search(Timer())
    (file,) = cache.iterdir()
    whole = file.read_text()

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    autotune._tell_unwritable.cache_clear()
    with pytest.warns(UserWarning, match="disk full"):
        autotune._write(file, KEY, SLOW)
    assert file.read_text() == whole
    assert list(cache.iterdir()) == [file]  # no other file is left


def test_writers_at_once_leave_one_whole_file(cache):
    search(Timer())
    (file,) = cache.iterdir()

    def write(config):
        for _ in range(50):
            autotune._write(file, KEY, config)

    writers = [threading.Thread(target=write, args=(config,)) for config in TIMES]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert autotune._read(file, KEY) in TIMES
    assert list(cache.iterdir()) == [file]


def test_nothing_is_timed_while_a_graph_is_captured(cache, monkeypatch):
    timer = Timer()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert search(timer) == SLOW and not timer.asked and not cache.exists()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert search(timer) == QUICKEST  # nothing was cached without a search
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert search(Timer({})) == QUICKEST  # captures use cached tiles


@pytest.mark.parametrize("value, on", [(None, False), ("", False), ("0", False), ("1", True)])
def test_only_the_variable_enables_autotuning(monkeypatch, value, on):
    monkeypatch.delenv("FASTATTN_AUTOTUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTATTN_AUTOTUNE", value)
    assert autotune.enabled() is on


@pytest.mark.parametrize(
    "variables, folder",
    [
        (dict(FASTATTN_CACHE_DIR="/a", XDG_CACHE_HOME="/b"), "/a"),
        (dict(XDG_CACHE_HOME="/b"), "/b/fastattn"),
        (dict(HOME="/c"), "/c/.cache/fastattn"),
    ],
    ids=["fastattn's", "xdg", "home"],
)
def test_winners_lie_in_a_folder_of_the_user(monkeypatch, variables, folder):
    for name in ("FASTATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(autotune.folder()) == folder
