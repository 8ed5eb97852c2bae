"""Calls that have every pair of arguments and properties: forward, LSE and gradients against the
float64 oracle.

`factors.py` lists the properties of a call, `covering.py` draws few calls that have every pair of
them, `calls.py` makes a call and its oracle. The mark `slow` runs every triple, on every
instruction set. A failure prints the smallest call that still fails, and a line that repeats it.
FASTATTN_SEED=1 draws others.
"""

import itertools
import os

import pytest

from tests.features import checking, factors
from tests.support.backends import INTERPRETED, not_interpreted
from tests.support.marks import parametrize

SEED = int(os.environ.get("FASTATTN_SEED", "0"))
NAMED = ("M", "N", "D", "dtype", "stored", "history", *factors.SCORES)
PARTS = 40  # of a slow test


def named(form, row, way):
    """What a call is, in the words of its arguments."""
    words = [form]
    for name, level in row.items():
        if name in ("M", "N", "D"):
            words.append(f"{name}{level}")
        elif name == "dtype":
            words.append(level)
        elif name in NAMED and level not in ("no", factors.FORMS[form][name][0]):
            words.append(f"{name}:{level}".replace(" ", "_"))
    return "-".join([*words, way])


def in_turn(calls, without=None):
    """Each call on one instruction set: neighbours have different ones."""
    for n, (form, row) in enumerate(calls):
        # The interpreter has no float64.
        if ways := [x for x in checking.ways(row) if x != without]:
            yield form, row, ways[n % len(ways)]


def cases(calls):
    return [pytest.param(*x, id=f"{n}-{named(*x)}") for n, x in enumerate(calls)]


def agrees(*call):
    if wrong := checking.report(*call):
        pytest.fail(wrong, pytrace=False)


@not_interpreted
@pytest.mark.parametrize(
    "form, row, way",
    cases(
        call
        for form in factors.FORMS
        for call in in_turn((form, row) for row in factors.rows(form, seed=SEED))
    ),
)
def test_pairs(form, row, way):
    agrees(form, row, way)


@not_interpreted
@pytest.mark.parametrize(
    "form, row, way", cases(in_turn(("dense", row) for row in factors.sparse()))
)
def test_two_arguments_alone(form, row, way):
    agrees(form, row, way)


@not_interpreted
@pytest.mark.parametrize("form, row, way", cases(in_turn(factors.edges(), without="reference")))
def test_edges(form, row, way):
    agrees(form, row, way)


# Of sizes that Triton's interpreter, a thousand times slower than a kernel, computes in a second.
SMALL = dict(B=(1, 2), M=(17, 1, 3, 33), N=(33, 1, 17, 40, 203), D=(16, 3, 17), Dv=(16, 5, 32))
SMALL |= dict(heads=((2, 2), (4, 2)), widths=((32, 32), (16, 3), (17, 16)), page=(16, 5))
SMALL |= dict(dtype=("float32", "bfloat16", "float16"))
SMALL |= dict(stored=("own", "int8", "float8_e4m3fn", "float8_e5m2"))
FEWER = {"selected": dict(M=(3, 1), N=(33, 17), block=(16, 32), heads=((2, 1), (2, 2)))}


def small(form):
    fixed = factors.of_form(form, SMALL) | FEWER.get(form, {})
    return [(form, row, "triton") for row in factors.rows(form, seed=SEED, **fixed)]


def by_turns(*lists):
    """The first of each, the second of each, and so on."""
    return [x for each in itertools.zip_longest(*lists) for x in each if x is not None]


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter runs with TRITON_INTERPRET=1")
@parametrize("form, row, way", cases(by_turns(*map(small, factors.FORMS))), fast=30)
def test_interpreted(form, row, way):
    agrees(form, row, way)


@not_interpreted
@pytest.mark.slow
def test_edges_in_every_way():
    for form, row in factors.edges():
        for way in checking.ways(row):
            agrees(form, row, way)


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("form", factors.FORMS)
def test_triples(form, part):
    for row in factors.rows(form, strength=3, seed=SEED)[part::PARTS]:
        for way in checking.ways(row):
            agrees(form, row, way)
