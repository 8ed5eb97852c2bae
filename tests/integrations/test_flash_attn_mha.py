"""`fastattn.flash_attn.mha` equals flash-attn 2.8's modules: an oracle in float64 that reads their
parameters by name, forward, backward, packed and in generation."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from fastattn.flash_attn import mha
from tests.support import flash_attn_oracle as oracle

B, N, H, HK, D = 2, 7, 4, 2, 8
E = H * D
CU = torch.tensor([0, 7, 8, 14], dtype=torch.int32)
SLOPES = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])  # of four heads

SIGNATURES = {
    mha.FlashSelfAttention: "causal softmax_scale attention_dropout window_size alibi_slopes "
    "deterministic",
    mha.FlashCrossAttention: "causal softmax_scale attention_dropout alibi_slopes window_size "
    "deterministic",
    mha.SelfAttention: "causal softmax_scale attention_dropout",
    mha.CrossAttention: "causal softmax_scale attention_dropout",
    mha.MHA: "embed_dim num_heads num_heads_kv cross_attn qkv_proj_bias out_proj_bias dropout "
    "softmax_scale causal layer_idx dwconv rotary_emb_dim rotary_emb_base rotary_emb_scale_base "
    "rotary_emb_interleaved use_alibi window_size fused_bias_fc use_flash_attn return_residual "
    "checkpointing device dtype",
    mha.FlashSelfAttention.forward: "self qkv causal cu_seqlens max_seqlen",
    mha.FlashCrossAttention.forward: "self q kv causal cu_seqlens max_seqlen cu_seqlens_k "
    "max_seqlen_k",
    mha.SelfAttention.forward: "self qkv causal key_padding_mask",
    mha.CrossAttention.forward: "self q kv causal key_padding_mask",
    mha.MHA.forward: "self x x_kv key_padding_mask cu_seqlens max_seqlen mixer_subset "
    "inference_params kwargs",
    mha.MHA.allocate_inference_cache: "self batch_size max_seqlen dtype",
}


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_arguments_have_flash_attns_order(call):
    assert list(inspect.signature(call).parameters) == SIGNATURES[call].split()


def random(*shape, seed=0):
    g = torch.Generator().manual_seed(seed + len(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def agree(call, expected, leaves):
    got, wanted = call(), expected()
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    weights = random(*wanted.shape, seed=77)
    gradients = [torch.autograd.grad((y * weights).sum(), leaves) for y in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12, 16])
def test_slopes(heads):
    """2^(-8/H), 2^(-16/H), ..., then every second slope of twice as many heads."""

    def powers(n):
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    power = 2 ** int(math.log2(heads))
    wanted = powers(power) + powers(2 * power)[::2][: heads - power]
    slopes = mha.get_alibi_slopes(heads)
    assert isinstance(slopes, list) and slopes == pytest.approx(wanted, rel=1e-6)


# ----------------------------------------------------------------------------- inner modules

FLASH = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(2, 1)),
    "alibi": dict(causal=True, alibi_slopes=SLOPES),
    "scale": dict(softmax_scale=0.3, deterministic=True),
}
every_flash = pytest.mark.parametrize("name", FLASH)


def of_oracle(arguments):
    return {key: x for key, x in arguments.items() if key != "deterministic"}


@every_flash
def test_flash_self_attention(name):
    module, given = mha.FlashSelfAttention(**FLASH[name]), of_oracle(FLASH[name])
    qkv, flat = random(B, N, 3, H, D).requires_grad_(), random(14, 3, H, D).requires_grad_()
    agree(lambda: module(qkv), lambda: oracle.dense(*qkv.unbind(2), **given)[0], [qkv])
    agree(
        lambda: module(flat, cu_seqlens=CU, max_seqlen=7),
        lambda: oracle.varlen(*flat.unbind(1), CU, CU, **given)[0],
        [flat],
    )
    changed = given | dict(causal=not given.get("causal", False))
    wanted = oracle.dense(*qkv.unbind(2), **changed)[0]
    torch.testing.assert_close(module(qkv, causal=changed["causal"]), wanted)


@every_flash
def test_flash_cross_attention(name):
    module, given = mha.FlashCrossAttention(**FLASH[name]), of_oracle(FLASH[name])
    q, kv = random(B, 5, H, D).requires_grad_(), random(B, N, 2, HK, D).requires_grad_()
    agree(lambda: module(q, kv), lambda: oracle.dense(q, *kv.unbind(2), **given)[0], [q, kv])
    cu_q = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    rows, pairs = random(9, H, D).requires_grad_(), random(14, 2, HK, D).requires_grad_()
    agree(
        lambda: module(rows, pairs, cu_seqlens=cu_q, max_seqlen=5, cu_seqlens_k=CU, max_seqlen_k=7),
        lambda: oracle.varlen(rows, *pairs.unbind(1), cu_q, CU, **given)[0],
        [rows, pairs],
    )


PADDING = {
    "none": None,
    "right": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0]],
}


def masked(q, k, v, kept, scale=None, mask=None):
    """Softmax attention of q (B,M,H,D) to the keys where mask is True; empty rows are 0."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    mask = torch.ones(1, 1, dtype=torch.bool) if mask is None else mask
    mask = mask if kept is None else mask & kept[:, None, None]
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhmn,bnhd->bmhd", weights, v)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", PADDING)
def test_self_attention(name, causal):
    kept = None if PADDING[name] is None else torch.tensor(PADDING[name]).bool()
    module, qkv = mha.SelfAttention(causal, softmax_scale=0.3), random(B, N, 3, H, D)
    mask = torch.ones(N, N, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    agree(
        lambda: module(qkv, key_padding_mask=kept),
        lambda: masked(*qkv.unbind(2), kept, 0.3, mask),
        [qkv.requires_grad_()],
    )
    wanted = masked(*qkv.unbind(2), kept, 0.3, torch.ones(N, N).tril().bool())
    torch.testing.assert_close(module(qkv, True, kept), wanted)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [3, N, N + 2])
@pytest.mark.parametrize("name", PADDING)
def test_cross_attention(name, rows, causal):
    """The last row is aligned with as many keys as count."""
    kept = None if PADDING[name] is None else torch.tensor(PADDING[name]).bool()
    module, q, kv = mha.CrossAttention(causal), random(B, rows, H, D), random(B, N, 2, HK, D)
    count = torch.full((B,), N) if kept is None else kept.sum(-1)
    last = torch.arange(rows)[:, None] + count[:, None, None, None] - rows
    mask = torch.arange(N) <= last if causal else None
    agree(
        lambda: module(q, kv, key_padding_mask=kept),
        lambda: masked(q, *kv.unbind(2), kept, mask=mask),
        [q.requires_grad_(), kv.requires_grad_()],
    )


@pytest.mark.parametrize(
    "kind", [mha.FlashSelfAttention, mha.FlashCrossAttention, mha.SelfAttention, mha.CrossAttention]
)
def test_dropout_is_for_training(kind):
    module = kind(attention_dropout=0.5)
    assert module.drop.p == 0.5 and not module.state_dict()
    q, kv = random(B, N, H, D), random(B, N, 2, H, D)
    given = (q, kv) if "Cross" in kind.__name__ else (torch.cat([q[:, :, None], kv], 2),)
    wanted = oracle.dense(q, *kv.unbind(2))[0]
    torch.testing.assert_close(module.eval()(*given), wanted)
    assert not torch.allclose(module.train()(*given), wanted)


@pytest.mark.parametrize("kind", [mha.FlashSelfAttention, mha.FlashCrossAttention])
def test_slopes_are_a_buffer_that_checkpoints_do_not_have(kind):
    module = kind(alibi_slopes=SLOPES.bfloat16())
    assert [name for name, _ in module.named_buffers()] == ["alibi_slopes"]
    assert not module.state_dict()
    q, kv = random(B, N, H, D), random(B, N, 2, H, D)
    given = (q, kv) if kind is mha.FlashCrossAttention else (torch.cat([q[:, :, None], kv], 2),)
    wanted = oracle.dense(q, *kv.unbind(2), alibi_slopes=SLOPES)[0]
    torch.testing.assert_close(module(*given), wanted)


# ----------------------------------------------------------------------------- MHA

LAYERS = {
    "plain": {},
    "causal": dict(causal=True, softmax_scale=0.2),
    "grouped": dict(causal=True, num_heads_kv=HK),
    "rotary": dict(causal=True, rotary_emb_dim=D, rotary_emb_base=100.0),
    "rotary_grouped": dict(
        num_heads_kv=1, rotary_emb_dim=4, rotary_emb_interleaved=True, qkv_proj_bias=False
    ),
    "xpos": dict(causal=True, rotary_emb_dim=D, rotary_emb_scale_base=8),
    "cross": dict(cross_attn=True, num_heads_kv=HK, out_proj_bias=False),
}
OF_FLASH = {
    "alibi": dict(causal=True, use_alibi=True),
    "alibi_grouped": dict(causal=True, use_alibi=True, num_heads_kv=HK, rotary_emb_dim=D),
    "window": dict(causal=True, window_size=(2, 0), num_heads_kv=HK, rotary_emb_dim=4),
}
EVERY = [(name, False) for name in LAYERS] + [(name, True) for name in LAYERS | OF_FLASH]
every_layer = pytest.mark.parametrize(
    "name, flash", EVERY, ids=[f"{name}-{'flash' if flash else 'plain'}" for name, flash in EVERY]
)


def layer_of(name, flash, **more):
    torch.manual_seed(0)
    return mha.MHA(E, H, use_flash_attn=flash, **(LAYERS | OF_FLASH)[name], **more).double()


def table(given, positions):
    """cos and sin of queries, and of keys, by the definitions of RoPE and xPos."""
    dim, base = given["rotary_emb_dim"], given.get("rotary_emb_base", 10000.0)
    pairs = torch.arange(0, dim, 2, dtype=torch.float64)
    at = torch.arange(positions, dtype=torch.float64)[:, None]
    angle, scale = at * base ** -(pairs / dim), torch.ones(1)
    if "rotary_emb_scale_base" in given:
        power = (at - positions // 2) / given["rotary_emb_scale_base"]
        scale = ((pairs + 0.4 * dim) / (1.4 * dim)) ** power
    return (angle.cos() * scale, angle.sin() * scale), (angle.cos() / scale, angle.sin() / scale)


def expected(layer, x, name, x_kv=None, positions=None):
    """A layer's output by its parameters."""
    own, given = dict(layer.named_parameters()), (LAYERS | OF_FLASH)[name]

    def projected(x, name):
        y = x @ own[f"{name}.weight"].T
        return y + own[f"{name}.bias"] if f"{name}.bias" in own else y

    keys = given.get("num_heads_kv", H)
    if given.get("cross_attn"):
        q = projected(x, "Wq")
        k, v = projected(x if x_kv is None else x_kv, "Wkv").split(keys * D, -1)
    else:
        q, k, v = projected(x, "Wqkv").split([E, keys * D, keys * D], -1)
    q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
    if given.get("rotary_emb_dim"):
        n, interleaved = x.shape[1], given.get("rotary_emb_interleaved", False)
        of_q, of_k = table(given, positions or n)
        last = torch.arange(n), interleaved
        q = torch.stack([oracle.turned(y, *of_q, *last) for y in q])
        k = torch.stack([oracle.turned(y, *of_k, *last) for y in k])
    arguments = {a: given[a] for a in ("causal", "softmax_scale", "window_size") if a in given}
    if given.get("use_alibi"):
        arguments["alibi_slopes"] = SLOPES
    return projected(oracle.dense(q, k, v, **arguments)[0].flatten(2), "out_proj")


def near(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # angles are float32


@every_layer
def test_layer(name, flash):
    layer, x = layer_of(name, flash), random(B, N, E).requires_grad_()
    got, wanted = layer(x), expected(layer, x, name)
    near(got, wanted)
    leaves, weights = [x, *layer.parameters()], random(B, N, E, seed=5)
    near(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (got, wanted)))


NAMES = {
    "plain": dict(Wqkv=(3 * E, E), out_proj=(E, E)),
    "grouped": dict(Wqkv=(E + 2 * HK * D, E), out_proj=(E, E)),
    "rotary_grouped": dict(Wqkv=(E + 2 * D, E), out_proj=(E, E)),
    "cross": dict(Wq=(E, E), Wkv=(2 * HK * D, E), out_proj=(E, E)),
    "alibi": dict(Wqkv=(3 * E, E), out_proj=(E, E)),
}
NO_BIAS = {("rotary_grouped", "Wqkv"), ("cross", "out_proj")}


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_flash_attns_names(name):
    wanted = {f"{x}.weight": shape for x, shape in NAMES[name].items()}
    with_bias = {x: n for x, (n, _) in NAMES[name].items() if (name, x) not in NO_BIAS}
    wanted |= {f"{x}.bias": (n,) for x, n in with_bias.items()}
    layer = layer_of(name, flash=True)
    assert {x: tuple(y.shape) for x, y in layer.state_dict().items()} == wanted
    assert isinstance(layer.inner_attn, mha.FlashSelfAttention)
    assert isinstance(layer.inner_cross_attn, mha.FlashCrossAttention)
    layer.load_state_dict({x: torch.zeros(shape) for x, shape in wanted.items()})
    made = mha.MHA(E, H, device="meta", dtype=torch.float16)
    assert {(x.device.type, x.dtype) for x in made.parameters()} == {("meta", torch.float16)}


@pytest.mark.parametrize("name", ["plain", "rotary_grouped"])
def test_checkpointing_and_the_residual(name):
    layer, x = layer_of(name, True, checkpointing=True, return_residual=True), random(B, N, E)
    got, same = layer(x.requires_grad_())
    assert same is x
    wanted = expected(layer, x, name)
    near(got, wanted)
    leaves = [x, *layer.parameters()]
    near(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, wanted)))


def test_packed_sequences():
    x = random(14, E)
    layer = layer_of("causal", True)
    wanted = [expected(layer, x[i:j][None], "causal")[0] for i, j in ((0, 7), (7, 8), (8, 14))]
    near(layer(x, cu_seqlens=CU, max_seqlen=7), torch.cat(wanted))
    layer = layer_of("grouped", True)
    wanted = [expected(layer, x[i:j][None], "grouped")[0] for i, j in ((0, 7), (7, 8), (8, 14))]
    of_keys = dict(cu_seqlens_k=CU, max_seqlen_k=7)
    near(layer(x, cu_seqlens=CU, max_seqlen=7, **of_keys), torch.cat(wanted))


@pytest.mark.parametrize("name", ["causal", "grouped", "rotary", "rotary_grouped"])
def test_padding(name):
    """Tokens before the padding are as without it."""
    layer, x = layer_of(name, False), random(B, N, E)
    kept = torch.tensor(PADDING["right"]).bool()
    got = layer(x, key_padding_mask=kept)
    for b, n in enumerate(kept.sum(-1).tolist()):
        near(got[b, :n], expected(layer, x[b : b + 1, :n], name)[0])


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
def test_other_keys_and_a_subset_of_queries(flash):
    layer, x, x_kv = layer_of("cross", flash), random(B, N, E), random(B, 4, E, seed=8)
    near(layer(x, x_kv), expected(layer, x, "cross", x_kv))
    first = layer(x, mixer_subset=slice(0, 1))
    near(first, expected(layer, x[:, :1], "cross", x))


def test_arguments_of_the_inner_module():
    layer, x = layer_of("plain", True), random(B, N, E)
    causal = layer_of("causal", True)
    causal.inner_attn.softmax_scale = None
    assert torch.equal(layer(x, causal=True), causal(x))


# ----------------------------------------------------------------------------- generation


def generation(batch=B, **more):
    given = dict(max_seqlen=16, max_batch_size=batch, seqlen_offset=0, batch_size_offset=0)
    given |= dict(key_value_memory_dict={}, lengths_per_sample=None)
    return SimpleNamespace(**(given | more))


GENERATING = [(name, flash) for name, flash in EVERY if name not in ("plain", "cross")]
GENERATING = [x for x in GENERATING if x[0] != "rotary_grouped"]  # not causal


@torch.no_grad()
@pytest.mark.parametrize(
    "name, flash", GENERATING, ids=[f"{x}-{'flash' if y else 'plain'}" for x, y in GENERATING]
)
def test_steps_continue_the_sequence(name, flash):
    layer, x, caches = layer_of(name, flash, layer_idx=3), random(B, N, E), generation()
    wanted = expected(layer, x, name, positions=16)
    for begin, end in ((0, 3), (3, 4), (4, 6), (6, 7)):
        caches.seqlen_offset = begin
        near(layer(x[:, begin:end], inference_params=caches), wanted[:, begin:end])
    (cache,) = caches.key_value_memory_dict.values()
    assert cache.shape == (B, 16, 2, layer.num_heads_kv, D) and 3 in caches.key_value_memory_dict


@torch.no_grad()
def test_sequences_of_different_lengths():
    name = "alibi_grouped"
    layer, x = layer_of(name, True, layer_idx=0), random(B, N, E)
    caches = generation(key_value_memory_dict={0: layer.allocate_inference_cache(B, 16)})
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    for b, n in enumerate(lengths.tolist()):
        caches.batch_size_offset = b
        layer(x[b : b + 1, :n], inference_params=caches)
    caches.batch_size_offset, caches.seqlen_offset, caches.lengths_per_sample = 0, 5, lengths
    step = torch.stack([x[b, n] for b, n in enumerate(lengths.tolist())])[:, None]
    got = layer(step, inference_params=caches)
    for b, n in enumerate(lengths.tolist()):
        near(got[b], expected(layer, x[b : b + 1, : n + 1], name)[0, -1:])


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
def test_a_batch_after_the_first_items(flash):
    layer, x = layer_of("rotary", flash, layer_idx=0), random(1, N, E)
    caches = generation(batch=3, batch_size_offset=2)
    layer(x[:, :6], inference_params=caches)
    caches.seqlen_offset = 6
    got = layer(x[:, 6:], inference_params=caches)
    near(got, expected(layer, x, "rotary")[:, 6:])


# ----------------------------------------------------------------------------- errors

MADE = {
    "dwconv": (dict(dwconv=True), "dwconv: got True"),
    "num_heads": (dict(num_heads=5), "num_heads: got 5, expected a divisor of 32"),
    "num_heads_kv": (dict(num_heads_kv=3), "num_heads_kv: got 3, expected a divisor of 4"),
    "rotary_cross": (dict(cross_attn=True, rotary_emb_dim=8), "rotary_emb_dim: got 8 with cross"),
    "alibi": (dict(use_alibi=True), "use_alibi: got it without use_flash_attn"),
    "window": (dict(window_size=(3, 0)), "window_size: got it without use_flash_attn"),
}


@pytest.mark.parametrize("name", MADE)
def test_layers_that_cannot_be_made(name):
    given, message = MADE[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        mha.MHA(**(dict(embed_dim=E, num_heads=H) | given))


X, KEPT = random(B, N, E), torch.ones(B, N, dtype=torch.bool)
CALLED = {
    "x_kv": ("plain", True, dict(x_kv=X), "x_kv: got it without cross_attn"),
    "subset": ("plain", True, dict(mixer_subset=0), "mixer_subset: got it without cross_attn"),
    "packed": ("plain", False, dict(cu_seqlens=CU, max_seqlen=7), "without use_flash_attn"),
    "packed_rotary": ("rotary", True, dict(cu_seqlens=CU, max_seqlen=7), "with rotary_emb_dim"),
    "no_max": ("plain", True, dict(cu_seqlens=CU), "max_seqlen: got None beside cu_seqlens"),
    "padding": ("plain", True, dict(key_padding_mask=KEPT), "key_padding_mask: got it with use_"),
    "no_layer_idx": (
        "plain",
        True,
        dict(inference_params=generation()),
        "layer_idx: got None beside inference_params, expected an int",
    ),
    "padding_dtype": ("plain", False, dict(key_padding_mask=KEPT.int()), "expected torch.bool"),
    "padding_shape": (
        "plain",
        False,
        dict(key_padding_mask=KEPT[:1]),
        r"key_padding_mask: got shape \(1, 7\), expected \(2, 7\)",
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_calls_that_do_not_fit_the_layer(name):
    layer, flash, given, message = CALLED[name]
    with pytest.raises(ValueError, match=message):
        layer_of(layer, flash)(X, **given)


def test_calls_that_do_not_fit_the_caches():
    layer = layer_of("rotary", True, layer_idx=0)
    with pytest.raises(ValueError, match="max_batch_size: got 1 in inference_params, expected at"):
        layer(X, inference_params=generation(batch=1))
    with pytest.raises(ValueError, match="kwargs: got causal beside inference_params"):
        layer(X, inference_params=generation(), causal=False)
    with pytest.raises(ValueError, match="max_seqlen: got 6 in inference_params, expected at lea"):
        layer_of("causal", True, layer_idx=0)(X, inference_params=generation(max_seqlen=6))
    with pytest.raises(ValueError, match="cu_seqlens_k: got None beside cu_seqlens"):
        layer_of("grouped", True)(X[0], cu_seqlens=torch.tensor([0, 7]), max_seqlen=7)
    with pytest.raises(TypeError):
        layer_of("plain", True)(X, attention_mask=None)


def params(lengths=None, offset=0):
    return SimpleNamespace(
        key_value_memory_dict={},
        max_seqlen=9,
        max_batch_size=4,
        seqlen_offset=offset,
        batch_size_offset=0,
        lengths_per_sample=lengths,
    )


@pytest.mark.parametrize("use_flash_attn", [False, True])
def test_a_step_without_a_cache_raises(use_flash_attn):
    layer = mha.MHA(32, 4, causal=True, layer_idx=0, use_flash_attn=use_flash_attn)
    with pytest.raises(ValueError, match="seqlen_offset: got 3 without a cache of layer 0"):
        layer(torch.randn(2, 1, 32), inference_params=params(offset=3))


@torch.no_grad()
@pytest.mark.parametrize("rotated", [0, 8])
def test_lengths_of_a_larger_batch(rotated):
    """Of which lengths_per_sample may have more than the batch. Without use_flash_attn they raise:
    a step is written at one place."""
    given = dict(causal=True, layer_idx=0, rotary_emb_dim=rotated)
    layer, plain = (mha.MHA(32, 4, use_flash_attn=x, **given) for x in (True, False))
    x, lengths = torch.randn(2, 6, 32), torch.tensor([3, 5, 1, 2], dtype=torch.int32)
    state = params()
    layer(x[:, :5], inference_params=state)
    state.seqlen_offset, state.lengths_per_sample = 5, lengths
    out = layer(x[:, 5:], inference_params=state)
    for b, n in enumerate(lengths[:2].tolist()):
        tokens = torch.cat((x[b : b + 1, :n], x[b : b + 1, 5:]), 1)
        torch.testing.assert_close(out[b, 0], layer(tokens)[0, -1])
    state = params()
    plain(x[:, :5], inference_params=state)
    state.seqlen_offset, state.lengths_per_sample = 5, lengths
    with pytest.raises(ValueError, match=r"lengths_per_sample: got .3, 5., expected 5"):
        plain(x[:, 5:], inference_params=state)


@pytest.mark.slow
@pytest.mark.parametrize("use_flash_attn", [False, True])
def test_one_graph_for_any_length(use_flash_attn):
    layer = mha.MHA(32, 4, causal=True, rotary_emb_dim=8, use_flash_attn=use_flash_attn)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for length in (5, 7, 9):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(compiled(x), layer(x))
