"""The CUDA kernels as a backend for CPU tensors, run by the emulator: for tests alone."""

import ctypes
import functools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from emulator import KERNELS, Emulator, aligned

from fastattn import native, ops
from fastattn.backends import cpu

DTYPES = ("bfloat16", "float16")
PASSES = {
    native.FORWARD: "fa_cuda_forward",
    native.BACKWARD: "fa_cuda_backward",
    native.WEIGHTS: "fa_cuda_weights",
}
DECODE_ROWS = 16  # at most, of each head


@functools.cache
def library():
    return Emulator(*sorted((KERNELS / "sm80").glob("*.cu")))


def decode_splits(params, sm_count):
    """Among how many blocks decode splits the keys."""
    splits = library().library.fa_cuda_decode_splits
    splits.restype = ctypes.c_int64
    return splits(ctypes.c_char_p(params), ctypes.c_int64(sm_count))


def decode_workspace(params, sm_count):
    """As many floats as decode asks for, each NaN."""
    workspace = library().library.fa_cuda_decode_workspace
    workspace.restype = ctypes.c_int64
    floats = aligned(workspace(ctypes.c_char_p(params), ctypes.c_int64(sm_count)) // 4, np.float32)
    floats[:] = np.nan
    return floats


class Emulated(cpu.Cpu):
    """The launcher of the CPU's kernels, which packs the same FaParams, with others behind it.

    Given a number of multiprocessors, it sends calls of few rows to decode. `findings` holds what
    the emulator told of each launch; `options` go to it; `splits` are those of the last decode.
    """

    name = "emulated"

    def __init__(self, sm_count=None, **options):
        self.sm_count, self.options, self.findings, self.splits = sm_count, options, [], None

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
        found = self._launch(which, params, spec)
        self.findings.append(found)
        assert not found.count, f"{found.count} findings: {found.first}"

    def _launch(self, which, params, spec):
        if self.sm_count and which == native.FORWARD and spec.M <= DECODE_ROWS:
            self.splits = decode_splits(params, self.sm_count)
            workspace = decode_workspace(params, self.sm_count)
            entry, more = "fa_cuda_decode", (ctypes.c_int64(self.sm_count),)
        else:
            workspace = np.full(spec.B * spec.H * spec.M, np.nan, np.float32)
            entry, more = PASSES[which], ()
        at = native.WORKSPACE
        params = params[:at] + workspace.ctypes.data.to_bytes(8, "little") + params[at + 8 :]
        return library().run(entry, ctypes.c_char_p(params), *more, None, **self.options)


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


def survivors(run, **options):
    """The sites of the synchronisations in `run` that can be deleted without a finding. One run
    with the checker is enough, whatever the values turn out to be."""
    with everywhere(**options) as backend:
        run()
    found = set()
    for site in sorted({site for x in backend.findings for site in x.sites}):
        with everywhere(**options, disabled=site):
            try:
                run()
            except AssertionError as caught:
                assert "findings" in str(caught)
            else:
                found.add(site)
    return found
