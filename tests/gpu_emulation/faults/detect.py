"""Run a slice on kernels with a fault, and return the complaints of the slice as text.

A slice is one small call, or a few, with a check of their results; slices.py has them by name. A
slice detects a fault (table.py) if it has a complaint: a wrong value, a finding of the emulator, or
a launch that the runtime refuses.
"""

import functools
import importlib
import inspect
import re
from collections import defaultdict
from contextlib import contextmanager

import pytest

from fastattn.backends.triton.runtime import kernels as triton_kernels
from tests.cuda.test_cuda_addresses import under_address_sanitizer
from tests.gpu_emulation import emulated, runtime
from tests.gpu_emulation.ptx import ours, triton
from tests.support.checkout import ROOT

from . import builds, dense_masks, hopper, launches, slices, table  # noqa: F401 (slices)

NO_FAULT = table.Fault("no fault", "", (), "")
ADDRESSES = "addresses of "  # before a slice: under AddressSanitizer


def detect(fault, name=None):
    """The complaints of a slice about the fault, "" if it has none. The slice is `name`, by default
    the one that the table names. Raises AssertionError if the fault does not compile, or if it
    edits a compiled kernel that the slice does not run."""
    name = name or fault.seen_by
    if name.startswith(ADDRESSES):
        return of_addresses(fault, name.removeprefix(ADDRESSES))
    with altered(fault, name) as seen_kernels:
        try:
            found = "\n".join(slices.complaints(name))
        except (AssertionError, RuntimeError) as caught:
            if re.search("findings: |fa_cuda_run returns|CUDA error", str(caught)):
                return str(caught)
            raise
    not_run = {x.where for x in fault.edits if x.of == "compiled"} - seen_kernels
    assert not not_run, f"{fault.title}: {name} runs no {', '.join(not_run)}"
    return found


def of_addresses(fault, name):
    """`detect` in another process with AddressSanitizer, which ends the process at the first access
    to memory that is not allocated."""
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.gpu_emulation.faults import detect, table\n"
        f"fault = table.every().get({fault.title!r}, detect.NO_FAULT)\n"
        f"print('detected' if detect.detect(fault, {name!r}) else 'passed')"
    )
    done = under_address_sanitizer("-c", program)
    if done.returncode == 0:
        assert "passed" in done.stdout, done.stdout
        return ""
    (found,) = [x for x in done.stderr.splitlines() if "ERROR: AddressSanitizer" in x]
    return found


@contextmanager
def altered(fault, name):
    """Inside, the slice runs with the fault. Yields a set, to which `Edit.where` of a compiled
    kernel is added when its PTX is read."""
    seen_kernels, (engine, _, _) = set(), slices.parts(name)

    def edited(ptx):
        seen_kernels.update(x.where for x in fault.edits if table.kernels_of(x, ptx))
        return table.applied_to_compiled(fault, ptx)

    with pytest.MonkeyPatch.context() as patch:
        for where in {x.where for x in fault.edits if x.of == "python"}:
            alter_python(patch, fault, where)
        if engine == "triton":
            with altered_triton(patch, edited):
                yield seen_kernels
        else:
            alter_library(patch, fault, name)
            if engine in ("ptx", "sm90"):
                alter_nvcc(patch, fault, name, edited)
            yield seen_kernels


def alter_library(patch, fault, name):
    """Build the emulator's library from altered sources. If nvcc compiles the kernels, g++ compiles
    only the host's code here, and alter_nvcc applies the fault."""
    engine = slices.parts(name)[0]
    # The edits are part of the name: PTX kernels that were added to a library stay there.
    if engine == "sm90":
        made = builds.AlteredHopper(f"{name} {fault}", fault)
    else:
        of_host = None if engine == "ptx" else fault
        passes = slices.passes(name)
        made = builds.Altered(f"{name} {fault}", slices.dim_of(name), of_host, passes)
    for module in (emulated, runtime):
        patch.setattr(module, "emulator", lambda *which: made)
    for cached in ("executor", "binary"):
        again = functools.cache(getattr(emulated, cached).__wrapped__)
        patch.setattr(emulated, cached, again)


def alter_nvcc(patch, fault, name, edited):
    """Alter the sources that nvcc compiles, and the PTX that it made."""
    of_source = ours.ptx
    altered = builds.tree(slices.dim_of(name), fault) / "cuda"
    patch.setattr(ours, "ptx", lambda *names: edited(of_source(*names, kernels=altered)))


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
    try:
        yield
    finally:
        for kernels, *_ in (of_device for x in loaded for of_device in x.values()):
            for kernel in kernels.values():
                kernel.module = None  # or its destructor would ask a GPU driver to unload it


# -- Python ----------------------------------------------------------------------------------------


def alter_python(patch, fault, where):
    """Give the functions of a module the code of its altered text."""
    module = importlib.import_module(where.removesuffix(".py").replace("/", "."))
    text = table.applied(fault, where, ROOT.joinpath(where).read_text())
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
