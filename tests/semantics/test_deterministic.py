"""`deterministic`, and torch's flag where a call does not say it: what reaches the kernels. Which
order they add in is tested in tests/gpu_emulation."""

import contextlib

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from fastattn.call.spec import Options, Tensors
from fastattn.dispatch import operation
from fastattn.dispatch.run_pass import _LATER, in_saved_order
from fastattn.flash_attn import flash_attn_func, flash_attn_varlen_func

ASKED = [(None, False, False), (None, True, True), (True, False, True), (False, True, False)]


@contextlib.contextmanager
def torchs_flag(on):
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=True)


@pytest.fixture
def specs(monkeypatch):
    """The specs of the passes that run."""
    found = []

    def spy(t, o, describe=operation.describe):
        found.append(describe(t, o))
        return found[-1]

    monkeypatch.setattr(operation, "describe", spy)
    operation.forget_plans()
    yield found
    operation.forget_plans()
    torch._dynamo.reset()  # it remembers sizes that changed


def tensors(*shape):
    return [torch.randn(*shape, requires_grad=True) for _ in "qkv"]


def dense(asked):
    return fastattn.attention(*tensors(1, 2, 40, 8), causal=True, deterministic=asked)


def banded_by_a_function(asked):
    given = dict(mask_mod=lambda b, h, i, j: j <= i, deterministic=asked)
    return fastattn.attention(*tensors(1, 2, 40, 8), **given)


def packed(asked):
    offsets = torch.tensor([0, 15, 40])
    return fastattn.attention_packed(*tensors(40, 2, 8), offsets, offsets, deterministic=asked)


def compiled(asked):
    whole = torch.compile(fastattn.attention, backend="aot_eager", fullgraph=True)
    return whole(*tensors(1, 2, 40, 8), deterministic=asked)


@pytest.mark.parametrize("asked, flag, expected", ASKED)
@pytest.mark.parametrize("call", [dense, banded_by_a_function, packed, compiled])
def test_what_kernels_are_told(call, asked, flag, expected, specs):
    with torchs_flag(flag):
        call(asked).sum().backward()
    assert specs and {x.deterministic for x in specs} == {expected}
    at = libraries.offset("deterministic")
    assert libraries.form(specs[-1])[at : at + 8] == int(expected).to_bytes(8, "little")


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_flash_attns_argument(asked, flag, specs):
    offsets = torch.tensor([0, 15, 40], dtype=torch.int32)
    with torchs_flag(flag):
        flash_attn_func(*tensors(1, 40, 2, 8), deterministic=asked).sum().backward()
        q, k, v = tensors(40, 2, 8)
        out = flash_attn_varlen_func(q, k, v, offsets, offsets, 25, 25, deterministic=asked)
        out.sum().backward()
    assert len(specs) >= 2 and {x.deterministic for x in specs} == {asked or flag}


def test_other_values_raise():
    with pytest.raises(TypeError, match=r"deterministic: got 1 \(int\), expected True or False"):
        dense(1)


@pytest.mark.parametrize("asked", [None, False, True])
def test_the_argument_of_modernbert(asked, specs):
    pytest.importorskip("transformers")
    from fastattn.integrations.transformers_attention import attend

    with torchs_flag(False):
        attend(torch.nn.Module(), *tensors(1, 2, 40, 8), None, is_causal=True, deterministic=asked)
    assert {x.deterministic for x in specs} == {bool(asked)}


def test_saved_programs_have_it_last():
    """A program that was saved before lacks it, and has all others where they were."""
    names = (*Tensors._fields, *Options._fields)
    assert in_saved_order(names)[-1] == "deterministic"
    assert in_saved_order(names)[-6:-1] == list(_LATER[:-1])
