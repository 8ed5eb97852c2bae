"""The Transformer of `fastattn.nn` and its layers, against torch's."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fastattn import nn
from tests.support.backends import every_backend, small
from tests.support.nn_naive import same

E, H, FF, B, N, M = 12, 3, 20, 3, 7, 5
CAUSAL = torch.ones(M, M, dtype=torch.bool).tril()
SHOWN = torch.arange(N) < torch.tensor([N, 4, 2])[:, None]  # True where there is no padding
TGT_SHOWN = torch.arange(M) < torch.tensor([3, M, 4])[:, None]


def drawn(module):
    """Draw all parameters, also biases and norms, so that none is 0 or 1."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return module


# --- beside torch's ----------------------------------------------------------------------------


def torchs(module, *inputs, **masks):
    """The result of torch's module with the parameters of ours."""
    state = nn.state_to_torch(dict(module.named_parameters()))
    return torch.func.functional_call(nn.to_torch(module), state, inputs, masks)


def hides(mask, causal=False):
    """A mask of ours (rows, keys), of items or of heads, as torch's: True where it hides."""
    if causal:
        seen = torch.ones(N, N, dtype=torch.bool).tril()
        mask = seen if mask is None else mask & seen[: mask.shape[-2], : mask.shape[-1]]
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None].expand(-1, H, -1, -1)
    return None if mask is None else ~(mask.flatten(0, 1) if mask.ndim == 4 else mask)


def random_mask(*shape):
    """Every row sees the first key: torch gives NaN for a row that sees none."""
    return (torch.rand(shape) > 0.4) | (torch.arange(shape[-1]) == 0)


MASKS = {
    "none": lambda: (None, None),
    "padding": lambda: (None, SHOWN),
    "matrix": lambda: (random_mask(N, N), None),
    "all": lambda: (random_mask(B, H, N, N), SHOWN.int()),
}


@every_backend
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masks", small(list(MASKS), ["all"]))
def test_encoder_layer(name, masks, causal, norm_first, on):
    mask, shown = MASKS[masks]()
    layer = drawn(nn.EncoderLayer(E, H, FF, dropout=0.0, norm_first=norm_first))
    x = torch.randn(B, N, E, requires_grad=True)
    found = layer(x, mask, shown, causal=causal)
    hidden = None if shown is None else shown == 0
    expected = torchs(layer, x, src_mask=hides(mask, causal), src_key_padding_mask=hidden)
    same([found], [expected], [x, *layer.parameters()])


@every_backend
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", small([False, True], [True]))
def test_decoder_layer(name, norm_first, bias, on):
    """Padding in both sequences and masks of both attentions, all at once."""
    layer = drawn(nn.DecoderLayer(E, H, FF, dropout=0.0, norm_first=norm_first, bias=bias))
    x, memory = (torch.randn(B, n, E, requires_grad=True) for n in (M, N))
    mask, memory_mask = random_mask(B, M, M), random_mask(M, N)
    found = layer(x, memory, mask, memory_mask, TGT_SHOWN, SHOWN)
    masks = dict(tgt_mask=hides(mask, causal=True), memory_mask=hides(memory_mask))
    masks |= dict(tgt_key_padding_mask=~TGT_SHOWN, memory_key_padding_mask=~SHOWN)
    same([found], [torchs(layer, x, memory, **masks)], [x, memory, *layer.parameters()])


@every_backend
@pytest.mark.parametrize("final_norm", small([False, True], [True]))
def test_transformer(name, final_norm, on):
    """From tokens with padding to logits, and the gradient of every parameter."""
    sizes = dict(embed_dim=E, num_heads=H, num_encoder_layers=2, num_decoder_layers=1, ff_dim=FF)
    model = nn.Transformer(11, 9, **sizes, dropout=0.0, final_norm=final_norm, pad_id=0)
    src, tgt = torch.randint(1, 11, (B, N)) * SHOWN, torch.randint(1, 9, (B, M)) * TGT_SHOWN

    def embedded(tokens, embedding):
        x = F.one_hot(tokens, embedding.num_embeddings).float() @ embedding.weight
        pos, column = torch.arange(tokens.shape[1])[:, None], torch.arange(E)
        angle = pos / 10000 ** (column // 2 * 2 / E)
        return x * math.sqrt(E) + torch.where(column % 2 == 0, angle.sin(), angle.cos())

    inputs = embedded(src, model.src_embedding), embedded(tgt, model.tgt_embedding)
    masks = dict(src=~SHOWN, memory=~SHOWN, tgt=~TGT_SHOWN)
    masks = {f"{x}_key_padding_mask": mask for x, mask in masks.items()}
    x = torchs(model, *inputs, tgt_mask=~CAUSAL, **masks)
    expected, found = x @ model.tgt_embedding.weight.T, model(src, tgt)
    assert found.shape == (B, M, 9)
    same([found], [expected], list(model.parameters()))


def test_a_row_that_sees_nothing_is_the_bias():
    attention, x = drawn(nn.CachedAttention(E, H)), torch.randn(B, N, E)
    out = attention(x, mask=torch.arange(N)[:, None] != 2)
    assert torch.equal(out[:, 2], attention.out_proj.bias.expand(B, E))


def test_feed_forward_and_its_activations():
    x = torch.randn(2, 5, E)
    for given, meant in (("relu", F.relu), ("gelu", F.gelu), (F.silu, F.silu)):
        module = nn.FeedForward(E, FF, dropout=0.0, activation=given)
        torch.testing.assert_close(module(x), module.linear2(meant(module.linear1(x))))
    assert nn.FeedForward(E).linear1.out_features == 2048
    with pytest.raises(ValueError, match='"relu", "gelu" or a function'):
        nn.FeedForward(E, activation="swish")


def test_dropout_acts_in_training_in_each_place():
    """Each dropout rate alone makes two calls differ in training; none acts in eval."""
    x = torch.randn(B, N, E)
    layer = nn.EncoderLayer(E, H, FF, dropout=0.0)
    assert torch.equal(layer(x), layer(x))
    for place in ("self_attn", "feed_forward.dropout", "residual1.dropout", "residual2.dropout"):
        changed = copy.deepcopy(layer)
        module = changed.get_submodule(place)
        setattr(module, "dropout" if place == "self_attn" else "p", 0.5)
        assert not torch.equal(changed(x), changed(x)), place
        assert torch.equal(changed.eval()(x), layer(x)), place
    everywhere = nn.DecoderLayer(E, H, FF, dropout=0.3)
    rates = {m.p for m in everywhere.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {everywhere.self_attn.dropout, everywhere.cross_attn.dropout} == {0.3}


def test_hidden_tokens_do_not_change_outputs():
    """Values of future tokens and padding do not change the outputs of other tokens."""
    model = tokens_model().eval()
    src, tgt = torch.randint(1, 11, (B, N)) * SHOWN, torch.randint(1, 11, (B, M))
    logits = model(src, tgt)
    later = tgt.clone()
    later[:, 3:] = 1 + later[:, 3:] % 10
    assert torch.equal(model(src, later)[:, :3], logits[:, :3])
    assert not torch.equal(model(src, later)[:, 3:], logits[:, 3:])
    short = model(src[1:2, :4], tgt[1:2])
    torch.testing.assert_close(short, logits[1:2])


def test_layers_of_a_stack_begin_apart():
    given = nn.EncoderLayer(E, H, FF)
    encoder = nn.Encoder(given, 3)
    same = zip(given.parameters(), encoder.layers[0].parameters())
    assert all(torch.equal(x, y) and x is not y for x, y in same)
    first, *others = (dict(layer.named_parameters()) for layer in encoder.layers)
    for other in others:
        assert not torch.equal(first["self_attn.in_proj_weight"], other["self_attn.in_proj_weight"])
        assert not torch.equal(
            first["feed_forward.linear1.weight"], other["feed_forward.linear1.weight"]
        )
    with pytest.raises(ValueError, match="num_layers"):
        nn.Encoder(nn.EncoderLayer(E, H, FF), 0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_zeroes_the_output_of_a_sublayer(norm_first):
    """At rate 1 a residual adds nothing, and a feed-forward network returns its last bias."""
    x, residual = torch.randn(2, 3, E), nn.Residual(E, dropout=1.0, norm_first=norm_first)
    assert torch.equal(residual(x, torch.nn.Linear(E, E)), x if norm_first else residual.norm(x))
    network = nn.FeedForward(E, FF, dropout=1.0)
    assert torch.equal(network(x), network.linear2.bias.expand_as(x))


@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_decoder_passes_on_every_mask(causal):
    encoder = nn.Encoder(nn.EncoderLayer(E, H, FF), 1)
    decoder = nn.Decoder(nn.DecoderLayer(E, H, FF), 1)
    model = drawn(nn.EncoderDecoder(encoder, decoder)).eval()
    src, tgt = torch.randn(B, N, E), torch.randn(B, M, E)
    masks = [torch.rand(shape) > 0.4 for shape in ((N, N), (M, M), (M, N), (B, N), (B, M))]
    own, tgt_own, cross, src_shown, tgt_shown = masks
    memory = encoder(src, own, src_shown)
    expected = decoder(tgt, memory, tgt_own, cross, tgt_shown, src_shown, causal=causal)
    assert torch.equal(model(src, tgt, *masks, causal=causal), expected)
    for i in range(5):  # each mask has an effect
        fewer = [None if j == i else mask for j, mask in enumerate(masks)]
        assert not torch.equal(model(src, tgt, *fewer, causal=causal), expected), i


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_masks_of_any_dtype_compose(dtype):
    layer, x = drawn(nn.EncoderLayer(E, H, FF)).eval(), torch.randn(B, N, E)
    mask, given = torch.rand(B, N, N) > 0.4, torch.rand(B, N) > 0.3
    expected = layer(x, mask, given)
    assert torch.equal(layer(x, -2 * mask.to(dtype), -2 * given.to(dtype)), expected)


def test_options_reach_every_layer():
    options = dict(dropout=0.25, activation="gelu", norm_first=True, eps=0.5, bias=False)
    modules = list(tokens_model(**options).modules())
    assert {m.p for m in modules if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert {m.dropout for m in modules if isinstance(m, nn.CachedAttention)} == {0.25}
    assert {m.eps for m in modules if isinstance(m, torch.nn.LayerNorm)} == {0.5}
    assert {m.activation for m in modules if isinstance(m, nn.FeedForward)} == {F.gelu}
    assert {m.norm_first for m in modules if isinstance(m, nn.Residual)} == {True}
    assert not [name for m in modules for name, _ in m.named_parameters() if "bias" in name]


def test_layers_begin_as_torchs():
    """Initial values are distributed as torch's: zero biases, the same spread of each matrix."""
    size = 128
    for ours, theirs in (
        (nn.CachedAttention(size, 2), torch.nn.MultiheadAttention(size, 2)),
        (nn.EncoderLayer(size, 2), torch.nn.TransformerEncoderLayer(size, 2)),
    ):
        found = nn.state_to_torch(ours.state_dict())
        for name, x in theirs.state_dict().items():
            assert found[name].shape == x.shape and found[name].any() == x.any(), name
            if x.ndim == 2:
                torch.testing.assert_close(found[name].std(), x.std(), rtol=0.05, atol=0)
                size_of = found[name].abs().max(), x.abs().max()
                torch.testing.assert_close(*size_of, rtol=0.05, atol=0)
    a, b = nn.to_torch(nn.DecoderLayer(E, H)), torch.nn.TransformerDecoderLayer(E, H)
    assert (a.dropout.p, a.norm1.eps, a.norm_first) == (b.dropout.p, b.norm1.eps, b.norm_first)
    model = nn.Transformer(5, embed_dim=size, num_heads=2, ff_dim=size, num_encoder_layers=1)
    widest = model.encoder.layers[0].feed_forward.linear1.weight.abs().max()
    assert 0.95 < widest / (6 / (2 * size)) ** 0.5 <= 1 and model.positions.dropout.p == 0.1


# --- the model of tokens -----------------------------------------------------------------------


def tokens_model(**options):
    sizes = dict(embed_dim=E, num_heads=H, num_encoder_layers=2, num_decoder_layers=2, ff_dim=FF)
    return nn.Transformer(11, **{**sizes, "pad_id": 0, **options})


def test_weights_are_tied():
    """Tied weights are one parameter with one name, so they cannot diverge."""
    shared, apart = tokens_model(), nn.Transformer(11, 9, embed_dim=E, num_heads=H)
    assert shared.out_proj is None and shared.tgt_embedding is shared.src_embedding
    assert apart.out_proj is None and apart.src_embedding.weight.shape == (11, E)
    assert apart.tgt_embedding.weight.shape == (9, E)
    src, tgt = torch.randint(1, 11, (B, N)), torch.randint(1, 11, (B, M))
    x = shared.eval().decoder(shared._embed(tgt, shared.tgt_embedding), shared.encode(src))
    torch.testing.assert_close(shared(src, tgt), x @ shared.tgt_embedding.weight.T)
    loose = tokens_model(tied=False)
    assert loose.out_proj.weight is not loose.tgt_embedding.weight
    assert loose.out_proj.bias is not None and loose.tgt_embedding is loose.src_embedding
    with torch.device("meta"):
        again = tokens_model()
    again.load_state_dict(shared.state_dict(), assign=True)
    assert len(list(again.parameters())) == len(list(shared.parameters()))
    assert torch.equal(again.eval()(src, tgt), shared.eval()(src, tgt))


def test_tokens_are_whole_numbers_within_max_len():
    model = tokens_model(max_len=6)
    fits = torch.ones(1, 6, dtype=torch.long)
    assert model(fits, fits).shape == (1, 6, 11)
    with pytest.raises(ValueError, match="max_len"):
        model(torch.ones(1, 7, dtype=torch.long), fits)
    for wrong in (fits[0], fits.float(), fits.bool()):
        with pytest.raises(ValueError, match="int32 or int64"):
            model(wrong, fits)
    with pytest.raises(ValueError, match="max_len: got 7, expected at most 6"):
        model.generate(fits, 7, bos_id=1)
