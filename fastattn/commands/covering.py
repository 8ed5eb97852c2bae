"""A covering array: few rows, so that every two levels that may meet are in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Factors = Mapping[str, Sequence[Any]]
Row = dict[str, Any]  # factor to level
Excludes = Callable[[str, Any, str, Any], bool]  # level a of factor f excludes level b of g
DRAFTS = 3  # of which the best becomes a row


def covering(factors: Factors, excludes: Excludes, seed: int = 0) -> list[Row]:
    """Rows that have each pair of levels, unless `excludes` says that they exclude each other.

    A row begins with a pair that no row has yet, and takes, factor by factor, the level that adds
    most new pairs (AETG, Cohen et al. 1997). The first rows have the most. The same arguments give
    the same rows.
    """
    levels = [(name, level) for name, some in factors.items() for level in some]
    fits = {
        frozenset((x, y))
        for x, y in itertools.combinations(levels, 2)
        if x[0] != y[0] and not excludes(*x, *y) and not excludes(*y, *x)
    }
    left = {x: None for x in itertools.combinations(levels, 2) if frozenset(x) in fits}
    new = {frozenset(x) for x in left}
    rng, rows = random.Random(seed), []

    def draft(start: tuple[Any, Any]) -> list[Any] | None:
        """A row with these levels; None if a factor has no level beside those taken."""
        row = list(start)
        for name in rng.sample(list(factors), len(factors)):
            if name in (taken for taken, _ in row):
                continue
            beside = [(name, level) for level in factors[name]]
            able = [x for x in beside if all(frozenset((x, y)) in fits for y in row)]
            if not able:
                return None
            gain = {x: sum(frozenset((x, y)) in new for y in row) + rng.random() for x in able}
            row.append(max(gain, key=gain.__getitem__))
        return row

    def worth(row: list[Any]) -> int:
        return sum(frozenset(x) in new for x in itertools.combinations(row, 2))

    while left:
        start = rng.choice(list(left))
        drafts = [row for _ in range(DRAFTS) if (row := draft(start))]
        best = max(drafts, key=worth, default=list(start))
        if drafts:
            rows.append({name: dict(best)[name] for name in factors})
        new -= {frozenset(x) for x in itertools.combinations(best, 2)}
        left = {x: None for x in left if frozenset(x) in new}
    return rows
