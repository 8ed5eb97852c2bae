"""nn.Transformer's layers with our attention inside: the same results, by calls of ours."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import fastattn
from tests.support.marks import parametrize
from tests.support.multihead_cases import E, H, L, N, causal_mask, spy_on_attention

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LAYER_OPTIONS = [
    dict(zip(("batch_first", "norm_first", "bias"), x, strict=True))
    for x in itertools.product((True, False), repeat=3)
]


def sequence(length, batch_first, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, length, E, generator=g)
    return x if batch_first else x.transpose(0, 1).contiguous()


def padding_at(*lengths, size=L):
    return torch.arange(size) >= torch.tensor(lengths)[:, None]


def converted_twin(model):
    ours = copy.deepcopy(model)
    fastattn.convert(ours)
    return ours


MASKS = {
    "none": {},
    "causal": {"mask": causal_mask(L, L), "is_causal": True},
    "detected": {"mask": nn.Transformer.generate_square_subsequent_mask(L)},
    "padding": {"src_key_padding_mask": padding_at(L, 3, 1)},
    "gaps": {"src_key_padding_mask": padding_at(L, 3, 1).flip(1)},
    "both": {"mask": causal_mask(L, L), "src_key_padding_mask": padding_at(L, 3, 1)},
}


@parametrize("options", LAYER_OPTIONS, ids=str, fast=7)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_encoder_gives_torchs_results(masks, train, options, monkeypatch):
    """In eval without gradients, torch takes its fast path, if possible with nested tensors."""
    torch.manual_seed(0)
    masks, batch_first = MASKS[masks], options["batch_first"]
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it will not use nested tensors
        theirs = nn.TransformerEncoder(layer, 2).train(train)
    for x in theirs.parameters():
        nn.init.normal_(x, std=0.3)
    ours, x = converted_twin(theirs), sequence(L, batch_first)
    calls = spy_on_attention(monkeypatch)
    padding = masks.get("src_key_padding_mask", torch.zeros(N, L, dtype=torch.bool))
    real = ~padding if batch_first else ~padding.T  # torch's outputs at padding are unspecified
    with torch.no_grad():
        expected, got = theirs(x, **masks), ours(x, **masks)
    torch.testing.assert_close(got[real], expected[real])
    assert got.isfinite().all() and len(calls) == 2
    expected, got = theirs(x, **masks), ours(x, **masks)
    torch.testing.assert_close(got[real], expected[real])
    for a, b in zip(
        torch.autograd.grad(got[real].square().sum(), list(ours.parameters())),
        torch.autograd.grad(expected[real].square().sum(), list(theirs.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_nested_tensors_are_what_the_encoder_feeds_to_the_module(monkeypatch):
    """Lengths skip the padded keys; the output is torch's, including zeros at padding."""
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    assert theirs.use_nested_tensor
    ours, x = converted_twin(theirs), sequence(L, True)
    calls = spy_on_attention(monkeypatch)
    for lengths in ((L, 3, 1), (2, 2, 2), (4, 1, L), (3, 0, 2)):
        with torch.no_grad():
            kwargs = {"src_key_padding_mask": padding_at(*lengths)}
            expected, got = theirs(x, **kwargs), ours(x, **kwargs)
        torch.testing.assert_close(got, expected)
    assert [tuple(c["key_lengths"].tolist()) for c in calls[-2:]] == [(3, 0, 2)] * 2


@pytest.mark.parametrize("train", [True, False])
def test_a_nested_batch_is_the_padded_batch_in_values_weights_and_gradients(train):
    ours = fastattn.MultiheadAttention(E, H, batch_first=True).train(train).double()
    lengths = (4, 1, 2)
    items = [torch.randn(n, E, dtype=torch.float64, requires_grad=True) for n in lengths]
    padding = padding_at(*lengths, size=4)
    for average in (True, False):
        nested = torch.nested.as_nested_tensor(items)
        out, weights = ours(nested, nested, nested, average_attn_weights=average)
        assert out.is_nested and not weights.is_nested
        padded = nn.utils.rnn.pad_sequence(items, batch_first=True)
        expected, expected_weights = ours(
            *(padded,) * 3, key_padding_mask=padding, average_attn_weights=average
        )
        rows = padding[:, :, None] if average else padding[:, None, :, None]
        torch.testing.assert_close(weights, expected_weights.masked_fill(rows, 0.0))
        torch.testing.assert_close(torch.cat(out.unbind()), expected[~padding])
        got = torch.autograd.grad(torch.cat(out.unbind()).square().sum(), items)
        torch.testing.assert_close(
            got, torch.autograd.grad(expected[~padding].square().sum(), items)
        )


NESTED_AND_WRONG = {
    "are not the same Tensor": ({}, lambda n, p: ((n, n.clone(), n), {})),
    "same Tensor": ({}, lambda n, p: ((p, n, n), {})),
    "batch_first": ({"batch_first": False}, lambda n, p: ((n, n, n), {})),
    "add_bias_kv": ({"add_zero_attn": True}, lambda n, p: ((n, n, n), {})),
    "_qkv_same_embed_dim": ({"kdim": 5}, lambda n, p: ((n, n, n), {})),
    "masks are not supported": (
        {},
        lambda n, p: ((n, n, n), {"key_padding_mask": padding_at(2, 4, size=4)}),
    ),
}


@pytest.mark.parametrize("reason", NESTED_AND_WRONG)
def test_other_nested_input_is_an_assertion_error_as_in_torch(reason):
    options, arguments = NESTED_AND_WRONG[reason]
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(4, E)])
    inputs, kwargs = arguments(nested, torch.nested.to_padded_tensor(nested, 0.0))
    options = {"batch_first": True} | options
    for kind in (nn.MultiheadAttention, fastattn.MultiheadAttention):
        with pytest.raises(AssertionError, match="does not support NestedTensor") as error:
            kind(E, H, **options).train()(*inputs, **kwargs)
    assert reason in str(error.value)


def test_items_without_any_real_key_stay_finite_through_an_encoder():
    """Padding with gaps prevents nested tensors; torch's own output is NaN here."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2)
    fastattn.convert(encoder)
    padding = padding_at(L, 3, 0)
    padding[1] = padding[1].flip(0)
    x = sequence(L, True).requires_grad_()
    for train in (True, False):
        out = encoder.train(train)(x, src_key_padding_mask=padding)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert out.isfinite().all() and grad.isfinite().all()
        with torch.no_grad():
            assert encoder(x, src_key_padding_mask=padding).isfinite().all()


@parametrize("train", [True, False], fast=1)
def test_compiled_encoder_is_one_graph_that_calls_the_module(train, monkeypatch):
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).train(train)
    fastattn.convert(layer)
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=record)
    x = sequence(L, True)
    for masks in ({}, {"src_key_padding_mask": padding_at(L, 3, 1)}):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, **masks), layer(x, **masks))
    code = [graph.print_readable(print_output=False) for graph in graphs]
    assert len(code) == 2
    assert all("fastattn" in c and "_transformer_encoder_layer_fwd" not in c for c in code)
