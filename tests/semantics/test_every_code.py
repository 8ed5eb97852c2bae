"""Every code of stored keys and values in every column: 256 of int8 and float8, 16 of int4. The row
of one key has its value as output and its product as LSE, so a decoder is seen number by number."""

import pytest
import torch

import fastattn
from fastattn.call.int4 import INT4
from tests.support.backends import every_dtype, not_interpreted, on_variants
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]
STORAGES = {
    "int8": torch.int8,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int4": INT4,
}
ROWS = {"a row": lambda D: (1, D), "a few": lambda D: (4, D // 4), "many": lambda D: (D, 1)}
CODES = 256
TILES = "amx_bf16", "amx_model"
K_SCALE, V_SCALE, SCALE = 0.5, 0.25, 0.75  # products have few bits: none is rounded


def codes(storage, B, keys, D, finite):
    """(B,keys,D) numbers as they are stored, with each code in each column, and as float64.

    finite: zeros in place of NaN and infinities.
    """
    n = torch.arange(B * keys).view(B, keys, 1) * 3 + torch.arange(D) * 5
    if storage == INT4:  # blocks of 32 columns with their scale and minimum
        n = n.unflatten(-1, (-1, 32)) % 16
        factors = torch.tensor([0.5, -3.0]).bfloat16().view(INT4).expand(*n.shape[:-1], 4)
        low, high = n.to(INT4).split(16, -1)
        stored = torch.cat([low + 16 * high, factors], -1).flatten(-2)
        return stored, (n.double() * 0.5 - 3.0).flatten(-2)
    stored = (n % CODES).to(torch.uint8).view(storage)
    if finite:
        stored = stored.float().nan_to_num(0, 0, 0).to(storage)
    return stored, stored.double()


def is_right(found, exact, dtype, rounding=0.0):
    """Is each number within two units in the last place of its own, or nearer than `rounding`, NaN
    and infinities included?"""
    found, eps = found.double(), max(torch.finfo(dtype).eps, 2.0**-50)
    near = (found - exact).abs() <= 2 * eps * exact.abs().nan_to_num(0, 0) + rounding
    return bool((near | (found == exact) | (found.isnan() & exact.isnan())).all())


@every_dtype
@parametrize("rows", ROWS, fast=1)
@parametrize("storage", STORAGES, fast=1)
def test_every_code_of_every_column(storage, rows, dtype):
    """Row and head r reads column r of a key. Of three keys a mask leaves one to a row: the others
    are decoded beside it."""
    storage, dtype = STORAGES[storage], DTYPES[dtype]
    for D, keys in ((32, 1), (64, 1), (32, 3), (64, 3), (96, 3)):
        M, H = ROWS[rows](D)
        B = CODES if keys == 1 else CODES // keys + 1
        k, wide_k = codes(storage, B, keys, D, finite=True)
        v, wide_v = codes(storage, B, keys, D, finite=keys > 1)
        column = torch.arange(D).view(H, M).T  # of each row and head
        key = column // 4 % keys
        q = torch.zeros(M, H, D, dtype=dtype).scatter_(2, column[..., None], 1)
        cu = torch.arange(B + 1)
        given = dict(cu_q=cu * M, cu_k=cu * keys, max_q=M, max_k=keys, scale=SCALE)
        if storage != INT4:
            given |= dict(k_scale=torch.full((B * keys, 1), K_SCALE))
            given |= dict(v_scale=torch.full((B * keys, 1), V_SCALE))
            wide_k, wide_v = wide_k * K_SCALE, wide_v * V_SCALE
        if keys > 1:
            given["mask"] = (torch.arange(keys) == key.T[..., None]).expand(B, H, M, keys)
        for isa in on_variants("cpu", dtype):
            with torch.no_grad():
                out, lse = fastattn.attention_packed(
                    q.repeat(B, 1, 1),
                    *(x.flatten(0, 1)[:, None] for x in (k, v)),
                    **given,
                    return_lse=True,
                    backend="cpu",
                )
            values, scores = wide_v[:, key].to(dtype).double(), wide_k[:, key, column] * SCALE
            assert is_right(out.unflatten(0, (B, M)), values, dtype), (isa, D, keys)
            # The logarithm of a sum, 1: on tiles the sum is that of rounded exponentials.
            one = 2 * torch.finfo(lse.dtype).eps if isa in TILES else 0.0
            assert is_right(lse.unflatten(0, (B, M)), scores, lse.dtype, one), (isa, D, keys)
