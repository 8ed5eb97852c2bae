"""On a GPU: the passes that take tangents, for every feature alone, against torch's forward mode of
the oracle in float64 on the CPU."""

import pytest

from fastattn.call.spec import Feature
from tests.support.backends import declares, passed
from tests.support.cases import FEATURE, PLAIN, SINGLES, Dims, name_of
from tests.support.gpu import (
    DIM,
    DTYPES,
    brought_back,
    build,
    compiled,  # noqa: F401  a fixture
    compiling,
    every_dtype,
    judged,
    moved,
    on_device,
    on_gpu,
)
from tests.support.tangents import about, directions, exact, passes

pytestmark = [*on_gpu, pytest.mark.usefixtures("compiled")]


def hold(name, problem, only=None):
    declares(name, problem.q.dtype, Feature.TANGENTS)
    moves, *incoming = directions(problem, only)
    on_its = {x: moved(y) for x, y in moves.items()}
    found = passes(name, on_device(problem), on_its, *map(moved, incoming), known=False)
    if not compiling.now:
        given = moves, *incoming
        passed(about(brought_back(found), problem, exact(problem, *given), given))


@every_dtype
@pytest.mark.parametrize("features", [PLAIN, *SINGLES], ids=name_of)
@judged
def test_features(name, dtype, features):
    dim = DIM[dtype]
    hold(name, build(Dims(2, 2, 2, 97, 131, dim, dim), features, DTYPES[dtype]))


EVERYTHING = ("bottom_right", "softcap", "alibi", "bias_grad", "sinks", "dropout", "gqa")


@every_dtype
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 192, 256])
@judged
def test_head_dims(name, dtype, dim):
    features = [FEATURE[x] for x in EVERYTHING]
    for chosen in (PLAIN, features):
        hold(name, build(Dims(1, 2, 2, 97, 131, dim, dim), chosen, DTYPES[dtype]))


@pytest.mark.parametrize("only", ["q", "k", "v", "mask", "sinks"])
@judged
def test_some_tangents_only(name, only):
    features = [FEATURE[x] for x in ("bias_grad", "sinks", "lse_loss")]
    hold(name, build(Dims(1, 2, 2, 97, 131, 64, 64), features, DTYPES["bfloat16"]), [only])
