"""Head dims past 256 in Triton's forward and decoding kernels, as of latent attention (576 of q and
k, 512 of v), and those past 128 with two products of q and k: 192 are 128 and 64."""

from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.backends.triton import arguments, job, tile_configs
from tests.features import factors
from tests.features.test_calls import agrees, by_turns, cases
from tests.support.backends import DECLARED, INTERPRETED, passed
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs Triton's interpreter")

SIZES = dict(
    B=(1, 2),
    M=(17, 1, 3, 33),
    N=(33, 1, 65, 140),
    D=(576, 192, 129, 575, 400, 257),
    Dv=(512, 128, 1, 511, 300, 192),
    heads=((2, 1), (4, 2)),
    dtype=("bfloat16", "float32", "float16"),
    grad=("no",),
    mod=("no", "table"),
    qv=("no",),
    widths=((576, 512), (192, 128), (400, 300), (257, 257)),
    page=(16, 64),
    stored=("own", "int8", "float8_e4m3fn"),
)


def rows(form):
    levels = factors.of_form(form, SIZES)
    return [(form, row, "triton") for row in factors.rows(form, most=40, **levels)]


@interpreted
@parametrize("form, row, way", cases(by_turns(*map(rows, ("dense", "packed", "paged")))), fast=6)
def test_rows(form, row, way):
    agrees(form, row, way)


LATENT, SPLIT = Dims(1, 4, 1, 19, 140, 576, 512), Dims(1, 4, 2, 40, 97, 192, 128)
FEW = Dims(2, 6, 2, 2, 300, 576, 512)


@interpreted
@parametrize("dtype", DECLARED, fast=1)
@pytest.mark.parametrize("dims", [LATENT, SPLIT, FEW], ids=str)
def test_values_that_are_the_first_columns_of_keys(dims, dtype):
    """They are read once: the bits are those of values elsewhere."""
    features = FEATURE["causal"], FEATURE["lengths"], FEATURE["sinks"]
    problem = build(dims, features, DTYPES[dtype])
    problem.v = problem.k[..., : dims.Dv]
    passed(Verdict(problem, backward=False).complaints(fastattn.attention, backend="triton"))
    kwargs = {x: y.detach() if hasattr(y, "detach") else y for x, y in problem.kwargs.items()}
    found = [
        fastattn.attention(problem.q, problem.k, x, **kwargs, backend="triton")
        for x in (problem.v, problem.v.clone())
    ]
    assert torch.equal(*found)


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "dims", [LATENT, FEW, Dims(1, 2, 1, 37, 45, 200, 130), Dims(1, 2, 2, 3, 170, 256, 256)], ids=str
)
def test_tiles_of_sm_75(dims, dtype, monkeypatch):
    """Some have 8 rows, or 8 keys."""
    monkeypatch.setattr(job, "architecture", lambda device: 75)
    features = FEATURE["causal"], FEATURE["softcap"], FEATURE["key_bias_grad"]
    problem = build(dims, features, DTYPES[dtype])
    trains = max(dims.D, dims.Dv) <= tile_configs.MOST
    found = Verdict(problem, backward=trains).complaints(fastattn.attention, backend="triton")
    passed(found)


@interpreted
def test_a_view_is_recognised_by_its_address_and_strides(monkeypatch):
    seen = []
    real = arguments.is_latent
    monkeypatch.setattr(
        fastattn.backends.triton.job,
        "is_latent",
        lambda *given: seen.append(real(*given)) or seen[-1],
    )
    q, k = torch.randn(1, 2, 20, 576), torch.randn(1, 1, 20, 576)
    wide = torch.randn(1, 1, 20, 600)
    for keys, v in (
        (k, k[..., :512]),
        (k, k[..., :256]),  # not all of the first product
        (k, k[..., 64:]),
        (k, k[..., :512].clone()),
        (wide[..., :576], wide[..., :512]),
        (wide[..., :576], wide[..., :512].flip(2)),
    ):
        fastattn.attention(q, keys, v, backend="triton")
    assert seen == [True, False, False, False, True, False]


# --- what is declared, and what a tile has --------------------------------------------------------


def why_not(D, Dv, training):
    q, k, v = torch.empty(1, 2, 20, D), torch.empty(1, 2, 20, D), torch.empty(1, 2, 20, Dv)
    spec = fastattn.explain(q, k, v).spec
    return base.get("triton").support.why_not(replace(spec, needs_grad=training, device="cuda"))


@pytest.mark.parametrize(
    "D, Dv, training, reasons",
    [
        (576, 512, False, []),
        (577, 512, False, ["head dim 577 is over 576"]),
        (576, 513, False, ["value head dim 513 is over 512"]),
        (256, 256, True, []),
        (257, 64, True, ["head dim 257 is over 256"]),
        (64, 512, True, ["value head dim 512 is over 256"]),
    ],
)
def test_the_head_dims_that_are_declared(D, Dv, training, reasons):
    found = why_not(D, Dv, training)
    assert [x for x in found if "head dim" in x] == reasons


@pytest.mark.parametrize(
    "head_dim, expected",
    [
        (1, (16, 0)),
        (96, (128, 0)),
        (128, (128, 0)),
        (129, (128, 16)),
        (192, (128, 64)),
        (193, (256, 0)),
        (256, (256, 0)),
        (257, (256, 16)),
        (384, (256, 128)),
        (385, (512, 0)),
        (576, (512, 64)),
    ],
)
def test_columns_of_a_tile(head_dim, expected):
    assert arguments.columns(head_dim) == expected


@pytest.mark.parametrize("arch", [0, 75, 80, 86, 90, 100, 120])
@pytest.mark.parametrize("which", ["forward", "decode", "combine"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_for_every_declared_head_dim(which, arch, itemsize):
    most = max(tile_configs.MOST_FORWARD)
    assert tile_configs.config(which, arch, itemsize, most, ()).BM >= 8
