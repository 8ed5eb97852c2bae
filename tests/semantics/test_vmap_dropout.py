"""vmap folds calls with dropout into one: each draws as it would alone, on every backend."""

import pytest
import torch
from torch.func import vmap

import fastattn
from fastattn.backends import base
from fastattn.call.spec import Options, Tensors
from fastattn.dispatch import operation, run_pass, vmap_fold
from tests.support import vmap_dropout
from tests.support.backends import (
    DECLARED,
    declares,
    every_backend,
    not_interpreted,
    on_variants,
    passed,
    small,
    thinned,
)
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")


@every_backend
@parametrize("way, dtype", thinned(vmap_dropout.WAYS, DECLARED), fast=10)
def test_each_draws_as_it_does_alone(name, way, dtype):
    """In decode, too: with one row."""
    declares(name, DTYPES[dtype])
    for isa in on_variants(name, DTYPES[dtype]):
        for rows in (1, vmap_dropout.M):
            assert vmap_dropout.draws_alike(name, way, DTYPES[dtype], rows), isa


MIXED = ("items heads", "heads items")


@every_backend
@parametrize("which, way", thinned(vmap_dropout.PASSES, small(vmap_dropout.WAYS, MIXED)), fast=6)
def test_one_call_is_each_of_them(name, which, way):
    """The pass runs once."""
    if which not in vmap_dropout.passes_of(name):
        pytest.skip(f"{name} has no {which}")
    wide = torch.float32 in base.get(name).support.dtypes
    dtype = torch.float32 if wide else torch.bfloat16
    for _ in on_variants(name, dtype):
        passed(list(vmap_dropout.complaints(name, dtype, [way], [which])))


@not_interpreted
@parametrize("way", vmap_dropout.WAYS, fast=4)
def test_vmap_dropout_of_the_reference(way):
    assert vmap_dropout.draws_alike("reference", way, torch.float64)
    passed(list(vmap_dropout.complaints("reference", torch.float64, [way])))


@not_interpreted
@pytest.mark.parametrize("way", ["items", "items items"])
def test_weights_of_examples(way):

    def f(q, k, v, sinks):
        given = dict(dropout_p=vmap_dropout.P, seed=vmap_dropout.SEED, place=vmap_dropout.PLACE)
        return tuple(
            fastattn.attention_weights(q, k, average_heads=average, backend="reference", **given)
            for average in (False, True)
        )

    given = list(vmap_dropout.tensors(way, torch.float64))
    with vmap_dropout.counted("forward") as seen:
        found = vmap_dropout.by_vmap(f, way)(*given)
    assert len(seen) == 4  # for each mean: the normaliser, then the weights
    for x, y in zip(found, vmap_dropout.alone(f, way)(*given), strict=True):
        torch.testing.assert_close(x, y)


@not_interpreted
@pytest.mark.parametrize("at", ["mask", "seed"])
def test_examples_with_a_tensor_of_their_own(at):
    """Calls with different seeds are not folded."""
    q, k, v, _ = vmap_dropout.tensors("items", torch.float64)
    own = dict(
        mask=torch.randn(3, vmap_dropout.H, 1, vmap_dropout.N), seed=torch.tensor([3, 4, 3])
    )[at]
    others = dict(dropout_p=0.4, backend="reference") | (dict(seed=5) if at == "mask" else {})

    def f(q, x):
        return fastattn.attention(q, k[0], v[0], **others, **{at: x})

    with vmap_dropout.counted("forward") as seen:
        found = vmap(f)(q, own)
    assert len(seen) == {"mask": 1, "seed": 3}[at]
    torch.testing.assert_close(found, torch.stack([f(*x) for x in zip(q, own)]))


@not_interpreted
def test_no_examples():
    q, k, v, _ = vmap_dropout.tensors("items", torch.float64)
    found = vmap(lambda q: vmap_dropout.attention("reference", q, k[0], v[0]))(q[:0])
    assert found.shape == (0, *q.shape[1:])


@not_interpreted
def test_a_plan_includes_the_repeats():
    """Calls that differ only in the repeats of items or heads have different draws."""
    q = torch.zeros(4, 4, 3, 8)
    t = Tensors(q, q, torch.eye(3).expand(4, 4, 3, 3), seed=torch.tensor([5]))
    for again in ((0, 0), (2, 0), (0, 2), (1, 3), (4, 4)):
        o = Options(
            dropout_p=0.5,
            backend="cpu",
            dropout_batch_period=again[0],
            dropout_head_period=again[1],
        )
        out, _ = run_pass.run(operation.FORWARD, operation.ATTENTION, t, o)
        kept = fastattn.reference.keep_mask((4, 4, 3, 3), 0.5, 5, again=again)
        assert torch.equal(out != 0, kept), again


@not_interpreted
def test_the_oracle_repeats_its_draws():
    one = fastattn.reference.keep_mask((2, 3, 5, 7), 0.5, 5, place=vmap_dropout.PLACE)
    many = fastattn.reference.keep_mask(
        (6, 6, 5, 7), 0.5, 5, place=vmap_dropout.PLACE, again=(2, 3)
    )
    assert torch.equal(many, one.repeat(3, 2, 1, 1))


@not_interpreted
@pytest.mark.parametrize(
    "name, x", [("dropout_batch_period", -1), ("dropout_head_period", 1 << 32)]
)
def test_repeats_must_be_valid_numbers(name, x):
    t = Tensors(*(torch.zeros(1, 1, 2, 2) for _ in "qkv"))
    with pytest.raises(ValueError, match=f"{name}: got {x}"):
        operation.plan(t, Options(**{name: x}), None)


@not_interpreted
def test_packed_batches_are_not_one_call():
    cu = torch.tensor([0, 2])
    t = Tensors(*(torch.zeros(1, 1, 2, 2) for _ in "qkv"), cu_q=cu, cu_k=cu)
    assert vmap_fold.fold_of(3, t, [0, *[None] * (len(t) - 1)], Options()) is None
    with pytest.raises(
        ValueError, match="dropout_batch_period: got 2, expected 0, of a packed batch"
    ):
        operation.plan(t, Options(max_q=2, max_k=2, dropout_batch_period=2), None)


@pytest.mark.slow
@not_interpreted
def test_it_compiles_as_one_graph():
    q, k, v, _ = vmap_dropout.tensors("items", torch.float32)
    run = vmap(lambda q: vmap_dropout.attention("reference", q, k[0], v[0]))
    torch._dynamo.reset()
    for dynamic in (False, True):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for n in (3, 2):
            torch.testing.assert_close(compiled(q[:n]), run(q[:n]))
