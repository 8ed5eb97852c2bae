"""What else models of transformers pass: weights, dropout, checkpoints, wrong arguments."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils as masks  # noqa: E402

import fastattn.integrations.transformers as ours  # noqa: E402
from fastattn.integrations import transformers_attention  # noqa: E402
from fastattn.integrations.transformers_masks import make_mask  # noqa: E402

from ..support.transformers_families import (  # noqa: E402
    FAMILIES,
    FAMILY,
    Family,
    inputs,
    made,
    text,
)
from .test_integration_transformers_masks import MODULE, POSITIONS, seen_by  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]


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


def assert_gradients_agree(found, expected):
    """Errors are judged beside a tensor's largest number. That of a key's bias has the gradient 0,
    of which rounding leaves something: it is judged beside the largest of all."""
    assert len(found) == len(expected) > 0
    rounding = 1e-7 * max(x.abs().max() for x in expected)
    for mine, theirs in zip(found, expected):
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max() + rounding


def attentions(out):
    """The weights of all layers, of an encoder and a decoder, too."""
    names = "attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"
    return [w for name in names for w in out.get(name) or ()]


PADDED = dict(Llama="left", GPT2="none", Bert="right", T5="none", GptOss="right", packed="none")


@pytest.mark.parametrize("name", PADDED)
def test_weights_and_their_gradients(name, registered):
    """A loss on the model's output reaches its attention weights, which keep their gradients, and a
    hook that changes these changes the gradients of parameters."""
    model, (ids, mask) = made(FAMILY.get(name, FAMILY["Llama"])), text(PADDED[name])
    given = dict(input_ids=ids, attention_mask=mask, output_attentions=True)
    if name == "T5":
        given["decoder_input_ids"] = ids[:, :5]
    if name == "packed":
        mask = mask[:1]
        given |= dict(input_ids=ids[:1], position_ids=POSITIONS, use_cache=False)
        del given["attention_mask"]

    def real(x):  # hidden states at padding are of no meaning, nor are gradients of weights of it
        return x[mask.bool()] if x.shape[1] == mask.shape[1] else x

    values, gradients = [], []
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(**given)
        weights = attentions(out)
        for w in weights:
            w.retain_grad()
            w.register_hook(lambda gradient: gradient * 2)
        real(out[0]).square().mean().backward()
        values.append([real(w.transpose(1, 2)) for w in weights])
        gradients.append([real((w.grad * (w != 0)).transpose(1, 2)) for w in weights])
        gradients[-1] += [x.grad for x in model.parameters() if x.grad is not None]
    assert len(values[0]) == len(values[1]) > 0
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    assert_gradients_agree(*gradients)


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", ["Bart", "Marian", "T5"])
def test_one_encoding_serves_several_decoder_rows(name, padding, registered):
    model, (ids, mask) = made(FAMILY[name]), text(padding)
    encoder = model.get_encoder()
    found = []
    for implementation in ("fastattn", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        encoded = encoder(ids[2:], attention_mask=mask[2:])
        given = dict(attention_mask=mask[2:].expand(3, -1), decoder_input_ids=ids[:, :5])
        out = model(encoder_outputs=encoded, **given, use_cache=False)
        out.logits.square().mean().backward()
        found.append([x.grad for x in model.parameters() if x.grad is not None])
        found[-1].append(out.logits)
    assert_gradients_agree(*found)


@pytest.mark.slow
def test_weights_of_every_family(registered):
    """Also of the models that do not pass `output_attentions` on to the attention function."""
    for family in filter(Family.is_here, FAMILIES):
        model, given = made(family), inputs(family, "none")
        number = []
        for implementation in ("fastattn", "eager"):
            model.set_attn_implementation(implementation)
            out = model(**given, output_attentions=True)
            number.append({name: len(x) for name, x in out.items() if "attentions" in name})
        assert number[0] == number[1] and any(number[0].values()), family.name


@pytest.mark.slow
def test_weights_of_compiled_models(registered):
    model, ids = made(FAMILY["GPT2"]), text("none")[0]
    model.set_attn_implementation("fastattn")
    expected = model(ids, output_attentions=True).attentions
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, output_attentions=True)
    assert len(found.attentions) == 2
    torch.testing.assert_close(found.attentions, expected)


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


@pytest.mark.slow
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
def test_steps_of_a_static_cache_have_the_same_arguments(overlay):
    """All steps pass the same arguments, so one compiled graph serves them, up to a full cache."""
    causal = masks.causal_mask_function
    function = masks.and_masks(causal, overlay) if overlay else causal
    steps = [make_mask(2, 1, 8, torch.tensor(i), 0, function) for i in range(3, 8)]
    assert len({tuple(sorted(step.arguments)) for step in steps}) == 1


def generated(attention):
    """The tokens that a model with a window generates with a static cache, and how often
    torch.compile made a graph. Padding leaves the window on the way."""
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, num_hidden_layers=1, sliding_window=4)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, attn_implementation=attention, eos_token_id=None)
    ).eval()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=backend)
    ids = torch.randint(3, 64, (2, 3))
    seen = torch.tensor([[0, 0, 1], [1, 1, 1]])
    given = dict(attention_mask=seen, max_new_tokens=7, do_sample=False, pad_token_id=0)
    return model.generate(ids, **given, cache_implementation="static"), len(graphs)


@pytest.mark.slow
def test_a_static_cache_with_a_window_compiles_as_many_graphs_as_sdpa(registered):
    expected, most = generated("sdpa")
    found, graphs = generated("fastattn")
    assert torch.equal(found, expected)
    assert graphs <= most


def test_the_mask_moves_to_the_models_device():
    """Models spread over devices move the mask between them."""
    mask = make_mask(2, 5, 5, attention_mask=seen_by("left", 5)[1:])
    moved = mask.to("meta", non_blocking=True)
    assert moved.arguments["mask"].is_meta and moved.exact().is_meta and moved.shape == mask.shape
    assert mask.to(torch.bool) is mask and mask.contiguous() is mask
    cut = mask[:, :, :3]
    assert cut.shape == (2, 1, 3, 5) and torch.equal(cut.exact(), mask.exact()[:, :, :3])


@pytest.mark.parametrize("padding", ["none", "right", "hole"])
def test_a_mask_of_one_row_applies_to_all_rows(padding, registered):
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


def test_models_with_other_semantics_are_refused():
    pytest.importorskip("transformers.models.bridgetower")
    from transformers import BridgeTowerModel

    assert "its eager attention is not causal" in ours._why_not(BridgeTowerModel)


def test_a_later_wrapper_stays():
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


def test_impossible_arguments_are_named(registered):
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
    with pytest.raises(NotImplementedError, match=r"^sinks: got some, expected none"):
        transformers_attention.attend(MODULE, q, k, k, None, sinks=q)
    given = dict(cu_seq_lens_q=torch.tensor([0, 3]), cu_seq_lens_k=torch.tensor([0, 3]))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: got some beside"):
        transformers_attention.attend(MODULE, q, k, k, None, output_attentions=True, **given)
