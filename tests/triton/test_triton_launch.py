"""Cached launches of Triton's kernels equal those that Triton itself would make.

A stub replaces Triton's call of the driver; no GPU is needed.
"""

import itertools
import random

import pytest
import torch

from fastattn.backends.triton import job, launch_cache, runtime, tile_configs
from fastattn.backends.triton.backend import Triton
from fastattn.call import spec, validation
from tests.support import launch_stub
from tests.support.launch_stub import laid
from tests.support.marks import parametrize

pytestmark = [
    pytest.mark.skipif(
        launch_stub.why_no_triton() is not None, reason=str(launch_stub.why_no_triton())
    ),
]
DIMS = dict(B=1, H=2, M=20, N=70, D=16)
LONG = dict(M=1, N=4000)


@pytest.fixture
def stub():
    with launch_stub.stubbed(80) as made:
        made.calls = []
        made.launched = lambda *args: made.calls.append(args)
        yield made


@pytest.fixture
def derived(monkeypatch):
    """The names of kernels that Triton's own launch ran."""
    seen, own = [], job.run

    def run(kernel, *args, **kwargs):
        seen.append(kernel.__name__)
        return own(kernel, *args, **kwargs)

    monkeypatch.setattr(job, "run", run)
    return seen


def described(layouts=({}, {}, {}), tensors=(), dtype=torch.bfloat16, **changed):
    """The (spec, tensors) of a call."""
    d = DIMS | {x: y for x, y in changed.items() if x in DIMS}
    options = {x: y for x, y in changed.items() if x not in DIMS}
    shapes = [(d["B"], d["H"], n, d["D"]) for n in (d["M"], d["N"], d["N"])]
    q, k, v = (laid(s, dtype, **x) for s, x in zip(shapes, layouts))
    t = spec.Tensors(q, k, v, **dict(tensors))
    return validation.describe(t, spec.Options(**options)), t


def train(s, t, needs_grad=("q", "k", "v")):
    outs = Triton().forward(s, t)
    return Triton().backward(s, t, outs, (torch.zeros_like(outs[0]), None), needs_grad)


def forward(s, t):
    return Triton().forward(s, t)


def flat(x, inputs):
    """An argument for comparison: without the addresses of new memory, which differ by call."""
    if isinstance(x, torch.Tensor):
        at = x.data_ptr() if x.data_ptr() in inputs else x.data_ptr() % 16
        return x.dtype, tuple(x.shape), x.stride(), at
    return tuple(flat(y, inputs) for y in x) if isinstance(x, tuple) else (type(x), x)


def launches(stub, call, s, t):
    """The calls of Triton's launcher: grid, stream, binary, and arguments."""
    stub.calls.clear()
    call(s, t)
    inputs = {x.data_ptr() for x in t if x is not None}
    return [
        (*call[1:7], flat(call[10:], inputs))  # without metadata and hooks
        for call in stub.calls
    ]


def as_triton(monkeypatch, stub, call, s, t):
    """The same calls, made by Triton's own launch."""
    with monkeypatch.context() as patch:
        patch.setattr(launch_cache, "_known", lambda: False)
        return launches(stub, call, s, t)


def noise(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def packed(M, N):
    offsets = {"cu_q": torch.tensor([0, M]), "cu_k": torch.tensor([0, N])}
    return dict(M=M, N=N, max_q=M, max_k=N, tensors=offsets)


KINDS = {
    "plain": {},
    "causal": dict(right=0),
    "decode": LONG,
    "softcap": dict(softcap=5.0),
    "mask": dict(tensors={"mask": noise(1, 1, 20, 70, dtype=torch.bool)}),
    "lengths": dict(tensors={"key_lengths": torch.tensor([31])}),
    "slopes": dict(tensors={"alibi_slopes": noise(2)}),
    "sinks": dict(tensors={"sinks": noise(2)}),
    "dropout": dict(dropout_p=0.1, tensors={"seed": torch.tensor(3)}),
    "float32": dict(dtype=torch.float32),
    "packed": packed(20, 70),
    "packed decode": packed(1, 4000),
}


@parametrize("kind", KINDS, fast=2)
def test_a_second_call_derives_nothing(kind, stub, derived, monkeypatch):
    """It launches the binary that Triton would, with the same arguments."""
    s, t = described(**KINDS[kind])
    train(s, t)
    assert derived
    derived.clear()
    again = launches(stub, train, s, t)
    assert again and not derived
    assert again == as_triton(monkeypatch, stub, train, s, t)


LAYOUTS = [
    dict(row=row, first=first, column=column)
    for row, first, column in itertools.product((0, 1, 8, 16), (0, 1, 8), (1, 2))
]


@parametrize("seed", range(4), fast=1)
def test_every_layout_has_the_kernel_that_triton_picks(seed, stub, derived, monkeypatch):
    """Layouts of one spec: pointers aligned to 16 bytes or not; strides of 1, multiples of 16, or
    others. Each layout is launched again after all others."""
    draw = random.Random(seed)
    cases = [described([draw.choice(LAYOUTS) for _ in range(3)]) for _ in range(8)]
    s = cases[0][0]
    assert all(other == s for other, _ in cases)
    for _, t in cases:
        forward(s, t)
    derived.clear()
    found = [launches(stub, forward, s, t) for _, t in cases]
    assert not derived
    assert found == [as_triton(monkeypatch, stub, forward, s, t) for _, t in cases]
    assert len({function for [(*_, function, _packed, _given)] in found}) > 1


def test_offsets_of_any_integers_and_address(stub, derived, monkeypatch):
    """Offsets of either integer type and any alignment share one spec."""
    s, t = described(**packed(20, 70))
    for first, dtype in itertools.product(itertools.product((0, 1), repeat=2), (torch.int32, None)):
        rows, keys = torch.zeros(2, 3, dtype=dtype or torch.int64)
        rows[first[0] + 1], keys[first[1] + 1] = 20, 70
        other = t._replace(cu_q=rows[first[0] :][:2], cu_k=keys[first[1] :][:2])
        forward(s, other)
        derived.clear()
        found = launches(stub, forward, s, other)
        assert not derived
        assert found == as_triton(monkeypatch, stub, forward, s, other)


@parametrize("M, N", [(20, 70), (1, 4000)], fast=1)
def test_pages_of_any_table(M, N, stub, derived, monkeypatch):
    """Tables of either integer type and any alignment share one spec."""
    _, t = described(**packed(M, N))
    pages = dict(k=laid((9, 2, 16, 16)), v=laid((9, 2, 16, 16)), key_lengths=torch.tensor([N // 2]))
    for first, dtype in itertools.product((0, 1), (torch.int32, torch.int64)):
        table = torch.zeros(1 + N // 16 + 1, dtype=dtype)[first:][None, : N // 16 + 1]
        other = t._replace(**pages, cu_k=None, block_table=table)
        s = validation.describe(other, spec.Options(max_q=M, max_k=N))
        forward(s, other)
        derived.clear()
        found = launches(stub, forward, s, other)
        assert not derived
        assert found == as_triton(monkeypatch, stub, forward, s, other)


@parametrize("strided", [False, True], ids=["whole", "strided"], fast=1)
def test_gradients_of_any_layout(strided, stub, monkeypatch):
    s, t = described()
    out, normaliser = Triton().forward(s, t)
    for at in (0, 8, 1):
        dout = laid(out.shape, row=8 * strided, first=at)
        dlse = noise(2 * normaliser[0].numel())[at % 3 :: 1 + strided][: normaliser[0].numel()]
        dlse = dlse.view(normaliser[0].shape) if dlse.numel() == normaliser[0].numel() else None

        def call(s, t, dout=dout, dlse=dlse):
            Triton().backward(s, t, (out, normaliser), (dout, dlse), ("q", "v"))

        call(s, t)
        assert launches(stub, call, s, t) == as_triton(monkeypatch, stub, call, s, t)


BUSY = {
    "plain": ({}, []),
    "sinks": (dict(tensors={"sinks": noise(2)}), []),
    "softcap": (dict(softcap=5.0), ["softcap"]),
    "two": (dict(softcap=5.0, tensors={"alibi_slopes": noise(2)}), ["alibi", "softcap"]),
    "narrow rows": (dict(D=12), ["narrow"]),
    "mask": (dict(tensors={"mask": noise(1, 1, 20, 70, dtype=torch.bool)}), ["mask"]),
    "wide mask": (dict(tensors={"mask": noise(1, 1, 20, 70)}), ["mask", "wide mask"]),
    "wide everything": (dict(dtype=torch.float32, tensors={"mask": noise(20, 70)}), ["mask"]),
}


@pytest.mark.parametrize("kind", BUSY)
def test_tiles_are_chosen_by_register_demand(kind, stub):
    arguments, busy = BUSY[kind]
    assert list(job.Job(*described(**arguments)).tiled[3]) == busy


def test_tensor_descriptors_come_and_go(derived, monkeypatch):
    """On sm_90, rows aligned to 16 bytes use descriptors, others do not; calls alternate."""
    with launch_stub.stubbed(90) as stub:
        stub.calls = []
        stub.launched = lambda *args: stub.calls.append(args)
        s, t = described(D=64)
        other = described([{}, dict(first=1), {}], D=64)[1]
        seen = []
        for x in (t, other, t, other):
            derived.clear()
            seen.append(launches(stub, forward, s, x))
            again = bool(derived)
            assert again == (len(seen) <= 2)
        assert seen[0] == seen[2] != seen[1] == seen[3]


def test_another_tile_makes_another_kernel(stub, derived, monkeypatch):
    s, t = described()
    first = launches(stub, forward, s, t)
    with monkeypatch.context() as patch:
        patch.setattr(tile_configs, "config", lambda *about: tile_configs.Config(32, 32, 2, 1))
        patched = launches(stub, forward, s, t)
        assert derived == ["forward_kernel"] * 2 and patched != first
    assert launches(stub, forward, s, t) == first and len(derived) == 2


@pytest.mark.parametrize(
    "arch, asked, expected",  # of forward, dq and dkv; or dk and dv, where they are two launches
    [
        (80, dict(D=64), ["tf32x3"] * 3),
        (80, dict(D=128), ["tf32x3"] * 4),
        (80, dict(D=128, softcap=9.0), ["tf32x3", "ieee", "ieee"]),  # those have no tiles
        (90, dict(D=16), ["bf16x6"] * 3),
        (90, dict(D=128), ["bf16x6"] * 4),
        (90, dict(D=256), ["ieee"] * 3),
        (90, dict(D=64, asked="ieee"), ["ieee"] * 3),
        (90, dict(D=128, asked="tf32"), ["tf32"] * 4),
        (90, dict(D=64, asked="tf32", dtype=torch.bfloat16), ["ieee"] * 3),
        (86, dict(D=64), ["ieee"] * 3),
        (100, dict(D=64), ["ieee"] * 3),
        (120, dict(D=64, asked="tf32"), ["tf32"] * 3),
    ],
    ids=str,
)
def test_how_each_pass_multiplies_float32(arch, asked, expected, monkeypatch):
    seen, asked = [], dict(asked)
    precision = asked.pop("asked", "parts")

    def run(kernel, grid, *args, **constants):
        if kernel.__name__ != "delta_kernel":
            seen.append(constants["F"].precision)

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(job, "precision", lambda: precision)
    with launch_stub.stubbed(arch):
        train(*described(**dict(dtype=torch.float32) | asked))
    assert seen == expected


@pytest.mark.parametrize("knob", ["debug", "instrumentation_mode", "tf32", "ieee"])
def test_a_compiler_option_makes_another_kernel(knob, stub, derived, monkeypatch):
    from triton import knobs

    s, t = described(dtype=torch.float32)
    first = launches(stub, forward, s, t)
    with monkeypatch.context() as patch:
        if knob in ("tf32", "ieee"):
            patch.setattr(job, "precision", lambda: knob)
        elif knob == "debug":
            patch.setattr(knobs.runtime, "debug", not knobs.runtime.debug)
        else:
            patch.setattr(knobs.compilation, "instrumentation_mode", "other")
        assert launches(stub, forward, s, t) != first and len(derived) == 2
    assert launches(stub, forward, s, t) == first and len(derived) == 2


def test_the_stream_is_the_current_one(stub, derived):
    s, t = described()
    for stream in (0, 7, 8):
        stub.stream = stream
        assert [x[3] for x in launches(stub, forward, s, t)] == [stream]
    assert len(derived) == 1


def test_each_device_has_its_own_kernel(stub, derived):
    s, t = described()
    functions = []
    for stub.device in (0, 1, 0, 1):
        functions.append(launches(stub, forward, s, t)[0][4])
    assert functions[0] is functions[2] is not functions[1] is functions[3]
    assert len(derived) == 2


def test_each_driver_has_its_own_kernel(derived):
    s, t = described()
    for arch in (80, 86):
        with launch_stub.stubbed(arch):
            forward(s, t)
            forward(s, t)
    assert len(derived) == 2


def test_hooks_are_called(stub, derived):
    """With hooks, calls use Triton's own launch, which passes hooks their arguments."""
    from triton import knobs

    s, t = described()
    forward(s, t)
    seen, kernel = [], runtime.kernels().forward.forward_kernel
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        forward(s, t)
        assert len(derived) == 2
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    kernel.pre_run_hooks.append(lambda *args, **kwargs: seen.append(args))
    try:
        forward(s, t)
    finally:
        kernel.pre_run_hooks.pop()
    assert len(seen) == 1 and len(derived) == 3  # the stub does not call launch hooks
    forward(s, t)
    assert len(derived) == 3


def test_workspace_of_descriptors_is_given_for_each_launch(stub, monkeypatch):
    from triton.runtime import _allocation

    monkeypatch.setitem(launch_stub.METADATA, "global_scratch_size", 128)
    allocators = []
    stub.launched = lambda *args: allocators.append(_allocation._allocator.get())
    s, t = described()
    outside = _allocation._allocator.get()
    forward(s, t)
    forward(s, t)
    assert allocators == [launch_cache._workspace] * 2
    assert _allocation._allocator.get() is outside


def test_a_kernel_that_does_not_fit_raises_each_time(stub, monkeypatch):
    monkeypatch.setitem(launch_stub.METADATA, "shared", 1 << 30)
    s, t = described()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="166912 bytes of shared memory for a block"):
            forward(s, t)


@pytest.mark.parametrize("end, step", [("OLDEST", -1), ("NEWEST", 1)])
def test_an_older_and_a_newer_triton_launch_by_themselves(end, step, stub, derived, monkeypatch):
    major, minor = getattr(launch_cache, end)
    monkeypatch.setattr(launch_cache, "_known", launch_cache._known.__wrapped__)
    monkeypatch.setattr(launch_cache, "version", lambda: (major, minor + step))
    s, t = described()
    forward(s, t)
    forward(s, t)
    assert len(derived) == 2


def test_the_launch_cache_is_bounded(stub, monkeypatch):
    monkeypatch.setattr(launch_cache, "MOST", 3)
    s, _ = described()
    for layout in LAYOUTS[:6]:
        forward(s, described([layout, {}, {}])[1])
        assert len(s.launcher_cache["launches"]) <= 3
