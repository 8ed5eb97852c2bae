"""The checks of a machine with a GPU, on the CPU, and what each says of a machine that fails it."""

import signal
import time
from types import SimpleNamespace

import pytest

from bench.measure import first_contact, nvidia, timing
from bench.measure.first_contact import CHECKS, LAUNCHES, Wrong
from bench.measure.isolated_process import Raised
from fastattn.backends.triton import launch_cache
from tests.bench.test_bench_gpu import US, Device

pytestmark = pytest.mark.slow

ON_CPU = [name for name in CHECKS if name != "clock"]


@pytest.mark.parametrize("name", ON_CPU)
def test_each_check_passes_on_the_cpu(name, capsys):
    assert first_contact.main([name, "--rehearse"]) == 0
    assert capsys.readouterr().out


def said(check, device="cpu"):
    with pytest.raises(Wrong) as caught:
        list(check(device))
    return str(caught.value)


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    why = "Triton compiles C code to call the driver, and there is no /usr/include/Python.h"
    monkeypatch.setattr(launch_cache, "launcher_unavailable", lambda: why)
    assert first_contact.main(["launcher", "--rehearse"]) == 1
    assert f"launcher: {why}. The backend cuda runs without it" in capsys.readouterr().err


def test_a_torch_for_another_driver_is_named(monkeypatch):
    monkeypatch.setattr(nvidia, "unusable", lambda: "got torch 2.13.0+cpu, expected another")
    assert said(first_contact.driver) == "got torch 2.13.0+cpu, expected another"


def test_a_torch_without_code_for_the_gpu_is_named(monkeypatch):
    about = "NVIDIA H100", "9.0", False
    monkeypatch.setattr(first_contact.isolated_process, "once", lambda function: about)
    assert "expected code for 9.0: install a build of torch" in said(first_contact.driver, "cuda")


@pytest.mark.parametrize("status", [0, 1])
def test_versions_that_are_too_old_are_named(status, monkeypatch):
    """Those of needed packages are wrong, those of others a remark."""
    text = "python has triton 3.3.1, expected 3.4 or newer\n"
    done = SimpleNamespace(returncode=status, stderr=text)
    monkeypatch.setattr(first_contact.subprocess, "run", lambda *about, **options: done)
    if status:
        assert said(first_contact.versions) == text.strip()
    else:
        monkeypatch.setattr(first_contact.machine, "versions", lambda: {"torch": "2.13.0"})
        assert list(first_contact.versions("cpu")) == [text.strip(), "torch 2.13.0"]


def test_a_gpu_that_another_process_holds_is_named(monkeypatch):
    def once(function, device):
        raise Raised("raised RuntimeError: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(first_contact.isolated_process, "once", once)
    text = said(first_contact.processes)
    assert "a process raised RuntimeError: CUDA-capable device(s)" in text
    assert "nvidia-smi --compute-mode 0" in text


@pytest.mark.parametrize(
    "check, attempt, text",
    [
        (first_contact.memory, "_use_too_much", "got memory that no machine has"),
        (first_contact.fault, "_fail", "expected the process to be lost"),
    ],
)
def test_an_error_that_does_not_happen_is_wrong(check, attempt, text, monkeypatch):
    monkeypatch.setattr(first_contact, attempt, first_contact._use)
    assert text in said(check)


def test_a_process_that_ends_for_want_of_memory_is_wrong(monkeypatch):
    monkeypatch.setattr(first_contact, "_use_too_much", first_contact._fail)
    with pytest.raises(first_contact.Died, match="SIGSEGV"):
        list(first_contact.memory("cpu"))


@pytest.mark.parametrize("slept", [True, False])
def test_the_clock_of_short_kernels(slept, monkeypatch):
    """With no sleep of the device before, the clock times the gaps between launches."""
    if not slept:
        monkeypatch.setattr(timing, "SLEEP", (0.0, 0.0))
        monkeypatch.setattr(timing, "L2_BYTES", 1)
    device = Device()
    launches = device.phase(*[(20 * US, 2 * US)] * LAUNCHES)
    replay = device.phase((20 * US, LAUNCHES * 2 * US))
    found = first_contact.gaps(device, lambda: device.host, launches, replay)
    line = "30 launches in us: DeviceClock {}, a graph 60.0, events alone 602.0, the host 600.0"
    if slept:
        assert list(found) == [line.format("60.0")]
    else:
        assert next(found) == line.format("600.0")
        with pytest.raises(Wrong, match=r"got 10\.0 times the graph's time, expected at most 2\.0"):
            next(found)


def test_a_check_that_hangs_ends(monkeypatch, capsys):
    def hang(device):
        yield "begun"
        time.sleep(30)

    monkeypatch.setitem(CHECKS, "launcher", hang)
    monkeypatch.setattr(first_contact, "SECONDS", 1)
    before, begun = signal.getsignal(signal.SIGALRM), time.monotonic()
    assert first_contact.main(["launcher"]) == 1 and time.monotonic() - begun < 20
    assert "launcher: got no result in 1 s" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGALRM) == before
