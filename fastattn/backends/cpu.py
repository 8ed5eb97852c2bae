"""Launcher of the C++ kernels in csrc/cpu: a short way for tiny calls, and errors by status."""

from __future__ import annotations

from torch import Tensor, get_num_threads

from ..call.spec import Feature, Tensors
from ..call.validation import DTYPES
from .base import COMMON_FEATURES, Support, check_values, register
from .native import libraries
from .native.extents import refused
from .native.marshalling import launch
from .native_launcher import AFTER, PLACES, Launcher, Prepared, convert


class Cpu(Launcher):
    name = "cpu"
    makes_all = True
    support: Support = Support(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        max_head_dim=libraries.CPU_MAX_HEAD_DIM,
        features=(
            COMMON_FEATURES
            | Feature.INVARIANT
            | Feature.QUANTISED
            | Feature.TANGENTS
            | Feature.UNROUNDED
        ),
    )

    def unavailable(self) -> str | None:
        return libraries.cpu_unavailable()

    def _launch(
        self, which: int, like: Prepared, t: Tensors, after: tuple[Tensor | None, ...]
    ) -> None:
        # Packs and launches in one step, without a workspace: the library allocates its own.
        spec = like.spec
        if spec.given:
            t = convert(spec, t)
        given = like.form, PLACES[which], (*t, *after), get_num_threads()
        status = launch(libraries.cpu().run_at, which, like.brief, *given)
        if status == libraries.OK:
            return
        if status in (libraries.BAD_LENGTH, libraries.BAD_OFFSET, libraries.BAD_PAGE):
            check_values(spec, t)
        if status >= libraries.BAD_EXTENT:
            raise refused(status, spec, dict(zip(AFTER[which], after)))
        if status == libraries.NO_MEMORY:
            raise MemoryError("the CPU kernels could not allocate their scratch memory")
        raise RuntimeError(f"the CPU kernels returned the unknown status {status}")


register(Cpu())
