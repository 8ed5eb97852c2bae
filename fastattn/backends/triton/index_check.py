"""The check of indices of captured tensors before Triton's kernels run."""

from __future__ import annotations

import torch

from ..base import BAD_INDEX
from ..shared.value_checks import checks_values
from .arguments import blocks
from .job import Job
from .runtime import kernels


def check_indices(job: Job) -> None:
    """Raise IndexError if a program indexes a captured tensor out of range at a pair that is seen.

    On a GPU this runs only if FASTATTN_CHECK=1, as `check_values` does; otherwise such an index is
    clamped.
    """
    if job.flags.outside is None or not checks_values(job.device):
        return
    c = job.config("index_check")
    programs = blocks(job.M, c.BM) * job.spec.B * job.spec.H
    found = job.t.q.new_empty(programs, dtype=torch.int32)
    job.launch(
        kernels().index_check.index_check_kernel,
        "index_check",
        lambda c: programs,
        (),
        (found,),
        F=job.flags._replace(block_mask=False, tma=False),
    )
    if found.any():
        raise IndexError(BAD_INDEX)
