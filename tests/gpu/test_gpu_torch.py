"""On a GPU: compile, autocast, tf32, fallbacks, and values that stay on the device."""

import warnings
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.call.spec import Feature
from tests.gpu.test_gpu_streams import capture
from tests.semantics.test_packed import batch
from tests.semantics.test_paged import in_pages
from tests.support.backends import declares
from tests.support.cases import FEATURE, build, square
from tests.support.gpu import EVERYTHING, attend, moved, on_device, on_every_backend, on_gpu

pytestmark = on_gpu
SLOW = "fastattn runs this attention call on the slow"


def inputs(dtype=torch.float32, dim=16, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 33, dim), (2, 2, 47, dim), (2, 2, 47, dim)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to("cuda", dtype).requires_grad_(grad) for x in made]


def gradients(call, leaves):
    out, lse = call(*leaves)
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), lse.detach()))


# ----------------------------------------------------------------------------------------- compile


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch's compiler warns about settings and about the machine.
compiles = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def marked(marks):
    def apply(test):
        for mark in marks:
            test = mark(test)
        return test

    return apply


@marked(compiles)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@on_every_backend
def test_compile_fullgraph(name, compiler, dynamic):
    lengths = torch.tensor([47, 20], device="cuda")

    def f(q, k, v):
        out, lse = fastattn.attention(
            *(q * 1.5, k, v),
            causal="bottom_right",
            softcap=5.0,
            dropout_p=0.3,
            seed=7,
            key_lengths=lengths,
            return_lse=True,
            backend=name,
        )
        return out * 2, lse

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=compiler)
    leaves = inputs(torch.bfloat16, grad=True)
    for a, b in zip(gradients(compiled, leaves), gradients(f, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves)[0], f(*leaves)[0], rtol=2e-2, atol=2e-2)


@marked(compiles)
@on_every_backend
def test_compile_draws_fresh_dropout(name):
    q, k, v = inputs(torch.bfloat16)

    @torch.compile(fullgraph=True)
    def f(q, k, v, seed=None):
        return fastattn.attention(q, k, v, dropout_p=0.5, seed=seed, backend=name)

    assert not f(q, k, v).equal(f(q, k, v))
    want = fastattn.attention(q, k, v, dropout_p=0.5, seed=5, backend=name)
    assert f(q, k, v, torch.tensor([5], device="cuda")).equal(want)


@marked(compiles)
@on_every_backend
def test_compile_into_cuda_graphs(name):
    """mode="reduce-overhead" records the kernels in a CUDA graph."""
    q, k, v = inputs(torch.bfloat16)

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def f(q, k, v):
        return fastattn.attention(q + 1, k, v, causal=True, backend=name) * 2

    with torch.no_grad():
        want = fastattn.attention(q + 1, k, v, causal=True, backend=name) * 2
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(f(q, k, v).clone(), want)


# ---------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_every_backend
def test_autocast(name, dtype):
    leaves = inputs(grad=True)
    bias = torch.randn(33, 47, device="cuda")

    def run(*leaves):
        return fastattn.attention(*leaves, mask=bias.to(leaves[0].dtype), backend=name)

    with torch.autocast("cuda", dtype=dtype):
        out = run(*leaves)
    assert out.dtype == dtype
    low = [x.detach().to(dtype).requires_grad_() for x in leaves]
    want = run(*low)
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for a, b in zip(grads, torch.autograd.grad(want, low, torch.ones_like(want)), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


# -------------------------------------------------------------------------------------------- tf32


def errors(problem, name):
    """{result: its largest error}, with products in the precision that torch is set to."""
    exact = problem.to(torch.float64).run(fastattn.reference.attention)
    found = attend(on_device(problem), name)
    return {x: (found[x].cpu().double() - exact[x]).abs().max().item() for x in exact}


@on_every_backend
def test_tf32_only_when_torch_allows_it(name, monkeypatch):
    """IEEE float32 and parts, without a setting, have less than a quarter of the error of tf32, and
    tf32's is below 1e-2."""
    declares(name, torch.float32)
    matmul = torch.backends.cuda.matmul
    problem = build(square(2, 2, 97, 16), (FEATURE["causal"],), torch.float32)
    monkeypatch.setattr(matmul, "fp32_precision", "ieee")
    ieee = errors(problem, name)
    monkeypatch.setattr(matmul, "fp32_precision", "tf32")
    tf32 = errors(problem, name)
    monkeypatch.setattr(matmul, "fp32_precision", "ieee")
    assert errors(problem, name) == ieee
    monkeypatch.setattr(matmul, "fp32_precision", "none")
    parts = errors(problem, name)
    for what, allowed in tf32.items():
        error = max(ieee[what], parts[what])
        assert error < 3e-5 and 4 * error < allowed < 1e-2, (what, error, allowed)


# ---------------------------------------------------------------------------------- what falls back


def falls_back(monkeypatch, tensors, reason):
    """Only the first call warns, with the reason; results are the reference's."""
    monkeypatch.setattr(base, "_warned", set())
    fastattn.dispatch.operation.forget_plans()
    with pytest.warns(UserWarning, match=SLOW) as caught:
        out = fastattn.attention(*tensors)
    (message,) = [str(x.message) for x in caught if SLOW in str(x.message)]
    assert reason in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fastattn.attention(*tensors)
    assert torch.equal(out, again)
    want = fastattn.reference.attention(*(x.double() for x in tensors))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


def test_head_dims_past_the_kernels_fall_back(monkeypatch):
    falls_back(monkeypatch, inputs(dim=277), "head dim 277 is over 256")


def test_float64_falls_back(monkeypatch):
    falls_back(monkeypatch, inputs(torch.float64), "no kernel for torch.float64")


@on_every_backend
def test_a_backend_chosen_by_name_raises_its_reason(name):
    for tensors, reason in (
        (inputs(dim=277), "head dim 277 is over 256"),
        (inputs(torch.float64), "no kernel for torch.float64"),
        ([x.cpu() for x in inputs()], "no kernel for device 'cpu'"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            fastattn.attention(*tensors, backend=name)


# ------------------------------------------------------------------ values that stay on the device


@on_every_backend
def test_lengths_are_clamped_without_waiting_and_checked_on_request(name, monkeypatch):
    q, k, v = inputs(torch.bfloat16)
    for beyond, clamped in (([47, 99], [47, 47]), ([-3, 2**40], [0, 47])):
        given, meant = (torch.tensor(x, device="cuda") for x in (beyond, clamped))
        found = fastattn.attention(q, k, v, key_lengths=given, backend=name)
        assert torch.equal(found, fastattn.attention(q, k, v, key_lengths=meant, backend=name))
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    with pytest.raises(ValueError, match="key_lengths: got -3, expected values in"):
        fastattn.attention(q, k, v, key_lengths=given, backend=name)


SEQUENCES = ((5, 7), (0, 3), (1, 1), (300, 401), (3, 0), (130, 64))


def packed(name, names):
    """(the batch on the CPU, the batch on the device)"""
    if Feature.PACKED not in base.get(name).support.features:
        pytest.skip(f"{name} declares no packed batches")
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, SEQUENCES, 64)
    changed = {x: moved(getattr(made, x)) for x in ("dout", "dlse")}
    given = {x: moved(y) for x, y in made.given.items()}
    return made, replace(made, given=given, **changed)


@on_every_backend
def test_offsets_are_clamped_without_waiting(name):
    """A graph recorded with one batch replays with other offsets, including impossible ones."""
    _, there = packed(name, "bottom_right")
    most = dict(max_q=439, max_k=476)  # the totals of the batch
    graph, found = capture(lambda: there.run(backend=name, **most))
    keys = (0, 9, 9, 9, 400, 476, 476)
    for rows in ((0, 5, 5, 9, 200, 201, 439), (-7, 5, 5, 9, 200, 201, 2**40)):
        meant = dict(there.given)
        for x, offsets, end in (("cu_q", rows, 439), ("cu_k", keys, 476)):
            there.given[x].copy_(torch.tensor(offsets))
            meant[x] = there.given[x].clamp(0, end)
        graph.replay()
        want = replace(there, given=meant).run(backend=name, **most)
        assert all(torch.equal(found[x], y) for x, y in want.items())


def paged(name, names, sizes, page):
    """(the batch on the CPU, the batch on the device with its keys in pages)"""
    declares(name, torch.bfloat16, Feature.PAGED)
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, sizes, 64)
    given = {x: moved(y) for x, y in in_pages(made, page, torch.int32).items()}
    return made, replace(made, given=given)


@on_every_backend
def test_tables_are_clamped_without_waiting_and_checked_on_request(name, monkeypatch):
    """A graph recorded with one table replays with others, including pages that do not exist."""
    given = paged(name, "bottom_right", SEQUENCES, 64)[1].given | dict(backend=name)
    table, lengths = given["block_table"].clamp_(0, 9), given["key_lengths"]
    most = dict(max_q=300, max_k=table.numel() * 64)
    with torch.no_grad():
        graph, found = capture(lambda: fastattn.attention_packed(**given, **most))
        for beyond in (table.flip(1), table - 9, table + 2**30, -table - 2**30):
            for ends in (lengths.flip(0), lengths - 20, lengths + 2**30):
                saved = table.clone(), lengths.clone()
                table.copy_(beyond), lengths.copy_(ends)
                graph.replay()
                meant = dict(
                    block_table=table.clamp(0, len(given["k"]) - 1),
                    key_lengths=lengths.clamp(0, table.shape[1] * 64),
                )
                want = fastattn.attention_packed(**given | meant, **most)
                assert torch.equal(found.nan_to_num(), want.nan_to_num())
                table.copy_(saved[0]), lengths.copy_(saved[1])
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    for change in (dict(block_table=table - 10), dict(key_lengths=lengths - 1000)):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: got .* of sequence"):
            fastattn.attention_packed(**given | change)


@on_every_backend
def test_a_cache_of_pages(name):
    """A prompt, then tokens one by one, in a cache and its fork: results of contiguous keys."""
    declares(name, torch.bfloat16, Feature.PAGED)
    options = dict(device="cuda", dtype=torch.bfloat16)
    cache = fastattn.KVCache(3, 2, 64, capacity=700, page_size=16, **options)
    k, v = torch.randn(2, 3, 2, 603, 64, **options)
    q = torch.randn(3, 4, 603, 64, **options)
    cache.append(k[:, :, :600], v[:, :, :600])
    caches = [cache, cache.fork()]
    whole = fastattn.attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), causal=True)
    for x in caches:
        near(x.attention(q[:, :, :600], backend=name), whole[:, :, :600])
        for n in range(600, 603):
            x.append(k[:, :, n : n + 1], v[:, :, n : n + 1])
            near(x.attention(q[:, :, n : n + 1], backend=name), whole[:, :, n : n + 1])


def near(found, exact):
    torch.testing.assert_close(found.double().cpu(), exact, rtol=2e-2, atol=2e-2)


@on_every_backend
def test_a_seed_lives_on_the_device(name):
    q, k, v = inputs(torch.bfloat16)
    seed = torch.tensor([5], device="cuda")
    one = fastattn.attention(q, k, v, dropout_p=0.5, seed=seed, backend=name)
    two = fastattn.attention(q, k, v, dropout_p=0.5, seed=5, backend=name)
    assert torch.equal(one, two)
    with pytest.raises(ValueError, match=r"seed\.device"):
        fastattn.attention(q, k, v, dropout_p=0.5, seed=seed.cpu(), backend=name)


@on_every_backend
def test_manual_seed_repeats_the_draw(name):
    q, k, v = inputs(torch.bfloat16)

    def draw():
        return fastattn.attention(q, k, v, dropout_p=0.5, backend=name)

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)


def test_the_default_backend_runs_everything_without_a_warning():
    """Without a backend named, a fused one is chosen, and it agrees with the oracle."""
    problem = on_device(build(square(2, 2, 97, 64), EVERYTHING, torch.bfloat16))
    found = problem.run(fastattn.attention)
    want = problem.to(torch.float64).run(fastattn.reference.attention)
    for what, value in found.items():
        torch.testing.assert_close(value.double(), want[what], rtol=5e-2, atol=5e-2, msg=what)
