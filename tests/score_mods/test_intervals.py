"""Classes of blocks: none is wrong, and of known masks none is missed."""

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.intervals import ALL, NONE, SOME, block_classes
from fastattn.score_mods.tracing import trace_mask_mod
from tests.score_mods import gallery
from tests.score_mods.trees import Tree, trees
from tests.support.marks import parametrize

N, BLOCK = 4096, 128
ROWS = torch.arange(N)
G = torch.Generator().manual_seed(0)
DOCS = torch.randint(0, 13, (N,), generator=G).sort().values.to(torch.int32)
PAD = ROWS < 3000
BATCH = torch.stack([DOCS, DOCS.flip(0)])
GRAPH = torch.zeros(N, N, dtype=torch.bool)
GRAPH[:1000, 2000:3500] = True


def natten(b, h, i, j):
    return ((i // 64 - j // 64).abs() <= 6) & ((i % 64 - j % 64).abs() <= 6)


def block_diffusion(b, h, i, j):
    x = torch.where(i >= 2048, (i - 2048) // 32, i // 32)
    y = torch.where(j >= 2048, (j - 2048) // 32, j // 32)
    return (x >= y) & ((j >= 2048) | ((i < 2048) & (i // 32 == j // 32)))


def nested(b, h, i, j):
    first = (i < 1024) & (j < 1024) & (i > j - 4)
    inside = (i >= 1024) & (i < 2048) & (j >= 1024) & (j < 2048)
    return first | (inside & ((i - 4 - 1024) // 4 == (j - 4 - 1024) // 4))


EXACT = {
    "causal": gallery.causal,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 300),
    "documents": lambda b, h, i, j: DOCS[i] == DOCS[j],
    "documents, causal": lambda b, h, i, j: (DOCS[i] == DOCS[j]) & (i >= j),
    "documents of an item": lambda b, h, i, j: BATCH[b, i] == BATCH[b, j],
    "prefix": lambda b, h, i, j: (j < 700) | (i >= j),
    "sinks and window": lambda b, h, i, j: ((i >= j) & (i - j <= 256)) | ((i >= 4) & (j < 4)),
    "natten": natten,
    "padding": lambda b, h, i, j: PAD[j],
    "padding by a negative index": lambda b, h, i, j: PAD[j - N],
    "dilated": lambda b, h, i, j: ((i - j).abs() <= 512) & ((i - j) % 4 == 0),
    "dilated by bits": lambda b, h, i, j: ((i - j).abs() <= 512) & ((i - j) & 3 == 0),
    "block diffusion": block_diffusion,
    "nested": nested,
    "table of pairs": lambda b, h, i, j: GRAPH[i, j],
    "table of pairs, transposed": lambda b, h, i, j: GRAPH[j, i],
}


def truth(traced, rows, keys, block_rows, block_keys, b=0, h=0):
    """Whether all pairs, and any pair, of each block are seen."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    at = dict(b=torch.tensor(b), h=torch.tensor(h), i=i, j=j)
    seen = evaluate(*traced, **at).expand(rows, keys)
    blocks = [list(x.split(block_keys, 1)) for x in seen.split(block_rows)]
    return [torch.tensor([[bool(f(y)) for y in x] for x in blocks]) for f in (torch.all, torch.any)]


def is_right(got, every, some):
    """No block is called whole that is not, and none empty that shows a pair."""
    return not ((got == ALL) & ~every).any() and not ((got == NONE) & some).any()


@parametrize("name", EXACT, fast=4)
def test_no_block_is_missed(name):
    traced = trace_mask_mod(EXACT[name])
    for b in (0, 1):
        every, some = truth(traced, N, N, BLOCK, BLOCK, b)
        got = block_classes(*traced, N, N, b=b)
        assert torch.equal(got, every.to(torch.uint8) + some.to(torch.uint8))


@pytest.mark.parametrize("blocks", [(1, 1), (3, 5), (16, 4)], ids=str)
@pytest.mark.parametrize("name", gallery.MASKS)
def test_no_block_of_the_gallery_is_wrong(name, blocks):
    traced = trace_mask_mod(gallery.MASKS[name])
    for b, h in ((0, 0), (1, 2)):
        every, some = truth(traced, gallery.N, gallery.N, *blocks, b, h)
        block_rows, block_keys = blocks
        got = block_classes(
            *traced, gallery.N, gallery.N, block_rows=block_rows, block_keys=block_keys, b=b, h=h
        )
        assert is_right(got, every, some)
        if blocks == (1, 1):  # of single pairs nothing is unknown
            assert torch.equal(got == ALL, every)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(tree=trees("bool", scores=False))
def test_no_block_of_a_random_tree_is_wrong(tree: Tree):
    traced = trace_mask_mod(tree.function)
    every, some = truth(traced, 12, 12, 4, 3, 1, 2)
    got = block_classes(*traced, 12, 12, block_rows=4, block_keys=3, b=1, h=2)
    assert is_right(got, every, some), tree.text


FLAGS = torch.tensor([False] * 6 + [True] * 2)
INFINITE = torch.tensor([float("inf"), -float("inf")])
HUGE = torch.tensor([2**62, 0])
HARD = {
    "a divisor that passes zero": lambda b, h, i, j: i // (j - 4) >= 5,
    "a range of a table that passes zero": lambda b, h, i, j: FLAGS[j - 2],
    "infinities of both signs": lambda b, h, i, j: INFINITE[i % 2] + INFINITE[j % 2] <= INFINITE[0],
    "a sum that overflows": lambda b, h, i, j: HUGE[i % 2] + HUGE[j % 2] < 1,
}


@pytest.mark.parametrize("name", HARD)
def test_no_block_is_wrong_where_operators_are_not_monotone(name):
    traced = trace_mask_mod(HARD[name])
    for blocks in ((8, 8), (4, 4), (8, 2), (2, 8)):
        every, some = truth(traced, 8, 8, *blocks)
        got = block_classes(*traced, 8, 8, block_rows=blocks[0], block_keys=blocks[1])
        assert is_right(got, every, some), blocks


def test_the_last_block_ends_with_the_rows():
    traced = trace_mask_mod(lambda b, h, i, j: (i < 10) & (j < 7))
    assert (block_classes(*traced, 10, 7, block_rows=4, block_keys=4) == ALL).all()


def test_a_part_of_a_larger_call():
    traced = trace_mask_mod(EXACT["documents, causal"])
    whole = block_classes(*traced, N, N)
    assert torch.equal(block_classes(*traced, 1024, 512, row=512, key=256), whole[4:12, 2:6])


BIG = torch.tensor([2**62, -(2**62)])
UNKNOWN = {
    "huge numbers": (lambda b, h, i, j: BIG[i % 2] * i * j >= j, 4),
    "not a number": (lambda b, h, i, j: (i - 2.0) * float("inf") >= 0, 8),
    "a root of a negative number": (lambda b, h, i, j: torch.sqrt(i - 4.0) < 5, 8),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    mask, size = UNKNOWN[name]
    got = block_classes(*trace_mask_mod(mask), 8, 8, block_rows=size, block_keys=size)
    assert set(got.flatten().tolist()) == {1}


def test_no_keys():
    traced = trace_mask_mod(gallery.causal)
    assert block_classes(*traced, 0, 5).shape == (0, 1)
    assert block_classes(*traced, 5, 0).shape == (1, 0)


class Computed(TorchDispatchMode):
    """Counts the numbers that operators of torch compute."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def test_a_long_sequence_takes_a_few_numbers_for_each_block():
    """Of its pairs there are 9 billion."""
    docs = torch.randint(0, 200, (96_000,), generator=G).sort().values.to(torch.int32)
    traced = trace_mask_mod(lambda b, h, i, j: (docs[i] == docs[j]) & (i >= j))
    with Computed() as computed:
        got = block_classes(*traced, 96_000, 96_000)
    assert got.numel() == 562_500 and (got != NONE).sum() < 6_000
    assert computed.count < 50 * got.numel()


def test_scores_have_no_classes():
    traced = trace_mask_mod(lambda b, h, i, j: i >= j)
    with pytest.raises(ValueError, match="mask_mod"):
        program = traced.program
        block_classes(type(program)(program.values[:1], ()), (), 4, 4)


ZEROS = torch.zeros(100)
EIGHT = torch.zeros(8)
DIAGONAL, AFTER = torch.eye(4, dtype=torch.bool), torch.arange(4) > 0  # blocks of 64 by 64
OUTSIDE = {  # a mask_mod that hides all it may, and the blocks that are SOME
    "all": (lambda b, h, i, j: ZEROS[j] > 0, AFTER.expand(4, 4)),
    "no element": (lambda b, h, i, j: ZEROS[:0][j] > 0, torch.ones(4, 4, dtype=torch.bool)),
    "by head": (lambda b, h, i, j: ZEROS[h + 100] > 0, torch.ones(4, 4, dtype=torch.bool)),
    "from the end": (lambda b, h, i, j: ZEROS[-1 - i] > 0, AFTER[:, None].expand(4, 4)),
    "a condition before": (
        lambda b, h, i, j: (i // 64 == j // 64) & (ZEROS[j] > 0),
        DIAGONAL & AFTER,
    ),
    "a condition after": (
        lambda b, h, i, j: (ZEROS[j] > 0) & (i // 64 == j // 64),
        AFTER.expand(4, 4),
    ),
    "in range by its bounds": (
        lambda b, h, i, j: EIGHT[(torch.sin(1.0 * i) * 3).to(torch.int64) + 3] > 0,
        torch.zeros(4, 4, dtype=torch.bool),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_block_hides_an_index_out_of_range(name):
    mask, some = OUTSIDE[name]
    got = block_classes(*trace_mask_mod(mask), 256, 256, block_rows=64, block_keys=64)
    assert torch.equal(got, torch.where(some, SOME, NONE))
