"""Models of transformers that select keys, with attn_implementation="fastattn": logits, gradients
and generated tokens are those of eager attention; no scores of all pairs are stored."""

import copy
from typing import NamedTuple

import pytest
import torch

from tests.support.backends import not_interpreted
from tests.support.marks import parametrize
from tests.support.transformers_families import LATENT, SIZES

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ours = pytest.importorskip("fastattn.integrations.transformers_selected")
integration = pytest.importorskip("fastattn.integrations.transformers")

pytestmark = not_interpreted

# Many heads: with few, all of a row's products may be negative, and its scores are then equal.
INDEXER = dict(index_topk=5, index_n_heads=24, index_head_dim=16)
MINIMAX = SIZES | dict(
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=32,
    dense_intermediate_size=64,
    shared_intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    rotary_dim=8,
    index_n_heads=2,
    index_head_dim=16,
    index_block_size=4,
    index_topk_blocks=2,
    mlp_layer_types=["dense", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse"],
)


class Family(NamedTuple):
    module: str
    config: str
    model: str
    arguments: dict
    chooses: bool  # does lightning_index choose its keys?


FAMILIES = {
    x.module: x
    for x in (
        Family("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", INDEXER, True),
        Family("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", INDEXER, True),
        Family("axk2", "AXK2Config", "AXK2ForCausalLM", INDEXER, True),
        Family("hy_v4", "HYV4Config", "HYV4ForCausalLM", INDEXER, False),
        Family("minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", MINIMAX, False),
    )
}


@pytest.fixture
def counts(monkeypatch):
    """How often each call runs."""
    found = dict(attention_selected=0, lightning_index=0)

    def counting(name, function):
        def call(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return call

    for name in found:
        monkeypatch.setattr(ours, name, counting(name, getattr(ours, name)))
    return found


def both(family):
    """The same model with eager attention and with ours."""
    if not hasattr(transformers, family.model):
        pytest.skip(f"this transformers has no {family.model}")
    common = SIZES | LATENT if family.arguments is INDEXER else {}
    config = getattr(transformers, family.config)(**common | family.arguments)
    kind = getattr(transformers, family.model)
    torch.manual_seed(0)
    models = [
        kind._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("eager", "fastattn")
    ]
    models[1].load_state_dict(models[0].state_dict())
    return models


def padded(where):
    ids, mask = torch.randint(3, 97, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    if where == "right":
        mask[0, -6:] = 0
    if where == "left":
        mask[0, :6] = 0
    return ids, mask


@pytest.mark.parametrize("where", ("none", "right", "left"))
@parametrize("name", FAMILIES, fast=3)
def test_logits_and_gradients_are_those_of_eager(name, where, registered, counts):
    family = FAMILIES[name]
    if where == "left" and family.arguments is MINIMAX:
        pytest.skip("its indexer also scores padding, and the hidden states of padding differ")
    models = both(family)
    ids, mask = padded(where)
    found = []
    for model in models:
        logits = model(ids, attention_mask=mask).logits * mask[..., None]
        logits.sin().sum().backward()
        grads = {x: p.grad for x, p in model.named_parameters() if p.grad is not None}
        found.append((logits.detach(), grads))
    (logits, grads), (ours_logits, ours_grads) = found
    torch.testing.assert_close(ours_logits, logits, atol=1e-5, rtol=1e-5)
    assert grads.keys() == ours_grads.keys()
    for x, grad in grads.items():
        torch.testing.assert_close(ours_grads[x], grad, atol=1e-4, rtol=1e-4)
    layers = 1 if family.arguments is MINIMAX else 2
    if where != "left":  # that is a dense mask, of which the selection becomes a part
        expected = dict(attention_selected=layers, lightning_index=layers * family.chooses)
        assert counts == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_eager(name, registered, counts):
    eager, model = both(FAMILIES[name])
    ids, _ = padded("none")
    given = dict(max_new_tokens=6, do_sample=False, output_logits=True)
    with torch.no_grad():
        a, b = (x.generate(ids, return_dict_in_generate=True, **given) for x in (eager, model))
    assert torch.equal(a.sequences, b.sequences)
    for x, y in zip(a.logits, b.logits, strict=True):
        torch.testing.assert_close(y, x, atol=1e-5, rtol=1e-5)
    assert counts["attention_selected"] >= 6


def test_unregister_restores_the_indexers(registered):
    kind = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    both(FAMILIES["deepseek_v32"])
    assert hasattr(kind.DeepseekV32Indexer.forward, "made_by_fastattn_of")
    integration.unregister()
    assert not hasattr(kind.DeepseekV32Indexer.forward, "made_by_fastattn_of")


@pytest.mark.parametrize("what", ("output_attentions", "position_bias"))
def test_what_no_model_combines_raises(what):
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 9, 8)
    given = {what: torch.zeros(1, 4, 3, 9) if what == "position_bias" else True}
    attend = pytest.importorskip("fastattn.integrations.transformers_attention").attend
    with pytest.raises(NotImplementedError, match="indices: got some beside"):
        attend(torch.nn.Module(), q, k, k, None, indices=torch.zeros(1, 3, 2).int(), **given)


@pytest.mark.parametrize("block", (1, 4, 5))
@pytest.mark.parametrize("masked", (False, True))
def test_any_block_and_mask(masked, block):
    """A mask that is not causal alone, and a block that the kernels do not have, are dense."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 19, 8), torch.randn(2, 2, 19, 8)
    indices = torch.randint(-1, -(-19 // block), (2, 2, 3, 2))
    mask = torch.rand(2, 1, 3, 19) > 0.3 if masked else None
    out = ours.attend(q, k, v, indices, block, mask, dict(scale=0.3))
    chosen = torch.zeros(2, 4, 3, 19, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            for i in range(3):
                for x in indices[b, h // 2, i].tolist():
                    if x >= 0:
                        chosen[b, h, i, x * block : (x + 1) * block] = True
    seen = torch.ones(3, 19, dtype=torch.bool).tril(16) if mask is None else mask
    s = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~(chosen & seen), -torch.inf)
    expected = torch.softmax(s, -1).nan_to_num(0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)
