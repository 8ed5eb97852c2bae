"""Models of transformers with "flash_attention_2", "_3" and "_4" through `install`: logits,
gradients and generated tokens equal those of "eager" or "sdpa". Weights are random; nothing is
downloaded."""

import importlib.util

import pytest
import torch

from fastattn import flash_attn as fa

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
if importlib.util.find_spec("flash_attn") is not None:
    pytest.skip("the real flash_attn is installed", allow_module_level=True)

from tests.integrations.test_integration_transformers import outputs_and_gradients, worst
from tests.support.transformers_families import FAMILY, inputs, text
from tests.support.transformers_families import made as made_of

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("ignore"),  # of transformers itself
]
# The implementation to compare with. That of sdpa has no softcap and no sinks.
MODELS = dict.fromkeys(("Llama", "Qwen3", "Mistral"), "sdpa") | dict(Gemma2="eager", GptOss="eager")


@pytest.fixture(scope="module")
def installed():
    fa.install()
    yield
    fa.uninstall()


@pytest.fixture(params=[2, 3, 4], ids=lambda x: f"version {x}")
def version(request):
    return request.param


@pytest.fixture
def calls(monkeypatch, version):
    """The number of calls of each function. transformers caches the functions that it has found."""
    from transformers import modeling_flash_attention_utils as utils

    counts = dict(_flash_fn=0, _flash_varlen_fn=0, _flash_with_kvcache_fn=0)
    utils.lazy_import_flash_attention(f"flash_attention_{version}")

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in counts:
        if getattr(utils, name) is not None:  # transformers knows no cache of version 4
            monkeypatch.setattr(utils, name, counted(name, getattr(utils, name)))
    return counts


def made(name, monkeypatch=None):
    model = made_of(FAMILY[name])
    if model._compatible_flash_implementations:  # gpt-oss lists those that had sinks earlier
        monkeypatch.setattr(type(model), "_compatible_flash_implementations", None)
    return model


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*MODELS, "Bert"])
def test_logits_and_gradients(name, padding, monkeypatch, calls, version):
    model, given = made(name, monkeypatch), inputs(FAMILY[name], padding)
    function = "_flash_fn" if padding == "none" else "_flash_varlen_fn"
    logits, gradients = outputs_and_gradients(model, given, f"flash_attention_{version}")
    assert {x: n for x, n in calls.items() if n} == {function: model.config.num_hidden_layers}
    expected, exact = outputs_and_gradients(model, given, MODELS.get(name, "sdpa"))
    assert calls[function] == model.config.num_hidden_layers
    real = given["attention_mask"].bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)
    assert gradients.keys() == exact.keys()
    for x, y in exact.items():
        assert worst(gradients[x], y, 1e-3) < 1e-4, x


@pytest.mark.parametrize("name", MODELS)
def test_generate(name, monkeypatch, calls, version):
    """Prefill, then generation row by row with a cache and left padding."""
    model, (ids, mask) = made(name, monkeypatch), text("left")
    tokens = []
    for implementation in (f"flash_attention_{version}", MODELS[name]):
        model.set_attn_implementation(implementation)
        given = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        tokens.append(model.generate(ids, attention_mask=mask, **given))
    assert tokens[0].shape == (3, 34) and torch.equal(*tokens)
    assert len(tokens[0][:, 24:].unique()) > 2
    assert (
        calls["_flash_varlen_fn"] + calls["_flash_fn"] == 2 * 10
    )  # a sliding window drops the padding


def test_padding_free_batches(version):
    """One row of several sequences, distinguished by their position ids."""
    model = made("Llama")
    torch.manual_seed(1)
    ids = torch.randint(1, 97, (1, 24))
    positions = torch.cat([torch.arange(n) for n in (5, 1, 11, 7)])[None]
    model.set_attn_implementation(f"flash_attention_{version}")
    packed = model(ids, position_ids=positions, use_cache=False).logits[0]
    model.set_attn_implementation("sdpa")
    alone = [model(x, use_cache=False).logits[0] for x in ids.split([5, 1, 11, 7], 1)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_continuous_batching(name, version):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = made(name)
    torch.manual_seed(1)
    prompts = [torch.randint(1, 97, (n,)).tolist() for n in (5, 17, 31, 9)]
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = dict(num_blocks=32, page_size=16, max_batch_tokens=64, auto_switch_to_flash=False)

    def together(implementation):
        model.set_attn_implementation(implementation)
        found = model.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**sizes),
            progress_bar=False,
        )
        return [found[x].generated_tokens for x in sorted(found)]

    def alone(prompt):
        ids = torch.tensor([prompt])
        return model.generate(ids, generation_config=config)[0, len(prompt) :].tolist()

    tokens = together(f"paged|flash_attention_{version}")
    if name != "Gemma2":  # "paged|sdpa" has no softcap
        assert tokens == together("paged|sdpa")
    model.set_attn_implementation("eager")
    assert tokens == [alone(x) for x in prompts] and [len(x) for x in tokens] == [8] * 4


@pytest.mark.parametrize("version", [2, 3], indirect=True)
def test_a_step_over_pages(calls, version):
    """Continuous batching on a GPU reads pages by a block table; this is that call."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 9, 16, 2, 8)
    lengths, sinks = torch.tensor([33, 5, 1]), torch.randn(4)
    table = torch.tensor([[4, 0, 7], [2, -1, -1], [8, -1, -1]], dtype=torch.int32)
    q, k, v = torch.randn(1, 3, 4, 8), *torch.randn(2, 1, 3, 2, 8)
    flat = {}
    for n, x, new in (("k", k_cache, k), ("v", v_cache, v)):
        rows = [x[t[t >= 0].long()].flatten(0, 1)[: n - 1] for t, n in zip(table, lengths)]
        flat[n] = torch.cat([y for b, r in enumerate(rows) for y in (r, new[0, b : b + 1])])
    cu_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    out = _flash_attention_forward(
        q,
        k,
        v,
        None,
        query_length=3,
        is_causal=True,
        cu_seq_lens_k=cu_k,
        block_table=table,
        k_cache=k_cache,
        v_cache=v_cache,
        s_aux=sinks,
        attn_implementation=f"flash_attention_{version}",
    )
    where = torch.arange(4), cu_k, 1, 33
    expected = fa.flash_attn_varlen_func(
        q[0], flat["k"], flat["v"], *where, causal=True, s_aux=sinks
    )
    torch.testing.assert_close(out[0], expected)
    assert calls["_flash_with_kvcache_fn"] == 1
    assert torch.equal(k_cache[7, 0], k[0, 0]) and torch.equal(v_cache[8, 0], v[0, 2])
