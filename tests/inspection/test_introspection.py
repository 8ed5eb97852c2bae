"""The package's diagnostics: the report, explain, the log, the warning, explicit backends."""

import inspect
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import fastattn
from fastattn import __main__
from fastattn.backends import base
from fastattn.backends.base import Support
from fastattn.backends.native import libraries
from fastattn.call import environment
from fastattn.call.spec import Feature
from fastattn.call.validation import DTYPES
from tests.support.fresh_python import python

HERE = {name for name, why in fastattn.available_backends().items() if why is None}
needs_cpu = pytest.mark.skipif("cpu" not in HERE, reason=str(fastattn.available_backends()["cpu"]))


def qkv(D=4, dtype=torch.float32):
    return [torch.randn(1, 2, 3, D).to(dtype) for _ in range(3)]


class Declining:
    """A backend that is tried first and declines every call."""

    name = "declining"
    support = Support(frozenset({"nowhere"}), frozenset(DTYPES), 2, Feature.MASK)

    def unavailable(self):
        return "it is Sunday"


@pytest.fixture
def declining(monkeypatch):
    monkeypatch.setattr(base, "_BACKENDS", {"declining": Declining(), **base._BACKENDS})
    yield


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Clear the caches before every test: choices, warnings and log lines are made once."""
    from fastattn.dispatch import operation

    monkeypatch.setattr(operation, "_plans", {})
    monkeypatch.setattr(base, "_warned", set())


# ---------------------------------------------------------------------------------- the report


@pytest.mark.slow
def test_report_as_json_and_as_text():
    found = json.loads(python("-m", "fastattn", "--json").stdout)
    assert found["torch"] == torch.__version__ and found["threads"] >= 1
    assert found["fastattn"] == fastattn.__version__
    assert set(found["backends"]) == set(fastattn.available_backends())
    for name, why in fastattn.available_backends().items():
        assert found["backends"][name] == {"available": why is None, "reason": why}
    text = __main__.show(found)
    assert torch.__version__ in text
    for name in found["backends"]:
        assert name in text


def test_an_unknown_attribute_is_named():
    with pytest.raises(AttributeError, match="has no attribute 'versions'"):
        fastattn.versions  # noqa: B018


@needs_cpu
def test_report_names_the_instruction_set(capsys):
    __main__.main([])
    assert (
        f"{libraries.cpu_isa()} (of {', '.join(libraries.cpu_isas())})" in capsys.readouterr().out
    )


@pytest.mark.slow
@needs_cpu
def test_an_instruction_set_can_be_forced():
    isa = libraries.cpu_isas()[-1]
    found = json.loads(python("-m", "fastattn", "--json", FASTATTN_CPU_ISA=isa).stdout)
    assert found["cpu"]["isa"] == isa
    assert found["cpu"]["why"] == "FASTATTN_CPU_ISA names it"


@pytest.mark.slow
@needs_cpu
@pytest.mark.parametrize("isa", ["mmx", "\udcff"])
def test_an_unavailable_instruction_set_is_a_reason(isa):
    found = json.loads(python("-m", "fastattn", "--json", FASTATTN_CPU_ISA=isa).stdout)
    why = found["backends"]["cpu"]["reason"]
    assert f"FASTATTN_CPU_ISA: got {isa!r}" in why and libraries.cpu_isas()[0] in why
    assert found["cpu"] is None


@needs_cpu
def test_an_unavailable_instruction_set_cannot_be_selected():
    with pytest.raises(ValueError, match="mmx"):
        libraries.select_cpu_isa("mmx")


@pytest.mark.parametrize("code", [["-m", "fastattn"], ["-c", "import fastattn"]], ids=" ".join)
def test_without_torch_the_error_names_the_package(tmp_path, code):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('none', name='torch')")
    path = os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(fastattn.__file__))])
    run = subprocess.run(
        [sys.executable, *code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and run.stdout == ""
    *trace, sentence = run.stderr.strip().splitlines()
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in sentence
    assert code[0] == "-c" or not trace


# ------------------------------------------------------------------------------------- explain


def test_explain_names_the_backend_that_then_runs():
    q, k, v = qkv()
    found = fastattn.explain(q, k, v, causal=True, dropout_p=0.5)
    assert found.backend in HERE and found.backend not in found.declined
    assert f"{found.backend}: would run" in str(found)
    fastattn.attention(q, k, v, causal=True, backend=found.backend)


def test_explain_has_the_reason_of_each_declining_backend(declining):
    found = fastattn.explain(*qkv(), causal=True, softcap=1.0)
    assert found.backend != "declining"
    why = "; ".join(found.declined["declining"])
    for part in ("it is Sunday", "device 'cpu'", "head dim 4 is over 2", "band, softcap"):
        assert part in why and part in str(found)


@needs_cpu
def test_explain_says_what_becomes_of_functions():
    """An argument, a program with the blocks that it hides, or a mask where no kernel runs one."""
    q = torch.zeros(1, 2, 512, 16)
    given = dict(score_mod=lambda s, b, h, i, j: s * 0.5, mask_mod=lambda b, h, i, j: i >= j)
    said = fastattn.explain(q, q, q, **given).functions
    assert said == "causal; score_mod: a program of 3 values"
    given["mask_mod"] = lambda b, h, i, j: i * 2 >= j * 2
    said = str(fastattn.explain(q, q, q, **given))
    assert "score_mod: a program of 3 values; mask_mod: a program of 6 values" in said
    assert "of 128 blocks of 32 x 64 pairs 56 are skipped" in said
    given.pop("score_mod")
    found = fastattn.explain(q, q, q, **given, backend="reference")
    assert found.functions == "a mask of shape (1, 1, 512, 512)"
    assert fastattn.explain(q, q, q).functions == ""


def test_explain_of_a_head_dim_that_only_the_reference_runs():
    found = fastattn.explain(*qkv(D=1025))
    assert found.backend == "reference"
    assert any("1025" in why for why in found.declined["cpu"])
    refused = fastattn.explain(*qkv(D=1025), backend="cpu")
    assert refused.backend is None and "1025" in str(refused)
    assert "reference: could run" in str(refused)


def test_explain_computes_nothing_and_refuses_bad_input():
    q, k, v = (x.to("meta") for x in qkv())
    assert fastattn.explain(q, k, v).spec.device == "meta"
    with pytest.raises(ValueError, match="head dim"):
        fastattn.explain(q, k[..., :2], v)
    with pytest.raises(ValueError, match="backend: got 'nvidia'"):
        fastattn.explain(q, k, v, backend="nvidia")


# -------------------------------------------------------------------------------- the one warning


def test_falling_back_to_the_reference_warns_once_with_the_reasons():
    with pytest.warns(UserWarning) as caught:
        fastattn.attention(*qkv(D=1025))
    assert len(caught) == 1 and caught[0].filename == __file__
    message = str(caught[0].message)
    assert "reference" in message and "cpu: " in message and "1025" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention(*qkv(D=1025))
        fastattn.attention(*qkv(D=1025), causal=True)
    with pytest.warns(UserWarning, match="1100"):
        fastattn.attention(*qkv(D=1100))


def test_choosing_the_reference_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention(*qkv(D=1025), backend="reference")


def test_the_fallback_is_right_in_every_pass():
    q, k, v = (x.double().requires_grad_() for x in qkv(D=1025))
    with pytest.warns(UserWarning):
        out = fastattn.attention(q, k, v)
    exact = fastattn.reference.attention(q, k, v)
    torch.testing.assert_close(out, exact)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, exact))):
        torch.testing.assert_close(a, b)


# ----------------------------------------------------------------------------- explicit backends


def test_an_explicit_backend_never_falls_back(declining):
    for given, part in ((dict(backend="cpu"), "1025"), (dict(backend="declining"), "Sunday")):
        with pytest.raises(NotImplementedError) as caught:
            fastattn.attention(*qkv(D=1025), **given)
        message = str(caught.value)
        assert part in message and "reference: can run it" in message and "declining: " in message


# ---------------------------------------------------------------------------------------- the log

CALLS = """
import torch, fastattn
q = torch.randn(1, 2, 3, 4, requires_grad=True)
for _ in range(3):
    fastattn.attention(q, q, q, causal=True, backend="reference").sum().backward()
    fastattn.attention(q.detach(), q.detach(), q.detach(), softcap=2., backend="reference")
"""


@pytest.mark.slow
def test_log_has_one_line_per_new_kind_of_call():
    lines = python("-c", CALLS, FASTATTN_LOG="1").stderr.strip().splitlines()
    assert len(lines) == 2 and all(x.startswith("fastattn: reference runs B=1 H=2") for x in lines)
    assert "[band grad]" in lines[0] and "[softcap]" in lines[1]


def test_logging_is_off_by_default(capsys, monkeypatch):
    monkeypatch.delenv("FASTATTN_LOG", raising=False)
    fastattn.attention(*qkv(), backend="reference")
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_importing_changes_no_state_of_the_process():
    code = """
import torch
state = lambda: (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(),
                 torch.random.initial_seed(), torch.get_float32_matmul_precision(),
                 (torch.tensor(1e-40) * 1).item())
before = state()
import fastattn
q = torch.randn(1, 1, 8, 8)
fastattn.attention(q, q, q, backend=fastattn.explain(q, q, q).backend)
assert state() == before
"""
    python("-W", "ignore", "-c", code)


def test_help_shows_every_argument_with_its_type():
    for function in (fastattn.attention, fastattn.attention_weights):
        text = str(inspect.signature(function))
        assert "mask: 'Tensor | None' = None" in text and "backend: 'str | None' = None" in text
        assert "arguments" not in text and "ForwardRef" not in text


def test_explain_draws_no_random_numbers():
    q = torch.randn(1, 1, 3, 4)
    before = torch.get_rng_state()
    assert fastattn.explain(q, q, q, dropout_p=0.1).spec.dropout_p == 0.1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", environment.VALUES)
def test_a_variable_has_one_of_its_values(name, monkeypatch):
    first, *others = environment.VALUES[name]
    for value in (None, "", first):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        assert environment.setting(name) == first
    for value in others:
        monkeypatch.setenv(name, value)
        assert environment.setting(name) == value
    for junk in ("yes", "O", "\udcff", first + " "):
        monkeypatch.setenv(name, junk)
        with pytest.raises(ValueError, match=f"{name}: got .*, expected {first} .as without it"):
            environment.setting(name)


@pytest.mark.slow
def test_a_variable_with_another_value_is_refused_at_import():
    with pytest.raises(AssertionError, match="FASTATTN_CHECK: got 'yes', expected 0"):
        python("-c", "import fastattn", FASTATTN_CHECK="yes")
