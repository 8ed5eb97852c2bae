"""Every argument has a factor, and arrays have every pair of levels."""

import inspect
import itertools
import random

import pytest

import fastattn
from fastattn.call.spec import ARGUMENTS, Feature
from tests.features import factors
from tests.features.arguments import functions
from tests.features.checking import MAKE
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


# Tested by test_weights, test_tangents and test_unrounded; and by every call with a gradient.
ELSEWHERE = Feature.WEIGHTS | Feature.TANGENTS | Feature.UNROUNDED
ELSEWHERE |= Feature.GRAD | Feature.PAGED_GRAD


def test_every_feature_is_in_a_call():
    """A feature that is added to the declarations needs a factor, too."""
    found = ELSEWHERE
    for form in ("dense", "paged"):
        for row in factors.rows(form)[:50]:
            call = MAKE[form](row)
            tensors = dict(call.tensors)
            mods = functions(row, row["heads"][0], tensors.pop("table", None))
            found |= fastattn.explain(**call.given, **tensors, **mods).spec.features
    missing = [feature.name for feature in Feature if feature & ~found]
    assert not missing, f"no level of tests/features/factors.py has {missing}"


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
