"""torch's Transformer, its layers and its attention, converted to those of fastattn.nn and back."""

import itertools
import warnings

import pytest
import torch
from torch.nn import functional as F

from fastattn import nn
from tests.nn.test_nn_transformer import (
    CAUSAL,
    FF,
    SHOWN,
    TGT_SHOWN,
    B,
    E,
    H,
    M,
    N,
    drawn,
    tokens_model,
)
from tests.support.marks import parametrize

# --- torch's -----------------------------------------------------------------------------------

OPTIONS = [
    dict(zip(("norm_first", "bias", "activation", "batch_first"), x))
    for x in itertools.product((False, True), (False, True), ("relu", F.gelu), (False, True))
]


def torchs(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it will not use nested tensors
        return drawn(torch.nn.Transformer(E, H, 2, 1, FF, **{"dropout": 0.0, **options}))


def call_torchs(model, src, tgt, padding):
    mask = torch.nn.Transformer.generate_square_subsequent_mask(M)
    masks = {}
    if padding:
        hidden = {"src": ~SHOWN, "memory": ~SHOWN, "tgt": ~TGT_SHOWN}
        masks = {f"{x}_key_padding_mask": mask for x, mask in hidden.items()}
        mask = mask == -torch.inf
    first = getattr(model, "batch_first", True)
    src, tgt = (x if first else x.transpose(0, 1) for x in (src, tgt))
    out = model(src, tgt, tgt_mask=mask, **masks)
    return out if first else out.transpose(0, 1)


def call_ours(model, src, tgt, padding):
    masks = dict(src_padding_mask=SHOWN, tgt_padding_mask=TGT_SHOWN) if padding else {}
    return model(src, tgt, **masks)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("train", [False, True])
@parametrize("options", OPTIONS, ids=lambda o: " ".join(f"{v}" for v in o.values()), fast=5)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_transformer_and_back(options, train, padding):
    """Outputs and gradients are equal at every token that is not padding."""
    theirs = torchs(**options).train(train)
    ours = nn.from_torch(theirs)
    back = nn.to_torch(ours)
    assert ours.training == back.training == train and back.batch_first
    src, tgt = torch.randn(B, N, E, requires_grad=True), torch.randn(B, M, E, requires_grad=True)
    real = TGT_SHOWN if padding else torch.ones_like(TGT_SHOWN)
    expected = call_torchs(theirs, src, tgt, padding)[real]
    names = dict(theirs.named_parameters())
    leaves = [src, tgt, *names.values()]
    grads = torch.autograd.grad(expected.square().sum(), leaves)
    for module, call in ((ours, call_ours), (back, call_torchs)):
        out = call(module, src, tgt, padding)[real]
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=5e-6)
        parameters = nn.state_to_torch(dict(module.named_parameters()))
        assert parameters.keys() == names.keys()
        found = torch.autograd.grad(out.square().sum(), [src, tgt, *(parameters[x] for x in names)])
        torch.testing.assert_close(found, grads, rtol=2e-4, atol=2e-5)
        with torch.no_grad():
            out = call(module, src, tgt, padding)[real]
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("norm", [None, "norm"])
def test_torchs_stacks_and_layers(norm):
    norm = norm and torch.nn.LayerNorm(E)
    layer = torch.nn.TransformerEncoderLayer(E, H, FF, batch_first=True)
    other = torch.nn.TransformerDecoderLayer(E, H, FF, layer_norm_eps=0.1, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    stacks = [drawn(x).eval() for x in (encoder, torch.nn.TransformerDecoder(other, 2, norm))]
    src, tgt = torch.randn(B, N, E), torch.randn(B, M, E)
    for theirs in (stacks[0], drawn(layer).eval()):
        ours = nn.from_torch(theirs)
        torch.testing.assert_close(ours(src), theirs(src), rtol=2e-5, atol=5e-6)
        torch.testing.assert_close(nn.to_torch(ours)(src), theirs(src), rtol=2e-5, atol=5e-6)
    for theirs in (stacks[1], drawn(other).eval()):
        ours = nn.from_torch(theirs)
        expected = theirs(tgt, src, tgt_mask=~CAUSAL)
        torch.testing.assert_close(ours(tgt, src), expected, rtol=2e-5, atol=5e-6)
        expected = theirs(tgt, src)
        torch.testing.assert_close(ours(tgt, src, causal=False), expected, rtol=2e-5, atol=5e-6)
        torch.testing.assert_close(nn.to_torch(ours)(tgt, src), expected, rtol=2e-5, atol=5e-6)


def test_conversion_copies_and_keeps_dtype_and_options():
    theirs = torchs(dropout=0.2, activation="gelu", norm_first=True, layer_norm_eps=0.5).double()
    state = torch.get_rng_state()
    ours = nn.from_torch(theirs)
    back = nn.to_torch(ours)
    assert torch.equal(torch.get_rng_state(), state)
    layer = back.encoder.layers[0]
    assert (layer.dropout.p, layer.dropout1.p, layer.self_attn.dropout) == (0.2, 0.2, 0.2)
    assert layer.activation is F.gelu and layer.norm_first and layer.norm2.eps == 0.5
    assert len(back.encoder.layers) == back.encoder.num_layers == 2
    for x, y, z in zip(theirs.parameters(), ours.parameters(), back.parameters()):
        assert x.dtype == y.dtype == z.dtype == torch.float64
    before = theirs.state_dict()
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in before.items())
    torch.nn.init.zeros_(ours.encoder.layers[0].self_attn.in_proj_weight)
    assert theirs.encoder.layers[0].self_attn.in_proj_weight.any()
    assert back.encoder.layers[0].self_attn.in_proj_weight.any()


def test_states_move_between_torchs_and_a_model_of_tokens():
    theirs, ours = torchs(), tokens_model(num_decoder_layers=1)
    missing, unexpected = ours.load_state_dict(
        nn.state_from_torch(theirs.state_dict()), strict=False
    )
    assert not unexpected
    assert set(missing) == {"src_embedding.weight", "tgt_embedding.weight"}
    moved = nn.state_to_torch(ours.state_dict())
    torchs().load_state_dict(moved)
    assert all(torch.equal(x, moved[name]) for name, x in theirs.state_dict().items())
    theirs = nn.to_torch(ours)
    assert type(theirs) is torch.nn.Transformer
    attention = torch.nn.MultiheadAttention(E, H)
    nn.CachedAttention(E, H).load_state_dict(attention.state_dict())


ALTERED = {
    "one dropout rate": lambda x: setattr(x.dropout1, "p", 0.7),
    "a dropout": lambda x: setattr(x, "dropout1", torch.nn.Identity()),
    "the first dropout": lambda x: setattr(x, "dropout", torch.nn.Identity()),
    "the attention's rate": lambda x: setattr(x.self_attn, "dropout", 0.7),
    "one eps": lambda x: setattr(x.norm2, "eps", 0.5),
    "a norm": lambda x: setattr(x, "norm1", torch.nn.RMSNorm(E)),
    "a norm without weights": lambda x: setattr(
        x, "norm2", torch.nn.LayerNorm(E, elementwise_affine=False)
    ),
    "an attention with zeros": lambda x: setattr(
        x, "self_attn", torch.nn.MultiheadAttention(E, H, dropout=0.1, add_zero_attn=True)
    ),
    "an attention with biases": lambda x: setattr(
        x, "self_attn", torch.nn.MultiheadAttention(E, H, dropout=0.1, add_bias_kv=True)
    ),
    "heads": lambda x: setattr(x, "multihead_attn", torch.nn.MultiheadAttention(E, 2, dropout=0.1)),
    "a linear layer": lambda x: setattr(x, "linear1", torch.nn.Sequential()),
    "no bias": lambda x: setattr(x, "linear2", torch.nn.Linear(FF, E, bias=False)),
    "a parametrization": lambda x: torch.nn.utils.parametrizations.weight_norm(x.linear2),
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_layer_is_refused(what):
    """The error names what the conversion would lose."""
    kind = torch.nn.TransformerDecoderLayer if what == "heads" else torch.nn.TransformerEncoderLayer
    layer = kind(E, H, FF)
    nn.from_torch(layer)
    ALTERED[what](layer)
    with pytest.raises(ValueError, match=r"altered|as its constructor makes it"):
        nn.from_torch(layer)


def test_an_altered_layer_of_ours_is_refused():
    for alter in (
        lambda x: setattr(x.residual1.dropout, "p", 0.7),
        lambda x: setattr(x.residual2.norm, "eps", 0.5),
        lambda x: setattr(x.residual2, "norm_first", True),
        lambda x: setattr(x.self_attn, "scale", 0.3),
        lambda x: setattr(x, "cross_attn", nn.CachedAttention(E, 2, dropout=0.1)),
    ):
        layer = nn.DecoderLayer(E, H, FF)
        nn.to_torch(layer)
        alter(layer)
        with pytest.raises(ValueError, match="as its constructor makes it"):
            nn.to_torch(layer)


def test_modules_without_a_counterpart_are_refused():
    for convert in (nn.from_torch, nn.to_torch):
        with pytest.raises(ValueError, match="got Linear, expected one of"):
            convert(torch.nn.Linear(2, 2))


def test_activations_that_are_modules_are_copied():
    theirs = torch.nn.TransformerEncoderLayer(E, H, FF, activation=torch.nn.PReLU()).eval()
    ours = nn.from_torch(theirs)
    x = torch.randn(B, N, E)
    expected = theirs(x.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(ours(x), expected, rtol=2e-5, atol=5e-6)
    torch.testing.assert_close(nn.to_torch(ours)(x), expected, rtol=2e-5, atol=5e-6)
    assert ours.feed_forward.activation is not theirs.activation


def test_frozen_parameters_and_modes_stay_what_they_are():
    theirs = torchs()
    theirs.encoder.requires_grad_(False).eval()
    for moved in (nn.from_torch(theirs), nn.to_torch(nn.from_torch(theirs))):
        assert not any(p.requires_grad for p in moved.encoder.parameters())
        assert all(p.requires_grad for p in moved.decoder.parameters())
        assert moved.training and moved.decoder.layers[0].training
        still = [m for m in moved.encoder.modules() if m.training]
        assert all(type(m) is torch.nn.ModuleList for m in still)


def test_layers_that_differ_and_norms_are_copied():
    def layer(heads, ff, **options):
        return torch.nn.TransformerEncoderLayer(E, heads, ff, batch_first=True, **options)

    norm = torch.nn.LayerNorm(E, eps=0.3)
    theirs = torch.nn.TransformerEncoder(layer(H, FF), 2, norm, enable_nested_tensor=False)
    layers = [layer(H, FF, norm_first=True), layer(2, 9, activation="gelu")]
    theirs.layers = torch.nn.ModuleList(layers)
    x, ours = torch.randn(B, N, E), nn.from_torch(drawn(theirs).eval())
    back = nn.to_torch(ours)
    for module in (ours, back):
        torch.testing.assert_close(module(x), theirs(x), rtol=2e-5, atol=5e-6)
    assert len({id(m.norm) for m in (theirs, ours, back)}) == 3


def test_wrong_shapes_raise():
    layer, x = nn.DecoderLayer(E, H, FF), torch.randn(B, M, E)
    for bad in (x[0], torch.randn(B, M, E + 1)):
        with pytest.raises(ValueError, match=r"x: got shape .* expected \(B, N, 12\)"):
            layer(bad, x)
        with pytest.raises(ValueError, match="memory: got shape"):
            layer(x, bad)
    for bad in ((M,), (B, 1), (1, M), (B, M + 1)):
        with pytest.raises(ValueError, match=r"^padding_mask: got shape .* expected \(3, 5\)"):
            layer(x, x, padding_mask=torch.ones(bad))
        with pytest.raises(ValueError, match=r"memory_padding_mask: got shape .* \(3, 5\)"):
            layer(x, x, memory_padding_mask=torch.ones(bad))
    with pytest.raises(ValueError, match="memory: got a batch of 2, expected 3"):
        layer(x, x[:2])
    with pytest.raises(ValueError, match="causal: got True beside a memory"):
        nn.CachedAttention(E, H)(x, x, causal=True)
    with pytest.raises(ValueError, match="mask: got shape"):
        layer(x, x, memory_mask=torch.ones(M, M + 1))
