"""Which backend runs a call on which GPU: each device counts for itself, an old GPU disables
nothing on a newer one, and `explain` and the errors say what this GPU has. GPUs are imagined."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastattn
from fastattn import api
from fastattn.backends import base
from fastattn.backends.native import cuda
from fastattn.backends.shared import gpu
from fastattn.backends.triton import launch_cache, runtime, tile_configs
from fastattn.call.spec import AttentionSpec, Feature
from fastattn.dropin import fused_kernels
from fastattn.inspection import explain_call
from tests.support.backends import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's kernels run on CPUs")
V100, T4, A100, H100 = 70, 75, 80, 90
ALL = (torch.float32, torch.bfloat16, torch.float16)
NO_TRITON, NO_CUDA = (
    f"needs compute capability {x}, got a GPU of " for x in ("7.5 or newer", "8.0 or newer")
)
SIZES = dict(B=1, H=2, Hk=2, M=300, N=300, scale=1.0, device="cuda")


@pytest.fixture
def machine(monkeypatch):
    """A function that puts these GPUs, by architecture, into the machine. Triton is installed, and
    the CUDA library is built; it has no classes of kernels."""

    def has(*chips):
        capabilities = [divmod(x, 10) for x in chips]
        for where, name, value in (
            (torch.version, "cuda", "13.0"),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: len(chips)),
            (torch.cuda, "get_device_capability", lambda device: capabilities[device.index]),
            (launch_cache, "launcher_unavailable", lambda: ""),
            (cuda.Cuda, "unavailable", lambda self: gpu.unavailable(cuda.SM_80)),
            (cuda.Cuda, "kernels", lambda *call: {}),
            (runtime, "version", lambda: runtime.OLDEST),
        ):
            monkeypatch.setattr(where, name, value)
        forget()
        return [torch.device("cuda", i) for i in range(len(chips))]

    def forget():
        gpu.architecture.cache_clear()
        runtime.unavailable.cache_clear()
        base._warned.clear()

    yield has
    forget()


def spec(dtype=torch.float16, D=64, Dv=64, **changed):
    return AttentionSpec(dtype=dtype, D=D, Dv=Dv, **SIZES, **changed)


def explained(device, dtype=torch.float16, **arguments):
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 300, 64, dtype=dtype, device=device) for _ in "qkv")
        return fastattn.explain(q, k, v, **arguments)


CALLS = {
    "forward": {},
    "backward": dict(needs_grad=True),
    "weights": dict(weights=True, Dv=0),
    "tangents": dict(tangents=True, needs_grad=True),
    "wide": dict(D=576, Dv=512),
    "training at 256": dict(D=256, Dv=256, needs_grad=True),
}


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_what_triton_runs_on_sm_80_it_runs_on_sm_75(machine, call, dtype):
    for chips in ((T4,), (T4, A100), (A100, T4)):
        for device in machine(*chips):
            assert base.choose(spec(dtype, **CALLS[call]), "", device).name == "triton"


def test_wide_tangents_in_float32_do_not_fit_a_t4(machine):
    """Their tiles need 96 KB of shared memory. The reference runs them, and says why."""
    old, new = machine(T4, A100)
    moved = dict(tangents=True, needs_grad=True)
    for d, runs in ((128, "triton"), (129, "reference")):
        for sizes in (dict(D=d, Dv=64), dict(D=64, Dv=d)):
            call = spec(torch.float32, **sizes, **moved)
            assert base.choose(call, "", new).name == "triton"
            if runs == "reference":
                base._warned.clear()
                said = "head dim 129 is over 128 for tangents in torch.float32 on this GPU"
                with pytest.warns(UserWarning, match=said):
                    assert base.choose(call, "", old).name == runs
            else:
                assert base.choose(call, "", old).name == runs
    for dtype in (torch.float16, torch.bfloat16):
        assert base.choose(spec(dtype, D=256, Dv=256, **moved), "", old).name == "triton"
    assert base.choose(spec(torch.float32, D=256, needs_grad=True), "", old).name == "triton"


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_explain_on_an_imagined_t4(machine, dtype):
    (device,) = machine(T4)
    found = explained(device, dtype, causal=True)
    assert found.backend == "triton"
    _, cpu, triton, cuda, reference = map(str.strip, str(found).splitlines())
    assert cpu == "cpu: no kernel for device 'cuda'"
    slow = "by multiply-adds: Triton has no products on the tensor cores of sm_75"
    assert triton == f"triton: would run, {slow}" and found.remarks == {"triton": slow}
    of_dtype = "; no kernel for torch.float32" if dtype == torch.float32 else ""
    assert cuda == f"cuda: {NO_CUDA}7.5{of_dtype}"
    assert reference == "reference: could run, but is not preferred"
    (newer,) = machine(A100)
    assert "  triton: would run\n" in str(explained(newer))


@pytest.mark.parametrize("chips", [(T4, A100), (A100, T4), (V100, A100), (A100, V100, H100)])
def test_an_old_gpu_beside_a_new_one_disables_nothing_there(machine, chips):
    """In whatever order they are asked."""
    devices = machine(*chips)
    assert fastattn.available_backends()["triton"] is None
    assert fastattn.available_backends()["cuda"] is None
    for device, chip in [*zip(devices, chips)] * 2:
        declined = explained(device).declined
        assert declined.get("triton", []) == ([f"{NO_TRITON}7.0"] if chip == V100 else [])
        old = f"{NO_CUDA}{gpu.capability(chip)}"
        assert declined.get("cuda", []) == ([old] if chip < A100 else [])


def test_a_gpu_that_is_too_old_runs_the_reference_and_the_warning_says_why(machine):
    old, new = machine(V100, A100)
    with pytest.warns(UserWarning, match=f"triton: {NO_TRITON}7.0"):
        assert base.choose(spec(), "", old).name == "reference"
    assert base.choose(spec(), "", new).name == "triton"
    with pytest.raises(NotImplementedError, match=f"triton: {NO_TRITON}7.0"):
        base.choose(spec(), "triton", old)


def test_gpus_that_are_all_too_old_are_a_reason(machine):
    machine(V100, 61)
    found = fastattn.available_backends()
    assert found["triton"] == f"{NO_TRITON}7.0" and found["cuda"] == f"{NO_CUDA}7.0"
    machine(T4, V100)
    found = fastattn.available_backends()
    assert found["triton"] is None and found["cuda"] == f"{NO_CUDA}7.5"


def test_without_a_gpu_no_capability_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    assert gpu.found(torch.device("cuda", 0)) is None
    assert gpu.found(None) is None and gpu.found(torch.device("cpu")) is None


def test_patches_ask_about_the_gpu_of_the_call(machine):
    old, turing, new = machine(V100, T4, A100)
    fused_kernels.look()
    for device in (turing, new):
        assert all(fused_kernels.why_none(device, dtype, 256) is None for dtype in ALL)
    assert fused_kernels.why_none(old, torch.float16) == "no fused kernel here for cuda:0"
    assert not api.runs_programs(old, None)
    assert api.runs_programs(turing, None) and api.runs_programs(new, "triton")


# --------------------------------------------------------------------------- the data of a backend

HALF = frozenset({torch.float16, torch.bfloat16})
BY_CHIP = base.Support(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    max_head_dim=64,
    features=Feature.NONE,
    chips=(base.Chips(75, frozenset({torch.float16}), "slowly"), base.Chips(80, HALF)),
)


@pytest.mark.parametrize(
    "architecture, dtype, declined",
    [
        (None, torch.bfloat16, []),
        (70, torch.float16, ["needs compute capability 7.5 or newer, got a GPU of 7.0"]),
        (75, torch.float16, []),
        (75, torch.bfloat16, ["no kernel for torch.bfloat16 on this GPU"]),
        (75, torch.float32, ["no kernel for torch.float32"]),
        (80, torch.bfloat16, []),
        (121, torch.bfloat16, []),
    ],
)
def test_dtypes_differ_by_chip(architecture, dtype, declined):
    assert BY_CHIP.why_not(spec(dtype), architecture) == declined


def test_the_readme_says_what_an_older_chip_has(monkeypatch):
    assert explain_call._dtypes(BY_CHIP) == "bfloat16, float16; on 7.5 float16"
    assert explain_call._chips(BY_CHIP) == "7.5 or newer"
    none = dataclasses.replace(BY_CHIP, chips=())
    assert explain_call._dtypes(none) == "bfloat16, float16" and explain_call._chips(none) == ""


def test_backends_declare_chips_in_order():
    for name in base.names():
        support = base.get(name).support
        chips = [x.architecture for x in support.chips]
        assert chips == sorted(set(chips))
        assert all(x.dtypes <= support.dtypes for x in support.chips)
        assert bool(chips) == (name in ("triton", "cuda"))
    assert base.get("triton").support.chips[0].architecture == min(tile_configs.TABLES)
