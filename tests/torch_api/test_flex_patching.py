"""patch() and sdpa() run torch's flex_attention on fastattn, and put torch's function back."""

import sys
import types

import pytest
import torch
from torch.nn.attention import flex_attention as module

import fastattn
from fastattn.dropin import flex_patching
from tests.support.flex_functions import MASK_MODS, SCORE_MODS

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TORCHS = [module.flex_attention]  # the patch replaces what is bound to a name of a module


@pytest.fixture
def importer():
    """A module that has imported the function by another name before the patch."""
    name = "a_module_that_imports_flex_attention"
    made = sys.modules[name] = types.ModuleType(name)
    (made.flex,) = TORCHS
    yield made
    del sys.modules[name]


def training(function):
    q = torch.ones(1, 2, 20, 8, requires_grad=True)
    out = function(q, q, q, SCORE_MODS["softcap"])
    return torch.autograd.grad(out.sum(), q)


def refuses_to_train(function):
    """True if it has no gradients on a CPU, as torch's own from 2.11 on."""
    try:
        training(function)
    except NotImplementedError as error:
        return "does not support backward on CPU" in str(error)
    return False


def test_it_trains_on_a_cpu(importer):
    refused = refuses_to_train(module.flex_attention)
    with fastattn.sdpa():
        assert module.flex_attention is importer.flex is not TORCHS[0]
        training(module.flex_attention)
        training(importer.flex)
    assert refuses_to_train(module.flex_attention) == refused
    assert module.flex_attention is importer.flex is TORCHS[0]


def test_patches_are_counted(importer):
    fastattn.patch()
    with fastattn.sdpa():
        fastattn.patch()
        fastattn.unpatch()
    assert importer.flex is not TORCHS[0]
    fastattn.unpatch()
    assert module.flex_attention is importer.flex is TORCHS[0]


@pytest.mark.slow
def test_names_that_are_bound_between_and_inside_of_blocks(importer):
    """A block searches all modules only if some may have changed."""
    for _ in range(2):
        with fastattn.sdpa():
            pass
    importer.between = TORCHS[0]
    with fastattn.sdpa():
        importer.inside = module.flex_attention
        assert importer.between is importer.flex is module.flex_attention is not TORCHS[0]
    assert importer.between is importer.inside is module.flex_attention is TORCHS[0]
    del importer.between  # one name less, and one more
    importer.another = TORCHS[0]
    with fastattn.sdpa():
        assert importer.another is module.flex_attention is not TORCHS[0]
        del importer.inside
    assert importer.another is TORCHS[0]
    assert not hasattr(importer, "between") and not hasattr(importer, "inside")


def test_a_stand_in_that_was_imported_runs_torchs_after_unpatch():
    with fastattn.sdpa():
        function = module.flex_attention
    assert refuses_to_train(function) == refuses_to_train(module.flex_attention)


def test_calls_run_on_fastattn(monkeypatch):
    seen = []
    ours = flex_patching._ours
    monkeypatch.setattr(flex_patching, "_ours", lambda *x, **y: seen.append(1) or ours(*x, **y))
    x = torch.randn(1, 2, 40, 8)
    blocks = module.create_block_mask(MASK_MODS["causal"], None, None, 40, 40, device="cpu")
    expected = module.flex_attention(x, x, x, SCORE_MODS["alibi"], blocks)
    with fastattn.sdpa():
        found = module.flex_attention(x, x, x, SCORE_MODS["alibi"], blocks)
    assert seen == [1]
    torch.testing.assert_close(found, expected)


def test_torchs_function_runs_what_ours_refuses():
    """Programs have no median."""
    x = torch.randn(1, 2, 40, 8)

    def score_mod(score, b, h, i, j):
        return score + torch.median(score)

    with pytest.raises(NotImplementedError, match="median"):
        fastattn.flex_attention(x, x, x, score_mod)
    expected = module.flex_attention(x, x, x, score_mod)
    with fastattn.sdpa():
        torch.testing.assert_close(module.flex_attention(x, x, x, score_mod), expected)
        with pytest.raises(ValueError, match="same number of heads"):
            module.flex_attention(x, x[:, :1], x[:, :1])


@pytest.mark.parametrize("first", [False, True], ids=["a later patch", "the first patch"])
def test_another_function_in_its_place_stays(monkeypatch, first):
    def other():
        pass

    with fastattn.sdpa():
        pass
    with monkeypatch.context() as during:
        if first:
            during.setattr(flex_patching, "_torchs", None)
        during.setattr(module, "flex_attention", other)
        with fastattn.sdpa():
            assert module.flex_attention is other
        assert module.flex_attention is other
    with fastattn.sdpa():
        training(module.flex_attention)
    assert module.flex_attention is TORCHS[0]


def test_in_compiled_code():
    x = torch.randn(1, 2, 40, 8)

    def model(x):
        return module.flex_attention(x, x, x, SCORE_MODS["alibi"])

    with fastattn.sdpa():
        found = torch.compile(model, backend="eager")(x.requires_grad_())
        found.sum().backward()
    torch.testing.assert_close(found, fastattn.flex_attention(x, x, x, SCORE_MODS["alibi"]))
