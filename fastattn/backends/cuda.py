"""Launcher of the CUDA kernels in csrc/cuda: on the stream of the caller, waiting for nothing."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import gpu, native
from ..backend import Support, check_lengths, register
from ..launcher import Launcher
from ..spec import AttentionSpec, Feature, Tensors


@functools.cache
def unavailable() -> str | None:
    if why := native.cuda_unavailable() or gpu.unavailable():
        return why
    library = native.cuda()
    if code := library.driver_error():
        return f"the CUDA runtime of its library cannot work here: {library.error(code).decode()}"
    return None


class Cuda(Launcher):
    name = "cuda"
    support = Support(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=native.CUDA_MAX_HEAD_DIM,
        max_length=gpu.LONGEST,
        features=(
            Feature.BAND
            | Feature.LENGTHS
            | Feature.MASK
            | Feature.ALIBI
            | Feature.SOFTCAP
            | Feature.SINKS
            | Feature.DROPOUT
            | Feature.GQA
            | Feature.WEIGHTS
            | Feature.GRAD
        ),
    )

    def unavailable(self) -> str | None:
        return unavailable()

    @property
    def library(self):
        return native.cuda()

    def multiprocessors(self, x: Tensor) -> int:
        return gpu.processors(x.device)

    def stream(self, x: Tensor) -> int:
        return torch.cuda.current_stream(x.device).cuda_stream

    def workspace(self, which: int, params: bytes, t: Tensors) -> int:
        return self.library.workspace(params, which, self.multiprocessors(t.q))

    def run(self, which: int, params: bytes, spec: AttentionSpec, t: Tensors) -> None:
        check_lengths(t.lengths, spec.N)
        q, library = t.q, self.library
        with gpu.on(q.device):
            code = library.run(
                params, which, q.get_device(), self.multiprocessors(q), self.stream(q)
            )
        if code:
            raise RuntimeError(
                f"the CUDA kernels failed at {library.failed_kernel().decode()}: "
                f"{library.error(code).decode()} (CUDA error {code}; it may be that of an earlier "
                "kernel, of anybody's: CUDA_LAUNCH_BLOCKING=1 finds it)"
            )


register(Cuda())
