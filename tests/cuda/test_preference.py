"""Which backend comes first on which GPU: the rules of preference.py, on faked architectures, and
what explain and the report say of them. The library has no kernels (kernel_classes.py)."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastattn
from bench.report import results
from fastattn import __main__
from fastattn.backends import base, preference
from fastattn.backends.native import cuda, libraries
from fastattn.backends.native.imagined import imagined
from fastattn.backends.preference import Rule, committed
from fastattn.backends.shared import gpu
from fastattn.backends.triton import backend as triton
from fastattn.call.spec import AttentionSpec, Feature
from fastattn.dispatch import operation
from fastattn.inspection import explain_call
from tests.gpu_emulation import kernel_classes
from tests.gpu_emulation.emulator import needs_emulator
from tests.support.checkout import ROOT

pytestmark = needs_emulator
RESULTS = ROOT / "bench" / "results"
HOPPER, AMPERE = (torch.device("cuda", at) for at in (0, 1))
CHIPS = {HOPPER: 90, AMPERE: 80}
RULE = Rule(
    architecture=90,
    passes=("forward", "backward"),
    head_dims=(33, 128),
    features=Feature.BAND | Feature.LENGTHS,
    dtypes=frozenset({torch.bfloat16}),
    backend="cuda",
    kernels="sm_90",
    instead_of="triton",
    evidence=("gpu/nvidia-h200-experiments.json",),
)
SIZES = dict(B=1, H=2, Hk=2, M=300, N=300, D=64, Dv=64, scale=1.0, dtype=torch.bfloat16)
CALL = AttentionSpec(**SIZES, device="cuda", needs_grad=True)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """torch sees an H100 and an A100, and both GPU backends can run."""
    library = kernel_classes.library()
    for where, name, value in (
        (gpu, "unavailable", lambda oldest=0: None),
        (gpu, "architecture", CHIPS.__getitem__),
        (triton.Triton, "unavailable", lambda self: None),
        (cuda.Cuda, "unavailable", lambda self: None),
        (libraries, "cuda", lambda: library),
        (libraries, "cuda_unavailable", lambda: None),
        (base, "rules", lambda device: [RULE]),
        (__main__, "rules", lambda device: [RULE]),
        (torch.cuda, "current_device", lambda: 0),
    ):
        monkeypatch.setattr(where, name, value)
    yield
    kernel_classes.decline(b"")


def chosen(spec, device=HOPPER):
    return base.choose(spec, "", device).name


def test_each_gpu_of_a_process_has_its_own_order():
    """Also if both were asked before: choices are kept."""
    for device, name in ((HOPPER, "cuda"), (AMPERE, "triton")) * 2:
        assert base.choose(CALL, "", device).name == name
    assert base.choose(CALL, "", None).name == "triton"


@pytest.mark.parametrize("architecture", [80, 86, 89, 100, 103, 120])
def test_other_architectures_keep_the_general_order(architecture, monkeypatch):
    monkeypatch.setattr(gpu, "architecture", lambda device: architecture)
    assert chosen(CALL) == "triton"
    assert base.ordered(CALL, HOPPER) == base.names()


UNLIKE = {  # properties that RULE does not admit
    "forward alone": dict(needs_grad=False),
    "narrower": dict(D=32, Dv=32),
    "wider": dict(D=136),
    "wider values": dict(Dv=136),
    "float16": dict(dtype=torch.float16),
    "softcap": dict(softcap=1.0),
    "a mask beside a band": dict(
        right=0, given=frozenset({"mask"}), mask_shape=(1, 1, 300, 300), mask_dtype=torch.bool
    ),
}
LIKE = {
    "plain": {},
    "unequal head dims": dict(D=16, Dv=128),
    "causal": dict(right=0),
    "window and lengths": dict(left=5, right=5, given=frozenset({"key_lengths"})),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_call_that_differs_keeps_the_general_order(what):
    assert chosen(dataclasses.replace(CALL, **UNLIKE[what])) == "triton"


@pytest.mark.parametrize("what", LIKE)
def test_a_call_that_a_rule_admits_has_its_order(what):
    spec = dataclasses.replace(CALL, **LIKE[what])
    assert chosen(spec) == "cuda"
    assert base.ordered(spec, HOPPER) == ["cpu", "cuda", "triton", "reference"]


@pytest.mark.parametrize("which", [libraries.FORWARD, libraries.BACKWARD])
def test_every_pass_must_have_kernels_of_the_class(which):
    kernel_classes.decline(b"tiles are too wide", [which])
    assert chosen(CALL) == "triton"


def test_a_backend_that_cannot_run_is_not_preferred(monkeypatch):
    monkeypatch.setattr(cuda.Cuda, "unavailable", lambda self: "no library")
    assert chosen(CALL) == "triton"


def test_without_the_other_backend_nothing_changes(monkeypatch):
    monkeypatch.setattr(triton.Triton, "unavailable", lambda self: "no Triton")
    assert chosen(CALL) == chosen(CALL, AMPERE) == "cuda"


def test_without_the_kernels_of_sm_90_the_general_order_stays(monkeypatch):
    """explain says why."""
    why = "FASTATTN_SM90 is off"
    monkeypatch.setenv("FASTATTN_SM90", "off")
    assert chosen(CALL) == "triton"
    found = base.get("cuda").kernels(CALL, HOPPER)
    assert found == dict.fromkeys(("forward", "backward"), f"sm_80: {why}")
    kernel_classes.decline(b"tiles are too wide", [libraries.BACKWARD])
    found = base.get("cuda").kernels(CALL, HOPPER)
    assert found == dict(forward=f"sm_80: {why}", backward="sm_80: tiles are too wide")


def test_a_requested_backend_runs():
    for name in ("triton", "cuda"):
        assert base.choose(CALL, name, HOPPER).name == name


def test_the_library_is_asked_only_about_calls_that_a_rule_admits(monkeypatch):
    asked = []
    monkeypatch.setattr(cuda.Cuda, "kernels", lambda *given: asked.append(given) or {})
    for what in UNLIKE.values():
        chosen(dataclasses.replace(CALL, **what))
    chosen(CALL, AMPERE)
    assert not asked
    chosen(CALL)
    assert len(asked) == 1


def test_a_plan_is_of_the_device_of_its_tensors(monkeypatch):
    asked = []

    def choose(spec, requested, device):
        asked.append(device)
        return base.get("triton")

    monkeypatch.setattr(operation, "choose", choose)
    operation.forget_plans()
    with FakeTensorMode():
        for device in (HOPPER, AMPERE, HOPPER, AMPERE):
            q = torch.empty(1, 2, 30, 64, dtype=torch.bfloat16, device=device)
            options = operation.Options()
            operation.plan(operation.Tensors(q, q, q), options, None)
    operation.forget_plans()
    assert asked == [HOPPER, AMPERE]


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize(
    "training, D, Dv, features, name",
    [
        (True, 64, 64, {}, "cuda"),
        (True, 64, 64, dict(right=0), "cuda"),
        (True, 128, 128, {}, "cuda"),
        (True, 128, 128, dict(right=0), "cuda"),
        (True, 80, 64, {}, "cuda"),
        (True, 32, 32, {}, "triton"),
        (True, 136, 64, {}, "triton"),
        (True, 64, 64, dict(softcap=1.0), "triton"),
        (False, 32, 32, {}, "triton"),
        (False, 64, 64, {}, "cuda"),
        (False, 96, 96, {}, "cuda"),
        (False, 128, 128, dict(right=0), "cuda"),
        (False, 192, 128, {}, "cuda"),
        (False, 256, 256, {}, "triton"),
        (False, 96, 96, dict(dropout_p=0.5), "triton"),
    ],
)
def test_the_rules_that_are(training, D, Dv, features, name, device, monkeypatch):
    """On other architectures the order is the general one."""
    monkeypatch.setattr(base, "rules", lambda device: committed())
    for dtype in (torch.bfloat16, torch.float16):
        call = dataclasses.replace(CALL, needs_grad=training, D=D, Dv=Dv, dtype=dtype, **features)
        assert chosen(call, device) == (name if device == HOPPER else "triton")


# ------------------------------------------------------------------------------- their evidence


def cells_of(rule, files):
    """The cells of result files that a rule decides, with the times of both backends: (cell, how
    much faster the rule's backend is)."""
    least, most = rule.head_dims
    for cell in (x for name in files for x in results.read(RESULTS / name)["cells"]):
        banded = Feature.BAND if cell["mask"] == "causal" else Feature.NONE
        alike = cell["mask"] in ("full", "causal") and not banded & ~rule.features
        decided = least <= cell["D"] <= most and cell["pass"] in rule.passes
        for timing in cell["timings"] if alike and decided else ():
            peers = [f"fastattn-{x}" for x in (rule.backend, rule.instead_of)]
            if all(x in timing["peers"] for x in peers):
                ours, theirs = (timing["peers"][x]["median_ms"] for x in peers)
                yield cell, theirs / ours


def complaints(rule):
    """What is wrong with the evidence of a rule: a pass that nothing timed, or a cell in which the
    other backend was faster."""
    found = list(cells_of(rule, rule.evidence))
    wrong = [f"{x} was not timed" for x in rule.passes if x not in {c["pass"] for c, _ in found}]
    for cell, faster in found:
        if faster < 1:
            about = [cell["pass"], f"D{cell['D']}", f"N{cell['N']}", cell["mask"]]
            wrong.append(f"{' '.join(about)}: {faster:.2f} times as fast as {rule.instead_of}")
    return wrong


def test_rules_were_measured():
    assert not [(rule, x) for rule in committed() for x in complaints(rule)]


def test_a_rule_against_its_evidence_is_noticed():
    (rule,) = (x for x in committed() if x.passes == ("forward",))
    assert "forward D256 N8192 causal: 0.90" in str(complaints(rule._replace(head_dims=(33, 256))))
    swapped = rule._replace(backend="triton", instead_of="cuda")
    assert len(complaints(swapped)) == len(list(cells_of(rule, rule.evidence))) > 8
    assert complaints(rule._replace(evidence=())) == ["forward was not timed"]
    (training,) = (x for x in committed() if len(x.passes) == 2)
    before = training._replace(evidence=rule.evidence)  # the kernels that an H100 ran
    assert "backward D128 N8192 causal: 0.7" in str(complaints(before))


# -------------------------------------------------------------- what explain and the report print


def explained(device=HOPPER, D=64, **arguments):
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, 2, 300, D, dtype=torch.bfloat16, device=device, requires_grad=True)
            for _ in range(3)
        )
        return fastattn.explain(q, k, v, **arguments)


def test_explain_follows_the_order_and_names_the_class():
    found = explained()
    assert found.backend == "cuda" and found.kernels == dict(forward="sm_90", backward="sm_90")
    assert "  cuda: would run: forward and backward by sm_90\n" in str(found)
    assert "  triton: could run, but is not preferred\n" in str(found)
    found = explained(AMPERE)
    assert found.backend == "triton" and found.kernels == dict(forward="sm_80", backward="sm_80")
    assert "could run, but is not preferred: forward and backward by sm_80\n" in str(found)


def test_a_rule_of_this_machine_decides_and_is_named(monkeypatch):
    """It comes after those that were committed; here it is of some sizes, and any class."""
    own = RULE._replace(backend="triton", instead_of="cuda", kernels="", source="/cache/cuda.json")
    own = own._replace(sizes=(("M", 257, 512), ("heads", 1, 2)))
    first = RULE._replace(source="the package's")
    monkeypatch.setattr(base, "rules", lambda device: [first, own])
    assert chosen(CALL) == "triton"
    found = explained()
    assert (found.backend, found.measured) == ("triton", "/cache/cuda.json")
    assert "  triton: would run, as measured (/cache/cuda.json)\n" in str(found)
    for other in (dict(M=256), dict(M=513), dict(B=2)):
        assert chosen(dataclasses.replace(CALL, **other)) == "cuda", other
    everything = own._replace(all_features=True)  # of a call that is banded and padded
    monkeypatch.setattr(base, "rules", lambda device: [first, everything])
    found = explained()
    assert (found.backend, found.measured) == ("cuda", "the package's")
    assert explained(backend="triton").measured == ""


def test_explain_says_why_kernels_decline():
    kernel_classes.decline(b"tiles are too wide", [libraries.BACKWARD])
    found = explained()
    assert found.backend == "triton"
    assert found.kernels == dict(forward="sm_90", backward="sm_80: tiles are too wide")
    text = "forward by sm_90, backward by sm_80 (sm_90: tiles are too wide)"
    assert f"  cuda: could run, but is not preferred: {text}\n" in str(found)


def test_explain_has_no_kernels_of_a_call_that_cuda_declines():
    found = explained(D=512)
    assert found.backend == "reference" and found.kernels == {}


def test_explain_of_tensors_has_their_addresses_and_strides(monkeypatch):
    """The kernels are asked about the tensors of the call, not about imagined ones."""
    monkeypatch.setattr(cuda.Cuda, "support", dataclasses.replace(cuda.Cuda.support, devices=None))
    monkeypatch.setattr(gpu, "architecture", lambda device: 90)
    wide = torch.zeros(1, 2, 20, 72, dtype=torch.bfloat16)
    q, k, v = (wide[..., at : at + 64] for at in (1, 2, 4))
    mask = torch.zeros(20, 20, dtype=torch.bool)
    fastattn.explain(q, k, v, mask=mask, key_lengths=torch.tensor([5]))
    seen = kernel_classes.seen()
    for name, x in dict(q=q, k=k, v=v).items():
        data, *strides, _ = libraries.TENSOR.unpack_from(seen, libraries.offset(name))
        assert data == x.data_ptr() and tuple(strides) == x.stride()
    data, *strides, _ = libraries.TENSOR.unpack_from(seen, libraries.offset("mask"))
    assert data == mask.data_ptr() and strides == [0, 0, 20, 1]
    for name in ("lengths", "out", "lse"):  # not read in place, or not there yet
        (data,) = libraries.POINTER.unpack_from(seen, libraries.offset(name))
        assert data and data % 128 == 0, name


def test_the_report_has_the_rules_and_the_classes():
    found = __main__.report()
    assert found["rules"] == [str(RULE)] and found["cuda"]["lacks_sm_90"] == ""
    text = __main__.show(found)
    assert "kernels of sm_80 and of sm_90\n" in text
    brief = "before triton on sm_90 for forward and backward with D 33 to 128"
    rest = "in bfloat16, plain or with band, lengths, if kernels of sm_90 run them"
    assert text.splitlines()[-1] == f"  cuda {brief}, {rest}"
    kernel_classes.decline(b"nvcc cannot")
    assert "kernels of sm_80; none of sm_90: nvcc cannot\n" in __main__.show(__main__.report())


def test_the_support_table_has_the_order(monkeypatch):
    monkeypatch.setattr(explain_call, "committed", lambda: [RULE])
    (line,) = (
        x for x in fastattn.inspection.explain_call.support_table().splitlines() if "order" in x
    )
    assert line == (
        "| order of choice | 1 | 2 | "
        "3; before triton on sm_90 for forward and backward with D 33 to 128 | 4 |"
    )


def test_passes_of_weights_have_no_rule():
    weights = dataclasses.replace(CALL, weights=True, Dv=0)
    assert preference.passes_of(weights) == ("weights", "weights_backward")
    assert chosen(weights) == "triton"
    assert set(base.get("cuda").kernels(weights, HOPPER)) == {"weights", "weights_backward"}
    assert explain_call._by_class({}) == "" and imagined(weights, libraries.WEIGHTS)
