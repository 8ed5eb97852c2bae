"""What torch's profilers record of a call: shapes, arguments, traces, flops, threads."""

import contextlib
import json
import threading

import pytest
import torch
from torch.profiler import ExecutionTraceObserver, profile
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.dispatch import run_pass
from tests.support.backends import not_interpreted
from tests.support.ways import rand
from tests.torch_api.test_torch_profiler import (
    CPU,
    B,
    D,
    H,
    N,
    seen,
    tensors,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread", "nothing_is_small"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@not_interpreted
def test_shapes_are_the_operators():
    """A direct call records the shapes that the dispatcher records for the operator."""
    q, k, v = tensors()
    shapes = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with profile(activities=CPU, record_shapes=True) as prof, mode:
            fastattn.attention(q, k, v, mask=rand(N, N), causal=True)
        (*_, event) = (x for x in prof.events() if x.name == "fastattn::attention")
        shapes.append((event.input_shapes, event.concrete_inputs))
    assert shapes[0] == shapes[1]
    assert shapes[0][0][:4] == [[B, H, N, D]] * 3 + [[N, N]]


@not_interpreted
def test_the_old_profiler():
    q, k, v = tensors()
    with torch.autograd.profiler.profile(use_kineto=False, record_shapes=True) as prof:
        fastattn.attention(q, k, v)
    (event,) = (x for x in prof.function_events if x.name.startswith("fastattn::"))
    assert event.name == "fastattn::attention" and event.input_shapes[0] == [B, H, N, D]


@not_interpreted
@pytest.mark.skipif(not torch.profiler.itt.is_available(), reason="torch was built without ITT")
def test_emit_itt(monkeypatch):
    recorded, record = [], run_pass._RecordFunctionFast
    monkeypatch.setattr(
        run_pass, "_RecordFunctionFast", lambda *x: recorded.append(x[0]) or record(*x)
    )
    with torch.autograd.profiler.emit_itt():
        fastattn.attention(*tensors())
    assert recorded == ["fastattn::attention"]


@not_interpreted
def test_execution_traces(tmp_path):
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    with profile(activities=CPU, execution_trace_observer=observer):
        fastattn.attention(*tensors())
    nodes = json.loads((tmp_path / "trace.json").read_text())["nodes"]
    assert [x["name"] for x in nodes].count("fastattn::attention") == 1


@not_interpreted
def test_flops():
    """`with_flops` knows aten operators only; FlopCounterMode counts ours, also when profiled."""
    given = [x.requires_grad_() for x in tensors()]
    with (
        profile(activities=CPU, with_flops=True) as prof,
        FlopCounterMode(display=False) as counter,
    ):
        fastattn.attention(*given).sum().backward()
    product = 2 * B * H * N * N * D
    counted = counter.get_flop_counts()["Global"]
    assert counted == {
        torch.ops.fastattn.attention: 2 * product,
        torch.ops.fastattn.attention_backward: 5 * product,
    }
    assert all(not x.flops for x in prof.events() if x.name.startswith("fastattn::"))


@not_interpreted
def test_other_threads():
    """A profiler records only the thread that started it, and autograd's work for that thread."""
    with profile(activities=CPU) as prof:
        in_a_thread(fastattn.attention, *tensors())
    assert not seen(prof)


@not_interpreted
def test_all_threads():
    """With profile_all_threads, a profiler records every thread."""

    def train(*given):
        fastattn.attention(*(x.requires_grad_() for x in given)).sum().backward()

    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=CPU, experimental_config=every) as prof:
        fastattn.attention(*tensors())
        in_a_thread(train, *tensors())
    assert seen(prof) == {"attention": 2, "attention_backward": 1}


def in_a_thread(function, *given):
    thread = threading.Thread(target=function, args=given)
    thread.start()
    thread.join()


@not_interpreted
def test_nothing_is_recorded_without_a_profiler(monkeypatch):
    def refuse(*args):
        raise AssertionError("an event without a profiler")

    monkeypatch.setattr(run_pass, "_RecordFunctionFast", refuse)
    given = [x.requires_grad_() for x in tensors()]
    fastattn.attention(*given).sum().backward()
    with torch.no_grad():
        fastattn.attention(*given)
        torch.func.vmap(fastattn.attention)(*(x[None] for x in given))
    with pytest.raises(AssertionError, match="an event"), profile(activities=CPU):
        fastattn.attention(*given)


@not_interpreted
def test_our_own_profile_inside_of_torchs():
    model = fastattn.MultiheadAttention(D, 2, batch_first=True).eval()
    x = rand(B, N, D)
    with profile(activities=CPU) as prof, torch.no_grad():
        report = fastattn.profile(model, x, x, x, need_weights=False)
    assert len(report.calls) == 1 and any("fastattn::attention" == x.name for x in prof.events())
