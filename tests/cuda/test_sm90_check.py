"""The check of a device's instructions before kernels of sm_90 serve a call: when it runs, what
follows from it, and that neither a wrong result, an error of CUDA nor a hang stops a call."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from fastattn.backends.native import cuda, libraries, sm90_check
from fastattn.backends.shared import gpu
from tests.gpu_emulation import kernel_classes, probe90
from tests.gpu_emulation.emulator import needs_emulator

pytestmark = needs_emulator
HOPPER, AMPERE, OTHER = (torch.device("cuda", at) for at in range(3))
CHIPS = {HOPPER: 90, AMPERE: 80, OTHER: 90}
FAILED = "the self-check of sm_90 instructions failed: "


class Library(probe90.Emulated):
    """The library on a Hopper GPU: probes run on the emulator, and the library without kernels
    answers all else."""

    def __init__(self, **options):
        super().__init__(**options)
        self.probes = 0

    def probe_sm90(self, given, stream):
        self.probes += 1
        return super().probe_sm90(given, stream)

    def __getattr__(self, name):
        return getattr(kernel_classes.library(), name)


@pytest.fixture
def on_hopper(monkeypatch):
    """A function that makes a library the one of a machine with two H100 and an A100."""
    probe90.emulator(), kernel_classes.library()  # they compile for longer than a check may take
    monkeypatch.setattr(sm90_check, "SECONDS", 300.0)
    monkeypatch.delenv("FASTATTN_SM90", raising=False)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    nothing = contextlib.nullcontext
    for name, value in dict(
        device=lambda x: nothing(),
        current_device=lambda: 0,
        Stream=lambda x: stream,
        stream=lambda x: nothing(),
        is_current_stream_capturing=lambda: False,
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    real = sm90_check.launch
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        sm90_check, "launch", lambda library, case, device, *rest: real(library, case, cpu, *rest)
    )
    monkeypatch.setattr(gpu, "architecture", CHIPS.__getitem__)
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
    monkeypatch.setattr(libraries.CudaLibrary, "translates", lambda self: 0, raising=False)

    def use(library):
        monkeypatch.setattr(libraries, "cuda", lambda: library)
        return library

    forget()
    yield use
    forget()
    kernel_classes.decline(b"")


def forget():
    cuda.met.cache_clear()
    sm90_check._found.cache_clear()


def chip(device):
    """The chip that a launch on this device is for."""
    return cuda.Cuda().chip(SimpleNamespace(device=device))


def test_a_device_that_passes_is_checked_once(on_hopper):
    library = on_hopper(Library())
    every = len(probe90.CASES)
    for _ in range(3):
        assert chip(HOPPER) == (132, 90) and library.probes == every
    assert chip(AMPERE) == (132, 80) and library.probes == every
    assert chip(OTHER) == (132, 90) and library.probes == 2 * every
    assert sm90_check.run(library, HOPPER) == dict.fromkeys(probe90.CASES, "")


def test_a_library_without_these_kernels_is_not_checked(on_hopper):
    library = on_hopper(Library())
    kernel_classes.decline(b"no kernel of this class is built")
    assert chip(HOPPER) == (132, 90) and not library.probes  # the library itself declines


def test_a_wrong_value_is_one_warning_and_other_kernels(on_hopper):
    library = on_hopper(Library(disabled="probe: numbers are added"))
    with pytest.warns(UserWarning, match=f"^{FAILED}bulk add: .* values are wrong") as caught:
        assert chip(HOPPER) == (132, 80)
    (text,) = (str(x.message) for x in caught)
    assert "FASTATTN_SM90=off" in text
    assert chip(HOPPER) == (132, 80) and library.probes == len(probe90.CASES)
    assert sm90_check.why_declined(library, HOPPER).startswith(f"{FAILED}bulk add: ")


def test_several_wrong_values_are_counted(on_hopper):
    library = on_hopper(Library(disabled="probe: a product"))
    with pytest.warns(UserWarning, match="wgmma bf16, A k-major, B k-major: .*, and 11 more"):
        assert sm90_check.why_declined(library, HOPPER)


def test_an_error_of_cuda_ends_the_check(on_hopper, monkeypatch):
    """A process cannot use its GPU after some of them, so no other case runs."""
    library = on_hopper(Library())

    def fail():
        raise RuntimeError("CUDA error: an illegal instruction was encountered\nmore")

    stream = SimpleNamespace(cuda_stream=0, synchronize=fail)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    said = "RuntimeError: CUDA error: an illegal instruction was encountered"
    with pytest.warns(UserWarning, match=f"{FAILED}a wait with a limit: {said}. Other"):
        assert chip(HOPPER) == (132, 80)
    assert library.probes == 1


def test_a_refused_launch_is_named(on_hopper):
    """As by a driver that does not load code for sm_90a."""
    library = on_hopper(Library())
    library.probe_sm90 = lambda given, stream: 209
    what = r"a wait with a limit: a kernel failed with an error \(error 209\)"
    more = f", and {len(probe90.CASES) - 1} more"
    with pytest.warns(UserWarning, match=FAILED + what + more):
        assert chip(HOPPER) == (132, 80)


@pytest.mark.parametrize("step, what", [(0, "the kernel never began"), (6, "setmaxnreg never")])
def test_a_kernel_that_hangs_is_named(step, what, on_hopper, monkeypatch):
    on_hopper(Library())
    real, released = sm90_check.launch, threading.Event()

    def launch(library, case, device, report, stream):
        if case.name == "setmaxnreg":
            report[0] = step
            released.wait()
            raise RuntimeError("the test is over")
        return real(library, case, device, report, stream)

    monkeypatch.setattr(sm90_check, "launch", launch)
    monkeypatch.setattr(sm90_check, "SECONDS", 3.0)
    try:
        with pytest.warns(UserWarning, match=f"{FAILED}setmaxnreg: after 3 s, {what}"):
            assert chip(HOPPER) == (132, 80)
    finally:
        released.set()
        for thread in threading.enumerate():
            if thread.name == "fastattn: sm_90":
                thread.join()


def test_nothing_is_checked_while_a_graph_is_captured(on_hopper, monkeypatch):
    """Kernels of sm_80 serve until a later call can check."""
    library = on_hopper(Library())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chip(HOPPER) == (132, 80) and not library.probes
    why = "a CUDA graph is being captured before the check of sm_90 instructions"
    assert cuda.Cuda()._unchecked(HOPPER) == why
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert chip(HOPPER) == (132, 90) and library.probes
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chip(HOPPER) == (132, 90)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 MiB",
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ],
)
def test_an_error_that_says_nothing_of_instructions_is_no_result(text, on_hopper, monkeypatch):
    """As if another thread captures a graph."""
    library = on_hopper(Library())

    def fail():
        raise RuntimeError(text)

    stream, real = SimpleNamespace(cuda_stream=0, synchronize=fail), torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    for _ in range(2):
        assert chip(HOPPER) == (132, 80)
    assert "has to be run again: a wait with a limit: " in cuda.Cuda()._unchecked(HOPPER)
    assert library.probes == 3
    monkeypatch.setattr(torch.cuda, "Stream", real)
    assert chip(HOPPER) == (132, 90)


@pytest.mark.parametrize("setting, architecture", [("off", 80), ("unchecked", 90), ("", 90)])
def test_the_setting(setting, architecture, on_hopper, monkeypatch):
    library = on_hopper(Library())
    monkeypatch.setenv("FASTATTN_SM90", setting)
    assert chip(HOPPER) == (132, architecture)
    assert bool(library.probes) == (setting == "")
    if setting == "off":
        assert sm90_check.why_declined(library, HOPPER) == "FASTATTN_SM90 is off"


def test_modes_of_the_caller_do_not_reach_the_check(on_hopper):
    """A default device, inference mode and a mode that counts operations belong to its thread."""
    library = on_hopper(Library())
    with torch.inference_mode(), torch.device("meta"):
        assert sm90_check.run(library, HOPPER) == dict.fromkeys(probe90.CASES, "")
