"""Rows in four bits: their layout, their rounding, and what becomes of special values."""

import struct

import pytest
import torch

from fastattn.call.int4 import INT4, columns, dequantised_int4, quantised_int4, row_bytes
from tests.support.backends import every_dtype
from tests.support.cases import DTYPES


def rounded(x, down):
    """x in bfloat16, as a float: not above x, or not below."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))  # to nearest; corrected below
    top = bits >> 16
    near = [of_bits(top + step) for step in (-1, 0, 1) if 0 <= top + step < 1 << 16] + [0.0]
    return max(y for y in near if y <= x) if down else min(y for y in near if y >= x)


def of_bits(top):
    return struct.unpack("<f", struct.pack("<I", top << 16))[0]


def by_hand(row):
    """The bytes of a row, in plain Python."""
    found = b""
    for block in (row[at : at + 32] for at in range(0, len(row), 32)):
        minimum = rounded(min(block), down=True)
        scale = rounded((max(block) - minimum) / 15, down=False)
        n = [min(round((x - minimum) / scale), 15) if scale else 0 for x in block]
        found += bytes(low | high << 4 for low, high in zip(n[:16], n[16:], strict=True))
        found += b"".join(struct.pack("<f", x)[2:] for x in (scale, minimum))
    return list(found)


def random_rows(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-9, 9, (*shape[:-1], 1), generator=generator)
    return (x + torch.randint(-2, 3, (*shape[:-1], 1), generator=generator)).to(dtype)


def test_rows_are_those_of_plain_python():
    x = random_rows(torch.float64, 40, 64)
    x[0, :32], x[1, 32:], x[2] = 1.5, -0.1, 0
    x[3, ::2] *= 100
    x[4] = x[4].abs()
    x[5] = -x[5].abs()
    x[6, :32] = torch.arange(32)
    rows = quantised_int4(x)
    assert rows.dtype == INT4 and rows.shape == (40, 40)
    for row, found in zip(x.tolist(), rows.tolist(), strict=True):
        assert found == by_hand(row)


def test_a_row_by_its_bytes():
    """The layout, from bytes to values: all numbers 0 to 15 in each half of a byte."""
    numbers = bytes(i | (15 - i) << 4 for i in range(16))
    factors = struct.pack("<f", 0.5)[2:] + struct.pack("<f", -3.0)[2:]
    more = struct.pack("<f", -2.0)[2:] + struct.pack("<f", 64.0)[2:]
    row = torch.tensor(list(numbers + factors + numbers[::-1] + more), dtype=INT4)
    n = torch.arange(16.0)
    expected = torch.cat([n / 2 - 3, n.flip(0) / 2 - 3, 64 - 2 * n.flip(0), 64 - 2 * n])
    assert torch.equal(dequantised_int4(row, torch.float32), expected)
    assert torch.equal(dequantised_int4(row[None, None], torch.float64)[0, 0], expected.double())


@every_dtype
@pytest.mark.parametrize("d", (32, 64, 160))
def test_a_number_is_as_close_as_its_block_allows(dtype, d):
    x = random_rows(DTYPES[dtype], 7, 5, d)
    rows = quantised_int4(x)
    assert rows.shape == (7, 5, d // 32 * 20) and columns(rows) == d
    found = dequantised_int4(rows, torch.float64).unflatten(-1, (-1, 32))
    exact = x.double().unflatten(-1, (-1, 32))
    spans = exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)
    # The minimum is rounded by 2^-7 of its size, the scale by 2^-7 of its own.
    steps = (spans + exact.amin(-1, keepdim=True).abs() * 2.0**-7) / 15 * (1 + 2.0**-7)
    assert ((found - exact).abs() <= steps / 2 * (1 + 1e-5)).all()


@every_dtype
def test_equal_numbers_that_bfloat16_has_are_exact(dtype):
    for value in (0.0, 1.0, -3.0, 0.0078125, 1.5, -96.0):
        x = torch.full((3, 64), value, dtype=DTYPES[dtype])
        rows = quantised_int4(x)
        blocks = rows.unflatten(-1, (2, 20))
        assert not blocks[..., :18].any()  # numbers and scale
        assert torch.equal(dequantised_int4(rows, torch.float64), x.double())


def test_a_block_alone_becomes_nan():
    most = torch.finfo(torch.float32).max
    wrong = {
        "nan": [torch.nan],
        "inf": [torch.inf],
        "-inf": [-torch.inf],
        "inf and -inf": [torch.inf, -torch.inf],
        "nan and inf": [torch.nan, torch.inf],
        "beyond bfloat16": [most],
        "below bfloat16": [-most],
        "too far apart": [-3e38, 3e38],
    }
    for dtype in (torch.float32, torch.float64):
        for what, numbers in wrong.items():
            x = torch.ones(4, 96, dtype=dtype)
            x[2, 40 : 40 + len(numbers)] = torch.tensor(numbers, dtype=dtype)
            found = dequantised_int4(quantised_int4(x), torch.float32)
            assert found[2, 32:64].isnan().all(), what
            found[2, 32:64] = 1
            assert torch.equal(found, torch.ones(4, 96)), what
    x = torch.ones(32, dtype=torch.float64)
    x[5] = 1e200
    assert dequantised_int4(quantised_int4(x), torch.float64).isnan().all()


def test_huge_and_tiny_numbers():
    for size in (1e37, 2e36, 1e-37, 1e-39, 3e-41, 1e-44):
        x = torch.linspace(-1, 1, 32) * size
        found = dequantised_int4(quantised_int4(x), torch.float32)
        step = 2 * size / 15 + 2.0**-133  # the spacing of bfloat16 near 0
        assert ((found - x).abs() <= step).all(), size
    assert not dequantised_int4(quantised_int4(torch.full((32,), -0.0)), torch.float32).any()


def test_no_rows_and_no_columns():
    for shape in ((0, 64), (3, 0), (2, 0, 32)):
        rows = quantised_int4(torch.ones(shape))
        assert rows.shape == (*shape[:-1], row_bytes(shape[-1]))
        assert dequantised_int4(rows, torch.float32).shape == shape


def test_rows_of_any_strides():
    x = random_rows(torch.float32, 6, 5, 64)
    rows = quantised_int4(x)
    for change in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    ):
        assert torch.equal(quantised_int4(change(x)), rows)
        expected = dequantised_int4(rows, torch.float32)
        assert torch.equal(dequantised_int4(change(rows), torch.float32), expected)
    odd = torch.zeros(41, dtype=INT4)
    odd[1:] = rows[0, 0]  # scales at odd addresses
    assert torch.equal(dequantised_int4(odd[1:], torch.float32), expected[0, 0])
