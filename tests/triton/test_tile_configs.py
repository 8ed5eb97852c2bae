"""Tuning: tables of tiles, splits of keys, and the search for better tiles."""

import itertools
import json
import math

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
GPU = torch.device("cuda")


class Races:
    """Races with times from a table. It records the tiles of each."""

    def __init__(self):
        self.asked = []

    def __call__(self, key, launches):
        self.asked.append([*launches])
        return min(launches, key=TIMES.__getitem__)


def best(key=KEY, default=SLOW, candidates=(QUICK, QUICKEST), launch=print):
    return autotune.best(key, GPU, default, candidates, launch)


@pytest.fixture
def stored(monkeypatch):
    """The choices of the user's file."""
    found = {}
    monkeypatch.setattr(autotune, "stored", lambda device: found)
    return found


def test_the_fastest_wins_and_each_is_raced_once(stored):
    races, found = Races(), {}
    with autotune.searching(races, found):
        assert autotune.active(GPU)
        for _ in range(2):
            assert best(candidates=(QUICK, QUICKEST, QUICK, SLOW)) == QUICKEST
        assert best(KEY._replace(which="dq"), candidates=(SLOW,)) == SLOW  # one needs no race
    assert races.asked == [[SLOW, QUICK, QUICKEST]] and found == {KEY: QUICKEST}
    assert not autotune.active(GPU) and best() == SLOW  # it is not stored


def test_a_launch_is_of_its_choice(stored):
    launched = []

    def race(key, launches):
        return [launch() for launch in launches.values()] and QUICK

    with autotune.searching(race, {}):
        assert best(launch=launched.append) == QUICK
    assert launched == [SLOW, QUICK, QUICKEST]


def test_a_stored_choice_serves_its_key_alone(stored):
    stored[KEY] = QUICK
    assert autotune.active(GPU) and best() == QUICK
    assert best(candidates=(QUICKEST,)) == SLOW  # it was of other tables
    for field in autotune.Key._fields:
        other = {int: 7, str: "other", tuple: ("dropout=True",)}[type(getattr(KEY, field))]
        assert best(KEY._replace(**{field: other})) == SLOW, field


def test_choices_are_read_as_they_are_written():
    found = {KEY: QUICK, KEY._replace(which="splits"): 3}
    text = json.dumps(autotune.written(found))
    assert autotune.parsed(json.loads(text)) == found
    for damage in ('"BM"', "[[{}, 1]]", text.replace("128", "true"), text.replace('"M"', '"m"')):
        with pytest.raises((TypeError, ValueError)):
            autotune.parsed(json.loads(damage))


def spec(**sizes):
    given = dict(B=2, H=8, Hk=2, M=1000, N=1025, D=64, Dv=32) | sizes
    return AttentionSpec(**given, dtype=torch.bfloat16, device="cuda", scale=0.125)


def test_a_key_names_the_call():
    pytest.importorskip("triton")
    from fastattn.kernels import score

    flags = score.Flags(scaled=None)
    key = autotune.key("dq", spec(), F=flags, GIVEN=False)
    assert (key.which, key.dtype) == ("dq", "torch.bfloat16")
    assert (key.D, key.Dv, key.group, key.M, key.N, key.heads) == (64, 32, 4, 1024, 2048, 16)
    for name in score.Flags._fields:
        other = autotune.key("dq", spec(), F=flags._replace(**{name: 1}), GIVEN=False)
        assert other.flags != key.flags
    assert autotune.key("dq", spec(), F=flags, GIVEN=True).flags != key.flags


@pytest.mark.parametrize("n, rounded", [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_sizes_are_rounded_up_to_powers_of_two(n, rounded):
    assert autotune.bucket(n) == rounded


@pytest.mark.parametrize("parts, tiles", [(1, 5), (3, 7), (8, 10), (13, 64), (64, 64)])
def test_other_splits_have_no_empty_part(parts, tiles):
    for other in tile_configs.other_splits(parts, tiles):
        assert 1 <= other <= tiles and (other - 1) * -(-tiles // other) < tiles
