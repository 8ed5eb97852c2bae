"""fastattn.MultiheadAttention is torch.nn.MultiheadAttention: results, gradients, files, errors."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import fastattn
from tests.support.marks import parametrize
from tests.support.multihead_cases import (
    GRID,
    E,
    H,
    L,
    N,
    S,
    assert_same,
    build,
    run,
    spy_on_attention,
    twins,
)


@parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)], fast=1)
def test_grid_of_options_gives_torchs_results_and_gradients(dtype, tolerance):
    for case in GRID:
        theirs, ours, inputs, kwargs = build(case, dtype)
        try:
            assert_same(run(ours, inputs, kwargs), run(theirs, inputs, kwargs), tolerance)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.slow
def test_grid_in_inference_mode_gives_the_results_of_torchs_fast_path():
    """Inference mode allows torch's fast path; except for fully masked rows, results agree."""
    fast = [x for x in GRID if not x["train"] and x["attn_mask"] != "causal hint"]
    assert len(fast) > 50
    for case in fast:
        theirs, ours, inputs, kwargs = build(case | {"inputs": "self"}, torch.float32)
        with torch.inference_mode():
            expected = run(theirs, inputs, kwargs, backward=False)
            assert_same(run(ours, inputs, kwargs, backward=False), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_within_twice_the_error_of_torch(dtype):
    """Errors are against float64. With need_weights, torch computes in the storage dtype."""
    for case in GRID[:60]:
        case = case | {"weights": "per head"}
        theirs, ours, inputs, kwargs = build(case, dtype)

        def wide(x):
            is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.detach().double().requires_grad_() if is_float else x

        same = {id(x): wide(x) for x in inputs}
        exact = run(
            copy.deepcopy(theirs).double(),
            [same[id(x)] for x in inputs],
            {x: wide(y) for x, y in kwargs.items()},
        )
        rough, got = run(theirs, inputs, kwargs), run(ours, inputs, kwargs)
        for name, want in exact.items():
            if want is None:
                continue
            size = want.abs().max().item()
            error = (got[name].double() - want).abs().max().item()
            allowed = (rough[name].double() - want).abs().max().item()
            factor = 3 if name.startswith("d") else 2
            assert got[name].dtype == dtype, (case, name)
            assert error <= factor * allowed + 2 * torch.finfo(dtype).eps * size, (case, name)


# -- the module as an object ----------------------------------------------------------------------

MODULES = [
    {},
    {"bias": False},
    {"kdim": 5, "vdim": 9},
    {"kdim": 5, "bias": False, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.25},
    {"dtype": torch.float64, "device": "cpu"},
]


@pytest.mark.parametrize("options", MODULES, ids=str)
def test_same_initial_values_from_the_same_seed_and_same_attributes(options):
    made = []
    for kind in (nn.MultiheadAttention, fastattn.MultiheadAttention):
        torch.manual_seed(5)
        made.append((kind(E, H, **options), torch.get_rng_state()))
    (theirs, rng), (ours, our_rng) = made
    assert torch.equal(rng, our_rng)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert theirs.state_dict()._metadata == ours.state_dict()._metadata
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    plain = (bool, int, float, type(None))
    public = {x: y for x, y in vars(theirs).items() if isinstance(y, plain)}
    assert public == {x: y for x, y in vars(ours).items() if isinstance(y, plain)}
    assert vars(theirs).keys() == vars(ours).keys()
    assert isinstance(ours, nn.MultiheadAttention)


def test_constructor_and_forward_have_torchs_signatures():
    for name in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, name)).parameters
        ours = inspect.signature(getattr(fastattn.MultiheadAttention, name)).parameters
        assert [(x.name, x.default, x.kind) for x in theirs.values()] == [
            (x.name, x.default, x.kind) for x in ours.values()
        ]


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_compute_the_same_and_are_still_called_inside_encoder_layers(clone, monkeypatch):
    calls = spy_on_attention(monkeypatch)
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    layer.self_attn = fastattn.MultiheadAttention(E, H, batch_first=True).eval()
    x = torch.randn(N, L, E)
    copied = clone(layer)
    assert type(copied.self_attn) is fastattn.MultiheadAttention
    assert len(copied.self_attn._forward_pre_hooks) == 1
    with torch.no_grad():
        assert torch.equal(layer(x), copied(x))
    assert len(calls) == 2
    assert not {id(x) for x in layer.parameters()} & {id(x) for x in copied.parameters()}


# -- errors ---------------------------------------------------------------------------------------


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


WRONG_CALLS = {  # batch first, so N = 3, L = 5; True: the text is torch's, word for word
    "query 1-D": (True, (zeros(E), zeros(E), zeros(E)), {}),
    "query 4-D": (True, (zeros(1, 1, L, E),) * 3, {}),
    "key 2-D": (True, (zeros(N, L, E), zeros(L, E), zeros(L, E)), {}),
    "key 3-D, query 2-D": (True, (zeros(L, E), zeros(N, L, E), zeros(N, L, E)), {}),
    "embedding": (True, (zeros(N, L, E + 1),) * 3, {}),
    "key embedding": (True, (zeros(N, L, E), zeros(N, L, 9), zeros(N, L, 9)), {}),
    "value embedding": (True, (zeros(N, L, E), zeros(N, L, E), zeros(N, L, 9)), {}),
    "value length": (True, (zeros(N, L, E), zeros(N, S, E), zeros(N, L, E)), {}),
    "unbatched value length": (True, (zeros(L, E), zeros(S, E), zeros(L, E)), {}),
    "batch": (False, (zeros(N, L, E), zeros(N + 1, L, E), zeros(N + 1, L, E)), {}),
    "dtype": (False, (zeros(N, L, E, dtype=torch.float64),) * 3, {}),
    "int mask": (True, None, {"attn_mask": zeros(L, L, dtype=torch.int64)}),
    "int padding": (True, None, {"key_padding_mask": zeros(N, L, dtype=torch.uint8)}),
    "mask dtype": (False, None, {"attn_mask": zeros(L, L, dtype=torch.float64)}),
    "padding dtype": (False, None, {"key_padding_mask": zeros(N, L, dtype=torch.float64)}),
    "mask 1-D": (True, None, {"attn_mask": zeros(L)}),
    "mask 4-D": (True, None, {"attn_mask": zeros(N, H, L, L)}),
    "mask (1, L, S)": (True, None, {"attn_mask": zeros(1, L, L)}),
    "mask (L, 1)": (True, None, {"attn_mask": zeros(L, 1)}),
    "mask of other size": (True, None, {"attn_mask": zeros(N * H, L, S)}),
    "unbatched 3-D mask": (True, (zeros(L, E),) * 3, {"attn_mask": zeros(H + 1, L, L)}),
    "padding 1-D": (True, None, {"key_padding_mask": zeros(L)}),
    "padding batch": (True, None, {"key_padding_mask": zeros(N + 1, L)}),
    "padding length": (True, None, {"key_padding_mask": zeros(N, L + 1)}),
    "unbatched padding": (True, (zeros(L, E),) * 3, {"key_padding_mask": zeros(1, L)}),
    "hint without mask": (True, None, {"is_causal": True}),
}


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("what", WRONG_CALLS)
def test_errors_have_torchs_type_and_text(what, options):
    same_text, inputs, kwargs = WRONG_CALLS[what]
    inputs = inputs or (zeros(N, L, E),) * 3
    theirs, ours = twins(batch_first=True, **options)
    for need_weights in (True, False):
        kwargs = kwargs | {"need_weights": need_weights}
        with pytest.raises((AssertionError, RuntimeError)) as expected:
            theirs(*inputs, **kwargs)
        with pytest.raises(expected.type) as got:
            ours(*inputs, **kwargs)
        assert got.type is expected.type
        if same_text:
            # torch 2.15 names one product mm that it named addmm.
            assert str(got.value).removeprefix("add") == str(expected.value).removeprefix("add")


def test_separate_projections_have_torchs_errors():
    theirs, ours = twins(kdim=5, vdim=6)
    query, key, value = zeros(L, N, E), zeros(S, N, 5), zeros(S, N, 6)
    for wrong in ((query, key, value[1:]), (query, value, value), (query, key, key)):
        with pytest.raises(AssertionError) as expected:
            theirs(*wrong)
        with pytest.raises(AssertionError) as got:
            ours(*wrong)
        assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("sizes", [(0, 4), (8, 0), (-8, 2), (9, 4)])
def test_constructor_has_torchs_errors(sizes):
    with pytest.raises((ValueError, AssertionError)) as expected:
        nn.MultiheadAttention(*sizes)
    with pytest.raises(expected.type) as got:
        fastattn.MultiheadAttention(*sizes)
    assert str(got.value) == str(expected.value)


def test_masks_of_two_kinds_warn_as_torch_does():
    theirs, ours = twins()
    x, padding = zeros(L, N, E), torch.zeros(N, L, dtype=torch.bool)
    for module in (theirs, ours):
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
            module(x, x, x, attn_mask=zeros(L, L), key_padding_mask=padding)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_impossible_dropout_raises(p):
    ours = fastattn.MultiheadAttention(E, H, dropout=p)
    for need_weights in (True, False):
        with pytest.raises(ValueError, match="dropout_p"):
            ours(*(zeros(L, N, E),) * 3, need_weights=need_weights)
    ours.eval()(*(zeros(L, N, E),) * 3)  # like torch, checked in training only


def test_torchscript_is_refused_with_what_to_do_instead():
    with pytest.raises(RuntimeError, match="use torch"):
        torch.jit.script(nn.Sequential(fastattn.MultiheadAttention(E, H)))
