"""The benchmark on machines with a GPU, without one: fakes replace it."""

import dataclasses
import math
import os
from types import SimpleNamespace

import pytest
import torch

from bench import commands
from bench.__main__ import main
from bench.benchmarks import peak_memory, tiny_call
from bench.cases import BACKWARD, FORWARD, TRAINING, Case
from bench.measure import isolated_process, machine, nvidia, roofline, run, timing
from bench.peers.registry import BASELINE, SUBJECT
from bench.reporting import console, results
from tests.support.bench_helpers import LIMITS, case, hurry

DRIVERS = {  # by driver version: the torch index that supports it, "" for none
    "470.82.01": "",
    "525.60.13": "cu126",
    "535.183.01": "cu126",
    "560.35.03": "cu126",
    "570.86.15": "cu128",
    "580.65.06": "cu130",
    "610.10": "cu130",
}
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs)\n"


class Fake:
    """What reveals a GPU: nvidia-smi, the driver's folder in /proc, a node in /dev."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        monkeypatch.setattr(nvidia, "PROC", folder / "proc")
        monkeypatch.setattr(nvidia, "NODE", folder / "nvidia0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.torch("2.13.0+cpu", None)

    def torch(self, version, cuda, says=""):
        def init():
            raise RuntimeError(says)

        self.patch.setattr(torch, "__version__", version)
        self.patch.setattr(torch.version, "cuda", cuda)
        self.patch.setattr(torch.cuda, "init", init)

    def smi(self, says, status=0):
        programs = self.folder / "bin"
        programs.mkdir()
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
        (programs / "nvidia-smi").chmod(0o755)
        self.patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def proc(self, driver, model="NVIDIA A100-SXM4-40GB"):
        card = self.folder / "proc" / "gpus" / "0000:01:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t {model}\nIRQ:   1\n")
        (self.folder / "proc" / "version").write_text(MODULE.format(driver))

    def node(self):
        (self.folder / "nvidia0").write_text("")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Fake(tmp_path, monkeypatch)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("by", ["smi", "proc"])
def test_the_device_index_is_the_drivers(by, driver, fake):
    fake.smi(f"NVIDIA H100, {driver}") if by == "smi" else fake.proc(driver)
    message = nvidia.unusable()
    assert message.startswith("got torch 2.13.0+cpu, expected one that can use the GPU")
    assert f"driver {driver}): it is built for CPUs alone; " in message
    assert ("NVIDIA H100" if by == "smi" else "NVIDIA A100-SXM4-40GB") in message
    if DRIVERS[driver]:
        assert message.partition("--index-url ")[2].startswith(f"{nvidia.URL}{DRIVERS[driver]}")
    else:
        assert "update the driver to 525 or newer" in message


def test_a_cuda_newer_than_the_driver_is_reported(fake):
    fake.smi("NVIDIA H100 80GB HBM3, 550.54.15")
    fake.torch("2.13.0+cu130", "13.0")
    message = nvidia.unusable()
    assert "built for CUDA 13.0; install a build for that driver" in message and "cu126" in message


def test_torchs_error_is_printed_if_the_driver_is_new_enough(fake):
    fake.smi("NVIDIA H100 80GB HBM3, 580.65.06")
    fake.torch("2.13.0+cu130", "13.0", "Error 802: system not yet initialized\nmore")
    message = nvidia.unusable()
    assert (
        "and fails with: Error 802: system not yet initialized; nvidia-smi may show more" in message
    )
    assert "index-url" not in message


def test_a_device_node_alone_reveals_a_gpu(fake):
    fake.node()
    text = nvidia.unusable()
    assert "(an NVIDIA GPU, a driver of unknown version)" in text and nvidia.URL in text


@pytest.mark.parametrize("version", ["[N/A]", "Graphics Device"])
def test_an_unknown_driver_version_is_reported_as_unknown(version, fake):
    fake.smi(f"NVIDIA RTX A6000, 48 GB, {version}")
    text = nvidia.unusable()
    assert "(NVIDIA RTX A6000, 48 GB, a driver of unknown version)" in text and nvidia.URL in text


@pytest.mark.parametrize("why", ["none", "no driver", "hidden", "usable"])
def test_no_message_if_nothing_can_be_fixed(why, fake, monkeypatch):
    if why == "no driver":
        fake.smi("NVIDIA-SMI has failed, no devices were found", 9)
    elif why != "none":
        fake.smi("NVIDIA H100, 550.54.15")
    if why == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if why == "usable":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nvidia.unusable() == ""


@pytest.mark.parametrize("command", ["sweep", "decode", "mha", "overhead", "memory", "gpu"])
def test_an_unusable_gpu_stops_only_gpu_benchmarks(command, fake, monkeypatch, capsys):
    """For the commands that take a device. Naming a device overrides the stop."""
    fake.smi("NVIDIA H100, 550.54.15")
    assert main([command]) == 2
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


def test_no_sleep_for_a_first_call_that_compiles(device):
    """Nor is a call that waits for the device itself."""
    clock = timing.DeviceClock(device, lambda: device.host)
    hosts = iter([3.0, *[10 * US] * 50])

    def compiling(_):
        device.host += next(hosts)
        device.enqueue(20 * US)

    def waiting(_):
        device.enqueue(20 * US)
        device.synchronize()

    for _ in range(20):
        clock.sample((compiling,), 1)
    assert device.slept < 20 * 2 * timing.SLEEP[0] + timing.SLEEP[1]
    device.slept = 0
    for _ in range(20):
        clock.sample((waiting,), 1)
    assert device.slept < 20 * 4 * timing.SLEEP[0]


def test_a_sample_is_not_lengthened_by_the_devices_sleep(device, monkeypatch):
    """A short kernel is called often in a sample, but not for seconds."""
    clock, calls = timing.DeviceClock(device, lambda: device.host), []
    short = device.phase((5 * US, 20 * US))
    timing.interleaved({"short": (lambda x: calls.append(1) or short(x),)}, clock, 0.0)
    each = (len(calls) - 2) / timing.ROUNDS[0]
    assert each == math.ceil(timing.MIN_SAMPLE_S / (20 * US + clock.unmeasured)) < 11


def test_both_times_are_in_the_record_and_on_the_page():
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
    message = console.host(rows[FORWARD][SUBJECT])
    assert message == ", device 0.020 ms, host 0.050 ms: bound by the host"
    assert console.host(rows[FORWARD][BASELINE]) == ", device 0.040 ms, host 0.010 ms"
    cells = [{"timings": [{"threads": None, "peers": rows[FORWARD]}]}] * 3
    assert list(console._hosts(cells)) == [f"{SUBJECT}: bound by the host in 3 of 3 cells"]
    cpu = run._summary(case(), FORWARD, 1, laps, {}, LIMITS)["peers"]
    assert all("host_ms" not in row and console.host(row) == "" for row in cpu.values())


# ------------------------------------------------------------------------------- a separate process


ENDINGS = {
    "aborts": "its process died of SIGABRT",
    "fills": "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB",
    "poisons": "raised RuntimeError: CUDA error: an illegal memory access was encountered; the GPU "
    "was lost to its process",
}
CRASHING = (SUBJECT, BASELINE, "aborts", "fills while timed", "poisons while timed")
SECTIONS = ("overhead", "memory", "modules", "targets", "subnormals", "complete")
NONE = dict.fromkeys(SECTIONS, ())


@pytest.fixture(scope="module")
def crashed():
    """The records of two cases and two passes, with peers that crash in every way."""
    with (
        pytest.MonkeyPatch.context() as patch,
        isolated_process.Process("tests.support.crashing_peers") as process,
    ):
        patch.setattr(run, "LIVES", 1)
        assert len({process.call(os.getpid) for _ in range(2)} - {os.getpid()}) == 1  # it stays
        with pytest.raises(isolated_process.Raised, match="raised ZeroDivisionError: float divmod"):
            process.call(divmod, 1.0, 0.0)
        given = (case(N=20), case(N=30)), (FORWARD, TRAINING), dict.fromkeys(CRASHING)
        yield list(run.cells(*given, LIMITS, 0.002, (1,), process))


def test_every_exit_status_of_a_process_is_described():
    endings = {status: isolated_process._ending(status) for status in (3, -9, -35)}
    assert endings[3] == "its process ended with status 3"
    assert endings[-9] == "its process died of SIGKILL"
    assert endings[-35] == "its process died of signal 35"


def test_a_peer_that_crashes_loses_only_its_own_entry(crashed):
    cells = [(n, what) for n in (20, 30) for what in (FORWARD, TRAINING)]
    assert [(x["N"], x["pass"]) for x in crashed] == cells
    for cell in crashed:
        assert cell["status"] == "ok" and cell["backend"] == "cpu", cell
        (entry,) = cell["timings"]
        assert set(entry["peers"]) == {SUBJECT, BASELINE}
        assert console.speedup_of(entry)["median"] > 0
        assert set(cell["peers"]) == set(CRASHING) and not cell["peers"][BASELINE]["reason"]


@pytest.mark.parametrize("name", CRASHING[2:])
def test_the_entry_has_the_exit_status(name, crashed):
    first, *_, last = (cell["peers"][name]["reason"] for cell in crashed)
    kind, _, _ = name.partition(" while ")
    if kind == "aborts":
        assert first == ENDINGS[kind]
    elif kind == "fills":
        assert first == f"{ENDINGS[kind]}, while timed"
    else:
        message, _, lost = ENDINGS[kind].partition("; ")
        assert first == f"{message}, while timed; {lost}"
    # A process that only ran out of memory survives, so its peer may be tried again.
    assert last == (first if kind == "fills" else "not tried: it ended the process in 1 cells")
    count = 4 if kind == "fills" else 2
    assert f"{name}: no time in {count} cells" in "\n".join(
        console.summary(NONE | {"cells": crashed})
    )


class Here:
    """An apart.Process without another process. GPU work is replaced by small work on the CPU."""

    def __init__(self, deaths=()):
        self.deaths, self.log, self.living = list(deaths), [], False

    def __enter__(self):
        return self

    def __exit__(self, *about):
        self.close()

    def close(self):
        self.living = False

    def call(self, function, *args):
        return next(self.stream(lambda: iter([self.done(function, *args)])))

    def stream(self, function, *args):
        self.living = True
        self.log.append((function, args))
        if self.deaths:
            raise isolated_process.Died(self.deaths.pop(0), "its process died")
        args = [self.small(x) if isinstance(x, Case) else x for x in args]
        yield from function(*args)

    def done(self, function, *args):
        if function is roofline.measure:
            compute = dict.fromkeys(args[1], LIMITS.compute["float32"])
            return LIMITS._replace(compute=compute)._asdict()
        found = function(*("cpu" if x == "cuda" else x for x in args))
        return found | {"device": "cuda"} if function is machine.describe else found

    def small(self, x):
        return dataclasses.replace(x, device="cpu", B=1, H=2, Hk=2)


@pytest.mark.parametrize(
    "deaths, reasons, status",
    [
        ([], {}, "ok"),
        ([BASELINE], {BASELINE: "its process died"}, "ok"),
        ([SUBJECT], {SUBJECT: "its process died"}, "failed"),
        ([BASELINE, SUBJECT], dict.fromkeys((BASELINE, SUBJECT), "its process died"), "failed"),
        ([None], dict.fromkeys((BASELINE, SUBJECT), "its process died"), "failed"),
        ([SUBJECT, SUBJECT], dict.fromkeys((BASELINE, SUBJECT), "its process died"), "failed"),
    ],
    ids=["none", "a peer", "the subject", "both", "outside of any", "the subject again"],
)
def test_a_crashed_cell_is_measured_again_without_the_cause(deaths, reasons, status):
    given = (case(),), (FORWARD,), dict.fromkeys((SUBJECT, BASELINE)), LIMITS, 0.002, (1,)
    (cell,) = run.cells(*given, process=Here(deaths))
    assert cell["status"] == status
    assert {x: y["reason"] for x, y in cell["peers"].items() if y["reason"]} == reasons
    assert list(console.summary(NONE | {"cells": [cell]}))  # a summary of it can be printed


def test_tiny_calls_are_measured_without_what_ended_them(monkeypatch):
    monkeypatch.setattr(tiny_call, "CALLS", 1)
    peers = dict.fromkeys((SUBJECT, BASELINE))
    found = tiny_call.measure("cpu", peers, (1,), Here([BASELINE]))
    assert found["errors"] == {SUBJECT: "", BASELINE: "its process died"}
    assert all(set(entry["peers"]) == {SUBJECT} for entry in found["timings"])
    with pytest.raises(OSError, match="its process died"):
        tiny_call.measure("cpu", peers, (1,), Here([None]))


@pytest.mark.parametrize("command", ["sweep", "decode", "overhead", "memory"])
def test_only_the_measuring_process_uses_the_gpu(command, monkeypatch, tmp_path):
    """As exclusive compute mode requires. This torch has no CUDA: using it here would raise."""
    process, probes = Here(), []

    class Probe:
        returncode = 0

        def __init__(self, *given, **options):
            probes.append(self)
            self.alone = not process.living and all(x.ended for x in probes[:-1])
            self.ended = False

        def communicate(self):
            self.ended = True
            return "1000", ""

    hurry(monkeypatch)
    monkeypatch.setattr(isolated_process, "Process", lambda: process)
    monkeypatch.setattr(peak_memory, "subprocess", SimpleNamespace(Popen=Probe))
    monkeypatch.setattr(commands, "launch_overhead", SimpleNamespace(lines=lambda: ()))
    monkeypatch.setattr(tiny_call, "SMALL", (4,))
    given = ["--device", "cuda", "--output", str(tmp_path), "--peers", BASELINE]
    given += [] if command == "memory" else ["--seconds", "0.002", "--dtypes", "bfloat16"]
    given += ["--lengths", "40"] if command != "overhead" else []
    given += ["--dims", "16"] if command == "sweep" else []
    if command == "overhead":
        given.remove("--dtypes")
        given.remove("bfloat16")
    assert main([command, *given]) == 0
    (path,) = tmp_path.glob("*.json")
    found = results.read(path)
    assert found["machine"]["device"] == "cuda" and (found["cells"] or found["memory"])
    assert bool(probes) == (command in ("sweep", "memory")) and all(x.alone for x in probes)
    assert not process.living
