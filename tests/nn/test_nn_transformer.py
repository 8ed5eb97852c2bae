"""The Transformer of `fastattn.nn`, against naive twins and torch's Transformer; and decoding."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from fastattn import nn
from tests.support.backends import every_backend, small
from tests.support.nn_naive import naive, same

E, H, FF, B, N, M = 12, 3, 20, 3, 7, 5
CAUSAL = torch.ones(M, M, dtype=torch.bool).tril()
SHOWN = torch.arange(N) < torch.tensor([N, 4, 2])[:, None]  # True where there is no padding
TGT_SHOWN = torch.arange(M) < torch.tensor([3, M, 4])[:, None]


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


def drawn(module):
    """Draw all parameters, also biases and norms, so that none is 0 or 1."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return module


# --- written out -------------------------------------------------------------------------------


def attention_twin(module, x, memory=None, mask=None, causal=False):
    """Attention computed head by head."""
    memory = x if memory is None else memory
    biases = itertools.repeat(None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    weights = module.in_proj_weight.chunk(3)
    q, k, v = (F.linear(y, w, b) for y, w, b in zip((x, memory, memory), weights, biases))
    size = q.shape[-1] // module.num_heads
    heads = []
    for h in range(module.num_heads):
        own = slice(h * size, h * size + size)
        each = mask[:, h] if mask is not None and mask.ndim == 4 else mask
        heads.append(naive(q[..., own], k[..., own], v[..., own], each, causal)[0])
    return module.out_proj(torch.cat(heads, -1))


def residual_twin(module, x, sublayer):
    def norm(y):
        centred = y - y.mean(-1, keepdim=True)
        y = centred / (centred.square().mean(-1, keepdim=True) + module.norm.eps).sqrt()
        return y * module.norm.weight + (0 if module.norm.bias is None else module.norm.bias)

    return x + sublayer(norm(x)) if module.norm_first else norm(x + sublayer(x))


def feed_forward_twin(module, x):
    hidden = F.linear(x, module.linear1.weight, module.linear1.bias).clamp(min=0)
    return F.linear(hidden, module.linear2.weight, module.linear2.bias)


def encoder_layer_twin(layer, x, mask, causal=False):
    x = residual_twin(
        layer.residual1, x, lambda y: attention_twin(layer.self_attn, y, None, mask, causal)
    )
    return residual_twin(layer.residual2, x, lambda y: feed_forward_twin(layer.feed_forward, y))


def decoder_layer_twin(layer, x, memory, mask, memory_mask, causal=True):
    x = residual_twin(
        layer.residual1, x, lambda y: attention_twin(layer.self_attn, y, None, mask, causal)
    )
    x = residual_twin(
        layer.residual2, x, lambda y: attention_twin(layer.cross_attn, y, memory, memory_mask)
    )
    return residual_twin(layer.residual3, x, lambda y: feed_forward_twin(layer.feed_forward, y))


def stack_twin(stack, twin, x, *rest):
    for layer in stack.layers:
        x = twin(layer, x, *rest)
    return x if stack.norm is None else stack.norm(x)


def transformer_twin(model, src, tgt):
    """A post-norm Transformer with separate vocabularies, the target's tied to out_proj."""

    def embedded(tokens, embedding):
        x = F.one_hot(tokens, embedding.num_embeddings).float() @ embedding.weight
        pos, column = torch.arange(tokens.shape[1])[:, None], torch.arange(E)
        angle = pos / 10000 ** (column // 2 * 2 / E)
        return x * math.sqrt(E) + torch.where(column % 2 == 0, angle.sin(), angle.cos())

    pad = model.pad_id
    seen, own = ((src != pad)[:, None], (tgt != pad)[:, None])
    x = embedded(src, model.src_embedding)
    memory = stack_twin(model.encoder, encoder_layer_twin, x, seen)
    x = embedded(tgt, model.tgt_embedding)
    x = stack_twin(model.decoder, decoder_layer_twin, x, memory, own, seen)
    return F.linear(x, model.tgt_embedding.weight, None)


MASKS = {
    "none": (None, None),
    "padding": (None, SHOWN),
    "matrix": ((torch.arange(N) + torch.arange(N)[:, None]) % 3 != 0, None),
    "all": (torch.rand(B, H, N, N, generator=torch.Generator().manual_seed(3)) > 0.4, SHOWN.int()),
}


def whole(mask, shown):
    """`mask` and `shown` as one mask (B, H, rows, keys), or None."""
    if shown is None:
        return mask
    shown = shown[:, None, None].expand(-1, H, -1, -1) != 0
    return shown if mask is None else mask & shown


@every_backend
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masks", small(list(MASKS), ["all"]))
def test_encoder_layer(name, masks, causal, norm_first, on):
    mask, shown = MASKS[masks]
    layer = drawn(nn.EncoderLayer(E, H, FF, dropout=0.0, norm_first=norm_first))
    x = torch.randn(B, N, E, requires_grad=True)
    found = layer(x, mask, shown, causal=causal)
    expected = encoder_layer_twin(layer, x, whole(mask, shown), causal)
    same([found], [expected], [x, *layer.parameters()])


@every_backend
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", small([False, True], [True]))
def test_decoder_layer(name, norm_first, bias, on):
    """Padding in both sequences and masks of both attentions, all at once."""
    layer = drawn(nn.DecoderLayer(E, H, FF, dropout=0.0, norm_first=norm_first, bias=bias))
    x, memory = (torch.randn(B, n, E, requires_grad=True) for n in (M, N))
    mask, memory_mask = torch.rand(B, M, M) > 0.2, torch.rand(M, N) > 0.3
    found = layer(x, memory, mask, memory_mask, TGT_SHOWN, SHOWN)
    expected = decoder_layer_twin(
        *(layer, x, memory), whole(mask[:, None], TGT_SHOWN), whole(memory_mask, SHOWN)
    )
    same([found], [expected], [x, memory, *layer.parameters()])


@every_backend
@pytest.mark.parametrize("final_norm", small([False, True], [True]))
def test_transformer(name, final_norm, on):
    """From tokens with padding to logits, and the gradient of every parameter."""
    model = nn.Transformer(
        *(11, 9),
        embed_dim=E,
        num_heads=H,
        num_encoder_layers=2,
        num_decoder_layers=1,
        ff_dim=FF,
        dropout=0.0,
        final_norm=final_norm,
        pad_id=0,
    )
    src, tgt = torch.randint(1, 11, (B, N)) * SHOWN, torch.randint(1, 9, (B, M)) * TGT_SHOWN
    found, expected = model(src, tgt), transformer_twin(model, src, tgt)
    assert found.shape == (B, M, 9)
    same([found], [expected], list(model.parameters()))


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


def test_a_step_of_training_lowers_the_loss():
    model = tokens_model(dropout=0.0)
    src, tgt = torch.randint(1, 11, (B, N)) * SHOWN, torch.randint(1, 11, (B, M + 1))

    def loss():
        return F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())

    before = loss()
    before.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    assert loss() < before


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


# --- decoding ----------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("cuts", small([(1, 1, 1, 1, 1), (3, 1, 1), (2, 3)], [(2, 1, 2)]), ids=str)
@pytest.mark.parametrize("norm_first", small([False, True], [False]))
def test_cached_decoding_equals_the_full_pass(name, norm_first, cuts, on):
    model = drawn(tokens_model(norm_first=norm_first)).eval()
    src, tgt = torch.randint(1, 11, (B, N)) * SHOWN, torch.randint(1, 11, (B, M))
    with torch.no_grad():
        full, memory = model(src, tgt), model.encode(src)
        cache = model.decoder.new_cache(M)
        steps = [
            # Only the first call reads the memory: later calls use its cached keys and values.
            model.decode(part, memory if i == 0 else memory * torch.nan, cache=cache, **shown(src))
            for i, part in enumerate(tgt.split(cuts, dim=1))
        ]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=2e-5, atol=5e-6)
    assert cache[0].self_attn.length == M and cache[1].cross_attn.length == N


def shown(src):
    return {"memory_padding_mask": src != 0}


@every_backend
def test_cached_language_model_equals_the_full_pass(name, on):
    """A causal encoder; in one item the first two tokens are padding."""
    encoder = drawn(nn.Encoder(nn.EncoderLayer(E, H, FF), 2)).eval()
    x, padding = torch.randn(B, N, E), torch.arange(N) >= torch.tensor([0, 0, 2])[:, None]
    with torch.no_grad():
        full = encoder(x, padding_mask=padding, causal=True)
        cache, parts = encoder.new_cache(N + 4), []
        for i in range(N):
            seen = padding[:, : i + 1]
            parts.append(encoder(x[:, i : i + 1], padding_mask=seen, causal=True, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=2e-5, atol=5e-6)


def test_a_cache_raises_for_wrong_sizes():
    encoder = nn.Encoder(nn.EncoderLayer(E, H, FF), 1)
    x = torch.randn(B, N, E)
    with torch.no_grad():
        small = encoder.new_cache(N - 1)
        with pytest.raises(ValueError, match="max_len"):
            encoder(x, causal=True, cache=small)
        assert small[0].view() is None  # an error leaves the cache unchanged
        cache = encoder.new_cache(N + 1)
        encoder(x, causal=True, cache=cache)
        with pytest.raises(ValueError, match="another batch"):
            encoder(x[:1, :1], causal=True, cache=cache)
        encoder(x[:, :1], causal=True, cache=cache)
        with pytest.raises(ValueError, match="tokens 8 to 8, expected 0 to 7"):
            encoder(x[:, :1], causal=True, cache=cache)


def test_a_cache_of_another_stack_raises():
    deep, shallow = (nn.Encoder(nn.EncoderLayer(E, H, FF), n) for n in (3, 1))
    x = torch.randn(B, N, E)
    for cache in (shallow.new_cache(N), []):
        with torch.no_grad(), pytest.raises(ValueError, match="expected 3, as this stack's"):
            deep(x, causal=True, cache=cache)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        deep(x, causal=True, cache=deep.new_cache(N))
    with torch.no_grad(), pytest.raises(ValueError, match=r"padding_mask: got shape \(3, 1\)"):
        cache = deep.new_cache(N + 1)
        deep(x, causal=True, cache=cache)
        deep(x[:, :1], padding_mask=torch.ones(B, 1), causal=True, cache=cache)


def test_generation_hides_padding_as_the_full_pass_does():
    """Also if bos_id is pad_id: generation and the full pass then both hide the first token."""
    model = drawn(tokens_model(pad_id=3)).eval()
    src = torch.randint(4, 11, (20, N))
    assert torch.equal(model.generate(src, 6, bos_id=3), greedy(model, src, 6, bos_id=3))


def test_generation_keeps_no_graph():
    model, seen = tokens_model(tied=False).eval(), []
    model.out_proj.register_forward_hook(lambda m, args, out: seen.append(out.requires_grad))
    model.generate(torch.ones(1, 2, dtype=torch.long), 2, bos_id=1)
    assert seen == [False, False]


def greedy(model, src, max_len, bos_id):
    """Greedy tokens, each from a full pass over all tokens before it."""
    tgt = torch.full((len(src), 1), bos_id)
    for _ in range(max_len):
        tgt = torch.cat([tgt, model(src, tgt)[:, -1:].argmax(-1)], 1)
    return tgt[:, 1:]


@pytest.mark.parametrize("norm_first", [False, True])
def test_generation_is_greedy(norm_first):
    model = tokens_model(norm_first=norm_first, tied=False, pad_id=10).eval()
    drawn(model.out_proj)
    src = torch.randint(1, 10, (6, N)).masked_fill(torch.arange(N) > 4, 10)
    free = greedy(model, src, 9, bos_id=1)
    assert torch.equal(model.generate(src, 9, bos_id=1), free)
    eos = int(free[:, 2].mode().values)
    found = model.generate(src, 9, bos_id=1, eos_id=eos)
    for row, whole in zip(found, free):
        ends = (whole == eos).nonzero()
        end = int(ends[0]) if len(ends) else 9
        assert torch.equal(row[:end], whole[:end][: len(row)]) and (row[end:] == eos).all()
    alike = src[:1].expand(2, -1)  # both items end at the same token, and so does generation
    eos = int(model.generate(alike, 3, bos_id=1)[0, 2])
    found = model.generate(alike, 50, bos_id=1, eos_id=eos)
    assert found.shape[1] <= 3 and (found[:, -1] == eos).all() and not found.requires_grad
    assert model.generate(src, 0, bos_id=1).shape == (6, 0)


# --- weights -----------------------------------------------------------------------------------


def test_weights_are_recorded_inside_alone():
    model = tokens_model(dropout=0.0)
    src, tgt = torch.randint(1, 11, (B, N)) * SHOWN, torch.randint(1, 11, (B, M))
    with nn.record_weights(model) as weights:
        inside = model(src, tgt)
    found = {name: tuple(x.shape) for name, x in weights.items()}
    assert found == {
        f"{where}.layers.{i}.{what}": shape
        for i in range(2)
        for where, what, shape in (
            ("encoder", "self_attn", (B, H, N, N)),
            ("decoder", "self_attn", (B, H, M, M)),
            ("decoder", "cross_attn", (B, H, M, N)),
        )
    }
    cross, own = (weights[f"decoder.layers.1.{x}_attn"] for x in ("cross", "self"))
    torch.testing.assert_close(cross.sum(-1), torch.ones(B, H, M))
    assert not cross.masked_select(~SHOWN[:, None, None]).any() and not own.triu(1).any()
    assert torch.equal(model(src, tgt), inside)
    assert not any(x.requires_grad for x in weights.values())
    weights.clear()
    model(src, tgt)
    assert not weights


def test_recordings_nest_and_end_with_an_error():
    model, src = tokens_model(), torch.randint(1, 11, (B, N))
    with nn.record_weights(model) as outer:
        with pytest.raises(KeyError), nn.record_weights(model.encoder) as inner:
            copied = copy.deepcopy(model)
            model(src, src)
            raise KeyError
        assert len(inner) == 2 and len(outer) == 6
        before = dict(inner)
        outer.clear()
        model(src, src)
        copied(src, src)
    assert len(outer) == 6 and all(inner[name] is x for name, x in before.items())


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


@pytest.mark.parametrize("masks", ["none", "padding", "both", "causal"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("itself", [False, True])
def test_attention_is_torchs(itself, bias, masks):
    """Self-attention and cross-attention with the state_dict of torch's module."""
    theirs = drawn(torch.nn.MultiheadAttention(E, H, bias=bias, batch_first=True))
    ours = nn.CachedAttention(E, H, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, E, requires_grad=True)
    memory = x if itself else torch.randn(B, N, E, requires_grad=True)
    mask = torch.rand(N, N) > 0.3 if masks == "both" else None
    mask = torch.ones(N, N, dtype=torch.bool).tril() if masks == "causal" else mask
    shown = SHOWN if masks in ("padding", "both") else None
    expected, _ = theirs(
        *(x, memory, memory),
        attn_mask=None if mask is None else ~mask,
        key_padding_mask=None if shown is None else ~shown,
    )
    merged = whole(mask, shown)
    causal = itself and masks == "causal"
    found = ours(x, None if itself else memory, None if causal else merged, causal=causal)
    real = expected.isfinite().all(-1)  # torch gives NaN for a row without keys
    assert real.sum() > B
    leaves = [x, memory, *theirs.parameters()] if real.all() else []
    torch.testing.assert_close(found[real], expected[real], rtol=2e-5, atol=5e-6)
    if leaves:
        grads = torch.autograd.grad(expected.square().sum(), leaves)
        leaves = [x, memory, *ours.parameters()]
        for a, b in zip(torch.autograd.grad(found.square().sum(), leaves), grads):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(f"{v}" for v in o.values()))
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
        for x, y in zip(found, grads):
            torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)
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
