"""torch's modes, tracers, autocast, generator, hooks and torch.func around a call."""

import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.backends import base
from tests.support.torch_calls import close, everything, inputs, rand

# ----------------------------------------------------------------------------- modes and subclasses


def test_modes_see_the_operator_and_fakes_compute_nothing(attention):
    q, k, v = inputs(dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        leaf = q.clone().requires_grad_()
        attention(leaf, k, v).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    by_name = {str(op): n for op, n in counts.items()}
    assert by_name["fastattn.attention"] == 2 * 2 * 4 * 5 * 7 * (3 + 4)
    assert by_name["fastattn.attention_backward"] == 2 * 2 * 4 * 5 * 7 * (3 * 3 + 2 * 4)

    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        out, lse = attention(*fakes, return_lse=True)
    assert out.shape == (2, 4, 5, 4) and lse.shape == (2, 4, 5)
    assert out.transpose(1, 2).is_contiguous()
    meta = attention(*(x.to("meta") for x in (q, k, v)))
    assert meta.is_meta and meta.shape == (2, 4, 5, 4)


def test_make_fx_and_jit_trace_record_a_call(attention):
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = inputs(dtype=torch.float32)

    def f(q, k, v):
        return attention(q, k, v, causal=True)

    other = q + 1
    graph = make_fx(f)(q, k, v)
    close(graph(other, k, v), f(other, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(f, (q, k, v))
    close(traced(other, k, v), f(other, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_sdpa(attention, dtype):
    q, k, v = (x.requires_grad_() for x in inputs(Hk=4, Dv=3, dtype=torch.float32))
    mask = rand(5, 7, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(q, k, v, mask=mask)
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        doubles = attention(q.double(), k.double(), v.double())
        mixed = attention(q, k.to(dtype), v.half())
    assert out.dtype == theirs.dtype == mixed.dtype == dtype and doubles.dtype == torch.float64
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_backward_inside_autocast_is_not_rounded(attention):
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float32))
    out = attention(q, k, v)
    outside = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu"):
        inside = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(a.equal(b) for a, b in zip(inside, outside))


def test_autocast_does_not_reach_into_the_oracle():
    q, k, v = inputs(dtype=torch.float32)
    plain = fastattn.reference.attention(q, k, v)
    with torch.autocast("cpu"):
        assert fastattn.reference.attention(q, k, v).equal(plain)


def test_a_given_seed_draws_nothing(attention):
    q, k, v = inputs()
    state = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.5, seed=1)
    assert state.equal(torch.get_rng_state())


def test_every_backend_is_registered_in_order_of_preference():
    assert base.names()[-1] == "reference" and base.names()[0] == "cpu"


# ----------------------------------------------------- checkpointing and hooks on saved tensors


def test_saved_tensors_are_unpacked_once_each(attention):
    packed, unpacked = [], []
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(1) or x, lambda x: unpacked.append(1) or x
    )
    with hooks:
        out = fastattn.attention(q, k, v, backend=attention.backend)
    out.sum().backward()
    assert len(packed) == len(unpacked) == 5


# --------------------------------------------------------------------------------------- torch.func


MAPPED = ("q", "k", "v", "mask", "key_lengths", "alibi_slopes", "sinks")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("names", [MAPPED, MAPPED[:3], *((n,) for n in MAPPED)], ids="+".join)
def test_vmap_over_any_tensor(attention, names, dropout_p):
    q, k, v = inputs()
    given = dict(q=q, k=k, v=v, **everything(dropout_p=dropout_p))
    stacked, dims = {}, {}
    for at, name in enumerate(names):
        x = given[name]
        others = [x.clamp(max=5), x] if x.dtype == torch.int64 else [x * 0.5, x + 0.25]
        dims[name] = at % (x.ndim + 1)  # the new dimension at various positions
        stacked[name] = torch.stack([x, *others], dim=dims[name])

    def one(chosen):
        call = given | chosen
        return attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)

    each = [one({n: x.select(dims[n], i) for n, x in stacked.items()}) for i in range(3)]
    close(vmap(one, in_dims=(dims,))(stacked), torch.stack(each))


def test_vmap_of_weights_and_their_gradient(attention):
    q, k, _ = inputs()
    qs = torch.stack([q, 2 * q])

    def weights(q):
        return fastattn.attention_weights(q, k, causal=True, backend=attention.backend)

    close(vmap(weights)(qs), torch.stack([weights(q) for q in qs]))
    f = grad(lambda q: weights(q).square().sum())
    close(vmap(f)(qs), torch.stack([f(q) for q in qs]))


def test_vmap_with_a_drawn_seed_follows_the_randomness_flag(attention):
    q, k, v = inputs()
    qs = torch.stack([q, q])

    def drop(q):
        return attention(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="random"):
        vmap(drop)(qs)
    a, b = vmap(drop, randomness="same")(qs)
    assert a.equal(b)
    a, b = vmap(drop, randomness="different")(qs)
    assert not a.equal(b)
