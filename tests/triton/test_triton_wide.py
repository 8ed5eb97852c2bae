"""Head dims past 256 in Triton's forward and decoding kernels, as of latent attention (576 of q and
k, 512 of v), and those past 128 with two products of q and k: 192 are 128 and 64."""

from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.backends.triton import arguments, tile_configs
from tests.semantics.test_packed import batch
from tests.semantics.test_paged import in_pages
from tests.semantics.test_storage import NAMES, same
from tests.support.backends import DECLARED, INTERPRETED, passed
from tests.support.cases import DTYPES, FEATURE, PLAIN, SINGLES, Dims, build, name_of
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs Triton's interpreter")

LATENT = Dims(1, 4, 1, 19, 140, 576, 512)
SIZES = {
    "576 of one value": Dims(1, 2, 2, 33, 65, 576, 1),
    "575 and 511": Dims(1, 2, 1, 32, 33, 575, 511),
    "513 and 512": Dims(2, 2, 2, 31, 64, 513, 512),
    "400, one product": Dims(1, 2, 1, 35, 70, 400, 300),
    "257": Dims(1, 2, 1, 35, 70, 257, 257),
    "300 and 500": Dims(1, 2, 1, 9, 70, 300, 500),
    "192 and 128": Dims(1, 4, 2, 40, 97, 192, 128),
    "160 and 192": Dims(1, 2, 2, 40, 97, 160, 192),
    "129 and 64": Dims(1, 2, 2, 40, 97, 129, 64),
    "few rows": Dims(2, 6, 2, 2, 300, 576, 512),
    "one row of 192": Dims(1, 16, 1, 1, 301, 192, 128),
    "no keys": Dims(1, 2, 1, 5, 0, 576, 512),
    "no rows": Dims(1, 2, 1, 0, 5, 576, 512),
}
WIDER = FEATURE["wide_values"]  # of 13 columns more than keys
FORWARD = [x for x in SINGLES if WIDER not in x]


def complaints(dims, features, dtype, latent=False):
    problem = build(dims, features, DTYPES[dtype])
    if latent:
        problem.v = problem.k[..., : dims.Dv]
    return Verdict(problem, backward=False).complaints(fastattn.attention, backend="triton")


@interpreted
@parametrize("dtype", DECLARED, fast=1)
@parametrize("features", [PLAIN, *FORWARD], ids=name_of, fast=6)
def test_features(features, dtype):
    passed(complaints(LATENT, features, dtype))


@interpreted
@parametrize("dtype", DECLARED, fast=1)
@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_sizes(dims, dtype):
    passed(complaints(dims, (FEATURE["causal"],), dtype) + complaints(dims, PLAIN, dtype))


@interpreted
@parametrize("dtype", DECLARED, fast=1)
@pytest.mark.parametrize("dims", [LATENT, SIZES["192 and 128"], SIZES["few rows"]], ids=str)
def test_values_that_are_the_first_columns_of_keys(dims, dtype):
    """They are read once: the bits are those of values elsewhere."""
    features = FEATURE["causal"], FEATURE["lengths"], FEATURE["sinks"]
    passed(complaints(dims, features, dtype, latent=True))
    problem = build(dims, features, DTYPES[dtype])
    v = problem.k[..., : dims.Dv]
    kwargs = {x: y.detach() if hasattr(y, "detach") else y for x, y in problem.kwargs.items()}
    found = [
        fastattn.attention(problem.q, problem.k, x, **kwargs, backend="triton")
        for x in (v, v.clone())
    ]
    assert torch.equal(*found)


@interpreted
@parametrize("dtype", DECLARED, fast=1)
@parametrize("page", [16, 64], fast=1)
def test_packed_and_in_pages(page, dtype):
    features = FEATURE["gqa"], FEATURE["bottom_right"]
    for sizes in (((33, 70), (5, 37)), ((1, 130), (2, 64))):
        made = batch(features, DTYPES[dtype], sizes, 576)
        made.given["v"] = made.given["k"][..., :512]
        with torch.no_grad():
            whole = fastattn.attention_packed(**made.given, backend="triton")
            exact = {x: y.double() if x in ("q", "k", "v") else y for x, y in made.given.items()}
            oracle = fastattn.attention_packed(**exact, backend="reference")
            paged = fastattn.attention_packed(**in_pages(made, page), backend="triton")
        bound = 3e-6 if dtype == "float32" else 8 * torch.finfo(DTYPES[dtype]).eps
        torch.testing.assert_close(whole.double(), oracle, rtol=bound, atol=bound)
        torch.testing.assert_close(paged.double(), oracle, rtol=bound, atol=bound)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("storage", NAMES)
def test_in_eight_bits(storage):
    made = batch((FEATURE["mqa"],), torch.bfloat16, ((1, 130), (3, 64), (33, 70)), 576)
    made.given["v"] = made.given["v"][..., :512].contiguous()
    same("triton", made, storage, (16,))


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


@pytest.mark.parametrize("arch", [0, 80, 86, 90, 100, 120])
@pytest.mark.parametrize("which", ["forward", "decode", "combine"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_for_every_declared_head_dim(which, arch, itemsize):
    most = max(tile_configs.MOST_FORWARD)
    assert tile_configs.config(which, arch, itemsize, most, ()).BM >= 16
