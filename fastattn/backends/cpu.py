"""Launcher of the C++ kernels in csrc/cpu: a short way for tiny calls, and errors by status."""

from __future__ import annotations

from torch import Tensor, get_num_threads

from ..call.spec import Feature, Tensors
from ..call.validation import DTYPES
from ..score_mods.encoding import encode
from .base import BAD_INDEX, COMMON_FEATURES, Support, check_values, register
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
            | Feature.SCORE_MOD
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
        form = _with_code(like) if spec.score_mod else like.form
        given = form, PLACES[which], (*t, *after), get_num_threads()
        status = launch(libraries.cpu().run_at, which, like.brief, *given)
        if status == libraries.OK:
            return
        if status == libraries.BAD_INDEX:
            raise IndexError(BAD_INDEX)
        if status in (libraries.BAD_LENGTH, libraries.BAD_OFFSET, libraries.BAD_PAGE):
            check_values(spec, t)
        if status >= libraries.BAD_EXTENT:
            raise refused(status, spec, dict(zip(AFTER[which], after)))
        if status == libraries.NO_MEMORY:
            raise MemoryError("the CPU kernels could not allocate their scratch memory")
        raise RuntimeError(f"the CPU kernels returned the unknown status {status}")


def _with_code(like: Prepared) -> bytes:
    """FaCall without tensors, with the code of the score_mod. The spec keeps the code."""
    spec = like.spec
    found = spec.launcher_cache.get("with_code")
    if found is None:
        operators = libraries.cpu().score_mod_ops
        code = encode(spec.score_mod, spec.floats, spec.ints, operators)
        at, end = libraries.offset("code"), libraries.offset("code") + 8
        address = libraries.POINTER.pack(code.buffer_info()[0])
        form = like.form[:at] + address + like.form[end:]
        found = spec.launcher_cache["with_code"] = form, code
    return found[0]


register(Cpu())
