"""How fastattn.MultiheadAttention calls the kernels: masks, dropout, empty rows, compilers."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastattn
from fastattn.backends.native import marshalling
from fastattn.dispatch import fast_path
from tests.support.marks import parametrize
from tests.support.multihead_cases import (
    E,
    H,
    L,
    N,
    S,
    assert_same,
    causal_mask,
    run,
    spy_on_attention,
    twins,
)

# -- masks and hints ----------------------------------------------------------------------------


def test_projections_are_viewed_and_padding_masks_stay_small(monkeypatch):
    calls = spy_on_attention(monkeypatch)
    ours = fastattn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    padding = torch.zeros(N, L, dtype=torch.bool)
    out, _ = ours(x, x, x, need_weights=False, key_padding_mask=padding)
    ours(x, x, x, need_weights=False, key_padding_mask=padding, attn_mask=causal_mask(L, L))
    first, second = calls
    storages = {first[name].untyped_storage().data_ptr() for name in "qkv"}
    assert len(storages) == 1, "q, k, v are not views of one projection"
    assert first["mask"].shape == (N, 1, 1, L)
    assert second["mask"].shape == (N, 1, L, L) and second["mask"].dtype == torch.bool
    assert out.is_contiguous()
    assert fastattn.MultiheadAttention(E, H)(x, x, x)[0].is_contiguous()


def test_causal_hint_replaces_the_mask_only_where_torch_drops_it():
    """The hint does not match the mask, so the result shows which of the two was used."""
    theirs, ours = twins(batch_first=True)
    query, key = torch.randn(N, L, E), torch.randn(N, S, E)
    not_causal = torch.rand(L, S) < 0.3
    not_causal[:, 0] = False
    padding = torch.zeros(N, S, dtype=torch.bool)
    kinds = [{}, {"need_weights": False}, {"need_weights": False, "key_padding_mask": padding}]
    for kwargs in kinds:
        kwargs = kwargs | {"attn_mask": not_causal, "is_causal": True}
        got, expected = (run(m, (query, key, key), kwargs, backward=False) for m in (ours, theirs))
        assert_same(got, expected, 1e-5)
    hinted, masked = (
        ours(query, key, key, attn_mask=not_causal, is_causal=hint, need_weights=False)[0]
        for hint in (True, False)
    )
    assert not torch.allclose(hinted, masked)


def test_float32_masks_with_16_bit_inputs():
    ours = fastattn.MultiheadAttention(E, H, dtype=torch.bfloat16)
    x = torch.randn(L, N, E, dtype=torch.bfloat16)
    mask = torch.randn(L, L).bfloat16().float().requires_grad_()
    for need_weights in (True, False):
        out, _ = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        expected, _ = ours(x, x, x, attn_mask=mask.bfloat16(), need_weights=need_weights)
        assert torch.equal(out, expected)
        (grad,) = torch.autograd.grad(out.float().square().sum(), mask)
        assert grad.dtype == torch.float32 and grad.any()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("how", ["padding", "float padding", "attn_mask", "both"])
def test_rows_that_see_nothing_give_the_bias_and_finite_gradients(how, train, need_weights):
    theirs, ours = (m.train(train) for m in twins(batch_first=True))
    x = torch.randn(N, L, E, requires_grad=True)
    padding = torch.zeros(N, L, dtype=torch.bool)
    rows = torch.zeros(N, L, dtype=torch.bool)  # query rows that see no key
    kwargs = {"need_weights": need_weights, "average_attn_weights": False}
    if how == "attn_mask":
        kwargs["attn_mask"] = torch.zeros(L, L)
        kwargs["attn_mask"][2] = -torch.inf
        rows[:, 2] = True
    elif how == "both":  # only both masks together hide all keys from row 1 of item 1
        kwargs["attn_mask"] = torch.zeros(L, L, dtype=torch.bool)
        kwargs["attn_mask"][1, :2] = padding[1, 2:] = True
        kwargs["key_padding_mask"] = padding
        rows[1, 1] = True
    else:
        padding[1] = rows[1] = True
        as_float = torch.zeros(N, L).masked_fill(padding, -torch.inf)
        kwargs["key_padding_mask"] = as_float if how.startswith("float") else padding
    got = run(ours, (x, x, x), kwargs)
    assert all(y.isfinite().all() for y in got.values())
    assert torch.equal(got["out"][rows], ours.out_proj.bias.expand(int(rows.sum()), E))
    expected = run(theirs, (x, x, x), kwargs, backward=False)
    torch.testing.assert_close(got["out"][~rows], expected["out"][~rows])
    if need_weights:
        weights = got["weights"].transpose(1, 2)
        assert (weights[rows] == 0).all()
        torch.testing.assert_close(weights[~rows], expected["weights"].transpose(1, 2)[~rows])
    with torch.inference_mode():
        assert torch.equal(ours(x, x, x, **kwargs)[0], got["out"])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [(0, S, N), (L, 0, N), (L, S, 0), (0, 0, 0)])
def test_sizes_of_zero(sizes, batch_first):
    rows, keys, batch = sizes
    theirs, ours = twins(batch_first=batch_first)

    def sequence(length):
        shape = (batch, length, E) if batch_first else (length, batch, E)
        return torch.randn(shape, requires_grad=True)

    query, key = sequence(rows), sequence(keys)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    for need_weights in (True, False):
        kwargs = {"need_weights": need_weights}
        got, expected = (run(m, (query, key, key), kwargs) for m in (ours, theirs))
        assert_same(got, expected, 1e-5)
        padded = run(ours, (query, key, key), kwargs | {"key_padding_mask": padding})
        assert_same(padded, expected, 1e-5)  # torch itself cannot reshape a mask without keys


# -- dropout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_dropout_is_one_draw_for_output_and_weights_and_stops_in_eval(options):
    ours = fastattn.MultiheadAttention(E, H, dropout=0.5, **options).double()
    x = torch.randn(8, 6, E, dtype=torch.float64)

    def call(**kwargs):
        torch.manual_seed(3)
        return ours(x, x, x, **kwargs)

    out, weights = call(average_attn_weights=False)
    assert torch.equal(out, call(need_weights=False)[0])
    assert torch.equal(out, call(average_attn_weights=True)[0])
    torch.testing.assert_close(weights.mean(1), call(average_attn_weights=True)[1])
    assert not torch.equal(out, ours(x, x, x)[0]), "a second call drew the same dropout"
    kept = ours.eval()(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(weights, torch.where(weights == 0, 0.0, 2 * kept))
    assert 0.4 < (weights == 0).double().mean() < 0.6
    if not options:  # the returned weights give the returned output
        value = F.linear(x, ours.in_proj_weight[2 * E :], ours.in_proj_bias[2 * E :])
        heads = value.unflatten(-1, (H, -1)).permute(1, 2, 0, 3)
        again = ours.out_proj((weights @ heads).permute(2, 0, 1, 3).flatten(2))
        torch.testing.assert_close(again, out)


# -- autocast, compilers, transforms --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_autocast_gives_torchs_dtypes_and_float32_gradients(options, dtype):
    theirs, ours = twins(**options)
    x = torch.randn(L, N, E, requires_grad=True)
    bias = torch.randn(L, L, requires_grad=True)
    padding = torch.zeros(N, L, dtype=torch.bool)
    for kwargs in ({}, {"attn_mask": bias}, {"key_padding_mask": padding}):
        for need_weights in (True, False):
            got, expected = [], []
            for results, module in ((got, ours), (expected, theirs)):
                with torch.autocast("cpu", dtype=dtype):
                    out, weights = module(x, x, x, need_weights=need_weights, **kwargs)
                leaves = [x, module.in_proj_weight] + [bias] * ("attn_mask" in kwargs)
                loss = out.float().square().sum()
                loss = loss if weights is None else loss + weights.float().square().sum()
                results += [out, weights, *torch.autograd.grad(loss, leaves)]
            for a, b in zip(got, expected, strict=True):
                if b is None:
                    assert a is None
                    continue
                assert a.dtype == b.dtype
                scale = b.abs().max().item()
                error = (a.float() - b.float()).abs().max().item()
                assert error <= 6 * torch.finfo(dtype).eps * scale


@pytest.mark.slow
@parametrize("dynamic", [False, True], fast=1)
@parametrize("need_weights", [True, False], fast=1)
def test_compiles_as_one_graph_with_gradients(need_weights, dynamic):
    ours = fastattn.MultiheadAttention(E, H, batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (L, L + 4):
        x = torch.randn(N, rows, E, requires_grad=True)
        padding = torch.rand(N, rows) < 0.3
        for masks in ({}, {"key_padding_mask": padding, "attn_mask": causal_mask(rows, rows)}):
            expected, got = [], []
            for module, results in ((ours, expected), (compiled, got)):
                out, weights = module(x, x, x, need_weights=need_weights, **masks)
                loss = out.square().sum() + (weights.square().sum() if need_weights else 0)
                results += [out, weights, *torch.autograd.grad(loss, [x, *ours.parameters()])]
            torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_compiled_dropout_is_dropout():
    ours = fastattn.MultiheadAttention(E, H, dropout=0.5)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, N, E)
    draws = [compiled(x, x, x, average_attn_weights=False)[1] for _ in range(2)]
    assert not torch.equal(*draws)
    assert all(0.4 < (w == 0).float().mean() < 0.6 for w in draws)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = fastattn.MultiheadAttention(E, H)

    def forward(self, x):
        return self.attention(x, x, x)


@pytest.mark.slow
def test_export_and_trace_record_the_attention():
    """A trace with the first output stored as a constant would return it for the second input."""
    ours = SelfAttention().eval()
    first, second = torch.randn(L, N, E), torch.randn(L, N, E)
    exported = torch.export.export(ours, (first,)).module()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        traced = torch.jit.trace(ours, (first,))
    for x in (first, second):
        for module in (exported, traced):
            torch.testing.assert_close(module(x), ours(x))


def test_functional_call_grad_and_vmap():
    ours = fastattn.MultiheadAttention(E, H, batch_first=True).double()
    parameters = {name: x.detach() for name, x in ours.named_parameters()}
    x = torch.randn(N, L, E, dtype=torch.float64)

    def loss(parameters, item):
        out, weights = torch.func.functional_call(ours, parameters, (item, item, item))
        return out.square().sum() + weights.square().sum()

    per_item = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(N):
        ours.zero_grad()
        loss(dict(ours.named_parameters()), x[index]).backward()
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(per_item[name][index], parameter.grad)


# ------------------------------------------------------------------------------- one native call


SOURCES = {  # (B, L, E), or without B
    "contiguous": lambda x: x,
    "rows turned": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": lambda x: torch.cat([x, x], 1)[:, ::2],
    "no batch": lambda x: x[0],
    "no rows": lambda x: x[:, :0],
    "a parameter": nn.Parameter,
}


WEIGHTS = {
    "no weights": dict(need_weights=False),
    "mean weights": {},
    "weights of heads": dict(average_attn_weights=False),
}


@pytest.mark.skipif(not hasattr(marshalling.extension, "attend"), reason="no extension")
@pytest.mark.parametrize("asked", WEIGHTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", [{}, dict(batch_first=False), dict(bias=False)], ids=str)
def test_self_attention_in_inference_is_one_native_call(options, source, asked, monkeypatch):
    found = []

    def attend(*args):
        found.append(marshalling.attend(*args))
        return found[-1]

    module = fastattn.MultiheadAttention(E, H, **dict(batch_first=True) | options).eval()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = SOURCES[source](torch.randn(N, L, E, dtype=dtype))
        with torch.inference_mode():
            monkeypatch.setattr(fast_path, "attend", attend)
            results = module.to(dtype)(x, x, x, **WEIGHTS[asked])
            monkeypatch.setattr(fast_path, "attend", lambda *args: None)
            expected = module(x, x, x, **WEIGHTS[asked])
        how = dict(rtol=0.02, atol=0.02) if dtype.itemsize == 2 else dict(rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(results, expected, **how)
        assert (results[1] is None) == (asked == "no weights")
    assert len(found) == 3 and all(y is not None for y in found)


@pytest.mark.skipif(not hasattr(marshalling.extension, "attend"), reason="no extension")
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_causal_hint_is_one_native_call(batch_first, monkeypatch):
    found = []

    def attend(*args):
        found.append(marshalling.attend(*args))
        return found[-1]

    monkeypatch.setattr(fast_path, "attend", attend)
    module = fastattn.MultiheadAttention(E, H, batch_first=batch_first).eval()
    x = torch.randn(N, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L if batch_first else N)
    with torch.inference_mode():
        out, _ = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)
        expected, _ = module(x, x, x, attn_mask=mask)  # with weights a mask is not dropped
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert found[0] is not None


@pytest.mark.parametrize("change", ["a gradient", "a mask", "other keys", "appended"])
def test_other_calls_have_their_steps(change, monkeypatch):
    taken = []
    at_once = fastattn.MultiheadAttention._attend_at_once
    monkeypatch.setattr(
        fastattn.MultiheadAttention,
        "_attend_at_once",
        lambda *args: taken.append(args) or at_once(*args),
    )
    module = fastattn.MultiheadAttention(E, H, add_zero_attn=change == "appended").eval()
    x = torch.randn(L, N, E)
    key = x.clone() if change == "other keys" else x
    given = dict(attn_mask=torch.eye(L).bool()) if change == "a mask" else {}
    with torch.set_grad_enabled(change == "a gradient"):
        module(x, key, key, **given)
    assert not taken
