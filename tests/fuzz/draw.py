"""Draw random calls. One `random.Random` determines everything, so a seed repeats a call."""

import math

import torch

from fastattn.backends import base
from tests.features import calls, factors
from tests.features.covering import random_row
from tests.support.backends import REASONS
from tests.support.cases import DTYPES

EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129)


def size(rng, most):
    """A length: often small, often at the edge of a block."""
    kind = rng.random()
    if kind < 0.4:
        return rng.randint(1, 9)
    if kind < 0.7:
        return rng.choice([n for n in EDGES if n <= most] or [most])
    return rng.randint(1, most)


# The largest head dim that every fused backend supports.
WIDEST = min(
    base.get(name).support.max_head_dim or 512
    for name, why in REASONS.items()
    if not why and name != "reference"
)


def head_dim(rng):
    if rng.random() < 0.6:
        return rng.randint(1, 40)
    some = (48, 64, 72, 80, 96, 127, 128, 129, 160, 192, 256, 512, 576, 1000)
    return rng.choice([d for d in some if d <= WIDEST])


def row(rng, form, most=150, **fixed):
    """A row of `factors.FORMS` with levels that `rng` draws; half of the sizes are of no list."""
    found = random_row(factors.FORMS[form] | fixed, factors.forbidden, rng)
    names = [name for name in ("M", "N", "D", "Dv") if name in found and name not in fixed]
    for name in names:
        found[name] = min(found[name], most) if name in "MN" else found[name]
        if rng.random() < 0.5:
            found[name] = size(rng, most) if name in "MN" else head_dim(rng)
    if found.get("qv", "no") != "no":  # keys have the columns of both
        found |= {name: min(found[name], WIDEST // 2) for name in names if name in ("D", "Dv")}
    if "M" in names and "block" not in found and rng.random() < 0.125:  # few rows, many keys
        found |= dict(M=rng.randint(1, 4), N=rng.randint(1, 10 * most))
    return found


def problem(rng, dtype, most=150, far=True, **fixed):
    """A dense call as a `Problem`. far: whether scores may be far from zero."""
    near = factors.IN_FLOAT64 if dtype == torch.float64 else factors.NEAR
    fixed |= factors.ONE_PROBLEM if far else near
    kind = next(name for name, x in DTYPES.items() if x == dtype)
    return calls.problem(row(rng, "dense", most, **fixed | dict(dtype=(kind,))))


def some(rng, names):
    """A non-empty subset of `names`; in half of the draws all of them."""
    chosen = [name for name in names if rng.random() < 0.6]
    return tuple(chosen if chosen and rng.random() < 0.5 else names)


def finite(x):
    """x with 0 in place of infinity, for use in a loss."""
    return torch.where(x.abs() == math.inf, 0.0, x)
