"""transformers' masks as structure: fastattn gets arguments that are equivalent to the mask."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils as masks  # noqa: E402

import fastattn.integrations.transformers as ours  # noqa: E402
from fastattn.integrations import transformers_attention  # noqa: E402
from fastattn.integrations.transformers_masks import (  # noqa: E402
    CallRows,
    Pattern,
    StructuredMask,
    _arguments,
    make_mask,
)

from ..support.marks import parametrize  # noqa: E402
from ..support.transformers_families import FAMILY, VOCABULARY, made, text  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]
MODULE = types.SimpleNamespace(is_causal=True)


def structure(call):
    """The names of the arguments that describe the mask."""
    return {x for x in ("causal", "window", "key_lengths", "mask") if x in call}


def is_dense(call):
    return "mask" in call and call["mask"].shape[-2] > 1


# --------------------------------------------------------------------------- every mask there is

CHUNK = torch.tensor([0, 0, 0])


def prefix(b, h, i, j):
    return j < 5


def blocks(N):
    return masks.blockwise_overlay(torch.arange(N).div(4, rounding_mode="floor").expand(3, -1))


def packed(N, inside):
    positions = torch.cat([torch.arange(n) for n in (5, 1, N - 6)]).expand(3, -1).clone()
    positions[1] = torch.arange(N)
    which = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return masks.and_masks(
        masks.packed_sequence_mask_function(which),
        masks.remap_positions_for_packed_sequence(inside, positions),
    )


KINDS = {
    "causal": lambda N: masks.causal_mask_function,
    "bidirectional": lambda N: masks.bidirectional_mask_function,
    "window": lambda N: masks.sliding_window_causal_mask_function(6),
    "wide window": lambda N: masks.sliding_window_causal_mask_function(64),
    "both ways": lambda N: masks.sliding_window_bidirectional_mask_function(4),
    "chunks": lambda N: masks.chunked_causal_mask_function(7, CHUNK),
    "one chunk": lambda N: masks.chunked_causal_mask_function(64, CHUNK),
    "padded chunks": lambda N: masks.chunked_causal_mask_function(7, torch.tensor([0, 3, 9])),
    "packed": lambda N: packed(N, masks.causal_mask_function),
    "packed windows": lambda N: packed(N, masks.sliding_window_causal_mask_function(6)),
    "packed chunks": lambda N: packed(N, masks.chunked_causal_mask_function(4, CHUNK)),
    "prefix": lambda N: masks.or_masks(masks.causal_mask_function, prefix),
    "blocks": lambda N: masks.or_masks(masks.causal_mask_function, blocks(N)),
    "two windows": lambda N: masks.and_masks(
        masks.sliding_window_overlay(6), masks.sliding_window_bidirectional_overlay(3)
    ),
}
PLACES = {  # M, N, the first row, the first key
    "whole": (21, 21, 0, 0),
    "rows at the end": (5, 21, 16, 0),
    "one row": (1, 21, 20, 0),
    "one row, static": (1, 21, torch.tensor(9), 0),
    "static": (7, 21, torch.tensor(9), 0),
    "static, as numbers": (7, 21, 9, 0),
    "static, empty": (7, 21, torch.tensor(0), 0),
    "the first keys are gone": (5, 12, 16, 9),
    "rows past the keys": (5, 12, 16, 0),
}


CASES = [  # transformers packs only without a cache
    pytest.param(kind, place, id=f"{kind}-{place}")
    for kind in KINDS
    for place in PLACES
    if place == "whole" or not kind.startswith("packed")
]


@parametrize("kind, place", CASES, fast=93)
def test_results_equal_those_of_the_dense_mask(kind, place):
    """Output and gradients are those of torch's function with transformers' dense mask."""
    M, N, row, key = PLACES[place]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, M, 8), torch.randn(3, 2, N, 8), torch.randn(3, 2, N, 8)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    last = int(row) + M - 1
    for padding in ("none", "left", "right", "both", "hole", "all of one"):
        if padding != "none" and kind.startswith("packed"):
            continue
        seen = None if padding == "none" else seen_by(padding, last + 1)
        given = (3, M, N, row, key, KINDS[kind](max(N, last + 1)), seen)
        message_of = f"padding: {padding}\n{{}}".format
        mask = make_mask(*given)
        assert isinstance(mask, StructuredMask) and mask.shape == (3, 1, M, N)
        exact = masks.sdpa_mask(*given, allow_is_causal_skip=False)
        assert torch.equal(mask.exact(), exact)
        out, _ = transformers_attention.attend(MODULE, q, k, v, mask)
        expected = F.scaled_dot_product_attention(q, k, v, exact, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2), msg=message_of)
        dout = torch.randn_like(out)
        mine = torch.autograd.grad(out, (q, k, v), dout)
        theirs = torch.autograd.grad(expected, (q, k, v), dout.transpose(1, 2))
        torch.testing.assert_close(mine, theirs, msg=message_of)


def seen_by(padding, N):
    """(3,N) bool: which tokens are not padding."""
    seen = torch.ones(3, N, dtype=torch.bool)
    if padding in ("left", "both"):
        seen[1, : N // 4], seen[2, : N // 2] = False, False
    if padding in ("right", "both"):
        seen[1, N - N // 8 - 1 :], seen[2, N - N // 3 :] = False, False
    if padding == "hole":
        seen[1, N // 3 : N // 2] = False
    if padding == "all of one":
        seen[1] = False
    return seen


# ---------------------------------------------------------------------------- what reaches fastattn


def ran(name, calls, **given):
    model = made(FAMILY[name])
    model.set_attn_implementation("fastattn")
    calls.clear()
    found = model(**given)
    assert len(calls) == 2
    return found


@pytest.mark.parametrize(
    "name, padding, expected",
    [
        ("Llama", "none", [{"causal"}] * 2),
        ("Llama", "right", [{"causal", "key_lengths"}] * 2),
        ("Llama", "left", [{"causal", "mask"}] * 2),
        ("Mistral", "none", [{"causal", "window"}] * 2),
        ("Mistral", "right", [{"causal", "window", "key_lengths"}] * 2),
        ("GptOss", "none", [{"causal", "window"}, {"causal"}]),
        ("Bert", "none", [set()] * 2),
        ("Bert", "right", [{"key_lengths"}] * 2),
        ("Bert", "left", [{"mask"}] * 2),
        ("ModernBert", "right", [{"key_lengths"}, {"key_lengths", "window"}]),
    ],
)
def test_no_mask_is_dense(name, padding, expected, calls):
    ids, mask = text(padding)
    ran(name, calls, input_ids=ids, attention_mask=mask)
    assert not any(map(is_dense, calls)) and {x["call"] for x in calls} == {"attention"}
    structures = [{x for x in structure(call) if call[x] is not False} for call in calls]
    assert structures == expected
    if "key_lengths" in calls[0]:
        assert calls[0]["key_lengths"].tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_position_bias_has_contiguous_rows(padding, calls):
    """T5's own has its heads last in memory, and the kernels would read each number by itself."""
    model, (ids, mask) = made(FAMILY["T5"]), text(padding)
    model.set_attn_implementation("fastattn")
    model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5])
    biases = [x["mask"] for x in calls if x["mask"].is_floating_point()]
    assert len(biases) == len(calls) and all(x.is_contiguous() for x in biases)


def test_decoding_has_no_dense_mask(calls):
    """A step has no mask, or with padding a mask of keys; a window is passed once it hides keys."""
    for name in ("Llama", "Mistral"):
        model = made(FAMILY[name])
        model.set_attn_implementation("fastattn")
        given = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        for padded in (False, True):
            calls.clear()
            ids, mask = text("left" if padded else "none")
            model.generate(ids, attention_mask=mask, **given)
            steps = calls[2:]
            assert len(steps) == 6 and not any(map(is_dense, steps))
            if name == "Llama":
                assert all(structure(x) == ({"mask"} if padded else set()) for x in steps)


def test_a_static_cache_has_lengths(calls):
    model, (ids, _) = made(FAMILY["Llama"]), text("none")
    model.set_attn_implementation("fastattn")
    given = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids, cache_implementation="static", **given)
    assert not any("mask" in x for x in calls)
    assert [x["key_lengths"][0].item() for x in calls[2:]] == [25, 25, 26, 26, 27, 27]
    assert all(structure(x) == {"key_lengths"} for x in calls[2:])  # also once the cache is full


def test_a_padded_static_cache_has_one_layout():
    """The position is a tensor, which is not read, and the padding a mask of all columns: else
    compiled code would be compiled again at the next step."""
    seen = torch.ones(2, 42, dtype=torch.bool)[:, ::2]
    seen[0, :3] = False
    found = _arguments(
        Pattern(causal=True), seen, CallRows(2, 1, 21, torch.tensor(9), 0, "cpu", True)
    )
    assert structure(found) == {"causal", "key_lengths", "mask"}
    assert found["key_lengths"].tolist() == [10, 10]
    assert found["mask"].is_contiguous() and torch.equal(found["mask"][:, 0, 0], seen)


POSITIONS = torch.cat([torch.arange(n) for n in (5, 1, 11, 7)])[None]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed(name, by, calls):
    """Sequences packed in one row give the results of the sequences one by one."""
    model, ids = made(FAMILY[name]), text("none")[0][:1]
    cu = torch.tensor([0, 5, 6, 17, 24], dtype=torch.int32)
    given = dict(position_ids=POSITIONS, use_cache=False)
    if by == "cu_seq_lens":
        lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=11, max_length_k=11)
        given |= lengths | dict(attention_mask=torch.ones_like(ids))
    logits = ran(name, calls, input_ids=ids, **given).logits[0]
    for call in calls:
        assert call["call"] == "attention_packed" and "mask" not in call
        assert call["args"][3].tolist() == cu.tolist() and call["max_q"] == 11
    model.set_attn_implementation("eager")
    alone = [model(x, use_cache=False).logits[0] for x in ids.split([5, 1, 11, 7], 1)]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("cuts", [(24,), (13, 11)])
def test_packed_positions_with_a_cache_are_one_sequence(name, cuts, calls):
    """As in eager: transformers looks for packed positions only without a cache."""
    model, ids = made(FAMILY[name]), text("none")[0][:1]
    found = {}
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=model.config)
        parts = zip(ids.split(cuts, 1), POSITIONS.split(cuts, 1), strict=True)
        logits = [model(x, position_ids=p, past_key_values=cache).logits for x, p in parts]
        found[implementation] = torch.cat(logits, 1)
    assert all(call["call"] == "attention" for call in calls)
    torch.testing.assert_close(*found.values(), rtol=1e-4, atol=1e-4)
    packed = model(ids, position_ids=POSITIONS, use_cache=False).logits
    assert (packed - found["eager"]).abs().max() > 0.1


def test_chunks_are_packed(calls):
    ran("Llama4", calls, input_ids=text("none")[0])
    by_name = {x["call"]: x for x in calls}
    assert by_name["attention_packed"]["args"][3].tolist() == list(range(0, 73, 8))
    assert not any(map(is_dense, calls))


# ------------------------------------------------------------------------------------- the traps


SMALL = dict(vocab_size=VOCABULARY, pad_token_id=0)
STRANGERS = {
    "Bloom": dict(hidden_size=32, n_layer=1, n_head=2),
    "Falcon": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    "Mpt": dict(d_model=32, n_heads=2, n_layers=1),
    "GPTJ": dict(n_embd=32, n_layer=1, n_head=2, rotary_dim=8),
    "GPTNeo": dict(hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_models_that_never_call_attention(name, registered):
    """Construction with "fastattn" raises, setting it later changes nothing, and a call raises if
    the config was changed directly."""
    if name in FAMILY and FAMILY[name].is_here():
        pytest.skip("in this transformers it calls attention")
    config = getattr(transformers, f"{name}Config")(**STRANGERS[name] | SMALL)
    kind = getattr(transformers, f"{name}ForCausalLM")
    with pytest.raises(ValueError, match=f"{name}ForCausalLM, expected a model whose attention"):
        kind._from_config(copy.deepcopy(config), attn_implementation="fastattn")
    model, ids = kind(config), text("none")[0]
    before = model.config._attn_implementation
    model.set_attn_implementation("fastattn")
    assert model.config._attn_implementation == before
    model.config._attn_implementation_internal = "fastattn"
    with pytest.raises(TypeError, match="expected it in fastattn's attention function alone"):
        model(ids)


PICKING = {
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "inkling2": "Inkling2TextModel",
}


@pytest.mark.parametrize("module", PICKING)
def test_models_that_select_keys(module):
    """The model passes the picked keys to eager and sdpa only, or a sink for each row."""
    name = f"transformers.models.{module}.modeling_{module}"
    kind = getattr(pytest.importorskip(name), PICKING[module])
    assert "picks keys, or has sinks" in ours._why_not(kind)


def test_a_head_made_in_a_notebook_is_treated_as_its_base_class():
    def made(base):
        return type("Head", (getattr(transformers, base),), {"__module__": "of a notebook"})

    assert ours._why_not(made("BertPreTrainedModel")) is None
    assert "computes its own" in ours._why_not(made("BloomPreTrainedModel"))


def test_a_mask_passes_through_fsdp():
    """FSDP casts the tensors of what a layer gets, and takes dataclasses apart for that."""
    from torch.distributed.utils import _apply_to_tensors

    mask = StructuredMask((1, 1, 3, 3), {"causal": True}, lambda: torch.ones(1, 1, 3, 3))
    assert _apply_to_tensors(lambda x: x.half(), {"mask": mask})["mask"] is mask
