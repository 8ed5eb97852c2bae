"""Launcher of the CUDA kernels in csrc/cuda: on the stream of the caller, without waiting."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...call.environment import setting
from ...call.spec import AttentionSpec, Feature, Tensors
from ..base import COMMON_FEATURES, Chips, Support, register
from ..preference import passes_of
from ..shared import cuda_errors, gpu
from ..shared.value_checks import check_values
from . import libraries
from .imagined import imagined
from .launcher import AFTER, PLACES, Launcher, Prepared, convert, refused
from .marshalling import launch_on, pack

SM_80, SM_90 = 80, 90
DTYPES = frozenset({torch.bfloat16, torch.float16})
PASSES = {
    "forward": libraries.FORWARD,
    "backward": libraries.BACKWARD,
    "weights": libraries.WEIGHTS,
    "weights_backward": libraries.WEIGHTS_BACKWARD,
}


@functools.cache
def unavailable() -> str | None:
    why = libraries.cuda_unavailable() or gpu.unavailable(SM_80)
    if why:
        return why
    library = libraries.cuda()
    if code := library.driver_error():
        theirs, ours = (f"{x // 1000}.{x % 1000 // 10}" for x in map(library.version, (1, 0)))
        said = f"{library.error(code).decode()} (CUDA {ours} there, {theirs} in the driver)"
        what = cuda_errors.advice(code)
        return f"the CUDA runtime of its library cannot work here: {said}{what and '; '}{what}"
    return None


def lacks_sm_90() -> str:
    """Why the library has no kernels of sm_90; "" if it has."""
    sizes: dict[str, Any] = dict(B=1, H=1, Hk=1, M=256, N=256, D=64, Dv=64, scale=1.0)
    usual = AttentionSpec(dtype=torch.bfloat16, device="cuda", **sizes)
    said = libraries.cuda().kernels(imagined(usual, libraries.FORWARD), libraries.FORWARD, 90)
    return said.decode().partition(": ")[2]


def current_stream(device: int) -> int:
    """The caller's stream on a device. It makes no Stream object if torch can do without: that
    would take longer than all else here."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw else torch.cuda.current_stream(device).cuda_stream


@functools.cache
def met(device: torch.device) -> gpu.Chip:
    """What launches on a device have to know of it. The first call there warns if the driver has to
    translate the kernels."""
    if device.type == "cuda" and libraries.cuda().translates():
        warnings.warn(waiting(device), stacklevel=2)
    architecture = gpu.architecture(device)
    if architecture == SM_90 and setting("FASTATTN_SM90") == "off":
        architecture = SM_80
    return gpu.Chip(gpu.processors(device), architecture)


def waiting(device: torch.device) -> str:
    arch = gpu.architecture(device)
    cache = Path(os.environ.get("CUDA_CACHE_PATH") or Path.home() / ".nv" / "ComputeCache")
    why = cuda_errors.why_unwritable(cache)
    if os.environ.get("CUDA_CACHE_DISABLE", "0") != "0":
        why = "CUDA_CACHE_DISABLE is set"
    each = f", in every process, because {cache} cannot be written ({why})" if why else ""
    return (
        f"the CUDA kernels have no code for sm_{arch}: the driver translates each when it is first "
        f"called, for up to a minute{each}. CUDAARCHS={arch}-real make setup spares it"
    )


class Cuda(Launcher):
    name = "cuda"
    support: Support = Support(
        devices=frozenset({"cuda"}),
        dtypes=DTYPES,
        chips=(Chips(SM_80, DTYPES),),
        max_head_dim=libraries.CUDA_MAX_HEAD_DIM,
        max_length=gpu.MAX_LENGTH,
        features=COMMON_FEATURES | Feature.INVARIANT,
    )

    def unavailable(self) -> str | None:
        return unavailable()

    @property
    def library(self) -> libraries.CudaLibrary:
        return libraries.cuda()

    def chip(self, x: Tensor) -> gpu.Chip:
        return met(x.device)

    def stream(self, x: Tensor) -> int:
        return current_stream(x.get_device())

    def kernels(
        self, spec: AttentionSpec, device: torch.device, t: Tensors | None = None
    ) -> dict[str, str]:
        chip, kernels = gpu.architecture(device), {}
        for name in passes_of(spec):
            which = PASSES[name]
            params = imagined(spec, which)
            if t is not None:
                # Others may be converted before kernels read them.
                read_in_place = Tensors(t.q, t.k, t.v, t.mask)
                rest = (None,) * len(AFTER[which])
                params = pack(params, PLACES[which], (*read_in_place, *rest), 0)
            kernels[name] = self.library.kernels(params, which, chip).decode()
        if setting("FASTATTN_SM90") == "off":
            off = "sm_80: FASTATTN_SM90 is off"
            kernels = {name: off if x == "sm_90" else x for name, x in kernels.items()}
        return kernels

    def workspace(self, which: int, params: bytes, t: Tensors) -> int:
        return self.library.workspace(params, which, *self.chip(t.q))

    def _launch(
        self, which: int, like: Prepared, t: Tensors, after: tuple[Tensor | None, ...]
    ) -> None:
        # In one step, if there is an extension. Nothing of a call is kept for the next.
        library, spec, q = self.library, like.spec, t.q
        if launch_on is None or not library.run_at:
            return super()._launch(which, like, t, after)
        if spec.given:
            t = convert(spec, t)
            check_values(spec, t)
        entries = library.run_at, library.workspace_at, functools.partial(_room, q)
        where = q.get_device(), *self.chip(q), self.stream(q)
        packed = like.form, PLACES[which], (*t, *after)
        with gpu.on(q.device):
            code = launch_on(*entries, which, *where, *packed)
        if status := self._check(code):
            raise refused(status, spec, dict(zip(AFTER[which], after)))

    def run(self, which: int, params: bytes, spec: AttentionSpec, t: Tensors) -> int:
        check_values(spec, t)
        q, library = t.q, self.library
        with gpu.on(q.device):
            code = library.run(params, which, q.get_device(), *self.chip(q), self.stream(q))
        return self._check(code)

    def _check(self, code: int) -> int:
        """Raise for an error of CUDA. Another code, or 0, is returned."""
        if code and code < libraries.BAD_EXTENT:
            library = self.library
            earlier = (
                "it may be that of an earlier kernel, of anybody's: CUDA_LAUNCH_BLOCKING=1 finds it"
            )
            raise RuntimeError(
                f"the CUDA kernels failed at {library.failed_kernel().decode()}: "
                f"{library.error(code).decode()} (CUDA error {code}; "
                f"{cuda_errors.advice(code) or earlier})"
            )
        return code


def _room(q: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=q.device)


register(Cuda())
