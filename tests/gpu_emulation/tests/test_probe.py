"""A GPU and the emulator both give the committed outputs, instruction by instruction.

test_emulator.py tests what instructions must give. This file compares with recorded outputs, so one
run on a GPU validates the emulator until csrc/cuda/ptx.cuh changes. Until then the summary says so.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastattn.backends.native import libraries
from tests.gpu_emulation import probe
from tests.gpu_emulation.emulator import Emulator, needs_emulator

every_case = pytest.mark.parametrize("name", probe.CASES)


@pytest.fixture(scope="module")
def emulator():
    return Emulator(probe.SOURCE)


@pytest.fixture
def own_record(tmp_path, monkeypatch):
    """A copy of the committed record, which the test may change."""
    copy = tmp_path / probe.RECORD.name
    copy.write_text(probe.RECORD.read_text())
    monkeypatch.setattr(probe, "RECORD", copy)
    return copy


def committed(name):
    return probe.as_words(probe.recorded()["outputs"][name])


def test_exactly_the_listed_cases_are_committed(record_property):
    assert list(probe.recorded()["outputs"]) == list(probe.CASES)
    if probe.recorded()["confirmed_on"] is None:
        digest = probe.recorded()["ptx_sha256"]
        assert digest == probe.digest(), "python -m tests.gpu_emulation.probe --accept"
    if notice := probe.unconfirmed(probe.recorded()):
        record_property("notice", notice)


@pytest.mark.slow
@needs_emulator
@every_case
def test_the_emulator_gives_what_is_committed(emulator, name):
    found = probe.on_emulator(emulator, probe.CASES[name])
    assert not (wrong := probe.complaints(name, found, committed(name))), wrong[0]


@pytest.mark.gpu
@every_case
def test_the_gpu_gives_what_is_committed(name):
    if why := libraries.cuda_unavailable():
        pytest.skip(why)
    found = probe.on_gpu(probe.CASES[name])
    assert not (wrong := probe.complaints(name, found, committed(name))), wrong[0]


@pytest.mark.slow
@needs_emulator
def test_the_gpu_and_the_emulator_have_one_interface(emulator, monkeypatch):
    """Runs the code path of a GPU with the emulator's library in place of the GPU's."""
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    library = SimpleNamespace(dll=emulator.library)
    monkeypatch.setattr(libraries, "cuda", lambda: library, raising=False)
    for name, case in probe.CASES.items():
        assert not (wrong := probe.complaints(name, probe.on_gpu(case), committed(name))), wrong[0]


# --- which outputs count as equal -----------------------------------------------------------------


@every_case
def test_one_changed_word_is_seen(name):
    for lane in (0, 31):
        found = committed(name)
        found[lane, 0] ^= 0x40004000
        (line,) = probe.complaints(name, found, committed(name))
        assert line.startswith(f"{name}, lane {lane}: got {found[lane, 0]:08x}")


@pytest.mark.parametrize(
    "name, nan, other",
    [
        ("multiply_f16_infinite", 0x7FFFFFFF, 0x7F800000),
        ("pack_f16", 0x7FFF, 0x7C00),
        ("pack_bf16", 0x7FFF, 0x7F80),
        ("widen_f16", 0x7FFFFFFF, 0x7F800000),
        ("exp2", 0x7FFFFFFF, 0x7F800000),
        ("log2", 0x7FFFFFFF, 0x7F800000),
    ],
)
def test_one_nan_is_like_another_and_like_no_infinity(name, nan, other):
    words = committed(name).view(np.uint16 if nan < 0x10000 else np.uint32)
    lane, i = np.argwhere((words & nan) > other)[0]
    for bits, right in (nan, True), (other, False):
        found = words.copy()
        found[lane, i] = bits
        assert right == (not probe.complaints(name, found.view(np.uint32), committed(name)))


@pytest.mark.parametrize("name", ["shuffle_xor_1", "widen_bf16"])
def test_a_move_keeps_the_bits_of_a_nan(name):
    found = committed(name)
    lane, i = np.argwhere(np.isnan(found.view(np.float32)))[0]
    found[lane, i] ^= 0x00010000  # a NaN with other bits
    assert probe.complaints(name, found, committed(name))


@pytest.mark.parametrize(
    "what, x, found, expected, right",
    [
        (probe.EXP2, 0.5, 1 + 2 * 2.0**-23, 1, True),
        (probe.EXP2, 0.5, 1 + 3 * 2.0**-23, 1, False),
        (probe.EXP2, -127, 2.0**-127, 0, False),
        (probe.EXP2, -126, 0, 2.0**-126, False),
        (probe.LOG2, 4.5, 2 + 2 * 2.0**-22, 2, True),
        (probe.LOG2, 4.5, 2 + 3 * 2.0**-22, 2, False),
        (probe.LOG2, 1.0001, 2.0**-13 + 2.0**-22, 2.0**-13, True),
        (probe.LOG2, 1.0001, 2.0**-13 + 2.0**-21, 2.0**-13, False),
        (probe.LOG2, 2.0**-127, -127, -np.inf, False),
        (probe.LOG2, 2.0**-126, -np.inf, -126, False),
        (probe.LOG2, -1, -np.inf, np.nan, False),
    ],
)
def test_how_near_an_approximation_must_be(what, x, found, expected, right):
    assert probe.near(what, *np.float32([[x], [found], [expected]])).tolist() == [right]


# --- notices and the record -----------------------------------------------------------------------


def test_a_file_is_unconfirmed_until_a_gpu_confirms_it_unchanged():
    now = probe.digest()
    assert probe.unconfirmed(dict(confirmed_on="a GPU", ptx_sha256=now)) is None
    assert "no GPU has" in probe.unconfirmed(dict(confirmed_on=None, ptx_sha256=now))
    changed = probe.unconfirmed(dict(confirmed_on="a GPU", ptx_sha256="0"))
    assert "ptx.cuh has changed since its outputs were confirmed on a GPU" in changed


def test_a_gpu_that_gives_the_same_is_recorded(own_record, monkeypatch, capsys):
    outputs = probe.recorded()["outputs"]
    monkeypatch.setattr(probe, "gpu_name", lambda: "a GPU")
    given = {id(case): committed(name) for name, case in probe.CASES.items()}
    monkeypatch.setattr(probe, "on_gpu", lambda case: given[id(case)])
    given[id(probe.CASES["pack_f16"])] = committed("pack_bf16")
    before = own_record.read_text()
    assert probe.main(["--confirm"]) == 1 and "pack_f16, lane" in capsys.readouterr().out
    assert own_record.read_text() == before

    given[id(probe.CASES["pack_f16"])] = committed("pack_f16")
    assert probe.main(["--confirm"]) == 0
    expected = dict(confirmed_on="a GPU", ptx_sha256=probe.digest(), outputs=outputs)
    assert probe.recorded() == expected


@needs_emulator
def test_accepting_other_outputs_removes_the_confirmation(own_record):
    probe.accept()  # outputs with this machine's libm
    outputs = probe.recorded()["outputs"]
    probe.record("a GPU", "0", outputs)
    probe.accept()
    assert probe.recorded() == dict(confirmed_on="a GPU", ptx_sha256="0", outputs=outputs)
    probe.record("a GPU", "0", {**outputs, "copy16": outputs["exp2"]})
    probe.accept()
    assert probe.recorded() == dict(confirmed_on=None, ptx_sha256=probe.digest(), outputs=outputs)
