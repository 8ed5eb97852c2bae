"""Test tiers: `rest` has everything that other tiers leave out, and `all` has everything."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import tiers

FILES = {x.stem: x for x in Path(__file__).parents[1].rglob("test_*.py")}


def item(file, test, *case, **params):
    name = f"{test}[{'-'.join(case)}]" if case else test
    found = SimpleNamespace(path=Path(f"{file}.py"), nodeid=f"{file}::{name}", originalname=test)
    if params:
        found.callspec = SimpleNamespace(params=params)
    return found


DTYPES = ("float32", "float64", "bfloat16", "float16")
ITEMS = [
    *(
        item("test_features", "test_features", f"feature{x}", y, dtype=y)
        for x in range(6)
        for y in DTYPES
    ),
    *(item("test_oracle", "test_pairs", f"pair{x}") for x in range(20)),
    item("test_aot", "test_every_pass_is_compiled"),
    item("test_new", "test_one"),
]


def test_a_name_is_the_name_of_one_file():
    """The tables name files without folders."""
    assert len(FILES) == len(list(Path(__file__).parents[1].rglob("test_*.py")))


@pytest.mark.parametrize("interpreted", [False, True])
def test_test_and_rest_are_all(interpreted):
    test, rest = (tiers.select(ITEMS, tier, interpreted)[0] for tier in ("test", "rest"))
    for tier in ("all", "whole"):
        every, none = tiers.select(ITEMS, tier, interpreted)
        assert every == ITEMS and not none
    assert sorted(x.nodeid for x in test + rest) == sorted(x.nodeid for x in ITEMS)


def test_every_feature_runs_in_alternating_dtypes():
    found = tiers.chosen(ITEMS[:24], "test", False)
    names = [f"test_features::test_features[feature{x}-{DTYPES[x % 4]}]" for x in range(6)]
    assert found == set(names)


def test_every_nth_case_and_the_first_are_chosen():
    found, n = tiers.chosen(ITEMS, "check", False), tiers.SHARES["test_oracle"][0]
    assert found >= {f"test_oracle::test_pairs[pair{x}]" for x in range(0, 20, n)}
    assert f"test_oracle::test_pairs[pair{n - 1}]" not in found
    assert "test_new::test_one" in found
    assert "test_aot::test_every_pass_is_compiled" not in found


def test_check_builds_no_emulator():
    files = [x for x in FILES if x.startswith(("test_cuda", "test_emulator", "test_ptx_"))]
    assert len(files) > 10
    for file in files:
        assert tiers.SHARES.get(file, tiers.DEFAULT)[0] == tiers.NONE, file


@pytest.mark.parametrize("file, wide", [("test_cuda_decode", True), ("test_forward", False)])
def test_test_builds_no_wide_kernels(file, wide):
    params = [
        dict(padded="64"),
        dict(padded="192 and 128"),
        dict(d=24),
        dict(d=72),
        dict(shape="wide"),
        {},
    ]
    found = [tiers.is_wide(item(file, "test_one", **x)) for x in params]
    assert found == [False, wide, False, wide, wide, False]
    items = [
        item(file, "test_one", "wide", padded="256"),
        item(file, "test_one", "64", padded="64"),
    ]
    assert (items[0].nodeid in tiers.chosen(items, "test", False)) == (not wide)
    assert tiers.chosen(items, "all", False) == {x.nodeid for x in items}


def test_all_leaves_cases_to_tests_with_their_own_command():
    items = [item("test_ptx_triton", "test_features", f"feature{x}") for x in range(11)]
    every, others = tiers.select(items, "all", False)
    test, rest = (tiers.select(items, tier, False)[0] for tier in ("test", "rest"))
    n = tiers.OF_ALL["test_ptx_triton::test_features"]
    assert every == items[::n] == test + rest and others == [x for x in items if x not in every]
    assert tiers.select(items, "whole", False) == (items, [])


@pytest.mark.parametrize(
    "name", [*tiers.SHARES, *tiers.INTERPRETED_SHARES, *tiers.OF_ALL, *tiers.INTERPRETED_OF_ALL]
)
def test_the_tables_name_what_exists(name):
    file, _, test = name.partition("::")
    written = FILES[file].read_text()
    assert f"def {test}" in written or f"\n{test} = " in written


def test_the_tables_have_shares():
    """A number, or ALL: two in the tables of `check` and `test`, one in those of `all`."""
    pairs = [*tiers.SHARES.values(), *tiers.INTERPRETED_SHARES.values()]
    assert all(isinstance(x, tuple) and len(x) == 2 for x in pairs)
    shares = [x for pair in pairs for x in pair]
    shares += [*tiers.OF_ALL.values(), *tiers.INTERPRETED_OF_ALL.values()]
    assert all(x == tiers.ALL or isinstance(x, int) for x in shares)


def test_a_missing_build_is_reported_in_one_message(tmp_path):
    environment = {"FASTATTN_LIBRARY": str(tmp_path / "nothing.so"), "PATH": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    output = (done.stdout + done.stderr).strip()
    assert done.returncode == 4 and output.count("\n") == 0, output
    assert output.startswith("ERROR: there is nothing to test: the native library was not built")
