"""The CUDA kernels in the emulator with sizes beyond 16 and 32 bits, with sizes of 0, and with
launches that are refused."""

import mmap
import re
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.base import broadcast_strides
from fastattn.backends.native import cuda, launcher, libraries
from fastattn.call.spec import AttentionSpec, Tensors
from tests.gpu_emulation.emulated import Emulated, binary
from tests.gpu_emulation.emulator import KERNELS, needs_emulator
from tests.support.cases import FEATURE, Dims, build

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]


def test_grids_have_one_dimension():
    """Other dimensions end at 65,535; so many blocks would take minutes here (test_gpu_scale)."""
    kernels = [x.read_text() for x in (KERNELS / "sm80").iterdir()]
    assert any("blockIdx.x" in text for text in kernels)
    assert not re.findall(r"(?:blockIdx|gridDim)\.[yz]|[^_]launch\(", "".join(kernels))


# --- past 32 bits ---------------------------------------------------------------------------------

FAR = (1 << 31) + 8
NO_RESERVE = 0x4000  # MAP_NORESERVE, in Python's mmap from 3.13 on


def room(shape, dim, dtype):
    """Memory for a tensor with a stride of 2^31 + 8 along `dim`. The system allocates only the
    pages that are touched."""
    strides, near = [0] * 4, 1
    for i in (3, 2, 1, 0):
        strides[i], near = (FAR, near) if i == dim else (near, near * shape[i])
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    except OSError:
        pytest.skip("this system gives no memory on credit")
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(shape, strides)


def far(x, dim):
    return room(x.shape, dim, x.dtype).copy_(x)


every_dim = pytest.mark.parametrize("dim", range(4), ids=["items", "heads", "rows", "columns"])
DIMS = Dims(2, 2, 2, 70, 67, 24, 40)


@pytest.mark.slow
@every_dim
def test_strides_past_32_bits(emulated, dim):
    near = build(DIMS, (FEATURE["bias_grad"],), torch.bfloat16)
    mask = near.kwargs["mask"].detach().expand(2, 2, 70, 67).clone()
    near.kwargs["mask"] = mask
    names = ("q", "k", "v", "dout")
    kwargs = near.kwargs | dict(mask=far(mask, dim))
    spread = replace(near, **{x: far(getattr(near, x), dim) for x in names}, kwargs=kwargs)
    found = spread.run(fastattn.attention)
    for what, value in near.run(fastattn.attention).items():
        assert torch.equal(found[what], value), what


@every_dim
def test_weights_past_32_bits(emulated, monkeypatch, dim):
    q, k = (torch.randn(2, 2, n, 24).bfloat16().requires_grad_() for n in (70, 67))
    dweights = torch.randn(2, 2, 70, 67).bfloat16()
    near = fastattn.attention_weights(q, k)
    grads = torch.autograd.grad(near, (q, k), dweights)

    def empty(shape, dtype, device):
        return room(shape, dim, dtype) if dtype == q.dtype else torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(launcher, "empty", empty)
    spread = fastattn.attention_weights(q, k)
    assert torch.equal(spread, near)
    for found, right in zip(torch.autograd.grad(spread, (q, k), far(dweights, dim)), grads):
        assert torch.equal(found, right)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["items", "heads", "keys"])
def test_decoding_past_32_bits(emulated, dim):
    emulated.sm_count = 8
    near = build(Dims(2, 2, 2, 3, 300, 24, 40), (), torch.bfloat16)
    spread = replace(near, k=far(near.k, dim), v=far(near.v, dim))
    found = spread.run(fastattn.attention, backward=False)
    assert torch.equal(found["out"], near.run(fastattn.attention, backward=False)["out"])
    assert emulated.splits > 1


# --- nothing, and too much ------------------------------------------------------------------------

EMPTY = {"no items": 0, "no rows": 2, "no keys": 3}


@pytest.mark.parametrize("mask", [(1, 1, 1, 1), (2, 1, 1, 5), (1, 2, 4, 1), (1, 1, 4, 5)], ids=str)
@pytest.mark.parametrize("without", EMPTY)
def test_gradients_of_nothing_are_zero(emulated, without, mask):
    """A mask that is broadcast along an empty dimension still has a gradient for each element."""
    sizes = [2, 2, 4, 5]
    sizes[EMPTY[without]] = 0
    B, H, M, N = sizes
    shape = [n if own > 1 else 1 for n, own in zip(sizes, mask, strict=True)]
    q, k, v = (torch.randn(B, H, n, 8).half().requires_grad_() for n in (M, N, N))
    mask, sinks = torch.randn(shape).half().requires_grad_(), torch.randn(2).requires_grad_()
    out = fastattn.attention(q, k, v, mask=mask, sinks=sinks)
    assert not out.any() and out.shape == (B, H, M, 8)
    grads = torch.autograd.grad(out, (q, k, v, mask, sinks), torch.ones_like(out))
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("m", [3, 20], ids=["decoding", "forward"])
def test_lengths_are_clamped_to_the_keys(emulated, monkeypatch, m):
    """On a GPU, values are checked only on request."""
    emulated.sm_count = 8
    q, k, v = (torch.randn(2, 2, n, 8).half() for n in (m, 300, 300))
    monkeypatch.setattr(cuda, "check_values", lambda spec, t: None)
    for beyond, cut in (([301, 2**40], [300, 300]), ([-3, 7], [0, 7])):
        found, right = (
            fastattn.attention(q, k, v, key_lengths=torch.tensor(x), causal="bottom_right")
            for x in (beyond, cut)
        )
        assert torch.equal(found, right)


@pytest.mark.parametrize("m", [1, 3, 16])
def test_weights_of_few_rows(emulated, m):
    """Weights get the LSE from a call without values, for which decode does not run."""
    q, k = torch.randn(2, 4, m, 24).half(), torch.randn(2, 2, 300, 24).half()
    emulated.sm_count = 8
    found = fastattn.attention_weights(q, k, causal="bottom_right").double()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 24**0.5
    ahead = torch.arange(300) > torch.arange(m)[:, None] + 300 - m
    expected = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


TOO_MANY = 1 << 31  # blocks for one grid


@pytest.mark.parametrize("name", ["forward", "decode", "weights", "delta"])
def test_a_refused_launch_raises_with_the_kernels_name(name):
    which = {"weights": libraries.WEIGHTS, "delta": libraries.BACKWARD}.get(name, libraries.FORWARD)
    q = torch.empty(1, 1, 1, 8, dtype=torch.float16)
    sizes = dict(B=TOO_MANY * (4 if name == "delta" else 1), H=1, Hk=1, M=1, N=1, D=8, Dv=8)
    spec = AttentionSpec(**sizes, dtype=q.dtype, device="cuda", scale=1.0, left=1, right=1)
    tensor = libraries.TENSOR.pack(q.data_ptr(), *broadcast_strides(q), libraries.DTYPE[q.dtype])
    params = tensor + libraries.form(spec)[len(tensor) :]

    class Unwatched(Emulated):
        library = property(lambda self: binary())

    with pytest.raises(RuntimeError, match=rf"failed at {name}_kernel: .*CUDA error 9;"):
        Unwatched(8 if name == "decode" else 0).run(which, params, spec, Tensors(q, q, q))
