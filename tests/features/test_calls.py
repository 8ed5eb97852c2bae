"""Calls that have every pair of arguments and properties: forward, LSE and gradients against the
float64 oracle.

`factors.py` lists the properties of a call, `covering.py` draws few calls that have every pair of
them, `calls.py` makes a call and its oracle. The mark `slow` runs every triple, on every
instruction set. A failure prints the smallest call that still fails, and a line that repeats it.
FASTATTN_SEED=1 draws others.
"""

import os

import pytest

from tests.features import checking, factors
from tests.support.backends import not_interpreted

pytestmark = not_interpreted
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


def in_turn(form, rows):
    """Each call on one instruction set: neighbours have different ones."""
    for n, row in enumerate(rows):
        ways = checking.ways(row)
        yield form, row, ways[n % len(ways)]


def cases(calls):
    return [pytest.param(*x, id=f"{n}-{named(*x)}") for n, x in enumerate(calls)]


def agrees(*call):
    if wrong := checking.report(*call):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.parametrize(
    "form, row, way",
    cases(x for form in factors.FORMS for x in in_turn(form, factors.rows(form, seed=SEED))),
)
def test_pairs(form, row, way):
    agrees(form, row, way)


@pytest.mark.parametrize("form, row, way", cases(in_turn("dense", factors.sparse())))
def test_two_arguments_alone(form, row, way):
    agrees(form, row, way)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("form", factors.FORMS)
def test_triples(form, part):
    for row in factors.rows(form, strength=3, seed=SEED)[part::PARTS]:
        for way in checking.ways(row):
            agrees(form, row, way)
