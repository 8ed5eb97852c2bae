"""A FaCall of which only the spec is known equals that of a real call with gapless tensors, but for
addresses and sizes."""

import dataclasses

import pytest
import torch

from fastattn.backends.base import dense_layout
from fastattn.backends.native import launcher, libraries, marshalling
from fastattn.backends.native.imagined import ADDRESS, imagined
from fastattn.call import spec, validation

H, HK, M, N, D, DV = 4, 2, 20, 70, 16, 24
LENGTHS = torch.tensor([31, 7])


def tensors(dtype=torch.bfloat16, B=2, rows=M, keys=N, items=2, **given):
    shapes = ((B, H, rows, D), (items, HK, keys, D), (items, HK, keys, DV))
    q, k, v = (torch.empty_strided(*dense_layout(*s, spec.TOKENS), dtype=dtype) for s in shapes)
    return spec.Tensors(q, k, v, **given)


PACKED = dict(B=1, items=1, rows=31, keys=80)
PACKED |= dict(cu_q=torch.tensor([0, 20, 31]), cu_k=torch.tensor([0, 70, 80]))
CALLS = {
    "plain": (tensors(), {}),
    "float16, stored by heads": (tensors(torch.float16), dict(out_order="BHM", grad_order="BHM")),
    "a bool mask": (tensors(mask=torch.zeros(1, 1, M, N, dtype=torch.bool)), {}),
    "a mask of keys": (tensors(mask=torch.zeros(2, 1, 1, N)), {}),
    "a mask of two dimensions": (tensors(mask=torch.zeros(M, 1, dtype=torch.bfloat16)), {}),
    "the rest": (
        tensors(key_lengths=LENGTHS, alibi_slopes=torch.zeros(H), sinks=torch.zeros(H)),
        dict(right=0, softcap=2.0),
    ),
    "packed": (tensors(**PACKED), dict(max_q=20, max_k=70)),
    "packed, with gradients by sequence": (
        tensors(**PACKED, mask=torch.zeros(1, H, M, 1), sinks=torch.zeros(H)),
        dict(max_q=20, max_k=70),
    ),
}
PAGED = dict(B=1, items=11, rows=31, keys=16, cu_q=PACKED["cu_q"])
PAGED |= dict(key_lengths=LENGTHS, block_table=torch.zeros(2, 5, dtype=torch.int64))


def real(s, t, which, after):
    """FaParams of the call, field by field: (is there an address?, strides, dtype)."""
    form, places = launcher.prepared(s).form, launcher.PLACES[which]
    return fields(marshalling._pack(form, places, (*launcher.convert(s, t), *after), 0))


def fields(params):
    found = {}
    for name in (*libraries.TENSORS, *libraries.MOVED):
        data, *rest = libraries.TENSOR.unpack_from(params, libraries.offset(name))
        found[name] = bool(data), *rest
    for name in libraries.POINTERS:
        (data,) = libraries.POINTER.unpack_from(params, libraries.offset(name))
        found[name] = bool(data)
    found["scalars"] = params[libraries.BEFORE_SCALARS :][: libraries.SCALARS.size]
    return found


def results(s, t):
    """out and normaliser, empty, with the strides that a launcher gives them."""
    like = launcher.prepared(s)
    out = t.q.new_empty_strided(*like.out, **like.stored)
    return out, torch.empty_strided(*like.normaliser, dtype=s.acc_dtype)


def gradients(s, t):
    wanted = [x for x in ("q", "k", "v", "sinks") if getattr(t, x) is not None]
    if t.mask is not None and t.mask.dtype != torch.bool:
        wanted.append("mask")
    return launcher.Launcher()._gradients(s, t, wanted)


@pytest.mark.parametrize("what", CALLS)
def test_both_passes(what):
    t, options = CALLS[what]
    s = validation.describe(t, spec.Options(**options, grad=True))
    outs = results(s, t)
    assert fields(imagined(s, libraries.FORWARD)) == real(s, t, libraries.FORWARD, outs)
    grads = gradients(s, t)
    after = *outs, torch.zeros(outs[0].shape, dtype=s.dtype), None
    after += tuple(grads.get(x) for x in spec.DIFFERENTIABLE)
    found, want = (
        fields(imagined(s, libraries.BACKWARD)),
        real(s, t, libraries.BACKWARD, after),
    )
    # dout comes from autograd with strides of its own.
    assert found.pop("dout")[0] and want.pop("dout")[0] and found == want


def test_pages():
    t = tensors(**PAGED)
    s = validation.describe(t, spec.Options(max_q=20, max_k=40))
    want = real(s, t, libraries.FORWARD, results(s, t))
    assert fields(imagined(s, libraries.FORWARD)) == want


@pytest.mark.parametrize("average", [False, True])
def test_weights(average):
    t = tensors()._replace(v=None)
    s = validation.describe(t, spec.Options(average_heads=average, grad=True))
    weights = torch.zeros(2, 1 if average else H, M, N, dtype=s.dtype)
    want = real(s, t, libraries.WEIGHTS, (weights,))
    assert fields(imagined(s, libraries.WEIGHTS)) == want
    normaliser = torch.zeros(2, 2, H, M)
    t = t._replace(normaliser=normaliser)
    s = dataclasses.replace(s, given=frozenset({"normaliser"}))
    grads = gradients(s, t)
    after = weights, *(grads.get(x) for x in spec.DIFFERENTIABLE)
    want = real(s, t, libraries.WEIGHTS_BACKWARD, after)
    assert fields(imagined(s, libraries.WEIGHTS_BACKWARD)) == want


def test_addresses_are_aligned():
    assert ADDRESS % 4096 == 0
