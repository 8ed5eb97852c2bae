"""Every test runs with NaN in uninitialised memory, and names why it is skipped.

Memory that is read before it is written shows: torch itself fills `torch.empty`, `empty_like`,
`new_empty`, `empty_strided` and `resize_` with NaN (integers with their maximum, so a byte
buffer read as floats is NaN too), and the native library fills its own scratch.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

# The yardstick in 16 bits is torch's: the same on every machine, and none of the tile instructions
# that torch's oneDNN makes, which some virtual machines announce and then refuse.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Tests import their helpers by name (`import cases`) whatever pytest's import mode is.
sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "fastattn",
        max_examples=int(os.environ.get("FASTATTN_EXAMPLES", "60")),
        deadline=None,  # a shared machine stalls
        derandomize="FASTATTN_EXAMPLES" not in os.environ,  # the same examples on every commit
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("fastattn")

NO_GPU = "torch sees no GPU here"


def quicken_interpreter():
    """Triton's interpreter patches its language at every inner call, which takes half its time and
    is never undone: once for each module does.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped, with the reason, without one")
    config.addinivalue_line("markers", "interpreter: Triton's kernels under TRITON_INTERPRET=1")
    from fastattn.backends.triton import interpreted

    if interpreted() and importlib.util.find_spec("triton"):
        quicken_interpreter()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter):
    """Last of all, what tests want known though they passed: what they recorded as `notice`."""
    reports = terminalreporter.getreports("passed")
    notices = [text for x in reports for name, text in x.user_properties if name == "notice"]
    for text in dict.fromkeys(notices):
        terminalreporter.write_line(f"WARNING: {text}", yellow=True, bold=True)


@pytest.fixture(autouse=True, scope="session")
def poisoned_scratch():
    """The native library's own workspaces start as NaN too."""
    from fastattn import native

    try:
        native.poison(True)
    except (OSError, RuntimeError):  # no library: test_backend_is_here says so
        yield
        return
    yield
    native.poison(False)


@pytest.fixture(autouse=True)
def poisoned_empty():
    was = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def threads():
    """A function that sets torch's thread count until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """For files of many tiny calls. Threads change no bit of a result (test_determinism)."""
    threads(1)


@pytest.fixture
def on(name, monkeypatch):
    """Every call inside runs on backend `name`."""
    from fastattn import backend, operation

    chosen = backend.get(name)
    monkeypatch.setattr(operation, "choose", lambda spec, asked: chosen)
    operation.forget_plans()
    yield name
    operation.forget_plans()
