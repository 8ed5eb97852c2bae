"""`attn_implementation="fastattn"`: model families of transformers give the results of eager."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import fastattn.integrations.transformers as ours  # noqa: E402

from ..support.marks import parametrize  # noqa: E402
from ..support.transformers_families import FAMILIES, Family, inputs, made, text  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]


@pytest.fixture(scope="module")
def registered():
    ours.register()
    yield
    ours.unregister()


def families(*given):
    here = filter(Family.is_here, FAMILIES)
    return [pytest.param(x, id=x.name) for x in here if x.given in given]


def outputs_and_gradients(model, given, implementation):
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    found = model(**given)
    found = found if "logits" in found else found.last_hidden_state
    if not isinstance(found, torch.Tensor):
        found.loss.backward()
        return found.logits.detach(), gradients(model)
    mask = given.get("attention_mask")
    real = found if mask is None else found[mask.bool()]
    real.square().mean().backward()
    return found.detach(), gradients(model)


def gradients(model):
    return {n: x.grad for n, x in model.named_parameters() if x.grad is not None}


def worst(mine, theirs, least=0.0):
    return (mine - theirs).abs().max() / theirs.abs().max().clamp(min=least)


@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@parametrize("family", families("text", "encoded", "pair"), fast=5)
def test_logits_and_gradients(family, padding):
    model, given = made(family), inputs(family, padding)
    y, grads = outputs_and_gradients(model, given, "fastattn")
    expected, exact = outputs_and_gradients(model, given, "eager")
    if family.given in ("text", "encoded"):  # outputs at padding are meaningless
        real = given["attention_mask"].bool()
        y, expected = y[real], expected[real]
    assert worst(y, expected) < 1e-5
    assert grads.keys() == exact.keys()
    for name, x in exact.items():
        assert worst(grads[name], x, 1e-3) < 1e-4, name


@pytest.mark.parametrize("family", families("pixels", "waves"))
def test_images_and_waves(family):
    test_logits_and_gradients(family, "none")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@parametrize("family", families("text", "pair"), fast=8)
def test_generate(family, cache):
    """Generate token by token from a prompt that is padded on the left."""
    model, (ids, mask) = made(family), text("left")
    given = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    given |= dict(output_logits=True, return_dict_in_generate=True)
    given |= {} if cache == "dynamic" else dict(cache_implementation=cache)
    found = []
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, attention_mask=mask, **given))
    mine, theirs = found
    assert torch.equal(mine.sequences, theirs.sequences) and len(mine.logits) == 12
    for x, y in zip(mine.logits, theirs.logits):
        assert worst(x, y) < 1e-5
