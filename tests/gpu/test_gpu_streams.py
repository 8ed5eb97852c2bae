"""On a GPU: other streams, devices and threads, CUDA graphs, and results the same to the bit."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import fastattn
from tests.support.backends import declares, passed
from tests.support.cases import FEATURE, Dims, build, square
from tests.support.error_budget import Verdict
from tests.support.gpu import EVERYTHING, attend, check, on_device, on_every_backend, on_gpu

pytestmark = on_gpu
LONG_SLEEP = 200_000_000  # cycles, a tenth of a second: launches never take as long

DECODING = Dims(2, 4, 2, 5, 1500, 64, 64)
SHAPES = {"square": square(2, 2, 97, 64), "decoding": DECODING}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def problem_of(shape, features=EVERYTHING):
    return build(SHAPES[shape], features, torch.bfloat16)


def same(found, first, where=""):
    assert found.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(found[name], value), f"{where}: {name} differs"


# ----------------------------------------------------------------------------------------- streams


@every_shape
@on_every_backend
def test_another_stream(name, shape):
    """Inputs are written late, on the side stream: a kernel on another stream would read NaN."""
    problem = on_device(problem_of(shape))
    want = attend(problem, name)
    late = replace(
        problem, **{x: torch.full_like(getattr(problem, x), torch.nan) for x in ("q", "k", "v")}
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        for x in ("q", "k", "v"):
            getattr(late, x).copy_(getattr(problem, x))
        found = attend(late, name)
        found = {x: y.clone() for x, y in found.items()}  # on the side stream, after the kernels
    side.synchronize()
    same(found, want)


@on_every_backend
def test_backward_runs_where_forward_did(name):
    """autograd.grad, called outside the stream context, synchronises with forward's stream."""
    problem = on_device(problem_of("square"))
    want = attend(problem, name)
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        out, lse = fastattn.attention(*leaves, **problem.kwargs, backend=name)
    torch.cuda.current_stream().wait_stream(side)
    grads = torch.autograd.grad((out, lse), leaves, (problem.dout, problem.dlse))
    same(dict(zip(("dq", "dk", "dv"), grads)), {x: want[x] for x in ("dq", "dk", "dv")})


@on_every_backend
def test_several_python_threads_on_their_own_streams(name):
    dims = [Dims(1, 2, 1, 60 + 37 * at, 90, 64, 64) for at in range(4)]
    problems = [on_device(build(x, EVERYTHING, torch.bfloat16)) for x in dims]
    alone = [attend(x, name) for x in problems]
    torch.cuda.synchronize()

    def work(at):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                same(attend(problems[at], name), alone[at], f"thread {at}")
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("shape", SHAPES)
@on_every_backend
def test_a_device_that_is_not_the_current_one(name, shape):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    problem = problem_of(shape)
    assert torch.cuda.current_device() == 0
    found = attend(on_device(problem, "cuda:1"), name)
    assert torch.cuda.current_device() == 0
    assert all(x.device.index == 1 for x in found.values())
    passed(Verdict(problem).about({x: y.cpu() for x, y in found.items()}))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("more", [{}, dict(seed=None)], ids=["given_seed", "drawn_seed"])
@every_shape
@on_every_backend
def test_nothing_waits_for_the_device(name, shape, more):
    """Forward and backward read no value back to the host: no lengths, no seeds."""
    problem = on_device(problem_of(shape))
    keys = problem.k.shape[2]
    problem.kwargs["key_lengths"] = torch.tensor([keys, keys // 2], device=problem.q.device)
    problem.kwargs |= more
    attend(problem, name)  # compiles, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(problem, name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------ graphs


def capture(call):
    """(graph, results): `call` warmed up on a side stream, as torch requires, then recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def refill(problem, other):
    """Write the values of `other` into the memory of `problem`."""
    for x in ("q", "k", "v", "dout", "dlse"):
        if getattr(problem, x) is not None:
            getattr(problem, x).copy_(getattr(other, x))
    for name, x in problem.kwargs.items():
        if isinstance(x, torch.Tensor):
            x.copy_(other.kwargs[name])


@every_shape
@pytest.mark.parametrize("kind", ["plain", "everything"])
@on_every_backend
def test_graph_replays_with_new_values(name, kind, shape):
    """Forward and backward, with every optional tensor, lengths and seed on the device."""
    features = () if kind == "plain" else (*EVERYTHING,)

    def make(seed):
        problem = build(SHAPES[shape], features, torch.bfloat16, seed=seed)
        keys = problem.k.shape[2]
        if kind == "everything":
            problem.kwargs["seed"] = torch.tensor([seed])
            problem.kwargs["key_lengths"] = torch.tensor([keys - seed, keys // 2 + seed])
        return problem

    problem = on_device(make(1))
    graph, found = capture(lambda: attend(problem, name))
    for seed in (2, 3, 2):
        new = make(seed)
        refill(problem, on_device(new))
        graph.replay()
        torch.cuda.synchronize()
        same(found, attend(on_device(new), name), f"replay of {seed}")
        passed(Verdict(new).about({x: y.cpu() for x, y in found.items()}))


@every_shape
@on_every_backend
def test_graph_reads_the_seed_when_it_replays(name, shape):
    problem = on_device(problem_of(shape, (FEATURE["dropout"],)))
    seed = problem.kwargs["seed"] = torch.tensor([5], device=problem.q.device)
    graph, found = capture(lambda: attend(problem, name))
    for value in (7, -1, 2**62, 7):
        seed.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        fresh = replace(problem, kwargs=problem.kwargs | dict(seed=value))
        same(found, attend(fresh, name), f"seed {value}")


@on_every_backend
def test_each_graph_replay_draws_a_new_mask(name):
    """Without a seed, every replay draws a new mask, and backward uses its forward's mask."""
    n, options = 61, dict(dtype=torch.bfloat16, device="cuda")
    q, k = torch.zeros(2, 3, n, 16, **options), torch.zeros(2, 3, n, 16, **options)
    eye = torch.eye(n, **options).expand(2, 3, n, n)
    v = eye.clone().requires_grad_()

    def call():
        out = fastattn.attention(q, k, v, dropout_p=0.4, backend=name)
        (dv,) = torch.autograd.grad(out, v, eye)
        return out.detach(), dv

    graph, (out, dv) = capture(call)
    seen = []
    for _ in range(4):
        graph.replay()
        torch.cuda.synchronize()
        kept = out != 0
        assert torch.equal(kept, dv.mT != 0), "forward and backward dropped different keys"
        assert 0.5 < kept.double().mean() < 0.7
        assert not any(torch.equal(kept, other) for other in seen), "the same draws again"
        seen.append(kept)


@on_every_backend
def test_graph_of_weights(name):
    features = (FEATURE["causal"], FEATURE["softcap"])
    problem = on_device(problem_of("square", features))

    def call():
        q = problem.q.detach().requires_grad_()
        weights = fastattn.attention_weights(q, problem.k, **problem.kwargs, backend=name)
        return weights.detach(), torch.autograd.grad(weights.float().square().sum(), q)[0]

    graph, found = capture(call)
    refill(problem, on_device(build(SHAPES["square"], features, torch.bfloat16, seed=9)))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, call(), strict=True))


# -------------------------------------------------------------------------------------- determinism


REPEATED = {
    **{shape: (dims, EVERYTHING) for shape, dims in SHAPES.items()},
    **{f"D {d}": (Dims(2, 4, 2, 500, 700, d, d), (FEATURE["causal"],)) for d in (64, 128)},
}


@pytest.mark.parametrize("shape", REPEATED)
@on_every_backend
def test_repeats(name, shape):
    """1000 repeats are bitwise equal: they would show a race that occurs once in many runs, as of
    blocks that add to dq in turn."""
    problem = on_device(build(*REPEATED[shape], torch.bfloat16))
    first = attend(problem, name)
    for at in range(1000):
        same(attend(problem, name), first, f"repeat {at}")


@on_every_backend
def test_repeats_with_other_work_on_the_device(name):
    """Repeats while another stream keeps the device busy, which changes the order of programs."""
    problem = on_device(build(Dims(3, 4, 2, 501, 777, 64, 64), EVERYTHING, torch.bfloat16))
    first = attend(problem, name)
    torch.cuda.synchronize()
    side, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for at in range(30):
        with torch.cuda.stream(side):
            busy @ busy
        same(attend(problem, name), first, f"repeat {at}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(150, 170), (5, 1500)], ids=["square", "decoding"])
@on_every_backend
def test_place_in_the_batch_does_not_matter(name, sizes, dtype):
    """Five copies of an item have the same bits. (Not with dropout, which depends on b and h.)"""
    declares(name, getattr(torch, dtype))
    names = ("bottom_right", "softcap", "alibi", "float_mask", "sinks", "lse_loss")
    dim = 64 if dtype == "bfloat16" else 16
    one = build(Dims(1, 3, 3, *sizes, dim, dim), [FEATURE[x] for x in names], getattr(torch, dtype))
    five = on_device(
        replace(
            one,
            **{x: repeated(getattr(one, x)) for x in ("q", "k", "v", "dout", "dlse")},
            kwargs=one.kwargs | dict(mask=repeated(one.kwargs["mask"])),
            needs_grad=("q", "k", "v"),
        )
    )
    found = attend(five, name)
    for what, value in found.items():
        assert torch.equal(value, value[:1].expand_as(value)), what
    if sizes[0] > 16:  # in decoding, the splits of keys depend on the number of heads
        alone = attend(on_device(replace(one, needs_grad=("q", "k", "v"))), name)
        same({x: y[3:4] for x, y in found.items()}, alone)


def repeated(x):
    return x.expand(5, *x.shape[1:]).contiguous()


@on_every_backend
def test_the_compared_calls_match_the_oracle(name):
    """The calls that the tests above compare with themselves, compared with the oracle."""
    check(name, [problem_of(shape) for shape in SHAPES])
