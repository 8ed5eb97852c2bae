"""Every test runs with NaN in uninitialised memory.

This exposes memory that is read before it is written: torch itself fills `torch.empty`,
`empty_like`, `new_empty`, `empty_strided` and `resize_` with NaN (integers with their maximum, so a
byte buffer read as floats is NaN too), and the native library fills its own scratch.
"""

import importlib.util
import os
from collections import Counter

# Set before torch is loaded. Parallel test workers split the cores among them, and a waiting thread
# does not spin on a core that another worker needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:  # inherited by the programs that tests start
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

# Choices that were measured on this machine are not those that the tests are about.
os.environ["FASTATTN_CACHE_DIR"] = os.path.join(os.devnull, "measured")

import pytest  # noqa: E402
import torch  # noqa: E402

# torch's inductor imports setuptools. In a test, where warnings are errors, that may find the
# standard library's distutils in place of setuptools' own, and raise.
if importlib.util.find_spec("setuptools"):
    importlib.import_module("setuptools")

# The 16-bit baseline is torch's. It must be the same on every machine, and must not use the tile
# instructions of torch's oneDNN, which some virtual machines announce and then refuse.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from tests.support import foreign_warnings  # noqa: E402

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
    """Patch Triton's language once for each module: the interpreter does it again at every inner
    call, which takes half its time and is never undone."""
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
    from fastattn.backends.native import libraries
    from fastattn.backends.triton.backend import interpreted

    if why := libraries.cpu_unavailable():
        raise pytest.UsageError(f"there is nothing to test: {why}; `make setup` builds it")
    if interpreted() and importlib.util.find_spec("triton"):
        quicken_interpreter()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        foreign_warnings.report_only()


REASONS = 5  # how many reasons for skips are printed


def pytest_terminal_summary(terminalreporter):
    """Print what was not run and why, and the `notice` properties that passing tests recorded."""
    reasons = Counter(x.longrepr[2].removeprefix("Skipped: ") for x in skipped(terminalreporter))
    for reason, count in reasons.most_common(REASONS):
        terminalreporter.write_line(f"not run: {count} of: {reason}")
    if others := sum(reasons.values()) - sum(dict(reasons.most_common(REASONS)).values()):
        terminalreporter.write_line(f"not run: {others} for other reasons, which -rs tells")
    reports = terminalreporter.getreports("passed")
    notices = [text for x in reports for name, text in x.user_properties if name == "notice"]
    for text in dict.fromkeys(notices):
        terminalreporter.write_line(f"WARNING: {text}", yellow=True, bold=True)


def skipped(terminalreporter):
    return [x for x in terminalreporter.getreports("skipped") if isinstance(x.longrepr, tuple)]


@pytest.fixture(autouse=True, scope="session")
def poisoned_scratch():
    """Fill the native library's own workspaces with NaN before use, too."""
    from fastattn.backends.native import libraries

    libraries.poison(True)
    yield
    libraries.poison(False)


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


@pytest.fixture(autouse=True)
def same_instruction_set():
    """A test that fails may leave a loop over instruction sets unfinished."""
    from fastattn.backends.native import libraries

    before = libraries.cpu_isa()
    yield
    libraries.select_cpu_isa(before)


@pytest.fixture
def threads():
    """A function that sets torch's thread count until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """For modules with many tiny calls. Threads change no bit of a result (test_determinism)."""
    threads(1)


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Make patched functions take calls of every size."""
    from fastattn.dropin import patching

    monkeypatch.setattr(patching, "SMALL", 0)


@pytest.fixture
def registered():
    """Register "fastattn" with transformers."""
    from fastattn.integrations import transformers

    transformers.register()
    yield
    transformers.unregister()


@pytest.fixture
def on(name, monkeypatch):
    """Every call inside runs on backend `name`."""
    from fastattn.backends import base
    from fastattn.dispatch import operation

    chosen = base.get(name)
    monkeypatch.setattr(operation, "choose", lambda spec, asked, device: chosen)
    operation.forget_plans()
    yield name
    operation.forget_plans()
