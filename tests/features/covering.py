"""Covering arrays: few rows, so that every pair (or triple) of levels is in one of them.

    array({"dtype": ("float32", "bfloat16"), "mask": ("no", "bool"), ...}, forbidden)

A row is a dict from factor to level. `forbidden(f, a, g, b)` says whether level a of f excludes
level b of g. Each row starts with a combination that no row has yet, and takes, factor by factor,
the level that adds most new ones (AETG, Cohen et al. 1997). The same arguments give the same rows.
No row at all is a ValueError: what has no case tests nothing.
"""

import itertools

import numpy as np


def array(factors, forbidden, strength=2, seed=0, tries=3, most=None):
    """A list of rows. tries: of so many drafts the best becomes a row. most: stop after so many."""
    names = list(factors)
    of = [(f, level) for f, name in enumerate(names) for level in factors[name]]
    levels = [np.array([x for x, (g, _) in enumerate(of) if g == f]) for f in range(len(names))]
    first = [int(x[0]) for x in levels]
    allowed = compatible(of, names, forbidden)
    left = allowed & ~np.eye(len(of), dtype=bool)
    if strength == 3:
        left = left[:, :, None] & left[:, None, :] & left[None]
    random, rows = np.random.default_rng(seed), []

    def draft(start):
        """A row that has these levels; None if the choices end where no level is allowed."""
        row, open_levels = list(start), allowed[list(start)].all(0)
        new = sum(left[x] for x in row)  # by candidate (and by a second candidate)
        taken = {of[x][0] for x in start}
        for f in random.permutation(len(names)):
            if f in taken:
                continue
            able = levels[f][open_levels[levels[f]]]
            ahead = np.logical_or.reduceat(open_levels & allowed[able], first, axis=1)
            able = able[ahead.all(1)]  # that leave a level of every factor
            if not len(able):
                return None
            gain = new[able] if strength == 2 else new[able][:, row].sum(1)
            row.append(able[(gain + random.random(len(able))).argmax()])
            open_levels = open_levels & allowed[row[-1]]
            new = new + left[row[-1]]
        return np.array(row)

    while most is None or len(rows) < most:
        places = np.flatnonzero(left)
        if not len(places):
            break
        start = np.unravel_index(places[random.integers(len(places))], left.shape)
        drafts = [row for row in (draft(start) for _ in range(tries)) if row is not None]
        if not drafts:  # others' levels exclude it
            for order in itertools.permutations(start):
                left[order] = False
            continue
        row = max(drafts, key=lambda row: left[np.ix_(*[row] * strength)].sum())
        left[np.ix_(*[row] * strength)] = False
        rows.append({names[of[x][0]]: of[x][1] for x in sorted(row)})
    if not rows:
        raise ValueError(f"no row is allowed of {factors}")
    return rows


def compatible(of, names, forbidden):
    """Whether two levels may be in one row: a matrix, with True on its diagonal."""
    allowed = np.eye(len(of), dtype=bool)
    for (x, (f, a)), (y, (g, b)) in itertools.combinations(enumerate(of), 2):
        f, g = names[f], names[g]
        allowed[x, y] = allowed[y, x] = (
            f != g and not forbidden(f, a, g, b) and not forbidden(g, b, f, a)
        )
    return allowed


def random_row(factors, forbidden, rng):
    """A row of levels that `rng`, a `random.Random`, draws. Half of the levels are the defaults."""
    row = {}
    for name in rng.sample(list(factors), len(factors)):
        able = [
            level
            for level in factors[name]
            if not any(
                forbidden(name, level, g, b) or forbidden(g, b, name, level) for g, b in row.items()
            )
        ]
        if not able:
            return random_row(factors, forbidden, rng)
        default = factors[name][0]
        row[name] = default if default in able and rng.random() < 0.5 else rng.choice(able)
    return {name: row[name] for name in factors}
