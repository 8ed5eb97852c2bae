"""Run a slice on kernels with a fault, and return what it notices, in words."""

import functools
import importlib
import inspect
import re
from collections import defaultdict
from contextlib import contextmanager

import pytest

from fastattn.backends.triton_support.runtime import kernels as triton_kernels
from tests.cuda.test_cuda_addresses import under_address_sanitizer
from tests.ptx import ours, triton
from tests.support import emulated, runtime

from . import builds, launches, slices, table  # noqa: F401 (launches has slices)

RIGHT = table.Fault("no fault", "", (), "")
ADDRESSES = "addresses of "  # before a slice: under AddressSanitizer


def notices(fault, name=None):
    """What the slice reports of the fault, or "". A fault that does not compile raises instead."""
    name = name or fault.seen_by
    if name.startswith(ADDRESSES):
        return of_addresses(fault, name.removeprefix(ADDRESSES))
    with altered(fault, name) as met:
        try:
            found = "\n".join(slices.complaints(name))
        except (AssertionError, RuntimeError) as caught:
            if re.search("findings: |fa_cuda_run returns|CUDA error", str(caught)):
                return str(caught)
            raise
    absent = {x.where for x in fault.edits if x.of == "compiled"} - met
    assert not absent, f"{fault.title}: {name} runs no {', '.join(absent)}"
    return found


def of_addresses(fault, name):
    """Run it in another process, which ends at the first address that was never allocated."""
    program = (
        "from tests.gpu_faults import notice, table; import torch; torch.set_num_threads(1)\n"
        f"fault = table.every().get({fault.title!r}, notice.RIGHT)\n"
        f"print('noticed' if notice.notices(fault, {name!r}) else 'passed')"
    )
    done = under_address_sanitizer("-c", program)
    if done.returncode == 0:
        assert "passed" in done.stdout, done.stdout
        return ""
    (found,) = [x for x in done.stderr.splitlines() if "ERROR: AddressSanitizer" in x]
    return found


@contextmanager
def altered(fault, name):
    """Inside, the slice runs with the fault. Yields a set, which receives the compiled kernels that
    the fault edits as they are met."""
    met, (engine, _, _) = set(), slices.parts(name)

    def edited(ptx):
        met.update(x.where for x in fault.edits if table.kernels_of(x, ptx))
        return table.applied_to_compiled(fault, ptx)

    with pytest.MonkeyPatch.context() as patch:
        for where in {x.where for x in fault.edits if x.of == "python"}:
            alter_python(patch, fault, where)
        if engine == "triton":
            with altered_triton(patch, edited):
                yield met
        else:
            alter_library(patch, fault, name)
            if engine == "ptx":
                alter_nvcc(patch, fault, name, edited)
            yield met


def alter_library(patch, fault, name):
    """The emulator gets altered kernels; with nvcc's kernels, g++ compiles the host's code
    alone."""
    by_nvcc = slices.parts(name)[0] == "ptx"
    made = builds.Altered(
        f"{name} {fault}",  # with its edits: what was added to a library stays there
        slices.dim_of(name),
        fault=None if by_nvcc else fault,
        passes=slices.passes(name),
    )
    for module in (emulated, runtime):
        patch.setattr(module, "emulator", lambda wide=False: made)
    for cached in ("executor", "binary"):
        again = functools.cache(getattr(emulated, cached).__wrapped__)
        patch.setattr(emulated, cached, again)


def alter_nvcc(patch, fault, name, edited):
    """Alter the sources that nvcc compiles, and the PTX that it made."""
    of_source = ours.ptx
    altered = builds.includes(builds.tree(slices.dim_of(name), fault))
    patch.setattr(ours, "INCLUDES", altered)
    patch.setattr(ours, "ptx", lambda name: edited(of_source(name)))


@contextmanager
def altered_triton(patch, edited):
    """Inside, Triton loads its kernels again, altered."""
    from triton.runtime.jit import JITFunction

    driver, loaded = triton.driver_of(80), []

    def load(name, ptx, *more):
        return driver.load(name, edited(ptx.decode()).encode(), *more)

    patch.setattr(driver.utils, "load_binary", load)
    for module in vars(triton_kernels()).values():
        for x in vars(module).values():
            if isinstance(x, JITFunction):
                loaded.append(defaultdict(x.create_binder))
                patch.setattr(x, "device_caches", loaded[-1])
    yield
    for kernels, *_ in (of_device for x in loaded for of_device in x.values()):
        for kernel in kernels.values():
            kernel.module = None  # or its destructor would ask a GPU driver to unload it


# -- Python ----------------------------------------------------------------------------------------


def alter_python(patch, fault, where):
    """Give the functions of a module the code of its altered text."""
    module = importlib.import_module(where.removesuffix(".py").replace("/", "."))
    text = table.applied(fault, where, builds.ROOT.joinpath(where).read_text())
    codes = dict(functions_of(compile(text, where, "exec", dont_inherit=True)))
    for name, code in codes.items():
        owner, _, own = name.rpartition(".")
        holder = getattr(module, owner) if owner else module
        function = vars(holder).get(own)
        if hasattr(function, "__code__") and function.__code__ != code:
            patch.setattr(function, "__code__", code)


def functions_of(code, within=""):
    """(dotted name, code) of every function in code, except those inside functions."""
    for x in code.co_consts:
        if hasattr(x, "co_consts") and x.co_name.isidentifier():
            yield within + x.co_name, x
            if not x.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
                yield from functions_of(x, f"{within}{x.co_name}.")
