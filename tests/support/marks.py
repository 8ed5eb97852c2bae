"""Which cases are fast. A test without the mark `slow` is fast; `pytest` runs the fast ones."""

import pytest


def parametrize(names, values, *, fast, **more):
    """pytest.mark.parametrize, of which the first `fast` values are fast and the others slow."""
    several = isinstance(names, (list, tuple)) or "," in names

    def slow(value):
        if isinstance(value, type(pytest.param())):
            return pytest.param(*value.values, marks=(*value.marks, pytest.mark.slow), id=value.id)
        return pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)

    values = list(values)
    return pytest.mark.parametrize(names, values[:fast] + list(map(slow, values[fast:])), **more)
