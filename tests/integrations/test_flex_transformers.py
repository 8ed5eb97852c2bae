"""Models of transformers with attn_implementation="flex_attention" train on a CPU by `sdpa()`."""

import pytest
import torch

import fastattn
from fastattn.dropin import flex_patching

pytestmark = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
MODELS = {
    "Llama": {},
    "Gemma2": dict(head_dim=16, attn_logit_softcapping=5.0, sliding_window=16),
    "Mistral": dict(sliding_window=16),
}
LENGTH, PADDING = 70, 9


def model(name, implementation):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    config._attn_implementation = implementation
    return getattr(transformers, f"{name}ForCausalLM")(config)


def batch():
    """Two sequences; the first one begins with padding, which has no label."""
    tokens = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[0, :PADDING], labels[0, : PADDING + 1] = 0, -100
    return dict(input_ids=tokens, attention_mask=mask, labels=labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_that_of_eager_attention(name, monkeypatch):
    calls = []
    ours = flex_patching._ours
    monkeypatch.setattr(flex_patching, "_ours", lambda *x, **y: calls.append(1) or ours(*x, **y))
    eager, flex = model(name, "eager"), model(name, "flex_attention")
    expected = eager(**batch()).loss
    expected.backward()
    with fastattn.sdpa():
        found = flex(**batch()).loss
        found.backward()
    assert len(calls) == SIZES["num_hidden_layers"]
    torch.testing.assert_close(found, expected)
    for (where, x), y in zip(flex.named_parameters(), eager.parameters()):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-6, msg=where)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
def test_stock_raises_after_the_patch():
    flex = model("Llama", "flex_attention")
    with fastattn.sdpa():
        flex(**batch()).loss.backward()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        flex(**batch())
