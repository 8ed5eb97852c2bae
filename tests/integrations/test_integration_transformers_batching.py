"""transformers' continuous batching with "fastattn": each prompt's tokens are as if run alone."""

import gc
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip(
    "transformers.generation.continuous_batching.initialization",
    reason="this transformers batches otherwise",
)

from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation import continuous_batching as batching  # noqa: E402

import fastattn.integrations.transformers as ours  # noqa: E402
from fastattn.integrations import (  # noqa: E402
    transformers_attention,
    transformers_masks,
    transformers_paged,
)
from fastattn.reference import attention as oracle  # noqa: E402

from ..support.marks import parametrize  # noqa: E402
from ..support.transformers_families import FAMILY, VOCABULARY, made  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]
# Full attention; a window; both kinds of layers, with softcap, without, and with sinks.
NAMES = ["Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3", "GptOss"]
STEPS = 12  # more than the tokens of a page
SIZES = dict(num_blocks=64, page_size=8, max_batch_tokens=96, auto_switch_to_flash=False)
SIZES |= dict(return_logprobs=True)
SCHEDULES = {
    "whole prompts": {},
    "prompts in chunks": dict(max_batch_tokens=14, num_blocks=14),  # some prompts wait for pages
}


@pytest.fixture(scope="module", autouse=True)
def rested():
    """Freeze what is imported: transformers collects garbage after every batch, which is slow."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def calls(monkeypatch, registered):
    """The arguments of every packed call."""
    found = []
    packed = transformers_paged.attention_packed

    def spy(*args, **kwargs):
        found.append(kwargs | dict(q=args[0], k=args[1], cu_q=args[3]))
        return packed(*args, **kwargs)

    monkeypatch.setattr(transformers_paged, "attention_packed", spy)
    return found


@pytest.fixture
def padded(monkeypatch):
    """Pad batches to a few sizes, as for a compiler or a CUDA graph."""
    original = batching.model_runner.ModelRunner.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(batching.model_runner.ModelRunner, "__init__", init)


def prompts():
    """Prompts of various lengths, one a single token; three share a prefix longer than a page."""
    torch.manual_seed(1)
    first = torch.randint(3, VOCABULARY, (19,)).tolist()
    alone = [torch.randint(3, VOCABULARY, (n,)).tolist() for n in (5, 17, 31, 1)]
    return [*alone, first, [*first, 7, 11, 5], [*first[:17], 4]]


def settings(**more):
    given = dict(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return GenerationConfig(**given, **more)


def together(model, implementation, **sizes):
    """The tokens of each prompt from `generate_batch`, and their log probabilities."""
    found = batch(model, implementation, **sizes)
    assert [x.error for x in found] == [None] * len(prompts())
    return [(x.generated_tokens, torch.tensor(x.logprobs)) for x in found]


def batch(model, implementation, **sizes):
    model.set_attn_implementation(implementation)
    found = model.generate_batch(
        inputs=prompts(),
        generation_config=settings(),
        continuous_batching_config=ContinuousBatchingConfig(**SIZES | sizes),
        progress_bar=False,
    )
    return found.values()


def alone(model):
    """The same from `generate` with "eager", prompt by prompt."""
    model.set_attn_implementation("eager")
    kept = settings(output_logits=True, return_dict_in_generate=True)
    results = []
    for prompt in prompts():
        found = model.generate(torch.tensor([prompt]), generation_config=kept)
        tokens = found.sequences[0, len(prompt) :]
        logprobs = torch.cat(found.logits).log_softmax(-1)
        results.append((tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0]))
    return results


def same(found, expected):
    for (tokens, logprobs), (others, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(logprobs, theirs, rtol=1e-4, atol=1e-4)
        if tokens != others:
            return False
    return True


@parametrize("name", NAMES, fast=2)
def test_tokens(name, calls):
    model = made(FAMILY[name])
    expected = alone(model)
    for schedule, sizes in SCHEDULES.items():
        calls.clear()
        assert same(together(model, "fastattn", **sizes), expected), schedule
        assert len(calls) >= STEPS * model.config.num_hidden_layers
    if name != "Gemma2":  # "paged|eager" knows no softcap
        assert same(together(model, "paged|eager", **sizes), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_padded_batches(name, calls, padded):
    model = made(FAMILY[name])
    expected = alone(model)
    calls.clear()
    sizes = dict(q_padding_interval_size=40, max_requests_per_batch=4)
    assert same(together(model, "fastattn", **sizes), expected)
    assert any(x["cu_q"][-2] < x["cu_q"][-1] for x in calls if "block_table" not in x)
    steps = [x["key_lengths"] for x in calls if "block_table" in x]
    assert bool(steps) == (name == "Llama") == any(0 in x for x in steps)


def test_the_old_spelling(calls):
    model = made(FAMILY["Llama"])
    found = together(model, "paged|fastattn")
    assert same(found, together(model, "fastattn")) and calls
    assert model.config._attn_implementation == "fastattn"


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_steps_read_pages_if_all_layers_use_full_attention(name, calls):
    """Layers with a window keep keys in a ring, for which transformers has no block table."""
    together(made(FAMILY[name]), "fastattn")
    steps = [x for x in calls if x.get("max_q") == 1]
    assert len(steps) > 2 * (STEPS - 3)
    assert all(("block_table" in x) == (name == "Llama") for x in steps)
    for x in steps:
        assert "causal" not in x and "window" not in x  # one row sees all keys
        assert name != "Llama" or x["k"].shape[1:] == (SIZES["page_size"], 2, 16)


def test_a_model_that_drops_the_cache_is_named(registered):
    for found in batch(made(FAMILY["StableLm"]), "fastattn"):
        assert "got 'fastattn' for StableLmForCausalLM in continuous batching" in found.error


def test_prefixes_are_shared(calls, monkeypatch):
    """Later prompts reuse the cached prefix instead of computing it again."""
    matched = []
    search = batching.cache.PagedAttentionCache.search_prefix_match

    def spy(*args):
        matched.append(search(*args))
        return matched[-1]

    monkeypatch.setattr(batching.cache.PagedAttentionCache, "search_prefix_match", spy)
    model = made(FAMILY["Llama"])
    assert same(together(model, "fastattn", max_batch_tokens=14), alone(model))
    assert max(matched) >= SIZES["page_size"]


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_no_mask_is_made(name, calls, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a mask was made")

    for owner, made_by in (
        (batching.input_outputs, "build_attention_mask"),
        (transformers_masks.masking_utils, "sdpa_mask"),
        (transformers_masks.StructuredMask, "__getitem__"),
        (torch.Tensor, "nonzero"),  # nor are the starts of requests searched for
    ):
        monkeypatch.setattr(owner, made_by, never)
    handlers = []
    memory = batching.cache.PagedAttentionMemoryHandler.__init__

    def init(self, *args, **kwargs):
        memory(self, *args, **kwargs)
        handlers.append(self)

    monkeypatch.setattr(batching.cache.PagedAttentionMemoryHandler, "__init__", init)
    together(made(FAMILY[name]), "fastattn")
    assert calls and not any("mask" in x for x in calls)
    assert [x.attention_mask_bytes(8192, 100) for x in handlers] == [0]  # nor memory for one


# ------------------------------------------------------------------------------- the registration

HOOKED = [
    (batching.continuous_api, "is_flash_attention_requested"),
    (batching.cache, "is_flash_attention_requested"),
    (batching.initialization, "ensure_decode_fast_path_is_available"),
    (batching.model_runner.ModelRunner, "compute_batch"),
]


def test_unregister_restores_by_identity():
    before = [getattr(*x) for x in HOOKED]
    for _ in range(2):
        ours.register()
        assert not any(getattr(*x) is y for x, y in zip(HOOKED, before))
    ours.unregister()
    assert all(getattr(*x) is y for x, y in zip(HOOKED, before))
    ours.unregister()


def manager(model, **changes):
    return model.init_continuous_batching(
        settings(), ContinuousBatchingConfig(**SIZES | changes)
    ).continuous_batching_config


def test_the_implementation_stays_selected(registered, monkeypatch):
    """Flash attention does not replace "fastattn", and other implementations behave as before."""
    for version in (2, 3):
        monkeypatch.setattr(
            batching.continuous_api, f"is_flash_attn_{version}_available", lambda **_: True
        )
    model = made(FAMILY["Llama"])
    model.set_attn_implementation("fastattn")
    manager(model, auto_switch_to_flash=True)
    assert model.config._attn_implementation == "fastattn"
    for name, then, blocks in (
        ("fastattn",) * 2 + (4,),
        ("eager", "paged|eager", 0),
        ("sdpa",) * 2 + (0,),
    ):
        model.set_attn_implementation(name)
        assert manager(model, max_blocks_per_request=4).max_blocks_per_request == blocks
        assert model.config._attn_implementation == then
    model.set_attn_implementation("fastattn")
    ours.unregister()
    with pytest.raises(ValueError, match="fastattn is not supported for continuous batching"):
        manager(model)


# ------------------------------------------------------------------- what generate_batch leaves out


class Given(batching.PagedAttentionCache):
    """A cache that already has all keys and values."""

    def __init__(self, key, value):
        self.held = key, value

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs |= {x: kwargs[x]["full_attention"] for x in ("cu_seq_lens_k", "max_length_k")}
        return self.held


MODULE = types.SimpleNamespace(is_causal=True, layer_idx=0)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_every_argument():
    """Rows without keys, empty sequences, padding rows and keys, Dv != D."""
    torch.manual_seed(0)
    rows, keys = [3, 0, 2, 1, 5], [9, 0, 0, 4, 5]
    T, S = 13, 20  # two rows and two keys belong to no sequence
    q, sinks = torch.randn(1, 4, T, 16), torch.randn(4)
    k, v = torch.randn(1, 2, S, 16), torch.randn(1, 2, S, 8)
    given = dict(scaling=0.3, softcap=2.0, s_aux=sinks)
    packed = dict(
        cu_seq_lens_q=offsets(rows),
        cu_seq_lens_k={"full_attention": offsets(keys)},
        max_length_q=T,
        max_length_k={"full_attention": 9},
        is_causal=True,
    )
    for window in (None, 4):
        out, weights = transformers_attention.attend(
            *(MODULE, q, k[:, :, -T:], v[:, :, -T:], None),
            **dict(sliding_window=window, cache=Given(k, v), **given, **packed),
        )
        assert out.shape == (1, T, 4, 8) and weights is None
        places = zip(
            q[:, :, :11].split(rows, 2), k[:, :, :18].split(keys, 2), v[:, :, :18].split(keys, 2)
        )
        for part, (x, y, z) in zip(out[:, :11].split(rows, 1), places):
            options = dict(window=(window - 1, None)) if window else {}
            options |= dict(scale=0.3, softcap=2.0, sinks=sinks, causal="bottom_right")
            torch.testing.assert_close(part, oracle(x, y, z, **options).transpose(1, 2))


def test_impossible_arguments_are_named():
    q = k = torch.randn(1, 2, 3, 8)
    for name, value in dict(output_attentions=True, position_bias=q, is_causal=False).items():
        with pytest.raises(NotImplementedError, match=f"^{name}: got .* beside a paged cache, exp"):
            transformers_attention.attend(MODULE, q, k, k, None, cache=Given(k, k), **{name: value})
