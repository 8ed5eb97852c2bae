"""The benchmark on machines with a GPU, without one: fakes replace it."""

import os

import pytest
import torch

from bench import commands
from bench.__main__ import main
from bench.cases import BACKWARD, FORWARD, TRAINING
from bench.measure import nvidia, run, timing
from bench.peers.registry import BASELINE, SUBJECT
from tests.support.bench_helpers import LIMITS, case

DRIVERS = {  # by driver version: the torch index that supports it, "" for none
    "470.82.01": "",
    "525.60.13": "cu126",
    "535.183.01": "cu126",
    "560.35.03": "cu126",
    "570.86.15": "cu128",
    "580.65.06": "cu130",
    "610.10": "cu130",
}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that makes nvidia-smi print a text. This torch is built for CPUs alone."""
    monkeypatch.setattr(nvidia, "NODE", tmp_path / "nvidia0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def prints(text):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)

    return prints


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_device_index_is_the_drivers(driver, smi):
    smi(f"NVIDIA H100, {driver}")
    message = nvidia.unusable()
    assert message.startswith("got torch 2.13.0+cpu, expected one that can use the GPU")
    assert f"driver {driver}): it is built for CPUs alone; " in message
    if DRIVERS[driver]:
        assert message.partition("--index-url ")[2].startswith(f"{nvidia.URL}{DRIVERS[driver]}")
    else:
        assert "update the driver to 525 or newer" in message


@pytest.mark.parametrize("command", ["sweep", "race decode", "memory", "gpu"])
def test_an_unusable_gpu_stops_only_gpu_benchmarks(command, smi, capsys):
    """For the commands that take a device. Naming a device overrides the stop."""
    smi("NVIDIA H100, 550.54.15")
    assert main(command.split()) == 2
    message = capsys.readouterr().err
    assert "it is built for CPUs alone" in message and f"{nvidia.URL}cu126" in message
    assert ("--rehearse" if command == "gpu" else "--device cpu measures the CPU") in message
    if command != "gpu":
        options = commands.Options(device="cpu")
        assert commands._device(options) == "cpu"


# -------------------------------------------------------------------------------------------- clock


class Device:
    """torch.cuda for a host and a device that works through a queue in simulated time."""

    CYCLES = 1.5e9

    def __init__(self):
        self.host = self.free = 0.0  # seconds: the present time, and when the queue will be empty
        self.slept = 0.0

    def Event(self, enable_timing):
        return Event(self)

    def current_device(self):
        return "cpu"

    def synchronize(self):
        self.host = max(self.host, self.free)

    def enqueue(self, seconds):
        self.free = max(self.host, self.free) + seconds

    def _sleep(self, cycles):
        self.slept += cycles / self.CYCLES
        self.enqueue(cycles / self.CYCLES)

    def phase(self, *kernels):
        """A phase that launches kernels. For each: (seconds on the host, seconds on the device)."""

        def call(value):
            for host, device in kernels:
                self.host += host
                self.enqueue(device)
            return (value or 0) + 1

        return call


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.enqueue(0.0)
        self.at = self.device.free

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(timing, "L2_BYTES", 1)
    return Device()


US = 1e-6


@pytest.mark.parametrize("host", [5 * US, 80 * US, 900 * US, 5000 * US], ids=lambda x: f"{x:.0e}")
@pytest.mark.parametrize("loops", [1, 7])
def test_the_clock_of_a_device_times_no_gaps(host, loops, device):
    """The gaps arise when the host launches kernels more slowly than they run."""
    clock = timing.DeviceClock(device, lambda: device.host)
    program = device.phase((host, 10 * US), (host, 20 * US)), device.phase((host, 40 * US))
    for _ in range(2):  # warm-up, as in `interleaved`
        clock.sample(program, 1)
    found = clock.sample(program, loops)
    assert found == pytest.approx([30 * US, 40 * US], rel=1e-6)
    assert clock.host(program) == pytest.approx([2 * host, host], rel=1e-6)


def test_both_times_are_in_the_record():
    laps = {SUBJECT: [[20 * US, 60 * US]] * 5, BASELINE: [[40 * US, 90 * US]] * 5}
    hosts = {SUBJECT: [50 * US, 70 * US], BASELINE: [10 * US, 20 * US]}
    rows = {
        what: run._summary(case(), what, None, laps, hosts, LIMITS)["peers"]
        for what in (FORWARD, BACKWARD, TRAINING)
    }
    ours = {what: (x[SUBJECT]["median_ms"], x[SUBJECT]["host_ms"]) for what, x in rows.items()}
    assert ours[FORWARD] == pytest.approx((0.02, 0.05))
    assert ours[BACKWARD] == pytest.approx((0.06, 0.07))
    assert ours[TRAINING] == pytest.approx((0.08, 0.12))
    cpu = run._summary(case(), FORWARD, 1, laps, {}, LIMITS)["peers"]
    assert all("host_ms" not in row for row in cpu.values())
