"""Boolean masks with one row for all queries: blocks of keys that it hides are skipped, and blocks
that it shows are not masked."""

import pytest
import torch

import fastattn
from tests.support.backends import (
    every_backend,
    everywhere,
    of_cpu_blocks,
    passed,
    variant,
    variants,
)
from tests.support.cases import FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = of_cpu_blocks
N = 700
PATTERNS = {
    "end": lambda j: j < 300,
    "begin": lambda j: j >= 300,
    "middle": lambda j: (j < 100) | (j > 600),
    "all": lambda j: j < 0,
    "none": lambda j: j >= 0,
    "every_other": lambda j: j % 2 == 0,
    "every_other_block": lambda j: j // 128 % 2 == 0,
    "one": lambda j: j == 511,
}


def masks(pattern):
    """(2,1,1,N): the pattern for the first item, all True for the second."""
    j = torch.arange(N)
    return torch.stack([PATTERNS[pattern](j), j >= 0])[:, None, None]


@every_backend
@parametrize("queries", [3, 200], fast=1)
@parametrize("others", ["", "causal", "gqa+dropout", "window+softcap+lse_loss"], fast=2)
@parametrize("pattern", PATTERNS, fast=2)
def test_skipped_blocks(name, pattern, others, queries, one_thread):
    features = [FEATURE[x] for x in others.split("+") if x]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        problem = build(Dims(2, 2, 2, queries, N, 16, 24), features, dtype)
        problem.kwargs["mask"] = masks(pattern)
        found += everywhere(name, Verdict(problem))
    passed(found)


@every_backend
@pytest.mark.parametrize("pattern", ["middle", "every_other_block"])
def test_blocks_wait_for_skipped_blocks(name, pattern, threads):
    """dq is summed over blocks of keys in order: a skipped block must pass on its turn."""
    problem = build(Dims(1, 1, 1, 300, N, 16, 16), (FEATURE["causal"],), torch.float32)
    problem.kwargs["mask"] = masks(pattern)[:1]
    for isa in variants(name, torch.float32):
        with variant(isa):
            threads(1)
            first = problem.run(fastattn.attention, backend=name)
            for count in (2, 3, 7):
                threads(count)
                found = problem.run(fastattn.attention, backend=name)
                assert all(torch.equal(found[x], first[x]) for x in first)


@every_backend
@pytest.mark.parametrize("step", [1, 2])
def test_masks_with_strided_keys(name, step, one_thread):
    problem = build(Dims(2, 2, 2, 130, N, 16, 16), (), torch.float32)
    problem.kwargs["mask"] = masks("middle").repeat_interleave(step, -1)[..., ::step]
    passed(everywhere(name, Verdict(problem)))


@every_backend
@parametrize("others", ["causal", "bottom_right", "window+gqa", "lengths", "softcap"], fast=3)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_a_mask_that_is_not_broadcast(name, others, kind, one_thread):
    """This gradient is dS itself: 0 where a key is hidden, whatever the memory contained."""
    features = [FEATURE[x] for x in others.split("+")]
    problem = build(Dims(2, 4, 4, 150, 400, 16, 16), features, torch.bfloat16)
    shape = (problem.q.shape[0], problem.q.shape[1], 150, 400)
    problem.kwargs["mask"] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)
    problem.needs_grad += ("mask",)
    passed(everywhere(name, Verdict(problem)))
