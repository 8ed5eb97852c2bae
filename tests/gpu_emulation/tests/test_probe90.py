"""Probes of sm_90a: the emulator gives what instructions must give, from source and from PTX. So
must a GPU. A mistake is named, and does not hang."""

import re

import pytest
import torch

from fastattn.backends.native import libraries
from tests.gpu_emulation import instructions90, probe90
from tests.gpu_emulation.emulator import IN_ORDER, RANDOM, needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.gpu_emulation.ptx.library import Executor

pytestmark = pytest.mark.slow

every_case = pytest.mark.parametrize("name", probe90.CASES)
WAYS = ((RANDOM, True), (IN_ORDER, False))  # (schedule, whether copies land late)


def gives_what_it_must(name, executor=None):
    for schedule, lazy in WAYS:
        emulated = probe90.Emulated(executor, schedule=schedule, lazy=lazy)
        assert not (wrong := probe90.complaint(emulated, name)), wrong
        emulated.found.none()


@needs_emulator
@every_case
def test_the_source_gives_what_it_must(name):
    gives_what_it_must(name)


@needs_emulator
@ours.needs_nvcc
@every_case
def test_the_ptx_gives_what_it_must(name):
    gives_what_it_must(name, probe90.executor())


def test_exactly_these_outputs_are_committed(record_property):
    found = probe90.recorded()
    assert found["outputs"] == probe90.expected(), "python -m tests.gpu_emulation.probe90 --accept"
    assert (found["confirmed_on"] is None) == (found["instructions_sha256"] is None)
    if notice := probe90.unconfirmed(found):
        record_property("notice", notice)


@pytest.mark.gpu
def test_the_gpu_gives_what_it_must():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the probes of sm_90a need compute capability 9.0")
    if why := libraries.cuda_unavailable():
        pytest.skip(why)
    wrong = {name: probe90.on_gpu().get(name, "it was not run") for name in probe90.CASES}
    assert not any(wrong.values()), "\n".join(filter(None, wrong.values()))


def test_a_record_is_confirmed_until_the_instructions_change(tmp_path, monkeypatch):
    monkeypatch.setattr(probe90, "RECORD", tmp_path / "probe90.json")
    probe90.accept()
    assert "no GPU has confirmed" in probe90.unconfirmed(probe90.recorded())
    probe90.record("a GPU", probe90.instructions())
    assert probe90.unconfirmed(probe90.recorded()) is None
    probe90.accept()
    assert probe90.recorded()["confirmed_on"] == "a GPU"  # the outputs are unchanged
    probe90.record("a GPU", "0")
    assert "of sm90 has changed since" in probe90.unconfirmed(probe90.recorded())


def test_a_gpu_that_gives_something_else_is_not_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probe90, "RECORD", tmp_path / "probe90.json")
    monkeypatch.setattr(probe90.probe, "gpu_name", lambda: "a GPU")
    probe90.accept()
    right = dict.fromkeys(probe90.CASES, "")
    for found in (right | {"bulk add": "bulk add: 1 of 512 values are wrong"}, {"bulk add": ""}):
        monkeypatch.setattr(probe90, "on_gpu", lambda found=found: found)
        assert probe90.main(["--confirm"]) == 1 and probe90.recorded()["confirmed_on"] is None
    said = capsys.readouterr().out
    assert "bulk add: 1 of 512 values are wrong" in said and "bulk load: it was not run" in said
    monkeypatch.setattr(probe90, "on_gpu", lambda: right)
    assert probe90.main(["--confirm"]) == 0 and probe90.recorded()["confirmed_on"] == "a GPU"


# --- mistakes -------------------------------------------------------------------------------------

# {a case: (what does not happen in it, what the report says)}
HANGS = {
    "bulk load": ("probe: bytes", "the bytes never arrived"),
    "TMA load, one item": ("probe: a box", "the bytes never arrived"),
    "mbarrier": ("probe: the last one arrives", "the mbarrier's phase never ended"),
    "a wait with a limit": ("probe: a phase", "it was not reported, got its end"),
}
WRONG_VALUES = {
    "TMA store, one item": "probe: a box goes out",
    "bulk add": "probe: numbers are added",
    "wgmma bf16, A k-major, B k-major": "probe: a product",
}


@needs_emulator
@pytest.mark.parametrize("name", HANGS)
def test_what_never_happens_is_named(name):
    site, what = HANGS[name]
    emulated = probe90.Emulated(disabled=site)
    assert probe90.complaint(emulated, name, limit=instructions90.SHORT) == f"{name}: {what}"


@needs_emulator
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_what_is_not_done_is_a_wrong_value(name):
    found = probe90.complaint(probe90.Emulated(disabled=WRONG_VALUES[name]), name)
    assert re.match(rf"{name}: \d+ of \d+ values are wrong, the first at \d+: got ", found), found


# {a fault: (its case, a part of the kernel's name, (a pattern of its PTX, what is there instead),
# what the report says)}
FAULTS = {
    "another sign": (
        "wgmma bf16, A k-major, B mn-major",
        "14probe_productsINS_3ptx4BF16ELb0ELb0ELb1E",
        (r"(wgmma\.mma_async.*), 1, 1, 0, 1;", r"\1, 1, -1, 0, 1;"),
        "values are wrong",
    ),
    "rows of another distance": (
        "wgmma fp16, A k-major, B k-major",
        "14probe_productsINS_3ptx3F16ELb0ELb0ELb0E",
        (r"1073741888", "1073741856"),
        "values are wrong",
    ),
    "too many bytes are expected": (
        "bulk load",
        "16probe_load_bytes",
        (r"(mbarrier\.arrive\.expect_tx\S* _, \[\S+\], )\S+;", r"\g<1>4096;"),
        "the bytes never arrived",
    ),
    "no transposition": (
        "stmatrix transposed",
        "20probe_store_matricesILb1E",
        (r"\.trans", ""),
        "values are wrong",
    ),
}


@needs_emulator
@ours.needs_nvcc
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_compiled_probes_are_noticed(fault):
    name, part, (old, new), said = FAULTS[fault]
    (mangled,) = {x for x in re.findall(r"\.entry (\w+)", probe90.ptx()) if part in x}
    changed, count = re.subn(old, new, probe90.ptx())
    assert count
    executor = Executor(probe90.emulator())
    executor.add(changed, {mangled: mangled})
    found = probe90.complaint(probe90.Emulated(executor), name, limit=instructions90.SHORT)
    assert found.startswith(f"{name}: ") and said in found, found
