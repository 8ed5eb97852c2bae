"""Slices with dense masks, besides those of slices.py."""

import torch
import torch.nn.functional as F

import fastattn
from tests.cuda.test_cuda_emulated import shifted
from tests.support.cases import Dims, build
from tests.support.error_budget import Verdict

from .slices import named


def dense(mask):
    """Complaints about a call with the mask of M x N that mask(rows, keys) makes."""
    problem = build(Dims(2, 2, 1, 150, 333, 24, 24), (), torch.bfloat16)
    problem.kwargs["mask"] = mask(torch.arange(150)[:, None], torch.arange(333))
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("forward")
def dense_mask():
    """Heads and items see different blocks, some of them far away; one row sees one key alone."""
    first = torch.tensor([0, 70, 0, 140]).view(2, 2, 1, 1)

    def shown(i, j):
        blocks = (j >= first) & (j < first + 60 + 10 * (i // 70)) | (j > 300) & (i > 70)
        return torch.where(i == 149, j == 210, blocks)

    return dense(shown)


@named("forward")
def dense_finfo_min():
    """Some rows have nothing else."""
    least = torch.finfo(torch.bfloat16).min
    return dense(lambda i, j: torch.where((j < 200) & (i % 50 < 46), 0.0, least).bfloat16())


@named("forward")
def odd_dense_mask():
    """No row of the mask begins at a multiple of 16 bytes."""

    def lies(i, j):
        mask = torch.where((j <= i) & (j > 1), 0.0, -torch.inf).bfloat16()
        return shifted(F.pad(mask, (0, 3)))[:, :333]

    return dense(lies)


def dense_gradients(mask):
    problem = build(Dims(2, 2, 1, 150, 450, 24, 24), (), torch.bfloat16)
    problem.kwargs["mask"] = mask(torch.arange(150)[:, None], torch.arange(450))
    return Verdict(problem).complaints(fastattn.attention)


@named("backward")
def dense_mask_gradients():
    """Heads and items see different blocks of keys, and one more at the end: adjacent or far away,
    whole tiles and parts. The last rows see nothing."""
    first = torch.tensor([0, 128, 0, 256]).view(2, 2, 1, 1)

    def shown(i, j):
        end = (j > 400) & (i >= 70)
        return ((j >= first) & (j < first + 128) & (i // 64 * 9 <= j - first) | end) & (i < 128)

    return dense_gradients(shown)


@named("backward")
def finfo_min_gradients():
    """finfo.min is all that one row has, which is not the first of its tile."""
    least = torch.finfo(torch.bfloat16).min
    return dense_gradients(lambda i, j: torch.where((j < 200) & (i != 9), 0.0, least).bfloat16())
