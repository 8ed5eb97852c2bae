"""torch's modes, tracers, autocast, generator, checkpoints and hooks around a call."""

import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.backends import base
from tests.support.torch_calls import close, inputs, rand

pytestmark = pytest.mark.usefixtures("one_thread")  # threads would only wait for each other


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


def test_lazily_negated_inputs_are_read_right(attention):
    z = torch.complex(*inputs(Hk=4, M=7, Dv=3)[1:])
    x = z.conj().imag
    assert x.is_neg()
    close(attention(x, x, x), attention(*(x.resolve_neg(),) * 3))


def test_parameters_and_inference_mode(attention):
    q, k, v = inputs()
    close(attention(torch.nn.Parameter(q), k, v), attention(q, k, v))
    with torch.inference_mode():
        inside = attention(q, k, v)
    close(inside.clone(), attention(q, k, v))
    attention(q.requires_grad_(), k, v).sum().backward()


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


# ----------------------------------------------------------------------------------------- the seed


def test_manual_seed_repeats_and_only_dropout_draws(attention):
    q, k, v = inputs()
    torch.manual_seed(3)
    first = attention(q, k, v, dropout_p=0.5)
    assert not first.equal(attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(3)
    assert first.equal(attention(q, k, v, dropout_p=0.5))
    state = torch.get_rng_state()
    attention(q, k, v)
    attention(q, k, v, dropout_p=0.5, seed=1)
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, 2**63 + 12345, 2**64 - 1, -(2**63)])
def test_a_seed_is_64_bits_in_any_form(attention, seed):
    q, k, v = inputs()
    as_int = attention(q, k, v, dropout_p=0.5, seed=seed)
    signed = seed - 2**64 if seed >= 2**63 else seed
    as_tensor = attention(q, k, v, dropout_p=0.5, seed=torch.tensor(signed))
    assert as_int.equal(as_tensor)
    close(as_int, fastattn.reference.attention(q, k, v, dropout_p=0.5, seed=seed))


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
