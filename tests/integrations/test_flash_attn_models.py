"""Models of transformers with "flash_attention_2" through `fastattn.flash_attn.install`: logits,
gradients and generated tokens equal those of "eager" or "sdpa". Weights are random; nothing is
downloaded."""

import importlib.util

import pytest
import torch

from fastattn import flash_attn as fa
from tests.support.transformers_families import EXPERTS, GROUPED, LOCAL, SIZES

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
if importlib.util.find_spec("flash_attn") is not None:
    pytest.skip("the real flash_attn is installed", allow_module_level=True)

pytestmark = [
    pytest.mark.usefixtures("one_thread", "installed"),
    pytest.mark.filterwarnings("ignore"),  # of transformers itself
]
MODELS = {  # name -> (config changes, the implementation to compare with)
    "Llama": (GROUPED, "sdpa"),
    "Qwen3": (GROUPED, "sdpa"),
    "Mistral": (GROUPED | dict(sliding_window=8), "sdpa"),
    "Gemma2": (GROUPED | dict(sliding_window=8, attn_logit_softcapping=0.5), "eager"),
    "GptOss": (GROUPED | EXPERTS | LOCAL, "eager"),
}


@pytest.fixture(scope="module")
def installed():
    fa.install()
    yield
    fa.uninstall()


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of each function. transformers caches the functions that it has found."""
    from transformers import modeling_flash_attention_utils as utils

    counts = dict(_flash_fn=0, _flash_varlen_fn=0, _flash_with_kvcache_fn=0)
    utils.lazy_import_flash_attention("flash_attention_2")

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(utils, name, counted(name, getattr(utils, name)))
    return counts


def made(name, monkeypatch=None):
    import transformers

    changes, _ = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**SIZES | changes, dtype=torch.float32)
    kind = getattr(transformers, f"{name}ForCausalLM")
    if kind._compatible_flash_implementations:  # gpt-oss lists those that had sinks earlier
        monkeypatch.setattr(kind, "_compatible_flash_implementations", None)
    torch.manual_seed(0)
    model = kind(config).eval()
    for x in model.parameters():  # parameters that start as 0 or 1 would hide errors
        torch.nn.init.normal_(x, 0.0 if x.ndim > 1 else 0.5, 0.2)
    return model


def padded(left=True, rows=3, length=24):
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 97, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    for b, n in enumerate((0, 7, 15)):
        mask[b, slice(0, n) if left else slice(length - n, None)] = 0
    return ids.masked_fill(mask == 0, 0), mask


def logits_and_gradients(model, ids, mask):
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) <= 1), -100)  # no loss before a token
    model.zero_grad()
    found = model(ids, attention_mask=mask, labels=labels)
    found.loss.backward()
    return found.logits.detach(), {n: x.grad for n, x in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, monkeypatch, calls):
    model, (_, other) = made(name, monkeypatch), MODELS[name]
    for mask_of, function in ((padded()[1], "_flash_varlen_fn"), (None, "_flash_fn")):
        ids, mask = padded()
        mask = torch.ones_like(mask) if mask_of is None else mask
        results = []
        for implementation in ("flash_attention_2", other):
            model.set_attn_implementation(implementation)
            assert model.config._attn_implementation == implementation
            before = dict(calls)
            results.append(logits_and_gradients(model, ids, mask))
            layers = SIZES["num_hidden_layers"] if implementation == "flash_attention_2" else 0
            assert calls[function] - before[function] == layers
        (logits, gradients), (expected, exact) = results
        real = mask.bool()
        torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)
        for x in exact:
            if exact[x] is not None:
                worst = (gradients[x] - exact[x]).abs().max() / exact[x].abs().max().clamp(min=1e-3)
                assert worst < 1e-4, (x, worst)


@pytest.mark.parametrize("name", MODELS)
def test_generate(name, monkeypatch, calls):
    """Prefill, then generation row by row with a cache and left padding."""
    model, (_, other) = made(name, monkeypatch), MODELS[name]
    ids, mask = padded()
    tokens = []
    for implementation in ("flash_attention_2", other):
        model.set_attn_implementation(implementation)
        given = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        tokens.append(model.generate(ids, attention_mask=mask, **given))
    assert tokens[0].shape == (3, 34) and torch.equal(*tokens)
    assert len(tokens[0][:, 24:].unique()) > 2
    assert (
        calls["_flash_varlen_fn"] + calls["_flash_fn"] == 2 * 10
    )  # a sliding window drops the padding


@pytest.mark.parametrize("left", [True, False])
def test_bert(left, calls):
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**SIZES, dtype=torch.float32)).eval()
    ids, mask = padded(left)
    results = []
    for implementation in ("flash_attention_2", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        hidden.square().mean().backward()
        gradients = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        results.append((hidden.detach(), gradients))
    torch.testing.assert_close(*(x for x, _ in results), rtol=1e-4, atol=1e-4)
    assert calls["_flash_varlen_fn"] == SIZES["num_hidden_layers"]
    for x, y in results[1][1].items():
        torch.testing.assert_close(results[0][1][x], y, rtol=1e-3, atol=1e-5)


def test_attention_dropout_is_drawn_and_repeats():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, attention_dropout=0.3, dtype=torch.float32)
    config._attn_implementation = "flash_attention_2"
    model, (ids, mask) = LlamaForCausalLM(config).train(), padded()
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model(ids, attention_mask=mask).logits)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_padding_free_batches():
    """One row of several sequences, distinguished by their position ids."""
    model = made("Llama")
    torch.manual_seed(1)
    ids = torch.randint(1, 97, (1, 24))
    positions = torch.cat([torch.arange(n) for n in (5, 1, 11, 7)])[None]
    model.set_attn_implementation("flash_attention_2")
    packed = model(ids, position_ids=positions, use_cache=False).logits[0]
    model.set_attn_implementation("sdpa")
    alone = [model(x, use_cache=False).logits[0] for x in ids.split([5, 1, 11, 7], 1)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_continuous_batching(name):
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

    tokens = together("paged|flash_attention_2")
    if name != "Gemma2":  # "paged|sdpa" has no softcap
        assert tokens == together("paged|sdpa")
    model.set_attn_implementation("eager")
    assert tokens == [alone(x) for x in prompts] and [len(x) for x in tokens] == [8] * 4


def test_a_step_over_pages(calls):
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
        attn_implementation="flash_attention_2",
    )
    where = torch.arange(4), cu_k, 1, 33
    expected = fa.flash_attn_varlen_func(
        q[0], flat["k"], flat["v"], *where, causal=True, s_aux=sinks
    )
    torch.testing.assert_close(out[0], expected)
    assert calls["_flash_with_kvcache_fn"] == 1
    assert torch.equal(k_cache[7, 0], k[0, 0]) and torch.equal(v_cache[8, 0], v[0, 2])
