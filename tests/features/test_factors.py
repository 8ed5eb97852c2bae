"""Every argument has a factor, and arrays have every pair of levels."""

import inspect
import itertools
import random

import pytest

import fastattn
from fastattn.call.spec import ARGUMENTS
from tests.features import factors
from tests.features.covering import random_row

FUNCTIONS = {
    "dense": fastattn.attention,
    "packed": fastattn.attention_packed,
    "paged": fastattn.attention_packed,
    "selected": fastattn.attention_selected,
}


@pytest.mark.parametrize("form", FUNCTIONS)
def test_every_argument_has_a_factor(form):
    signature = inspect.signature(FUNCTIONS[form]).parameters
    names = [name for name, x in signature.items() if x.kind is not x.VAR_POSITIONAL]
    missing = [name for name in names if name not in factors.FACTOR_OF]
    assert not missing, f"give {missing} a factor in tests/features/factors.py"
    known = factors.PACKED | factors.PAGED if form in ("packed", "paged") else factors.FORMS[form]
    others = [x for x in names if factors.FACTOR_OF[x] not in known]
    assert others in ([], ["backend"])  # which `checking.ways` chooses


def test_every_tensor_of_a_call_has_a_factor():
    missing = ARGUMENTS.keys() - factors.FACTOR_OF.keys()
    assert not missing, f"give {missing} a factor in tests/features/factors.py"


@pytest.mark.parametrize("form", factors.FORMS)
def test_an_array_has_every_pair(form):
    rows, levels = factors.rows(form), factors.FORMS[form]
    have = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}

    def possible(*pair):
        """Every other factor has a level that fits to both."""
        return all(
            any(factors.allowed(dict([*pair, (name, level)])) for level in some)
            for name, some in levels.items()
            if name not in dict(pair)
        )

    for (f, some), (g, others) in itertools.combinations(levels.items(), 2):
        for pair in itertools.product([(f, a) for a in some], [(g, b) for b in others]):
            assert pair in have or not possible(*pair), pair
    assert all(factors.allowed(row) for row in rows)


def test_a_random_row_is_allowed():
    rng = random.Random(0)
    for levels in factors.FORMS.values():
        row = random_row(levels, factors.forbidden, rng)
        assert row.keys() == levels.keys() and factors.allowed(row)
