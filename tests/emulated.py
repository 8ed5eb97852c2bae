"""The CUDA kernels as a backend for CPU tensors, run by the emulator: for tests alone."""

import ctypes
import functools
from contextlib import contextmanager

import pytest
import torch
from emulator import KERNELS, Emulator

from fastattn import native, ops
from fastattn.backends import cpu

DTYPES = ("bfloat16", "float16")
PASSES = {
    native.FORWARD: "fa_cuda_forward",
    native.BACKWARD: "fa_cuda_backward",
    native.WEIGHTS: "fa_cuda_weights",
}


@functools.cache
def library():
    return Emulator(*sorted((KERNELS / "sm80").glob("*.cu")))


class Emulated(cpu.Cpu):
    """The launcher of the CPU's kernels, which packs the same FaParams, with others behind it.

    `findings` holds what the emulator told of each launch; `options` go to it.
    """

    name = "emulated"

    def __init__(self, **options):
        self.options, self.findings = options, []

    def forward(self, *arguments):
        return self._instead(super().forward, *arguments)

    def backward(self, *arguments):
        return self._instead(super().backward, *arguments)

    def weights(self, spec, t):
        return self._instead(super().weights, spec, t)

    def _instead(self, run, *arguments):
        before, cpu._run = cpu._run, self._run
        try:
            return run(*arguments)
        finally:
            cpu._run = before

    def _run(self, which, params, spec, t):
        assert spec.dtype in (torch.bfloat16, torch.float16)
        scratch = torch.full((spec.B * spec.H * spec.M,), torch.nan)
        at = native.WORKSPACE
        params = params[:at] + scratch.data_ptr().to_bytes(8, "little") + params[at + 8 :]
        found = library().run(PASSES[which], ctypes.c_char_p(params), None, **self.options)
        self.findings.append(found)
        assert not found.count, f"{found.count} findings: {found.first}"


@contextmanager
def everywhere(**options):
    """Every call inside runs on the emulator, whatever backend it asks for."""
    backend = Emulated(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "choose", lambda spec, asked: backend)
        ops._plans.clear()
        try:
            yield backend
        finally:
            ops._plans.clear()


def survivors(run):
    """The sites of the synchronisations in `run` that can be deleted without a finding. One run
    with the checker is enough, whatever the values turn out to be."""
    with everywhere() as backend:
        run()
    found = set()
    for site in sorted({site for x in backend.findings for site in x.sites}):
        with everywhere(disabled=site):
            try:
                run()
            except AssertionError as caught:
                assert "findings" in str(caught)
            else:
                found.add(site)
    return found
