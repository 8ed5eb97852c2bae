"""On a GPU: every pair of features, each in one dtype; pairs that hide keys also with probes.

Hundreds of kernels are compiled for this file alone: skip it (--ignore) to save minutes.
"""

import pytest

from tests.support.cases import FEATURE, PAIRS, Dims, name_of, negative_logits
from tests.support.gpu import DIM, DTYPES, build, check, compiled, judged, on_gpu  # noqa: F401  compiled is a fixture
from tests.support.marks import parametrize

pytestmark = [*on_gpu, pytest.mark.usefixtures("compiled")]

NUMBER = {pair: at for at, pair in enumerate(PAIRS)}
TURNS = ("bfloat16", "float16", "bfloat16", "float16", "float32")  # float32 compiles slowly


def problem_of(pair):
    """The problem for a pair; its dtype is the next in TURNS."""
    dtype = TURNS[NUMBER[pair] % len(TURNS)]
    return build(Dims(2, 2, 2, 140, 197, DIM[dtype], DIM[dtype]), pair, DTYPES[dtype])


@parametrize("pair", PAIRS, ids=name_of, fast=473)
@judged
def test_pairs(name, pair):
    check(name, [problem_of(pair)])


HIDING = ("causal", "bottom_right", "window", "left_window", "right_window", "own_key", "lengths")
HIDING += ("bool_mask", "padding_mask", "float_mask", "bias_grad", "one_query", "many_queries")
OTHERS = ("softcap", "alibi", "sinks", "dropout", "gqa", "lse_loss")
PROBED = [p for p in PAIRS if any(f.name in HIDING for f in p) and any(f.name in OTHERS for f in p)]


@pytest.mark.parametrize("pair", PROBED, ids=name_of)
@judged
def test_hidden_keys_do_not_change_results(name, pair):
    check(name, [negative_logits(problem_of(pair))])


def test_every_hiding_feature_is_probed():
    assert {f.name for pair in PROBED for f in pair} == {*HIDING, *OTHERS}
    assert all(name in FEATURE for name in HIDING + OTHERS)
