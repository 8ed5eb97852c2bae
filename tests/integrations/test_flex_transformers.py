"""Models of transformers with attn_implementation="flex_attention" train on a CPU by `sdpa()`."""

import pytest

import fastattn
from fastattn.dropin import flex_patching

pytest.importorskip("transformers")

from ..support.transformers_families import FAMILY, inputs, made
from .test_integration_transformers import outputs_and_gradients, worst

pytestmark = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mistral"])
def test_a_training_step_is_that_of_eager_attention(name, monkeypatch):
    calls = []
    ours = flex_patching._ours
    monkeypatch.setattr(flex_patching, "_ours", lambda *x, **y: calls.append(1) or ours(*x, **y))
    model, given = made(FAMILY[name]), inputs(FAMILY[name], "left")
    logits, exact = outputs_and_gradients(model, given, "eager")
    with fastattn.sdpa():
        found, gradients = outputs_and_gradients(model, given, "flex_attention")
    assert len(calls) == model.config.num_hidden_layers
    real = given["attention_mask"].bool()
    assert worst(found[real], logits[real]) < 1e-5 and gradients.keys() == exact.keys()
    for where, x in exact.items():
        assert worst(gradients[where], x, 1e-3) < 1e-4, where


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
def test_stock_raises_after_the_patch():
    model, given = made(FAMILY["Llama"]), inputs(FAMILY["Llama"], "left")
    with fastattn.sdpa():
        outputs_and_gradients(model, given, "flex_attention")
    with pytest.raises(Exception, match="does not support backward on CPU"):
        model(**given)
