"""Triton programs from outside this project: matrix products, attention, softmax of rows.

An emulator and kernels that were made for each other may share a mistake. These programs follow
Triton's tutorials, and Triton's compiler is not nvcc.
"""

import pytest
import torch

from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import triton as executed
from tests.support.backends import INTERPRETED
from tests.support.marks import parametrize

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
if INTERPRETED:
    pytest.skip("there is nothing to compile", allow_module_level=True)
FUSED = dict(enable_fp_fusion=True)  # Triton's default


ROWS = {80: 32, 90: 64, 100: 64}  # {arch: rows of a tile}, as the matrix products of the chip need


@pytest.fixture(params=ROWS, ids="sm_{}".format)
def arch(request):
    return request.param


@pytest.fixture(params=SCHEDULES, ids="schedule{}".format)
def compiled(request, arch):
    with executed.compiled(arch, schedule=request.param) as driver:
        yield driver
    assert driver.launched


with_tensor_maps = pytest.mark.parametrize("arch", [90], indirect=True)


def sites(driver, opcode):
    return [x for _, found in driver.launched for x in found.sites if x.startswith(opcode)]


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C (M, N) = A (M, K) B (K, N)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        at = k * BK + inner
        x = tl.load(
            a + rows[:, None] * K + at[None, :],
            mask=(rows[:, None] < M) & (at[None, :] < K),
            other=0.0,
        )
        y = tl.load(
            b + at[:, None] * N + columns[None, :],
            mask=(at[:, None] < K) & (columns[None, :] < N),
            other=0.0,
        )
        total = tl.dot(x, y, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


@pytest.mark.slow
@parametrize("stages", [1, 3, 4], fast=1)
@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str, fast=1)
def test_product(compiled, arch, dtype, stages):
    """Products of small whole numbers, which are exact in every format and order of sums."""
    a, b, c = whole_numbers(dtype)
    (M, K), N, BM = a.shape, b.shape[1], ROWS[arch]
    grid = (triton.cdiv(M, BM), triton.cdiv(N, 64))
    product[grid](a, b, c, M, N, K, BM=BM, BN=64, BK=32, num_warps=4, num_stages=stages, **FUSED)
    assert torch.equal(c, a.float() @ b.float())
    assert bool(sites(compiled, "wgmma.mma_async")) == (arch == 90)
    assert bool(sites(compiled, "tcgen05.commit")) == (arch == 100)


def whole_numbers(dtype):
    g = torch.Generator().manual_seed(0)
    M, N, K = 80, 72, 136
    a, b = (torch.randint(-3, 4, x, generator=g).to(dtype) for x in ((M, K), (K, N)))
    return a, b, torch.full((M, N), torch.nan)


@triton.jit
def described_product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C = A B; boxes of A and B are loaded by tensor maps that the kernel makes."""
    of_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    of_b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(of_a.load([row, k]), of_b.load([k, column]), total)
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, BN)[None, :]
    tl.store(c + rows * N + columns, total, mask=(rows < M) & (columns < N))


@pytest.mark.slow
@with_tensor_maps
@parametrize("depth, stages", [(64, 1), (32, 3), (16, 4)], fast=1)
@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str, fast=1)
def test_product_of_boxes(compiled, dtype, depth, stages):
    a, b, c = whole_numbers(dtype)
    (M, K), N = a.shape, b.shape[1]
    grid, tile = (triton.cdiv(M, 64), triton.cdiv(N, 64)), dict(BM=64, BN=64, BK=depth)
    described_product[grid](a, b, c, M, N, K, num_warps=4, num_stages=stages, **tile, **FUSED)
    assert torch.equal(c, a.float() @ b.float())
    assert sites(compiled, "cp.async.bulk.tensor.2d") and sites(compiled, "wgmma.mma_async")


@triton.jit
def shifted(a, b, M, N, down, right, BM: tl.constexpr, BN: tl.constexpr):
    """B = A, moved down and to the right: boxes are loaded and stored. Outside of A are zeros, and
    what leaves B is dropped."""
    of_a = tl.make_tensor_descriptor(a, [M, N], [N, 1], [BM, BN])
    of_b = tl.make_tensor_descriptor(b, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    of_b.store([row + down, column + right], of_a.load([row, column]))


@pytest.mark.slow
@with_tensor_maps
@parametrize("width", [16, 32, 64], fast=1)
@parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str, fast=1)
def test_boxes_are_stored(compiled, dtype, width):
    M, N, right = 45, 144, 16 // dtype.itemsize
    a = torch.randint(1, 200, (M, N), generator=torch.Generator().manual_seed(3)).to(dtype)
    padded = torch.zeros(triton.cdiv(M, 8) * 8, N, dtype=dtype)
    padded[:M] = a
    for down in (-3, 5):
        b, expected = torch.full_like(a, 201), torch.full_like(a, 201)
        grid, tile = (triton.cdiv(M, 8), triton.cdiv(N, width)), dict(BM=8, BN=width)
        shifted[grid](a, b, M, N, down, right, num_warps=4, **tile, **FUSED)
        first, end = max(0, down), min(M, len(padded) + down)
        expected[first:end, right:] = padded[first - down : end - down, :-right]
        assert torch.equal(b, expected)
    assert sites(compiled, "cp.async.bulk.tensor.2d.global")


@triton.jit
def specialised_product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C = A B by warpgroups of two kinds: one loads, two multiply and store. They exchange
    registers."""
    of_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    of_b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    of_c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True, num_stages=2):
        total = tl.dot(of_a.load([row, k]), of_b.load([k, column]), total)
    of_c.store([row, column], total)


@pytest.mark.slow
@with_tensor_maps
@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str, fast=1)
def test_product_of_specialised_warpgroups(compiled, dtype):
    """In two steps. From the third on Triton waits for a parity of -1; the ISA knows 0 and 1."""
    a, b, c = whole_numbers(dtype)
    a = torch.cat([a, a + 1])  # 160 rows: the second tile has rows past the end
    c = c.repeat(2, 1)
    (M, K), N = a.shape, b.shape[1]
    grid, tile = (triton.cdiv(M, 128), triton.cdiv(N, 64)), dict(BM=128, BN=64, BK=128)
    specialised_product[grid](a, b, c, M, N, K, num_warps=4, **tile, **FUSED)
    assert torch.equal(c, a.float() @ b.float())
    for opcode in ("setmaxnreg.inc", "setmaxnreg.dec", "cp.async.bulk.tensor.2d.global"):
        assert sites(compiled, opcode)


@triton.jit
def attention(q, k, v, out, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Causal attention with an online softmax; the program's second axis is the head."""
    head = tl.program_id(1) * N * D
    rows, of_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x = tl.load(q + head + rows[:, None] * D + of_d[None, :], mask=rows[:, None] < N, other=0.0)
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    weight = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, D), dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BM, N), BN):
        keys = start + tl.arange(0, BN)
        y = tl.load(k + head + keys[None, :] * D + of_d[:, None], mask=keys[None, :] < N, other=0.0)
        z = tl.load(v + head + keys[:, None] * D + of_d[None, :], mask=keys[:, None] < N, other=0.0)
        s = tl.dot(x, y) * scale
        s = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] < N), s, -float("inf"))
        newer = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - newer[:, None])
        before = tl.exp(top - newer)
        weight = weight * before + tl.sum(p, 1)
        total = tl.dot(p.to(z.dtype), z, total * before[:, None])
        top = newer
    total = total / weight[:, None]
    to = out + head + rows[:, None] * D + of_d[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=rows[:, None] < N)


@triton.jit
def described_attention(
    q, k, v, out, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The same, with boxes loaded from one tensor of all heads."""
    rows_of_all = tl.num_programs(1) * N
    of_q = tl.make_tensor_descriptor(q, [rows_of_all, D], [D, 1], [BM, D])
    of_k = tl.make_tensor_descriptor(k, [rows_of_all, D], [D, 1], [BN, D])
    of_v = tl.make_tensor_descriptor(v, [rows_of_all, D], [D, 1], [BN, D])
    head, first = tl.program_id(1) * N, tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    x = of_q.load([head + first, 0])
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    weight = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, D), dtype=tl.float32)
    for start in range(0, tl.minimum(first + BM, N), BN):
        keys = start + tl.arange(0, BN)
        s = tl.dot(x, of_k.load([head + start, 0]).T) * scale
        s = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] < N), s, -float("inf"))
        newer = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - newer[:, None])
        before = tl.exp(top - newer)
        weight = weight * before + tl.sum(p, 1)
        z = of_v.load([head + start, 0])
        total = tl.dot(p.to(z.dtype), z, total * before[:, None])
        top = newer
    to = out + (head + rows)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, (total / weight[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < N)


SIZES = pytest.mark.parametrize("N, D", [(96, 32), (75, 64), (150, 128)])


@pytest.mark.slow
@SIZES
def test_attention(compiled, arch, N, D):
    judge(attention, ROWS[arch], N, D)


@pytest.mark.slow
@with_tensor_maps
@SIZES
def test_attention_of_boxes(compiled, N, D):
    judge(described_attention, 64, N, D)
    assert sites(compiled, "cp.async.bulk.tensor.2d") and sites(compiled, "wgmma.mma_async")


def judge(kernel, B, N, D):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, N, D, generator=g).half() for _ in "qkv")
    out = torch.full_like(q, torch.nan)
    grid, tile = (triton.cdiv(N, B), 2), dict(D=D, BM=B, BN=B)
    kernel[grid](q, k, v, out, N, D**-0.5, num_warps=4, num_stages=2, **tile, **FUSED)
    s = (q.double() @ k.double().mT) * D**-0.5
    s = s.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out.double(), s.softmax(-1) @ v.double(), rtol=2e-3, atol=2e-3)


@triton.jit
def softmax(x, out, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.program_id(0) * columns
    given = tl.load(x + row + at, mask=at < columns, other=-float("inf"))
    found = tl.exp(given - tl.max(given, 0))
    tl.store(out + row + at, found / tl.sum(found, 0), mask=at < columns)


@parametrize("columns", [1, 37, 256, 1000], fast=1)
def test_softmax_of_rows(compiled, columns):
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(2)) * 5
    out = torch.full_like(x, torch.nan)
    size = triton.next_power_of_2(columns)
    softmax[(5,)](x, out, columns, SIZE=size, num_warps=8, **FUSED)
    torch.testing.assert_close(out, x.softmax(-1), rtol=2e-6, atol=1e-9)
