"""flash-attn's private passes, which other libraries import: those of fastattn compute what
`flash_attn_func` and autograd compute, and diffusers runs on them."""

import importlib.util
import inspect
import subprocess
import sys

import pytest
import torch

import fastattn
from fastattn import flash_attn as fa
from fastattn.flash_attn import passes

H, HK, D, DV = 4, 2, 8, 6
SCALE = 0.4
SLOPES = torch.tensor([0.5, 0.1, 0.25, 1.0])
OPTIONS = {  # dropout_p, causal, window, softcap, slopes
    "plain": (0.0, False, (-1, -1), 0.0, None),
    "causal": (0.0, True, (-1, -1), 0.0, None),
    "window": (0.0, False, (7, 3), 0.0, None),
    "dropout": (0.4, False, (-1, -1), 0.0, None),
    "everything": (0.3, True, (9, 0), 1.5, SLOPES),
}


def drawn(*shapes, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*x, generator=g, dtype=torch.float64).to(dtype) for x in shapes]


def passed(options):
    """The arguments of `_flash_attn_forward` after q, k and v."""
    dropout_p, causal, window, softcap, slopes = options
    return dropout_p, SCALE, causal, *window, softcap, slopes


def public(options):
    dropout_p, causal, window_size, softcap, alibi_slopes = options
    named = dict(causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes)
    return dict(dropout_p=dropout_p, softmax_scale=SCALE, return_attn_probs=True, **named)


def judged(found, whole, tensors, dout, backward):
    """out and LSE equal those of `whole`, and so do the gradients that `backward` writes."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.manual_seed(1)
    out, lse, S_dmask = whole(*leaves)
    torch.testing.assert_close(found[0], out.detach())
    torch.testing.assert_close(found[1], lse.detach())
    assert found[2].numel() == 0 if S_dmask is None else found[2].equal(S_dmask)
    rooms = [torch.full_like(x, torch.nan) for x in tensors]
    sums = backward(rooms)
    torch.testing.assert_close(rooms, torch.autograd.grad(out, leaves, dout))
    torch.testing.assert_close(sums.transpose(-1, -2), (dout * out.detach()).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name, dtype):
    options = OPTIONS[name]
    *tensors, dout = drawn(
        (2, 9, H, D), (2, 13, HK, D), (2, 13, HK, DV), (2, 9, H, DV), dtype=dtype
    )
    torch.manual_seed(1)
    found = passes._flash_attn_forward(*tensors, *passed(options), True)

    def backward(rooms):
        given = dout, *tensors, *found[:2], *rooms, *passed(options), False, found[3]
        return passes._flash_attn_backward(*given)

    if dtype == torch.float64:
        judged(found, lambda *x: fa.flash_attn_func(*x, **public(options)), tensors, dout, backward)
    else:  # dtypes and finiteness only
        rooms = [torch.empty_like(x) for x in tensors]
        assert backward(rooms).dtype == found[1].dtype == torch.float32
        assert found[0].dtype == dtype and all(x.isfinite().all() for x in rooms)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name):
    options, where = (
        OPTIONS[name],
        (*(torch.tensor(x) for x in ([0, 3, 3, 9], [0, 5, 6, 13])), 6, 7),
    )
    *tensors, dout = drawn((9, H, D), (13, HK, D), (13, HK, DV), (9, H, DV))
    torch.manual_seed(1)
    found = passes._flash_attn_varlen_forward(*tensors, *where, *passed(options), True)

    def backward(rooms):
        given = dout, *tensors, *found[:2], *rooms, *where, *passed(options), False, found[3]
        return passes._flash_attn_varlen_backward(*given)

    def whole(*leaves):
        return fa.flash_attn_varlen_func(*leaves, *where, **public(options))

    judged(found, whole, tensors, dout, backward)


def test_a_ring_of_two_blocks_of_keys():
    """Like a ring: merge by LSE, and give each backward pass the out and LSE of all keys."""
    q, k, v, dout = drawn((2, 9, H, D), (2, 14, HK, D), (2, 14, HK, D), (2, 9, H, D))
    options = *passed(OPTIONS["plain"]), False
    blocks = list(zip(k.split(7, 1), v.split(7, 1)))
    parts = [passes._wrapped_flash_attn_forward(q, *block, *options)[:2] for block in blocks]
    out, lse = fastattn.merge([(x.transpose(1, 2), y) for x, y in parts])
    out = out.transpose(1, 2)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for at, block in enumerate(blocks):
        own, rows = torch.empty_like(q), slice(7 * at, 7 * at + 7)
        rooms = own, dk[:, rows], dv[:, rows]
        passes._wrapped_flash_attn_backward(dout, q, *block, out, lse, *rooms, *options)
        dq += own
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = fa.flash_attn_func(*leaves, softmax_scale=SCALE)
    torch.testing.assert_close(out, whole.detach())
    torch.testing.assert_close((dq, dk, dv), torch.autograd.grad(whole, leaves, dout))


def test_keys_that_count_and_pages():
    q, k, v = drawn((9, H, D), (13, HK, D), (13, HK, D))
    where = *(torch.tensor(x) for x in ([0, 3, 9], [0, 6, 13])), 6, 7
    used, options = torch.tensor([4, 5], dtype=torch.int32), passed(OPTIONS["causal"])
    found = passes._flash_attn_varlen_forward(q, k, v, *where, *options, seqused_k=used)
    kept = torch.cat([torch.arange(4), torch.arange(6, 11)])
    shorter = torch.tensor([0, 4, 9])
    expected = passes._flash_attn_varlen_forward(
        q, k[kept], v[kept], where[0], shorter, *where[2:], *options
    )
    torch.testing.assert_close(found[:2], expected[:2])
    pages = [torch.cat([x, x.new_zeros(1, HK, D)]).unflatten(0, (7, 2)) for x in (k, v)]
    table = torch.tensor([[0, 1, 2], [3, 4, 5]])
    found = passes._flash_attn_varlen_forward(
        q, *pages, *where, *options, block_table=table, seqused_k=used
    )
    torch.testing.assert_close(found[:2], expected[:2])


def test_unsupported_arguments_are_named():
    q, k, v = drawn((9, H, D), (13, HK, D), (13, HK, D))
    where = *(torch.tensor(x) for x in ([0, 9], [0, 13])), 9, 13
    options = passed(OPTIONS["dropout"])
    with pytest.raises(NotImplementedError, match="leftpad_k: got a tensor, expected None"):
        passes._flash_attn_varlen_forward(q, k, v, *where, *options, leftpad_k=where[0][:1])
    out, lse, *_ = passes._flash_attn_varlen_forward(q, k, v, *where, *options)
    rooms = None, None, None
    with pytest.raises(ValueError, match="rng_state: got None beside dropout_p"):
        passes._flash_attn_varlen_backward(out, q, k, v, out, lse, *rooms, *where, *options, False)
    with pytest.raises(ValueError, match="k: got shape"):
        passes._flash_attn_forward(q[None], k, v[None], *options, False)


REST = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
PARTS = "dout q k v out softmax_lse dq dk dv"
OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
LATER = "window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None"
SIGNATURES = {
    "forward": f"q k v {REST} return_softmax",
    "backward": f"{PARTS} {REST} deterministic rng_state=None",
    "varlen_forward": f"q k v {OFFSETS} dropout_p softmax_scale causal {LATER} "
    "return_softmax=False block_table=None leftpad_k=None seqused_k=None",
    "varlen_backward": f"{PARTS} {OFFSETS} {REST} deterministic rng_state=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    function = getattr(passes, f"_flash_attn_{name}")
    found = inspect.signature(function).parameters.values()
    signature = [x.name + ("" if x.default is x.empty else f"={x.default}") for x in found]
    assert signature == SIGNATURES[name].split()
    assert getattr(passes, f"_wrapped_flash_attn_{name}") is function


DIFFUSERS = """
import torch
from types import SimpleNamespace
import fastattn
fastattn.flash_attn.install()
from diffusers.models import attention_dispatch as dispatch
assert dispatch._CAN_USE_FLASH_ATTN
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

q, k, v, dout = torch.randn(4, 2, 9, 3, 8, dtype=torch.float64).unbind()
leaves = [x.requires_grad_() for x in (q, k, v)]
with attention_backend("native"):
    expected = dispatch_attention_fn(*leaves, is_causal=True)
with attention_backend("flash"):
    found = dispatch_attention_fn(*leaves, is_causal=True)
torch.testing.assert_close(found, expected)
grads = torch.autograd.grad(expected, leaves, dout)
for x, y in zip(torch.autograd.grad(found, leaves, dout), grads):
    torch.testing.assert_close(x, y)

ctx = SimpleNamespace()  # context parallelism calls the passes
ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
out, lse = dispatch._flash_attention_forward_op(ctx, q, k, v, is_causal=True, return_lse=True)
torch.testing.assert_close(out, expected.detach())
for x, y in zip(dispatch._flash_attention_backward_op(ctx, dout), grads):
    torch.testing.assert_close(x, y)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="asks for diffusers")
def test_diffusers_runs_its_flash_backend():
    command = [sys.executable, "-W", "ignore", "-c", DIFFUSERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "failed to import" not in done.stderr
