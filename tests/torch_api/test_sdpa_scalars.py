"""fastattn.scaled_dot_product_attention accepts the numbers and flags that torch's accepts."""

import decimal
import fractions
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastattn
from tests.support.marks import parametrize

ours, theirs = fastattn.scaled_dot_product_attention, F.scaled_dot_product_attention

Q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))


class Floating:
    def __float__(self):
        return 0.5


class Index:
    def __index__(self):
        return 1


class Real(float):
    pass


class Whole(int):
    pass


NUMPY = ("float16", "float32", "float64", "longdouble", "complex64", "int8", "int64", "uint8")
TENSORS = ("float32", "float64", "bfloat16", "float16", "complex64", "int64", "uint8", "bool")
VALUES = {
    **{str(x): x for x in (None, True, False, 0, 1, 2, -1, 0.5, 1e-30, 2**64, 1j, "0.5", b"1")},
    **{f"an int of {n} bits": 1 << (n - 1) for n in (65, 2000)},
    **{f"numpy.{name}": getattr(np, name)(0.5) for name in NUMPY if "int" not in name},
    **{f"numpy.{name}": getattr(np, name)(1) for name in NUMPY if "int" in name},
    **{f"numpy.bool {x}": np.bool_(x) for x in (True, False)},
    "numpy.str_": np.str_("0.5"),
    "numpy.datetime64": np.datetime64("2020"),
    **{f"an array of {n} dimensions": np.full((1,) * n, 0.5) for n in (0, 1)},
    **{f"a tensor of {x}": torch.tensor(0.5).to(getattr(torch, x)) for x in TENSORS},
    **{f"a tensor of {n} dimensions": torch.full((1,) * n, 0.5) for n in (1, 2)},
    "a tensor of True": torch.tensor(True),
    "an empty tensor": torch.tensor([]),
    "a tensor that requires grad": torch.tensor(0.5, requires_grad=True),
    "a detached tensor": torch.tensor(0.5, requires_grad=True).detach(),
    "a parameter": torch.nn.Parameter(torch.tensor(0.5)),
    "a buffer": torch.nn.Buffer(torch.tensor(0.5)),
    "a tensor without values": torch.tensor(0.5, device="meta"),
    "a complex tensor": torch.tensor(0.5 + 1j),
    "a list": [0.5],
    "a tuple": (0.5,),
    "a type": float,
    "Fraction": fractions.Fraction(1, 2),
    "Decimal": decimal.Decimal("0.5"),
    "__float__": Floating(),
    "__index__": Index(),
    "a kind of float": Real(0.5),
    "a kind of int": Whole(1),
}
NAMES = ("scale", "dropout_p", "is_causal", "enable_gqa")


def call(function, **given):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of complex numbers
        return function(Q, Q, Q, **given)


def outcome(function, **given):
    try:
        return call(function, **given), None
    except Exception as error:
        return None, error


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", NAMES)
def test_as_torch(name, value):
    x = VALUES[value]
    (found, error), (wanted, reason) = (outcome(f, **{name: x}) for f in (ours, theirs))
    assert type(error) is type(reason), (error, reason)
    if isinstance(reason, TypeError):
        assert str(error).split(", not")[0] == str(reason).split(", not")[0]
    elif reason is not None and name == "scale":
        assert str(error) == str(reason)
    elif reason is None and name == "dropout_p":  # the draws differ from torch's
        plain = float(np.real(x.item() if isinstance(x, torch.Tensor) else x))
        assert torch.equal(found, call(ours, dropout_p=plain))
        assert torch.equal(wanted, call(theirs, dropout_p=plain))
    elif reason is None:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_are_in_the_table(name):
    accepted = {outcome(theirs, **{name: x})[1] is None for x in VALUES.values()}
    assert accepted == {True, False}


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_scale_that_is_not_finite_is_refused(x):
    """A deliberate difference: torch returns NaN, or hides it."""
    for given in (x, torch.tensor(x), np.float32(x)):
        with pytest.raises(RuntimeError, match=r"^scale: got .*, expected a finite number"):
            ours(Q, Q, Q, scale=given)


WRONG = {
    "no value": ((Q, Q), {}),
    "too many": ((Q, Q, Q, None, 0.0, False, 1.0), {}),
    "scale by place": ((Q, Q, Q, None, 0.0, False, None), {}),
    "unknown": ((Q, Q, Q), dict(mask=None)),
    "twice": ((Q, Q, Q), dict(query=Q)),
    "no tensor": ((Q, Q, 1.0), {}),
    "a mask that is none": ((Q, Q, Q, 1.0), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    args, given = WRONG[name]
    for function in (ours, theirs):
        with pytest.raises(TypeError, match=r"^scaled_dot_product_attention\(\)"):
            function(*args, **given)


def test_every_argument_has_torchs_name_and_place():
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    by_place = Q, Q, Q, mask, 0.0, False
    by_name = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), by_place))
    rest = dict(scale=0.5, enable_gqa=True)
    wanted = theirs(**by_name, **rest)
    torch.testing.assert_close(ours(**by_name, **rest), wanted)
    torch.testing.assert_close(ours(*by_place, **rest), wanted)


def test_jagged_switches_are_bools_too():
    q = torch.nested.nested_tensor([Q[0].mT] * 2, layout=torch.jagged)
    for name in ("is_causal", "enable_gqa"):
        with pytest.raises(TypeError, match=f"argument '{name}' must be bool, not int"):
            ours(q, q, q, **{name: 1})


# ------------------------------------------------------------------------------------- compiled


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", **options)


@pytest.mark.slow
def test_compiled_numbers():
    """From the second float on, the compiler makes the scale a symbol."""
    attend = compiled(lambda q, x: ours(q, q, q, scale=x), fullgraph=True)
    for x in (True, 2, 0.5, 0.25, -0.125, 3):
        torch.testing.assert_close(attend(Q, x), theirs(Q, Q, Q, scale=x))


@parametrize("x", [torch.tensor(0.5), np.float32(0.5), np.int64(2)], ids=repr, fast=1)
def test_compiled_tensors_and_numpy(x):
    """The compiler does not know their values, so the graph breaks, as with torch's function."""
    found = compiled(lambda q, x: ours(q, q, q, scale=x))(Q, x)
    torch.testing.assert_close(found, theirs(Q, Q, Q, scale=x))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiled_numbers_that_data_decide():
    found = compiled(lambda q, x: ours(q, q, q, scale=x.item()))(Q, torch.tensor(0.5))
    torch.testing.assert_close(found, theirs(Q, Q, Q, scale=0.5))


@pytest.mark.parametrize("given", [dict(is_causal=None), dict(enable_gqa=1), dict(scale="0.5")])
def test_compiled_errors(given):
    for function in (ours, theirs):
        with pytest.raises(TypeError, match=r"must be (bool|float), not"):
            compiled(lambda q, f=function: f(q, q, q, **given))(Q)


# ---------------------------------------------------------------------------------- fastattn's own


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_attention_takes_only_numbers_as_scalars(name):
    """A tensor might need a gradient, and a bool might be meant for another argument."""
    for x in (0.5, 1, np.float32(0.5), np.float64(0.5), np.int64(1), fractions.Fraction(1, 2)):
        torch.manual_seed(0)
        found = fastattn.attention(Q, Q, Q, **{name: x})
        torch.manual_seed(0)
        assert torch.equal(found, fastattn.attention(Q, Q, Q, **{name: float(x)}))
    for x in (True, np.bool_(True), "0.5", np.array(0.5)):
        with pytest.raises(TypeError, match=f"^{name}: got .*, expected a number"):
            fastattn.attention(Q, Q, Q, **{name: x})
    for x in (torch.tensor(0.5), torch.nn.Parameter(torch.tensor(0.5))):
        with pytest.raises(TypeError, match=rf"(?s)^{name}: got .*: float\({name}\)"):
            fastattn.attention(Q, Q, Q, **{name: x})
