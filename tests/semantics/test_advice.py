"""Warnings about calls that are legal and most likely meant otherwise; and other calls, without."""

import pytest
import torch

import fastattn
from fastattn.dispatch import advice, operation

pytestmark = pytest.mark.filterwarnings("error")  # that of one row is ignored elsewhere

r = torch.randn


def heads(*shape, keys=None):
    """q, k and v: k and v with this number of rows."""
    q = r(*shape)
    return q, *(r(*shape[:2], keys or shape[2], shape[3]) for _ in "kv")


def packed(rows, keys):
    offsets = (torch.tensor([0, x, 2 * x]) for x in (rows, keys))
    return r(2 * rows, 1, 8), r(2 * keys, 1, 8), r(2 * keys, 1, 8), *offsets


ONE_ROW, LAYOUT = "causal=True of one row and 7 keys.*bottom_right", "transpose"
WARNED = {
    "one row": (lambda: fastattn.attention(*heads(2, 2, 1, 8, keys=7), causal=True), ONE_ROW),
    "one row, with gradient": (
        lambda: fastattn.attention(r(1, 1, 1, 8).requires_grad_(), *r(2, 1, 1, 7, 8), causal=True),
        ONE_ROW,
    ),
    "one row of weights": (
        lambda: fastattn.attention_weights(*heads(2, 2, 1, 8, keys=7)[:2], causal="top_left"),
        ONE_ROW,
    ),
    "one row of each sequence": (
        lambda: fastattn.attention_packed(*packed(1, 7), causal=True), ONE_ROW
    ),
    "flash-attn's layout": (lambda: fastattn.attention(*heads(2, 256, 8, 16)), LAYOUT),
    "flash-attn's grouped heads": (
        lambda: fastattn.attention(*heads(2, 300, 32, 64, keys=8), causal=True), LAYOUT
    ),
}  # fmt: skip
SILENT = {
    "one row, bottom_right": lambda: fastattn.attention(
        *heads(2, 2, 1, 8, keys=7), causal="bottom_right"
    ),
    "one row and one key": lambda: fastattn.attention(*heads(2, 2, 1, 8), causal=True),
    "two rows": lambda: fastattn.attention(*heads(2, 2, 2, 8, keys=7), causal=True),
    "a part of a larger call": lambda: fastattn.attention(
        *heads(2, 2, 1, 8, keys=7), causal=True, place=fastattn.Place(row=3, rows=7)
    ),
    "torch's function": lambda: fastattn.scaled_dot_product_attention(
        *heads(2, 2, 1, 8, keys=7), is_causal=True
    ),
    "torch's function, patched": lambda: patched(*heads(2, 2, 1, 8, keys=7), is_causal=True),
    "torch's module": lambda: fastattn.MultiheadAttention(8, 2)(
        r(1, 2, 8), r(7, 2, 8), r(7, 2, 8),
        attn_mask=torch.ones(1, 7).bool().triu(1), is_causal=True,
    ),
    "heads that are a batch's": lambda: fastattn.attention(*heads(1, 1024, 16, 32)),
    "windows of pictures": lambda: fastattn.attention(*heads(64, 32, 49, 32)),
    "many heads, one row each": lambda: fastattn.attention(*heads(2, 512, 1, 64, keys=100)),
    "channels that are heads": lambda: fastattn.attention(*heads(2, 512, 9, 1)),
    "many heads on long keys": lambda: fastattn.attention(*heads(2, 256, 8, 16, keys=64)),
}  # fmt: skip


def patched(*tensors, **arguments):
    with fastattn.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **arguments)


@pytest.fixture
def unplanned(monkeypatch):
    """No kind of call is planned, and no warning was given."""
    operation.forget_plans()
    monkeypatch.setattr(advice, "given", set())
    yield
    operation.forget_plans()


@pytest.mark.parametrize("name", WARNED)
def test_a_call_that_is_meant_otherwise_warns_once(name, unplanned):
    function, message = WARNED[name]
    with pytest.warns(UserWarning, match=message) as found:
        function()
    assert [x.filename for x in found] == [__file__]
    operation.forget_plans()
    function()  # warnings are errors


@pytest.mark.parametrize("name", SILENT)
def test_other_calls_do_not(name, unplanned):
    SILENT[name]()
