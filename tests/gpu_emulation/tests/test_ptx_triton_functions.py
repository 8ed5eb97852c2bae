"""A score_mod and a mask_mod in Triton's kernels, compiled for three architectures and run on the
emulator."""

import pytest
import torch

import fastattn
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.tests.test_ptx_triton import (  # noqa: F401  arch, compiled and small are fixtures
    ATTENTION,
    arch,
    compiled,
    kernels,
    small,
)
from tests.support.backends import looked_at, needs_triton
from tests.support.cases import DTYPES, Dims, build

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator, needs_triton, pytest.mark.slow]


@pytest.mark.parametrize("rows", ["many", "few"])
def test_functions(compiled, small, rows):  # noqa: F811
    """A score_mod and a mask_mod, with operators that the interpreter computes in another way. The
    oracle computes the same function of all scores."""
    n = small.keys + 5 if rows == "many" else small.keys_of_decode
    dims = Dims(1, 2, 1, n if rows == "many" else 3, n, small.d, small.d)
    problem = build(dims, (), DTYPES["bfloat16"])
    table = torch.randn(2, n, generator=torch.Generator().manual_seed(1))
    documents = torch.arange(n) // 50

    def score(s, b, h, i, j):
        far = ((i - j) // 3 % 7 - 2) * 0.1 + torch.exp(-j / 9) + torch.log2(i + 0.5)
        return 3 * torch.tanh((s + table[h, (j - i) % n]) / 3) + s.abs() ** 1.5 - far

    def shown(b, h, i, j):
        return (documents[i] == documents[j]) | (j - i == torch.round(i / 7).int())

    i, j, h = torch.arange(dims.M)[:, None], torch.arange(n), torch.arange(2)[:, None, None]
    given = problem.q, problem.k, problem.v

    def gradients(attend):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        out, lse = attend(*leaves)
        if rows == "few":
            return out.detach(), lse.detach()
        loss = out.float().square().sum() + lse.sin().sum()
        return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)

    expected = gradients(
        lambda *x: fastattn.reference.attention(
            *(y.float() for y in x),
            score_mod=lambda s: score(s, 0, h, i, j),
            mask=shown(0, h, i, j),
            return_lse=True,
        )
    )
    with looked_at():
        found = gradients(
            lambda *x: fastattn.attention(*x, score_mod=score, mask_mod=shown, return_lse=True)
        )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(
            x.float(), y.float(), rtol=0, atol=1.5e-2 * float(1 + y.abs().max())
        )
    split = {"split_kernel", "combine_kernel"}
    assert kernels(compiled) == (split if rows == "few" else ATTENTION | {"block_mask_kernel"})


@pytest.mark.parametrize("only", ["captured", "all"])
def test_gradients_of_captured_tensors(compiled, small, only):  # noqa: F811
    """By each index that a sum over a tile, over its rows or its keys comes before, and by one that
    has none; alone and with those of q, k and v."""
    n = small.keys + 5
    problem = build(Dims(1, 2, 1, n, n, small.d, small.d), (), DTYPES["bfloat16"])
    draw = torch.Generator().manual_seed(1)
    sizes = dict(table=(2, 2 * n), of_head=(2,), of_key=(n,), of_row=(n,))
    captured = {x: torch.randn(size, generator=draw) for x, size in sizes.items()}
    i, j, h = torch.arange(n)[:, None], torch.arange(n), torch.arange(2)[:, None, None]

    def gradients(attend, given):
        leaves = [x.detach().clone().requires_grad_(only == "all") for x in given]
        own = {x: y.clone().requires_grad_() for x, y in captured.items()}

        def score(s, b, h, i, j):
            bent = torch.tanh(s * own["of_head"][h] + own["table"][h, i - j + n])
            return bent + own["of_key"][j] * own["of_row"][i]

        loss = attend(*leaves, score).float().square().sum()
        wanted = [x for x in (*own.values(), *leaves) if x.requires_grad]
        return torch.autograd.grad(loss, wanted)

    given = problem.q, problem.k, problem.v
    expected = gradients(
        lambda *x: fastattn.reference.attention(
            *x[:3], score_mod=lambda s: x[3](s, 0, h, i, j), causal=True
        ),
        [x.float() for x in given],
    )
    with looked_at():
        found = gradients(lambda *x: fastattn.attention(*x[:3], score_mod=x[3], causal=True), given)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(
            x.float(), y.float(), rtol=0, atol=1.5e-2 * float(1 + y.abs().max())
        )
    assert kernels(compiled) == (ATTENTION - {"dkv_kernel"} if only == "captured" else ATTENTION)
