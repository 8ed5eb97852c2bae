"""The CUDA kernels as a backend for CPU tensors, run by the emulator: for tests alone."""

import ctypes
import functools

import torch
from emulator import KERNELS, Emulator

from fastattn import native
from fastattn.backends import cpu

DTYPES = ("bfloat16", "float16")
PASSES = {native.FORWARD: "fa_cuda_forward"}


@functools.cache
def library():
    return Emulator(KERNELS / "sm80" / "forward.cu")


class Emulated(cpu.Cpu):
    """The launcher of the CPU's kernels, which packs the same FaParams, with others behind it.

    `findings` holds what the emulator told of each launch; `options` go to it.
    """

    name = "emulated"

    def __init__(self, **options):
        self.options, self.findings = options, []

    def forward(self, spec, t):
        return self._instead(super().forward, spec, t)

    def _instead(self, run, *arguments):
        before, cpu._run = cpu._run, self._run
        try:
            return run(*arguments)
        finally:
            cpu._run = before

    def _run(self, which, params, spec, t):
        assert spec.dtype in (torch.bfloat16, torch.float16)
        entry = PASSES[which]
        found = library().run(entry, ctypes.c_char_p(params), None, **self.options)
        self.findings.append(found)
        assert not found.count, f"{found.count} findings: {found.first}"
