"""What calls with keys and values in four bits refuse, and which calls refuse these."""

import pytest
import torch

import fastattn
from fastattn.call.int4 import INT4
from fastattn.call.spec import Feature
from fastattn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.semantics.test_int4 import every_backend, some
from tests.support.backends import declares, not_interpreted

pytestmark = pytest.mark.usefixtures("one_thread")


def bytes_of(*shape):
    return torch.zeros(shape, dtype=INT4)


PAGED = dict(
    k=bytes_of(11, 1, 2, 40),
    v=bytes_of(11, 1, 2, 40),
    block_table=torch.zeros(2, 8).long(),
    key_lengths=torch.tensor([8, 3]),
    cu_k=None,
)
WRONG = {
    "k_scale: got a tensor, expected None, because rows in four bits": dict(
        k_scale=torch.zeros(11, 2), v_scale=torch.zeros(11, 2)
    ),
    "v_scale: got a tensor, expected None, because rows in four bits": dict(
        v_scale=torch.zeros(11, 2)
    ),
    "v.dtype: got torch.float32, expected torch.uint8, as k has": dict(v=torch.zeros(11, 2, 64)),
    "v.dtype: got torch.int8, expected torch.uint8, as k has": dict(
        v=torch.zeros(11, 2, 40, dtype=torch.int8)
    ),
    "k.dtype: got torch.float32, expected torch.uint8, as v has": dict(k=torch.zeros(11, 2, 64)),
    "k.dtype: got torch.bfloat16, expected torch.uint8, as v has": dict(
        k=torch.zeros(11, 2, 64).bfloat16()
    ),
    "q.dtype: got torch.uint8, expected float32": dict(q=bytes_of(5, 4, 64)),
    "q.dtype: got torch.int64, expected float32": dict(q=torch.zeros(5, 4, 64).long()),
    r"q: got shape \(1, 4, 5, 48\), expected a head dim that is a multiple of 32": dict(
        q=torch.zeros(5, 4, 48)
    ),
    r"k: got shape \(1, 2, 11, 64\), expected rows of 40 bytes, 20 for 32 numbers": dict(
        k=bytes_of(11, 2, 64)
    ),
    r"k: got shape \(1, 2, 11, 20\), expected rows of 40 bytes": dict(k=bytes_of(11, 2, 20)),
    r"v: got shape \(1, 2, 11, 32\), expected rows of a multiple of 20 bytes": dict(
        v=bytes_of(11, 2, 32)
    ),
    r"v: got shape \(1, 2, 12, 40\), expected 11 rows, as k has": dict(v=bytes_of(12, 2, 40)),
    r"v: got shape \(1, 1, 11, 40\), expected 2 heads, as k has": dict(v=bytes_of(11, 1, 40)),
    "k: got 3 heads, expected a divisor of q's 4 heads": dict(
        k=bytes_of(11, 3, 40), v=bytes_of(11, 3, 40)
    ),
    r"k: got shape \(11, 40\), expected 3 dimensions": dict(k=bytes_of(11, 40)),
    r"v: got shape \(1, 11, 2, 40\), expected 3 dimensions": dict(v=bytes_of(1, 11, 2, 40)),
    r"k: got shape \(11, 2, 40\), expected 4 dimensions": PAGED | dict(k=bytes_of(11, 2, 40)),
    r"v: got shape \(9, 2, 1, 40\), expected 11 pages": PAGED | dict(v=bytes_of(9, 1, 2, 40)),
    r"k: got shape \(11, 2, 1, 60\), expected rows of 40": PAGED | dict(k=bytes_of(11, 1, 2, 60)),
    "mask.dtype: got torch.uint8, expected torch.bool": dict(mask=bytes_of(3, 8)),
}


@every_backend
@pytest.mark.parametrize("message", WRONG)
def test_rows_that_do_not_fit(name, message):
    declares(name, torch.float32, Feature.INT4)
    fastattn.attention_packed(**some(), backend=name)
    with pytest.raises(ValueError, match=message):
        fastattn.attention_packed(**some(**WRONG[message]), backend=name)


@not_interpreted
def test_other_calls_refuse_rows_in_four_bits():
    q, rows = torch.zeros(1, 4, 5, 64), bytes_of(1, 4, 5, 40)
    expected = "k.dtype: got torch.uint8, expected torch.float32, as q has; attention_packed"
    for call in (
        lambda: fastattn.attention(q, rows, rows),
        lambda: fastattn.attention_weights(q, rows),
        lambda: fastattn.attention_jvp(q, rows, rows, q, None, None),
    ):
        with pytest.raises(ValueError, match=expected):
            call()
    with pytest.raises(NotImplementedError, match="qv: got keys in four bits"):
        fastattn.attention_packed(**some(), qv=torch.zeros(5, 4, 64))


@not_interpreted
def test_the_api_of_flash_attn_refuses_rows_in_four_bits():
    rows, cu = bytes_of(1, 8, 2, 40), torch.tensor([0, 5], dtype=torch.int32)
    q = torch.zeros(5, 2, 64)
    with pytest.raises(ValueError, match=r"k.dtype: got torch.uint8, expected q's dtype"):
        flash_attn_varlen_func(q, rows[0], rows[0], cu, cu, 5, 8)
    for more in ({}, dict(k=q[None], v=q[None], cache_seqlens=0)):
        with pytest.raises(ValueError, match=r"k_cache.dtype: got torch.uint8, expected q's dtype"):
            flash_attn_with_kvcache(q[None], rows, rows, **more)
