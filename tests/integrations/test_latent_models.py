"""Models of transformers with latent attention: few rows run with absorbed weights, and give the
results of eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import fastattn.integrations.transformers as ours  # noqa: E402
from fastattn import mla  # noqa: E402

from ..support.transformers_families import LATENT, SIZES  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]
FAMILIES = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu", "AXK1", "Mistral4")


@pytest.fixture(autouse=True)
def registered():
    ours.register()
    yield
    ours.unregister()


@pytest.fixture
def rows(monkeypatch):
    """The numbers of rows of the calls with absorbed weights."""
    found, original = [], mla.absorbed

    def absorbed(q, q_rotated, weights):
        found.append(q.shape[2])
        return original(q, q_rotated, weights)

    monkeypatch.setattr(mla, "absorbed", absorbed)
    return found


def made(family, dtype=torch.float32):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | LATENT)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    model.set_attn_implementation("fastattn")
    return model


def ids(n, batch=2):
    return torch.randint(
        1, SIZES["vocab_size"], (batch, n), generator=torch.Generator().manual_seed(1)
    )


@torch.no_grad()
def logits(model, implementation, tokens, steps, **given):
    """Of a prompt, and of further tokens in these steps."""
    model.set_attn_implementation(implementation)
    found = model(tokens[:, : -sum(steps)], use_cache=True, **given)
    parts, past, at = [found.logits], found.past_key_values, tokens.shape[1] - sum(steps)
    for n in steps:
        if "attention_mask" in given:
            seen = torch.ones(len(tokens), at + n, dtype=torch.int64)
            seen[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
            given["attention_mask"] = seen
        step = tokens[:, at : at + n]
        found = model(step, past_key_values=past, use_cache=True, **given)
        parts.append(found.logits)
        past, at = found.past_key_values, at + n
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_that_of_eager_attention(family, rows):
    """One token at a time and a few at once, after a prompt, which expands its keys."""
    model, tokens = made(family), ids(70)
    found = logits(model, "fastattn", tokens, (1, 1, 3))
    layers = model.config.num_hidden_layers
    assert rows == [1] * layers + [1] * layers + [3] * layers
    rows.clear()
    expected = logits(model, "eager", tokens, (1, 1, 3))
    assert not rows
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(1 + expected.abs().max()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side, rows):
    model, tokens = made("DeepseekV3"), ids(40)
    mask = torch.ones(2, 36, dtype=torch.int64)
    mask[0, slice(0, 9) if side == "left" else slice(30, 36)] = 0
    found = logits(model, "fastattn", tokens, (1, 3), attention_mask=mask)
    expected = logits(model, "eager", tokens, (1, 3), attention_mask=mask)
    real = torch.cat([mask.bool(), torch.ones(2, 4, dtype=torch.bool)], 1)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-5)
    assert rows


def test_in_bfloat16_as_near_as_eager_attention():
    """To float32, of the same weights."""
    model, tokens = made("DeepseekV3", torch.bfloat16), ids(50)
    half = [logits(model, x, tokens, (1, 1)).float() for x in ("fastattn", "eager")]
    exact = logits(model.float(), "eager", tokens, (1, 1))
    mine, theirs = ((x - exact).abs().mean() for x in half)
    assert mine < 1.5 * theirs


def test_weights_of_attention():
    model, tokens = made("DeepseekV3"), ids(20)
    found = []
    for name in ("fastattn", "eager"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            past = model(tokens[:, :-1], use_cache=True).past_key_values
            found.append(model(tokens[:, -1:], past_key_values=past, output_attentions=True))
    torch.testing.assert_close(found[0].attentions, found[1].attentions, rtol=0, atol=1e-6)


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "class"])
def test_layers_that_are_more_than_their_weight_are_called(how, rows):
    """As offloading, parallel layers and adapters have them."""
    model, tokens = made("DeepseekV3"), ids(20)
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        if how == "hook":
            own.register_forward_hook(lambda layer, given, out: 2 * out)
        elif how == "pre-hook":
            own.register_forward_pre_hook(lambda layer, given: (2 * given[0],))
        elif how == "class":
            own.__class__ = Scaled
        else:
            own.forward = lambda x, own=own: 2 * torch.nn.functional.linear(x, own.weight)
    found = [logits(model, name, tokens, (1, 1)) for name in ("fastattn", "eager")]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    assert not rows


@pytest.mark.parametrize("heads", [1, 2])
def test_any_number_of_heads(heads):
    torch.manual_seed(0)
    sizes = SIZES | LATENT | dict(num_attention_heads=heads, num_key_value_heads=heads)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).eval()
    model.set_attn_implementation("fastattn")
    found = [logits(model, name, ids(20), (1, 1)) for name in ("fastattn", "eager")]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_compiled():
    """A step of decoding, with a cache of a fixed size."""
    model, tokens = made("DeepseekV3"), ids(20)
    step = torch.compile(model, backend="eager")
    found = []
    for run in (model, step):
        past = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            model(tokens[:, :-1], past_key_values=past, use_cache=True)
            found.append(run(tokens[:, -1:], past_key_values=past, use_cache=True).logits)
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_training_expands_keys(rows):
    model, tokens = made("DeepseekV3"), ids(20)
    grads = []
    for name in ("fastattn", "eager"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        grads.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert not rows


def test_unregister_restores_the_models():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention as Layer

    made("DeepseekV3")
    assert Layer.expand_kv.__wrapped__
    ours.unregister()
    assert not hasattr(Layer.expand_kv, "__wrapped__")


def test_the_cache_keeps_latent_vectors():
    """transformers' own cache: the numbers of a token in a layer are L + R, not those of heads."""
    model, tokens = made("DeepseekV3"), ids(20)
    with torch.no_grad():
        past = model(tokens, use_cache=True).past_key_values
    numbers = sum(x.keys.numel() + x.values.numel() for x in past.layers)
    each = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert numbers == 2 * 20 * each * model.config.num_hidden_layers
