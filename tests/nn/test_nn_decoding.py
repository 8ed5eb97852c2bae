"""Decoding with a cache equals the full pass; generation; weights recorded on the way."""

import copy

import pytest
import torch

from fastattn import nn
from tests.nn.test_nn_transformer import FF, SHOWN, B, E, H, M, N, drawn, tokens_model
from tests.support.backends import every_backend, small

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


@pytest.mark.parametrize("by", ("memory", "in_proj_weight", "in_proj_bias"))
def test_a_memory_that_is_kept_has_no_gradient(by):
    """The first call, without gradients, keeps its keys; one that would need theirs raises."""
    attention, x = nn.CachedAttention(E, H), torch.randn(B, 1, E)
    given = dict(attention.named_parameters()) | dict(memory=torch.randn(B, N, E))
    attention.requires_grad_(False)
    cache = nn.KeyValueCache()
    with torch.no_grad():
        expected = attention(x, given["memory"], cache=cache)
    assert torch.equal(attention(x, given["memory"], cache=cache), expected)
    given[by].requires_grad_()
    with pytest.raises(ValueError, match=rf"{by}: got a tensor that requires grad.*no_grad\(\)"):
        attention(x, given["memory"], cache=cache)


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
