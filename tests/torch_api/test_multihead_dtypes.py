"""fastattn.MultiheadAttention with parameters and masks of several dtypes: it gives the results of
torch's module, in the same dtype, and raises if torch's module raises."""

import itertools
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.marks import parametrize
from tests.support.multihead_cases import E, L, N, S, twins

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
MODULES = [(F32, BF16), (F32, F64), (BF16, F32), (F64, F32)]  # of the module, and of one parameter
PARAMETERS = {
    "in_proj_bias": {},
    "out_proj.bias": {},
    "in_proj_weight": {},
    "out_proj.weight": {},
    "in_proj_bias and out_proj.bias": {},
    "in_proj_bias beside three weights": dict(kdim=8, vdim=8),
    "k_proj_weight": dict(kdim=8, vdim=8),
}
MODES = {  # training, with gradients, autocast, weights: torch's paths
    "fast": (False, False, False, False),
    "evaluated": (False, True, False, True),
    "trained": (True, True, False, False),
    "trained with weights": (True, True, False, True),
    "autocast": (True, True, True, False),
}


def changed(module, names, dtype):
    for name in names.split(" beside ")[0].split(" and "):
        *path, last = name.split(".")
        of = module.get_submodule(".".join(path))
        setattr(of, last, nn.Parameter(getattr(of, last).detach().to(dtype)))
    return module


def rand(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(module, inputs, mode, **masks):
    train, grad, autocast, need_weights = MODES[mode]
    casts = torch.autocast("cpu", BF16) if autocast else nullcontext()
    leaves = list(module.parameters())
    try:
        with casts, nullcontext() if grad else torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: masks of different dtypes are deprecated
            out, weights = module.train(train)(*inputs, need_weights=need_weights, **masks)
            found = [out] if weights is None else [out, weights]
            if grad:
                found += torch.autograd.grad(out.sum(), leaves, allow_unused=True)
        return found, None
    except RuntimeError as error:
        return None, error


def compare(theirs, ours, inputs, mode, **masks):
    (found, error), (wanted, reason) = (outcome(m, inputs, mode, **masks) for m in (ours, theirs))
    if reason is not None:
        assert type(error) is type(reason), (error, reason)
        assert "dtype" in str(error) and "dtype" in str(reason)
        return False
    assert error is None, error
    coarse = any(x.dtype in (BF16, F16) for x in (*inputs, *wanted[:1]))
    for a, b in zip(found, wanted):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            size = 1 + b.detach().abs().max().item()
            torch.testing.assert_close(a, b, rtol=0, atol=size * (0.05 if coarse else 1e-4))
    return True


@pytest.mark.parametrize("mode", MODES)
@parametrize("names", PARAMETERS, fast=5)
def test_a_parameter_of_another_dtype(names, mode):
    computed = set()
    for (dtype, other), first in itertools.product(MODULES, (True, False)):
        options = PARAMETERS[names] | dict(batch_first=first)
        theirs, ours = (changed(m.to(dtype), names, other) for m in twins(**options))
        lead, width = (N,) if first else (), options.get("kdim", E)
        behind = () if first else (N,)
        x = rand(*lead, L, *behind, E, dtype=dtype)
        y = rand(*lead, S, *behind, width, seed=1, dtype=dtype)
        every = [(x, y, y)] + ([(x, x, x)] if width == E else [])
        computed |= {(first, compare(theirs, ours, inputs, mode)) for inputs in every}
        alone = rand(L, E, dtype=dtype), *[rand(S, width, seed=1, dtype=dtype)] * 2
        compare(theirs, ours, alone, mode)
    if names in ("in_proj_bias", "in_proj_bias beside three weights"):
        assert (True, True) in computed, "torch's module computes with the batch first"


MASKS = (None, torch.bool, F32, BF16, F16)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("padding, mask", list(itertools.product(MASKS, MASKS)), ids=str)
def test_masks_of_several_dtypes(padding, mask, dtype):
    """Beside a float mask, a bool mask is converted to query's dtype."""
    theirs, ours = (m.to(dtype) for m in twins(batch_first=True))
    x, y = rand(N, L, E, dtype=dtype), rand(N, S, E, seed=1, dtype=dtype)
    hidden = dict(key_padding_mask=rand(N, S, seed=2) > 1, attn_mask=rand(L, S, seed=3) > 1)
    given = {}
    for (name, keep), kind in zip(hidden.items(), (padding, mask)):
        keep[:, 0] = False
        if kind is not None:
            given[name] = keep if kind == torch.bool else torch.zeros(keep.shape, dtype=kind)
            if kind != torch.bool:
                given[name] = given[name].masked_fill(keep, -torch.inf)
    compare(theirs, ours, (x, y, y), "trained", **given)
