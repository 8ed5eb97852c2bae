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
from fastattn.integrations.transformers_masks import Mask, make_mask  # noqa: E402

from ..support.transformers_families import FAMILY, VOCABULARY, made, text  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]
MODULE = types.SimpleNamespace(is_causal=True)


@pytest.fixture
def calls(monkeypatch, registered):
    """The arguments of every call by name; "call" is the function that was called."""
    found = []
    for name in ("attention", "attention_packed"):
        original = getattr(transformers_attention, name)

        def spy(*args, original=original, name=name, **kwargs):
            told = {x: y for x, y in kwargs.items() if y is not None}
            found.append(told | dict(call=name, args=args))
            return original(*args, **kwargs)

        monkeypatch.setattr(transformers_attention, name, spy)
    return found


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
    return masks.packed_sequence_compatibility_function(inside, positions, which)


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


@pytest.mark.parametrize("kind, place", CASES)
def test_it_is_the_mask(kind, place):
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
        said = f"padding: {padding}\n{{}}".format
        mask = make_mask(*given)
        assert isinstance(mask, Mask) and mask.shape == (3, 1, M, N)
        exact = masks.sdpa_mask(*given, allow_is_causal_skip=False)
        assert torch.equal(mask.exact(), exact)
        out, _ = transformers_attention.attend(MODULE, q, k, v, mask)
        expected = F.scaled_dot_product_attention(q, k, v, exact, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2), msg=said)
        dout = torch.randn_like(out)
        mine = torch.autograd.grad(out, (q, k, v), dout)
        theirs = torch.autograd.grad(expected, (q, k, v), dout.transpose(1, 2))
        for x, y in zip(mine, theirs):
            torch.testing.assert_close(x, y, msg=said)


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
    told = [{x for x in structure(call) if call[x] is not False} for call in calls]
    assert told == expected
    if "key_lengths" in calls[0]:
        assert calls[0]["key_lengths"].tolist() == mask.sum(1).tolist()


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
    told = {x["call"]: x for x in calls}
    assert told["attention_packed"]["args"][3].tolist() == list(range(0, 73, 8))
    assert not any(map(is_dense, calls))


def test_prefixes_are_exact(registered):
    """Image tokens of Gemma 3 see their whole image; no structure expresses that."""
    config = made(FAMILY["Gemma3"]).config
    config._attn_implementation = "fastattn"
    x = torch.randn(1, 21, 64)
    mask = masks.create_causal_mask(config, x, None, None, or_mask_function=prefix)
    config._attn_implementation = "sdpa"
    expected = masks.create_causal_mask(config, x, None, None, or_mask_function=prefix)
    assert torch.equal(mask.arguments["mask"], expected)


# ------------------------------------------------------------------------------------- the traps


def test_trap_of_dense_masks(calls):
    """sdpa's mask function makes a correct dense mask; ours passes a mask of keys alone."""
    ids, seen = text("left")
    exact = masks.sdpa_mask(3, 24, 24, attention_mask=seen.bool())
    assert exact.shape == (3, 1, 24, 24)
    ran("Llama", calls, input_ids=ids, attention_mask=seen)
    assert {tuple(x["mask"].shape) for x in calls} == {(3, 1, 1, 24)}


def test_trap_of_no_mask_function(registered):
    """Without a registered mask function, an attention function gets no padding or sequences."""
    model, (ids, seen) = made(FAMILY["Llama"]), text("left")
    name, interface = "test-attention-alone", transformers.AttentionInterface
    padded = dict(input_ids=ids, attention_mask=seen)
    sequences = dict(input_ids=ids[:1], position_ids=POSITIONS, use_cache=False)
    interface.register(name, transformers_attention.attend)
    try:
        for given in (padded, sequences):
            real = given.get("attention_mask", torch.ones(1, 24)).bool()
            found = {}
            for implementation in (name, "fastattn", "eager"):
                model.set_attn_implementation(implementation)
                found[implementation] = model(**given).logits[real]
            torch.testing.assert_close(found["fastattn"], found["eager"], rtol=1e-4, atol=1e-4)
            assert (found[name] - found["eager"]).abs().max() > 0.05
    finally:
        interface._global_mapping.pop(name)


SMALL = dict(vocab_size=VOCABULARY, pad_token_id=0)
STRANGERS = {
    "Bloom": dict(hidden_size=32, n_layer=1, n_head=2),
    "Falcon": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    "Mpt": dict(d_model=32, n_heads=2, n_layers=1),
    "GPTJ": dict(n_embd=32, n_layer=1, n_head=2, rotary_dim=8),
    "GPTNeo": dict(hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_trap_of_models_that_never_call(name, registered):
    """Construction with "fastattn" raises, setting it later changes nothing, and a call raises if
    the config was changed directly."""
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
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "inkling2": "Inkling2TextModel",
    "minimax_m3_vl": "MiniMaxM3VLTextModel",
}


@pytest.mark.parametrize("module", PICKING)
def test_trap_of_models_that_pick_keys(module):
    """The model passes the picked keys to eager and sdpa only: others would attend to all keys."""
    name = f"transformers.models.{module}.modeling_{module}"
    kind = getattr(pytest.importorskip(name), PICKING[module])
    assert "picks keys, or has sinks" in ours._why_not(kind)


def test_a_head_made_in_a_notebook_is_what_it_stands_on():
    def made(base):
        return type("Head", (getattr(transformers, base),), {"__module__": "of a notebook"})

    assert ours._why_not(made("BertPreTrainedModel")) is None
    assert "computes its own" in ours._why_not(made("BloomPreTrainedModel"))


# ---------------------------------------------------------------------------------- the rest of it


def test_register_is_undone_exactly():
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    def state():
        mappings = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
        return *map(dict, mappings), PreTrainedModel.get_correct_attn_implementation

    before = state()
    for times in (1, 2):
        for _ in range(times):
            ours.register()
        assert "fastattn" in state()[0] and "fastattn" in state()[1]
        for _ in range(times):
            ours.unregister()
        assert state() == before


def test_weights(registered):
    cases = dict(Llama="left", Bert="right", T5="none", GptOss="right")
    for name, padding in cases.items():
        model, (ids, mask) = made(FAMILY[name]), text(padding)
        given = dict(input_ids=ids, attention_mask=mask, output_attentions=True)
        given |= dict(decoder_input_ids=ids[:, :5]) if name == "T5" else {}
        found = {}
        for implementation in ("fastattn", "eager"):
            model.set_attn_implementation(implementation)
            out = model(**given)
            kinds = ("encoder", "decoder", "cross") if name == "T5" else ("",)
            each = [getattr(out, f"{x}_attentions".lstrip("_")) for x in kinds]
            found[implementation] = [w for weights in each for w in weights]
        assert len(found["fastattn"]) == len(found["eager"]) > 0
        for mine, theirs in zip(found["fastattn"], found["eager"]):
            rows = mask.bool() if mine.shape[2] == 24 else torch.ones(3, 5).bool()
            mine, theirs = (x.transpose(1, 2)[rows] for x in (mine, theirs))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_weights_of_a_packed_batch(registered):
    model, ids = made(FAMILY["Llama"]), text("none")[0][:1]
    given = dict(input_ids=ids, position_ids=POSITIONS, use_cache=False, output_attentions=True)
    found = []
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model(**given).attentions)
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_items_of_nothing_but_padding_are_those_of_sdpa(registered):
    """In such items eager instead averages over the padding."""
    ids, mask = text("right")
    mask[1] = 0
    for name in ("Llama", "Bert", "Bart"):
        model, found = made(FAMILY[name]), []
        for implementation in ("fastattn", "sdpa"):
            model.set_attn_implementation(implementation)
            found.append(model(input_ids=ids, attention_mask=mask)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks_of_the_caller(kind, registered):
    model, (ids, _) = made(FAMILY["Llama"]), text("none")
    shown = torch.rand(3, 1, 24, 24) < 0.6
    shown |= torch.eye(24, dtype=torch.bool)
    added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=added).logits
    model.set_attn_implementation("fastattn")
    found = model(ids, attention_mask=shown if kind == "bool" else added.double()).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_drawn_and_repeats(calls):
    model, (ids, mask) = made(FAMILY["Llama"]), text("left")
    model.set_attn_implementation("fastattn")
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.3
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model(ids, attention_mask=mask).logits)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert all(x["dropout_p"] == 0.3 for x in calls)


def test_checkpoints_and_autocast(calls):
    """Gradient checkpointing runs a layer twice; autocast runs it in bfloat16."""
    model, (ids, mask) = made(FAMILY["Llama"]), text("left")
    found = []
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        model.train().gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, attention_mask=mask).logits[mask.bool()].square().mean().backward()
        found.append([x.grad for x in model.parameters()])
    assert len(calls) == 4
    for mine, theirs in zip(*found):
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()
    model.set_attn_implementation("fastattn")
    with torch.autocast("cpu", torch.bfloat16):
        out = model.eval()(ids, attention_mask=mask).logits
    assert out.dtype == torch.bfloat16 and out[mask.bool()].isfinite().all()


def test_beams(registered):
    model, (ids, mask) = made(FAMILY["Mistral"]), text("left")
    given = dict(max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = []
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        tokens.append(model.generate(ids, attention_mask=mask, **given))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name, padding", dict(Llama="left", Gemma2="none", Bert="right").items())
def test_compiled(name, padding, calls):
    """The model compiles to one graph, in which a causal or bidirectional mask stays structure."""
    model, (ids, mask) = made(FAMILY[name]), text(padding)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask)[0][mask.bool()]
    model.set_attn_implementation("fastattn")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(ids, attention_mask=mask)[0][mask.bool()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()


@pytest.mark.parametrize("overlay", [None, masks.sliding_window_overlay(6)])
def test_steps_of_a_static_cache_are_told_alike(overlay):
    """All steps pass the same arguments, so one compiled graph serves them, up to a full cache."""
    causal = masks.causal_mask_function
    function = masks.and_masks(causal, overlay) if overlay else causal
    steps = [make_mask(2, 1, 8, torch.tensor(i), 0, function) for i in range(3, 8)]
    assert len({tuple(sorted(step.arguments)) for step in steps}) == 1


def test_it_goes_where_the_model_does():
    """Models spread over devices move the mask between them."""
    mask = make_mask(2, 5, 5, attention_mask=seen_by("left", 5)[1:])
    moved = mask.to("meta", non_blocking=True)
    assert moved.arguments["mask"].is_meta and moved.exact().is_meta and moved.shape == mask.shape
    assert mask.to(torch.bool) is mask and mask.contiguous() is mask
    cut = mask[:, :, :3]
    assert cut.shape == (2, 1, 3, 5) and torch.equal(cut.exact(), mask.exact()[:, :, :3])


@pytest.mark.parametrize("padding", ["none", "right", "hole"])
def test_a_mask_of_one_row_is_that_of_all(padding, registered):
    """Some models make a mask of one row that is meant for all rows."""
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 24, 8)
    seen = torch.ones(3, 24, dtype=torch.bool) if padding == "none" else seen_by(padding, 24)[:3]
    both = masks.bidirectional_mask_function
    one, all_rows = (make_mask(3, m, 24, 0, 0, both, seen) for m in (1, 5))
    found, wanted = (transformers_attention.attend(MODULE, q, k, k, x)[0] for x in (one, all_rows))
    assert one.shape[2] == 1 and torch.equal(found, wanted)
    with pytest.raises(ValueError, match=r"\(1, 24\), expected \(5, 23\)"):
        transformers_attention.attend(MODULE, q, k[:, :, 1:], k[:, :, 1:], one)


def test_a_mask_of_one_key_hides_nothing(registered):
    """A BERT that generates without being a decoder makes it: its mask ignores the cached keys."""
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 13, 8)
    one = make_mask(2, 1, 1, 0, 0, masks.bidirectional_mask_function)
    expected = transformers_attention.attend(MODULE, q, k, k, None, is_causal=False)[0]
    assert torch.equal(transformers_attention.attend(MODULE, q, k, k, one)[0], expected)


def test_models_that_mean_something_else_are_refused():
    pytest.importorskip("transformers.models.bridgetower")
    from transformers import BridgeTowerModel, DeepseekV4ForCausalLM

    assert "its eager attention is not causal" in ours._why_not(BridgeTowerModel)
    assert "picks keys" in ours._why_not(DeepseekV4ForCausalLM)


def test_what_somebody_wrapped_since_stays():
    from transformers import PreTrainedModel

    original = PreTrainedModel.get_correct_attn_implementation
    ours.register()
    beneath = PreTrainedModel.get_correct_attn_implementation

    def theirs(self, *args, **kwargs):
        return beneath(self, *args, **kwargs)

    try:
        PreTrainedModel.get_correct_attn_implementation = theirs
        ours.unregister()
        assert PreTrainedModel.get_correct_attn_implementation is theirs
    finally:
        PreTrainedModel.get_correct_attn_implementation = original


def test_what_cannot_be_is_named(registered):
    q = k = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=r"^cache: got object, expected transformers'"):
        transformers_attention.attend(MODULE, q, k, k, None, cache=object())
    with pytest.raises(ValueError, match=r"\(M, N\) = \(3, 4\), expected \(3, 3\)"):
        transformers_attention.attend(MODULE, q, k, k, make_mask(1, 3, 4))
    with pytest.raises(TypeError, match=r"in torch\.add, expected it in fastattn's"):
        torch.add(q, make_mask(1, 3, 3))
    arithmetic = lambda x: ~x, lambda x: x & q, lambda x: x == 0, lambda x: q - x, lambda x: x / 2
    for use in (
        *arithmetic,
        len,
        list,
        abs,
        lambda x: x ^ q,
        lambda x: x.device,
        lambda x: x.min(),
    ):
        with pytest.raises(TypeError, match="expected it in fastattn's attention function alone"):
            use(make_mask(1, 3, 3))
    with pytest.raises(AttributeError, match=r"in `\.device`, expected it in fastattn's"):
        _ = make_mask(1, 3, 3).device
    assert make_mask(1, 3, 3) != None  # noqa: E711
    for name in ("indices", "block_indices", "sinks"):
        with pytest.raises(NotImplementedError, match=f"^{name}: got some, expected none"):
            transformers_attention.attend(MODULE, q, k, k, None, **{name: q})
    given = dict(cu_seq_lens_q=torch.tensor([0, 3]), cu_seq_lens_k=torch.tensor([0, 3]))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: got some beside"):
        transformers_attention.attend(MODULE, q, k, k, None, output_attentions=True, **given)
