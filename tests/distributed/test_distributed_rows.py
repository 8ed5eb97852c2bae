"""Dense and packed calls over ranks that have every pair of arguments, properties and strategies,
against the float64 oracle."""

import itertools

from tests.distributed.parts import MAKE, run_row, together
from tests.distributed.test_distributed import MESH, STRATEGIES
from tests.features import factors
from tests.features.calls import Expected
from tests.features.covering import array
from tests.support.marks import parametrize

PACKED_STRATEGIES = (("gather", 1), ("gather", 2), ("gather", 4), ("gather", MESH))
PACKED_STRATEGIES += (("ulysses", 2), ("ulysses", 3), ("auto", 3), ("auto", MESH))
ALIKE = ("heads", "small_dtype", "mask")  # ranks restrict these in every form
LEVELS = {
    "dense": factors.RANKS | dict(strategy=STRATEGIES, mod=factors.MODS),
    "packed": {
        name: levels
        for name, levels in factors.PACKED.items()
        if name not in ("qv", "grad", "row_invariant", "deterministic", "used")
    }
    | {name: factors.RANKS[name] for name in ALIKE}
    | dict(strategy=PACKED_STRATEGIES),
}
PLAIN = {name: {f: x[0] for f, x in factors.FORMS[name].items()} for name in LEVELS}


def rows(form):
    return [(form, PLAIN[form] | row) for row in array(LEVELS[form], factors.forbidden)]


IN_TURN = [
    row for each in itertools.zip_longest(rows("dense"), rows("packed")) for row in each if row
]


@parametrize("form, row", IN_TURN, fast=80)
def test_rows(four, form, row):
    found = four.results(row["strategy"][1], run_row, form, row)
    call = MAKE[form](row)
    where = dict(layout=row["cut"]) if form == "dense" else dict(dim=0)
    complaints = Expected(call).about(together(call.tensors | call.given, found, **where))
    assert not complaints, f"{form} {factors.changed(row, LEVELS[form])}: {complaints}"
