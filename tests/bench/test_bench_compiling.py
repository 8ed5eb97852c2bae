"""What Triton compiles for a sweep on a GPU: little for the quick one, and all of it in advance.

A stub driver replaces the GPU, and requests to compile a kernel are counted.
"""

import dataclasses
import threading

import pytest
import torch

import fastattn
from bench import cases, commands
from bench.cases import FORWARD, PASSES, TRAINING, Case
from bench.measure import isolated_process, precompile, progress, run
from bench.peers import registry
from bench.peers.registry import BASELINE, SUBJECT
from fastattn import api
from fastattn.backends.triton import backend as triton
from fastattn.call import validation
from tests.support import launch_stub
from tests.support.backends import needs_triton
from tests.support.bench_helpers import LIMITS, case
from tests.support.marks import parametrize

QUICK = [x for grid in cases.GRIDS["quick on a GPU"] for x in grid.cases("cuda")]
MOST = 40  # kernels of the quick sweep
compiled = pytest.mark.skipif(triton.interpreted(), reason="nothing is compiled in the interpreter")


@pytest.fixture
def kernels_of(monkeypatch):
    """The kernels that the calls of a case request from Triton. None is compiled."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    seen = set()

    def hook(*, key, fn, **about):
        seen.add((fn.name, key))
        return True  # tells Triton not to compile

    with launch_stub.stubbed(90):
        from triton import knobs

        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)

        def ask(x):
            seen.clear()
            forward_and_backward(x)
            return set(seen)

        yield ask


def forward_and_backward(x):
    """With uninitialised tensors of the case's sizes, on the CPU, where the stub accepts them."""
    x = dataclasses.replace(x, device="cpu")
    dtype = cases.DTYPES[x.dtype]
    q, k, v = (
        torch.empty(x.B, heads, n, x.D, dtype=dtype)
        for heads, n in ((x.H, x.M), (x.Hk, x.N), (x.Hk, x.N))
    )
    given = registry.arguments(x)
    if x.rule.added:
        given["mask"] = torch.empty(1, x.H, x.M, x.N, dtype=dtype)
    t, options = api.prepare(q, k, v, given, "attention")
    if options.dropout_p and t.seed is None:
        t = t._replace(seed=torch.tensor(3))
    s = validation.describe(t, options)
    needs_grad = ["mask" if name == "bias" else name for name in x.leaves]
    out, normaliser = triton.Triton().forward(s, t)
    triton.Triton().backward(s, t, out, normaliser, torch.empty_like(out), None, needs_grad)


@needs_triton
@compiled
def test_the_quick_sweep_compiles_few_kernels_ahead(kernels_of):
    kinds = precompile.kinds(QUICK)
    ahead = set().union(*map(kernels_of, kinds))
    assert 3 * len(kinds) <= len(ahead) <= MOST, sorted(name for name, _ in ahead)
    for x in QUICK:
        assert kernels_of(x) <= ahead, x


@needs_triton
@compiled
def test_kernels_are_counted_where_they_are_compiled(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.compilation, "listener", None)
    small = Case("cuda", "bfloat16", "full", B=1, H=2, N=16, D=16)
    before = precompile.count()
    with launch_stub.stubbed(80):
        forward_and_backward(small)
        found = precompile.count() - before
        forward_and_backward(small)
        assert precompile.count() - before == found == 4  # forward, delta, dq, dkv


def test_the_quick_sweep_has_no_peer_that_is_compiled_for_every_case():
    assert not {"flex"} & registry.chosen("cuda").keys()
    assert "flex" in registry.chosen("cuda", full=True) and "flex" not in registry.chosen(
        "cpu", full=True
    )
    assert "flex" in registry.chosen("cuda", ("flex",))


def test_a_sweep_on_a_gpu_is_the_quick_one_for_it(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "_device", lambda options: "cuda")
    monkeypatch.setattr(commands, "grids", lambda options, preset: seen.append(preset) or ())
    monkeypatch.setattr(isolated_process, "Process", lambda: (_ for _ in ()).throw(KeyError))
    for full in (False, True):
        with pytest.raises(KeyError):
            commands.sweep(commands.Options(full=full))
    assert seen == ["quick on a GPU", "full"]


@pytest.fixture
def runs(monkeypatch):
    """The (case, pass, thread) of each run of `ahead`. Triton is reported as available."""
    found = []

    def compute(call, x, inputs, what):
        found.append((x, what, threading.get_ident()))
        if x.N == 512:
            raise RuntimeError("as it will in the cell")

    monkeypatch.setattr(precompile, "compute", compute)
    monkeypatch.setattr(Case, "inputs", lambda self: None)
    monkeypatch.setattr(fastattn, "available_backends", lambda: {"triton": None})
    return found


@parametrize("passes, what", [(PASSES, "backward"), ((FORWARD,), FORWARD)], fast=1)
def test_every_kind_is_run_once_and_the_first_alone(passes, what, runs):
    few = [dataclasses.replace(x, device="cpu") for x in QUICK]
    said = precompile.ahead(few, passes)
    assert next(said).startswith(f"compiled 1 of {len(precompile.kinds(few))} kinds of calls, ")
    assert len(runs) == 1
    lines = list(said)
    assert [x for x, *_ in sorted(runs, key=lambda x: few.index(x[0]))] == precompile.kinds(few)
    assert {x for _, x, _ in runs} == {what} and len(lines) == len(runs) - 1
    assert f"compiled {len(runs)} of {len(runs)} kinds" in lines[-1]
    assert "kernels in 0 s" in lines[-1]


def test_without_triton_nothing_runs(runs, monkeypatch):
    monkeypatch.setattr(fastattn, "available_backends", lambda: {"triton": "not installed"})
    assert not list(precompile.ahead([case()], PASSES)) and not runs


class Dying:
    def stream(self, function, *args):
        yield "compiled 1 of 2"
        raise isolated_process.Died(SUBJECT, "its process died of SIGSEGV")


def test_a_crashed_compile_process_is_reported(capsys):
    commands._compile(Dying(), [case()], PASSES)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "compiled 1 of 2" and said[1].endswith("ahead: its process died of SIGSEGV")


class Here:
    def stream(self, function, *args):
        return function(*args)


def test_progress_is_printed_before_each_measurement(capsys):
    given = (case(),), (FORWARD, TRAINING), dict.fromkeys((SUBJECT, BASELINE)), LIMITS, 0.002, (1,)
    records = progress.follow(run.cells(*given, process=Here()), 2, lambda record: "done")
    next(records)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"measuring {case()}, forward, forward+backward: fastattn, torch"
    assert second.startswith("[1/2 ") and second.endswith("done")
