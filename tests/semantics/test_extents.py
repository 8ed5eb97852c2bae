"""A native library refuses to write a tensor of a wrong size: it raises an error with the tensor's
name and writes nothing. Each tensor that each pass writes is replaced by one of a wrong shape."""

import itertools

import pytest
import torch

import fastattn
from fastattn.backends.native import cpu, launcher, libraries, marshalling
from tests.support.backends import INTERPRETED, on_variants

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="about the native library"),
]

GRADIENTS = ("dq", "dk", "dv", "dmask", "dsinks")
WRITES = {  # by pass
    libraries.FORWARD: ("out", "lse"),
    libraries.BACKWARD: GRADIENTS,
    libraries.WEIGHTS: ("weights",),
    libraries.WEIGHTS_BACKWARD: ("dq", "dk", "dmask", "dsinks"),
    libraries.JVP: ("out_t", "lse_t"),
    libraries.FORWARD_JVP: ("out", "lse", "out_t", "lse_t"),
    libraries.SECOND: GRADIENTS,
}
NAMES = {getattr(libraries, x): x for x in ("FORWARD", "BACKWARD", "WEIGHTS", "WEIGHTS_BACKWARD")}
NAMES |= {getattr(libraries, x): x for x in ("JVP", "FORWARD_JVP", "SECOND")}
MARK = 7  # fills memory that must not be written
# Packed: three sequences with at most two rows.
ROWS, KEYS = (2, 2, 1), (3, 1, 2)


class Replaced:
    """Inside, a backend's pass gets `name` with another shape: `shape(the right shape)`."""

    def __init__(self, backend, which, name, shape):
        self.backend, self.which, self.name, self.shape = backend, which, name, shape
        self.tensor = self.was = None

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        launch, names = self.backend._launch, list(launcher.AFTER[self.which])

        def replaced(backend, which, spec, t, after):
            if which == self.which and (x := dict(zip(names, after))[self.name]) is not None:
                self.was = tuple(x.shape)
                self.tensor = x.new_full(self.shape(self.was), MARK)
                at = names.index(self.name)
                after = (*after[:at], self.tensor, *after[at + 1 :])
            return launch(backend, which, spec, t, after)

        self.patch.setattr(self.backend, "_launch", replaced)
        return self

    def __exit__(self, *error):
        self.patch.undo()


def tensors(packed, dtype=torch.float32, D=8):
    """q, k, v, mask and sinks; the mask has all dimensions that it may have."""
    draft = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=draft).to(dtype).requires_grad_()

    B, H, M, N = 3, 2, 2, 3
    shapes = [(B, H, M, D), (B, H, N, D), (B, H, N, D)]
    if packed:
        shapes = [(sum(ROWS), H, D), (sum(KEYS), H, D), (sum(KEYS), H, D)]
    return (*(rand(*shape) for shape in shapes), rand(B, H, M, N), rand(H))


def attention(q, k, v, mask, sinks, packed=False):
    given = dict(mask=mask, sinks=sinks, return_lse=True)
    if not packed:
        return fastattn.attention(q, k, v, **given)
    cu = (torch.tensor([0, *itertools.accumulate(x)]) for x in (ROWS, KEYS))
    return fastattn.attention_packed(q, k, v, *cu, max_q=max(ROWS), max_k=max(KEYS), **given)


def run(which, leaves, packed=False):
    """Run this pass by public calls."""

    def call(*x):
        return attention(*x, packed=packed)

    if which in (libraries.WEIGHTS, libraries.WEIGHTS_BACKWARD):
        q, k, _, mask, sinks = leaves
        weights = fastattn.attention_weights(q, k, mask=mask, sinks=sinks)
        if which == libraries.WEIGHTS_BACKWARD:
            weights.sum().backward()
    elif which == libraries.FORWARD_JVP:
        q, k, v, mask, sinks = leaves
        fastattn.attention_jvp(q, k, v, q, None, None, mask=mask, sinks=sinks)
    elif which == libraries.JVP:
        torch.func.jvp(call, leaves, leaves)
    else:
        out, lse = call(*leaves)
        if which in (libraries.BACKWARD, libraries.SECOND):
            twice = which == libraries.SECOND
            grads = torch.autograd.grad(out.sum() + lse.sum(), leaves, create_graph=twice)
            if twice:
                torch.autograd.grad(sum(x.sum() for x in grads), leaves)


def dimensions(which, name, packed):
    """The number of dimensions of a tensor that a pass writes."""
    with Replaced(cpu.Cpu, which, name, lambda shape: shape) as replaced:
        run(which, tensors(packed), packed)
    return len(replaced.was)


def changed(dim, by):
    return lambda shape: (*shape[:dim], shape[dim] + by, *shape[dim + 1 :])


def refuse(which, name, shape, packed=False, backend=cpu.Cpu, leaves=None):
    """The error of a run in which a tensor has that shape. The tensor must not be written."""
    leaves = leaves or tensors(packed)
    refused = pytest.raises(RuntimeError, match="nothing was written")
    with Replaced(backend, which, name, shape) as replaced, refused as caught:
        run(which, leaves, packed)
    assert replaced.was != tuple(replaced.tensor.shape)
    assert (replaced.tensor == MARK).all()
    assert f"{name}: got shape {tuple(replaced.tensor.shape)}, expected (" in str(caught.value)
    return str(caught.value)


CASES = [
    (which, name, packed)
    for which, names in WRITES.items()
    for name in names
    for packed in (False, True)
    if not (
        packed and which in (libraries.WEIGHTS, libraries.WEIGHTS_BACKWARD, libraries.FORWARD_JVP)
    )
]
every_case = pytest.mark.parametrize(
    "which, name, packed",
    CASES,
    ids=[f"{NAMES[x]}-{name}-{'packed' if packed else 'dense'}" for x, name, packed in CASES],
)


@every_case
def test_any_other_size_is_refused(which, name, packed, monkeypatch):
    """One more and one less in every dimension, by the extension and by Python."""
    for by_python in (False, True):
        if by_python:
            monkeypatch.setattr(cpu, "launch", marshalling._launch)
        for dim, by in itertools.product(range(dimensions(which, name, packed)), (1, -1)):
            if name != "dmask" or dim in (0, 3) or by == 1:  # 1 head or row is valid: a sum
                refuse(which, name, changed(dim, by), packed)


def test_a_mask_of_columns_has_no_gradient_by_sequence_and_column():
    """(B,N) would be taken for (M,N)."""
    for which in (libraries.BACKWARD, libraries.SECOND):
        message = refuse(which, "dmask", lambda shape: (shape[0], shape[3]), packed=True)
        expected = "expected (B, H, M, N) = (3, 2, 2, 3), or 1 for H, M and N; nothing"
        assert f"dmask: got shape (3, 3), {expected}" in message
        refuse(which, "dmask", lambda shape: (1, *shape[1:]), packed=True)  # no part for each
        refuse(which, "dsinks", lambda shape: shape[1:], packed=True)


def test_an_empty_tensor_is_not_an_absent_one():
    refuse(libraries.FORWARD, "out", lambda shape: (*shape[:2], 0, shape[3]))
    refuse(libraries.BACKWARD, "dq", lambda shape: (0, *shape[1:]))


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_instruction_set_refuses(name):
    for _ in on_variants("cpu", torch.float32):
        refuse(libraries.BACKWARD, name, changed(0, 1))


def test_both_sides_name_the_same_tensors():
    """`native.WRITTEN` lists enum FaWritten of csrc/abi.h, in the same order."""
    sizes = [x for x in libraries.FIELDS.split() if x.endswith("_size")]
    assert sizes == [f"{x}_size" for x in libraries.WRITTEN]
    assert {x for names in WRITES.values() for x in names} == set(libraries.WRITTEN)
