"""torch's profilers show every pass of every call once, under its operator's name, with time,
memory, shapes and flops."""

import contextlib
import json
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.profiler._memory_profiler import SchemaMatcher
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.dispatch import run_pass
from tests.support.backends import FUSED, INTERPRETED, not_interpreted, small
from tests.support.ways import in_sdpa, mapped, multihead, out_alone, packed, rand

REFERENCE = [] if INTERPRETED else ["reference"]
every_backend = pytest.mark.parametrize("name", [*FUSED, *REFERENCE])
pytestmark = pytest.mark.usefixtures("nothing_is_small")

B, H, N, D = 2, 2, small(40, 9), 8
CPU = [ProfilerActivity.CPU]


def tensors():
    return [rand(B, H, N, D, seed=i) for i in range(3)]


# ------------------------------------------------------------------------------------- ways in


def encoder(q, k, v):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True)
    fastattn.convert(layer)
    return layer(q[:, 0])


def cached(q, k, v):
    cache = fastattn.KVCache(B, H, D, capacity=N)
    cache.append(k, v)
    return cache.attention(q)


def ring(q, k, v):
    return fastattn.distributed.attention(q, k, v, strategy="ring")


@pytest.fixture
def way(request):
    """The name of a way to call attention; "distributed" runs in a group of one rank."""
    if request.param != "distributed":
        yield request.param
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


FORWARD, BACKWARD = ["attention"], ["attention_backward"]
WAYS = {  # (the call, its forward events, its backward events)
    "attention": (fastattn.attention, FORWARD, BACKWARD),
    "attention_packed": (packed, FORWARD, BACKWARD),
    "attention_weights": (
        lambda q, k, v: fastattn.attention_weights(q, k),
        ["attention", "weights"],
        ["weights_backward"],
    ),
    "attention_jvp": (
        lambda q, k, v: sum(fastattn.attention_jvp(q, k, v, k.detach(), None, None)),
        ["attention_jvp"],
        ["attention_second"],
    ),
    "scaled_dot_product_attention": (fastattn.scaled_dot_product_attention, FORWARD, BACKWARD),
    "sdpa": (in_sdpa, FORWARD, BACKWARD),
    "MultiheadAttention": (out_alone, FORWARD, BACKWARD),
    "MultiheadAttention, weights": (
        multihead,
        ["attention", "weights"],
        ["attention_backward", "weights_backward"],
    ),
    "a converted layer": (encoder, FORWARD, BACKWARD),
    "KVCache": (cached, FORWARD, None),
    "distributed": (ring, FORWARD, BACKWARD),
    "vmap": (mapped, FORWARD, BACKWARD),
    "vjp": (
        lambda *x: torch.func.vjp(fastattn.attention, *x)[1](x[0])[0],
        [*FORWARD, *BACKWARD],
        None,
    ),
}


every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


def seen(prof):
    """Count our events by name. No event may be inside another of the same name."""
    found = [x for x in prof.events() if x.name.startswith("fastattn::")]
    for x in found:
        above = x.cpu_parent
        while above is not None:
            assert above.name != x.name
            above = above.cpu_parent
    return Counter(x.name.removeprefix("fastattn::") for x in found)


@every_backend
@every_way
def test_every_way_to_call_attention_is_recorded(on, way):
    call, forward, backward = WAYS[way]
    with profile(activities=CPU) as prof, torch.no_grad():
        call(*tensors())
    assert seen(prof) == Counter(forward)
    if backward is None:
        return
    given = [x.requires_grad_() for x in tensors()]
    with profile(activities=CPU) as prof:
        out = call(*given)
    assert seen(prof) == Counter(forward)
    with profile(activities=CPU) as prof:
        out.sum().backward()
    assert seen(prof) == Counter(backward)
    assert not {x.key for x in prof.key_averages()} & {"Differentiable", "DifferentiableBackward"}


@not_interpreted
@pytest.mark.parametrize("backend", ("eager", "inductor"))
def test_compiled(backend):
    """Compiled code has the same event names, from the operators."""
    given = [x.requires_grad_() for x in tensors()]
    compiled = torch.compile(fastattn.attention, backend=backend, fullgraph=True)
    compiled(*given).sum().backward()
    with profile(activities=CPU) as prof:
        compiled(*given).sum().backward()
    assert seen(prof) == Counter(FORWARD + BACKWARD)


@not_interpreted
def test_second_derivatives():
    given = [x.requires_grad_() for x in tensors()]
    with profile(activities=CPU) as prof:
        (dq,) = torch.autograd.grad(
            fastattn.attention(*given).square().sum(), given[0], create_graph=True
        )
        torch.autograd.grad(dq.square().sum(), given)
    passes = ["attention_jvp", "attention_second"]
    assert seen(prof) == Counter(FORWARD + 2 * BACKWARD + passes)


@not_interpreted
def test_names_of_grad_fn():
    given = [x.requires_grad_() for x in tensors()]
    out = fastattn.attention(*given)
    assert out.grad_fn.name() == "AttentionBackward"
    weights = fastattn.attention_weights(*given[:2])
    assert weights.grad_fn.name() == "AttentionWeightsBackward"
    (dq,) = torch.autograd.grad(out.sum(), given[0], create_graph=True)
    assert dq.grad_fn.name() == "AttentionBackwardBackward"
    mapped = torch.func.vmap(fastattn.attention)(*(x[None] for x in given))
    nodes = [mapped.grad_fn]
    for node in nodes:
        nodes += [x for x, _ in node.next_functions if x]
    assert "AttentionBackward" in {node.name().removeprefix("Generated") for node in nodes}


# ------------------------------------------------------------------------------------ time, memory

LONG = {"cpu": 1400, "reference": 400, "triton": 24}  # some 50 ms


TRIES = 3  # a busy machine may pause the process between two events


def share(prof, own):
    """The share of our events in the whole time: self time, or total time with callees."""
    rows = prof.key_averages()
    total = sum(x.self_cpu_time_total for x in rows)
    of = (x.self_cpu_time_total if own else x.cpu_time_total for x in rows if "fastattn::" in x.key)
    return sum(of) / total


@every_backend
@pytest.mark.parametrize("grad", (False, True), ids=("forward", "training"))
def test_the_time_is_the_events_own(on, grad):
    """Time is our events' self time, except on the reference, which calls torch's operators."""
    q, k, v = (rand(1, 8, LONG[on], 64, seed=i).requires_grad_(grad) for i in range(3))
    fastattn.attention(q, k, v)  # fill the caches for this kind of call

    def profiled():
        with profile(activities=CPU) as prof:
            out = fastattn.attention(q, k, v)
            if grad:
                torch.autograd.grad(out, (q, k, v), q.detach())
        return prof

    prof = max((profiled() for _ in range(TRIES)), key=lambda x: share(x, on != "reference"))
    assert seen(prof) == Counter(FORWARD + BACKWARD * grad)
    assert share(prof, own=on != "reference") > 0.9
    lines = prof.key_averages().table(sort_by="self_cpu_time_total").splitlines()
    top = next(line for line in lines if line.strip().startswith(("fastattn::", "aten::")))
    assert on == "reference" or top.split()[0] == "fastattn::attention" + "_backward" * grad


@not_interpreted
def test_with_stacks_the_time_is_in_the_events():
    """With stacks, self time belongs to events of Python functions, inside of ours."""
    q, k, v = (rand(1, 8, LONG["cpu"], 64, seed=i) for i in range(3))
    fastattn.attention(q, k, v)
    shares = []
    for _ in range(TRIES):
        with profile(activities=CPU, with_stack=True) as prof:
            fastattn.attention(q, k, v)
        assert seen(prof) == Counter(FORWARD)
        (event,) = (x for x in prof.events() if x.name == "fastattn::attention")
        # Python functions in which other threads wait have events, too.
        own = (x for x in prof.events() if x.thread == event.thread)
        whole = sum(x.self_cpu_time_total for x in own)
        shares.append(event.cpu_time_total / whole)
    assert max(shares) > 0.9


@every_backend
def test_memory_is_the_events(on):
    """All results are allocated inside of our events."""
    given = [x.requires_grad_() for x in tensors()]
    with profile(activities=CPU, profile_memory=True) as prof:
        out, lse = fastattn.attention(*given, return_lse=True)
        torch.autograd.grad(out, given, torch.ones_like(out))
    rows = {x.key: x for x in prof.key_averages()}
    assert rows["fastattn::attention"].cpu_memory_usage >= out.nbytes + 2 * lse.nbytes
    assert rows["fastattn::attention_backward"].cpu_memory_usage >= 3 * given[0].nbytes
    if on == "cpu":
        assert rows["fastattn::attention"].cpu_memory_usage == out.nbytes + 2 * lse.nbytes


@not_interpreted
@every_way
def test_arguments_fit_the_schemas(way):
    """Memory timelines read from schemas which arguments an operator mutates: ours mutate none."""
    call, _, backward = WAYS[way]
    given = [x.requires_grad_(backward is not None) for x in tensors()]
    with profile(activities=CPU, record_shapes=True, profile_memory=True, with_stack=True) as prof:
        out = call(*given)
        if backward:
            out.sum().backward()
    todo = list(prof.profiler.kineto_results.experimental_event_tree())
    found = []
    for event in todo:
        todo += event.children
        if event.tag == _EventType.TorchOp and event.name.startswith("fastattn::"):
            found.append(event.name)
            mutable = SchemaMatcher.inputs_are_mutable(event.typed[1])
            assert mutable and not any(mutable), event.name
    assert found


# ----------------------------------------------------------------------- what is recorded of a call


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


@pytest.mark.slow
@not_interpreted
def test_our_own_profile_inside_of_torchs():
    model = fastattn.MultiheadAttention(D, 2, batch_first=True).eval()
    x = rand(B, N, D)
    with profile(activities=CPU) as prof, torch.no_grad():
        report = fastattn.profile(model, x, x, x, need_weights=False)
    assert len(report.calls) == 1 and any("fastattn::attention" == x.name for x in prof.events())
