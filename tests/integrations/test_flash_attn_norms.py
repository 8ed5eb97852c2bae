"""flash-attn's norms, losses and swiglu: values and gradients against formulas in float64."""

import itertools

import pytest
import torch

from fastattn.flash_attn import activations, losses, norms
from tests.integrations.test_flash_attn import random, signature_of

ROWS, C = (3, 5), 7


def near(found, expected, dtype):
    """Within a rounding to the dtype, after sums in float32 or float64."""
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=16 * eps)


def formula(x, w, b, eps, is_rms_norm):
    if not is_rms_norm:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w
    return y if b is None else y + b


# What a call has beside x and weight, and which results it gives.
OPTIONS = ("bias", "residual", "x1", "weight1", "rowscale", "prenorm", "zero_centered_weight")
COMBINED = [x for x in itertools.product((False, True), repeat=len(OPTIONS)) if not (x[2] and x[4])]
DRAWN = [x for at, x in enumerate(COMBINED) if at % 5 == 0 or sum(x) in (0, 6)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
def test_norms(is_rms_norm, dtype):
    for chosen in DRAWN:
        has = dict(zip(OPTIONS, chosen))
        shapes = dict(x=(*ROWS, C), weight=(C,), bias=(C,), residual=(*ROWS, C), x1=(*ROWS, C))
        shapes |= dict(weight1=(C,), bias1=(C,), rowscale=ROWS)
        given = {
            name: random(*shape, seed=at).to(dtype).requires_grad_()
            for at, (name, shape) in enumerate(shapes.items())
            if has.get(name if name != "bias1" else "weight1", True)
        }
        exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        flags = {name: has[name] for name in ("prenorm", "zero_centered_weight")}
        function = norms.rms_norm_fn if is_rms_norm else norms.layer_norm_fn
        found = function(**(dict(bias=None) | given | flags), eps=0.01)
        found = found if isinstance(found, tuple) else (found,)
        total = exact["x"]
        if has["rowscale"]:
            total = total * exact["rowscale"][..., None]
        for name in ("x1", "residual"):
            total = total + exact.get(name, 0)
        one = float(has["zero_centered_weight"])
        expected = [
            formula(total, exact[w] + one, exact.get(b), 0.01, is_rms_norm)
            for w, b in (("weight", "bias"), ("weight1", "bias1"))
            if w in exact
        ]
        expected += [total] * has["prenorm"]
        assert len(found) == len(expected)
        for x, y in zip(found, expected):
            assert x.dtype == dtype
            near(x, y, dtype)
        if dtype != torch.bfloat16:  # of which a gradient is a sum of rounded ones
            loss, of_exact = (
                sum((x.double() * (1 + x.double())).sum() for x in some)
                for some in (found, expected)
            )
            of_given = torch.autograd.grad(loss, [*given.values()])
            for x, y in zip(of_given, torch.autograd.grad(of_exact, [*exact.values()])):
                torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_the_sum_is_not_rounded_before_the_norm(residual_in_fp32):
    x, weight = random(9, 64).bfloat16(), random(64, seed=1).float()
    out, total = norms.rms_norm_fn(
        x,
        weight,
        None,
        rowscale=torch.full((9,), 1 / 3),
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        out_dtype=torch.float32,
    )
    assert total.dtype == (torch.float32 if residual_in_fp32 else torch.bfloat16)
    third = x.double() * torch.tensor(1 / 3).double()
    near(out, formula(third, weight.double(), None, 1e-6, True), torch.float32)
    residual = random(9, 64, seed=2).float()
    total = norms.layer_norm_fn(x, weight, None, residual, prenorm=True)[1]
    assert total.dtype == torch.float32 and torch.equal(total, x.float() + residual)


@pytest.mark.parametrize("with_x1", [False, True])
def test_dropout(with_x1):
    x, x1 = random(200, 64).requires_grad_(), random(200, 64, seed=1) if with_x1 else None
    given = dict(x1=x1, dropout_p=0.25, prenorm=True, return_dropout_mask=True)
    _, total, kept, kept1 = norms.layer_norm_fn(x, torch.ones(64).double(), None, **given)
    assert kept.dtype == torch.bool and 0.72 < kept.double().mean() < 0.78
    expected = torch.where(kept, x / 0.75, 0)
    if with_x1:
        assert 0.5 < (kept == kept1).double().mean() < 0.7  # 0.625 of independent draws
        expected = expected + torch.where(kept1, x1 / 0.75, 0)
    else:
        assert kept1 is None
    torch.testing.assert_close(total, expected)
    (dx,) = torch.autograd.grad(total.sum(), x)
    torch.testing.assert_close(dx, kept.double() / 0.75)
    assert norms.layer_norm_fn(x, x[0], None, return_dropout_mask=True)[1:] == (None, None)


def test_modules():
    x, residual = random(4, 8).float(), random(4, 8, seed=1).float()
    for zero_centered_weight in (False, True):
        norm = norms.RMSNorm(8, zero_centered_weight=zero_centered_weight, dropout_p=0.5).eval()
        assert list(norm.state_dict()) == ["weight"] and norm.bias is None
        near(norm(x), formula(x.double(), 1.0, None, 1e-5, True), torch.float32)
        assert torch.equal(norm(x, residual, prenorm=True)[1], x + residual)
    assert (norm.train()(x, prenorm=True)[1] == 0).any()
    weight = random(8, seed=2).float()
    near(
        norms.rms_norm(x, weight, 0.1),
        formula(x.double(), weight.double(), None, 0.1, True),
        torch.float32,
    )


def test_results_are_written():
    x, weight = random(4, 8), torch.ones(8).double()
    out, total = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x)
    found = norms.layer_norm_fn(x, weight, None, x, prenorm=True, out=out, residual_out=total)
    assert found[0] is out and found[1] is total and torch.equal(total, 2 * x)
    near(out, formula(2 * x, 1.0, None, 1e-6, False), torch.float32)


X, W = torch.zeros(2, 3, 4), torch.ones(4)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: norms.layer_norm_fn(X, W[:3], None), ValueError, "weight: got shape .3"),
        (lambda: norms.layer_norm_fn(X, None, None), TypeError, "weight: got None"),
        (lambda: norms.layer_norm_fn(X, W, W[:1]), ValueError, "bias: got shape .1"),
        (lambda: norms.layer_norm_fn(X, W, None, X[0]), ValueError, "residual: got shape"),
        (lambda: norms.layer_norm_fn(X, W, None, x1=X[0]), ValueError, "x1: got shape"),
        (lambda: norms.layer_norm_fn(X, W, None, rowscale=X), ValueError, "rowscale: got shape"),
        (lambda: norms.layer_norm_fn(X, W, None, out=X[0]), ValueError, "out: got shape"),
        (
            lambda: norms.layer_norm_fn(X, W, None, x1=X, rowscale=X[..., 0]),
            ValueError,
            "rowscale: got it beside x1",
        ),
        (lambda: norms.rms_norm(X.long(), W, 1.0), ValueError, "x: got torch.int64"),
        (lambda: norms.rms_norm([1.0], W, 1.0), TypeError, "x: got list"),
        *(
            (lambda p=p: norms.rms_norm_fn(X, W, None, dropout_p=p), ValueError, "dropout_p: got")
            for p in (-0.5, 1.0)
        ),
        (lambda: losses.CrossEntropyLoss(reduction="max"), ValueError, "reduction: got 'max'"),
        (
            lambda: losses.CrossEntropyLoss(process_group=0)(X[0], torch.tensor([0, 1, 2])),
            NotImplementedError,
            "process_group: got",
        ),
        (
            lambda: losses.cross_entropy_loss(X, torch.tensor([0, 1])),
            ValueError,
            "logits: got shape",
        ),
        (
            lambda: losses.cross_entropy_loss(X[0], torch.tensor([0, 1])),
            ValueError,
            "labels: got torch.int64",
        ),
        (lambda: activations.swiglu(X, X[0]), ValueError, "y: got shape"),
        (lambda: activations.swiglu(1.0, X), TypeError, "x: got"),
        (lambda: activations.swiglu(X.long(), X), ValueError, "x.dtype: got torch.int64"),
        (
            lambda: losses.cross_entropy_loss(X[0].long(), torch.tensor([0])),
            ValueError,
            "logits.dtype: got torch.int64",
        ),
        (
            lambda: losses.cross_entropy_loss(X[0], torch.tensor([0] * 3), label_smoothing=2.0),
            ValueError,
            "label_smoothing: got 2.0",
        ),
        (
            lambda: norms.layer_norm_fn(X, torch.ones(X.shape[-1]), None, bias1=X[0, 0]),
            ValueError,
            "bias1: got it without weight1",
        ),
    ],
)
def test_refusals(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_cross_entropy(dtype, reduction):
    logits = random(6, 9).to(dtype).requires_grad_()
    labels = torch.tensor([0, 8, 3, 5, 3, 1], dtype=torch.int32)
    loss = losses.CrossEntropyLoss(3, reduction, 0.2, 1.5, 0.01, return_z_loss=True)
    found = loss(logits, labels)
    exact = logits.detach().double().requires_grad_()
    x, counts = exact * 1.5, labels != 3
    lse = x.exp().sum(-1).log()
    own = x.gather(1, labels.long()[:, None])[:, 0]
    z = 0.01 * lse.square() * counts
    expected = (lse - 0.8 * own - 0.2 * x.mean(-1)) * counts + z, z
    if reduction != "none":
        expected = [y.sum() / (counts.sum() if reduction == "mean" else 1) for y in expected]
    for y, z in zip(found, expected):
        assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        near(y, z, y.dtype)
    assert not found[1].requires_grad
    (dx,) = torch.autograd.grad(found[0].sum(), logits)
    near(dx, torch.autograd.grad(expected[0].sum(), exact)[0], dtype)
    assert torch.equal(
        losses.CrossEntropyLoss()(logits, labels.long()),
        torch.nn.functional.cross_entropy(logits.to(found[0].dtype), labels.long()),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_swiglu(dtype):
    x, y = (random(4, 9, seed=at).to(dtype).requires_grad_() for at in (0, 1))
    of_x, of_y = (z.detach().double().requires_grad_() for z in (x, y))
    out, expected = activations.swiglu(x, y), of_x / (1 + (-of_x).exp()) * of_y
    assert out.dtype == dtype
    near(out, expected, dtype)
    gradients = torch.autograd.grad(out.double().sum(), (x, y))
    for found, exact in zip(gradients, torch.autograd.grad(expected.sum(), (of_x, of_y))):
        near(found, exact, dtype)


SHARED = "residual=None x1=None weight1=None bias1=None eps=1e-06 dropout_p=0.0 rowscale=None "
SHARED += "prenorm=False residual_in_fp32=False zero_centered_weight=False"
LAST = "return_dropout_mask=False out_dtype=None out=None residual_out=None"
SCALES = "label_smoothing=0.0 logit_scale=1.0 lse_square_scale=0.0"
SIGNATURES = {
    norms.layer_norm_fn: f"x weight bias {SHARED} is_rms_norm=False {LAST}",
    norms.rms_norm_fn: f"x weight bias {SHARED} {LAST}",
    norms.rms_norm: "x weight epsilon",
    norms.RMSNorm: "hidden_size eps=1e-05 dropout_p=0.0 zero_centered_weight=False device=None "
    "dtype=None",
    losses.cross_entropy_loss: f"logits labels precomputed_lse=None {SCALES} ignore_index=-100 "
    "inplace_backward=False process_group=None",
    losses.CrossEntropyLoss: f"ignore_index=-100 reduction=mean {SCALES} inplace_backward=False "
    "process_group=None return_z_loss=False",
    activations.swiglu: "x y",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda x: x.__name__)
def test_signatures(function):
    assert signature_of(function) == SIGNATURES[function].split()


def test_a_wider_residual_is_not_rounded():
    x, residual = torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)
    _, total = norms.layer_norm_fn(x, torch.ones(4), None, residual, prenorm=True)
    assert torch.equal(total, x + residual)
