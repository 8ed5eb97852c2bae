"""torch's BlockMask in fastattn.flex_attention: its lists decide."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fastattn
from fastattn.dropin import flex, flex_blocks
from tests.support.flex_functions import MASK_MODS, B, visible
from tests.support.torch_version import NO_SLICED_BLOCK_MASKS, skip_without
from tests.torch_api.test_flex_attention import M, N, close, exact, tensors

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SIZE = 8  # of blocks, of which there are 5 x 6
LISTS = {  # for each row of blocks: those of which mask_mod decides, and those that are whole
    "no function": ([[0, y] for y in range(1, 6)], [[]] * 5, lambda b, h, i, j: i > -1),
    "whole blocks skip mask_mod": (
        [[y] for y in range(5)],
        [[y + 1] for y in range(5)],
        MASK_MODS["causal"],
    ),
    "some rows have none": ([[], [1, 2], [], [0], [5]], [[]] * 5, MASK_MODS["both sides"]),
}


def block_mask(name):
    """The BlockMask of some lists, and what it shows (M,N)."""
    partial, whole, mask_mod = LISTS[name]

    def ordered(rows):
        filled = [[*x, *(y for y in range(6) if y not in x)] for x in rows]
        counts = torch.tensor([[[len(x) for x in rows]]], dtype=torch.int32)
        return counts, torch.tensor([[filled]], dtype=torch.int32)

    made = torchs.BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(whole), SIZE, mask_mod, seq_lengths=(M, N)
    )
    shown = torch.zeros(M, N, dtype=torch.bool)
    of_pair = visible(mask_mod, M, N)[0, 0]
    for x in range(5):
        for y in range(6):
            block = slice(x * SIZE, (x + 1) * SIZE), slice(y * SIZE, (y + 1) * SIZE)
            shown[block] = y in whole[x] or (of_pair[block] & (y in partial[x]))
    return made, shown


@pytest.mark.parametrize("name", LISTS)
def test_the_lists_of_a_block_mask_decide(name):
    """Unlisted blocks stay hidden, even where its mask_mod shows their keys. torch's function reads
    the lists where it is compiled."""
    given, (made, shown) = tensors(), block_mask(name)
    out = fastattn.flex_attention(*given, block_mask=made, enable_gqa=True)
    close(out, exact(*given, mask_mod=lambda b, h, i, j: shown[i, j])[0], torch.float32)
    both = fastattn.flex_attention(
        *given, block_mask=made, mask_mod=MASK_MODS["window"], enable_gqa=True
    )
    shown &= visible(MASK_MODS["window"], M, N)[0, 0]
    close(both, exact(*given, mask_mod=lambda b, h, i, j: shown[i, j])[0], torch.float32)


def test_a_block_mask_of_all_blocks_costs_nothing():
    nothing = torchs._create_empty_block_mask(*tensors()[:2])
    assert flex_blocks.mask_mod_of(nothing).__name__ == "noop_mask"
    given = tensors()
    out = fastattn.flex_attention(*given, block_mask=nothing, enable_gqa=True)
    torch.testing.assert_close(out, fastattn.flex_attention(*given, enable_gqa=True))


def test_one_item_of_keys_for_all():
    q, k, v = tensors()
    blocks = torchs.create_block_mask(MASK_MODS["lengths"], B, None, M, N, device="cpu")
    named = dict(block_mask=blocks, enable_gqa=True)
    expected = torchs.flex_attention(q, k[:1], v[:1], **named)
    torch.testing.assert_close(fastattn.flex_attention(q, k[:1], v[:1], **named), expected)


def test_a_cropped_block_mask():
    blocks = torchs.create_block_mask(MASK_MODS["causal"], None, None, 64, 64, device="cpu")
    given = tensors()
    with pytest.raises(ValueError, match=r"got q_len=37 and kv_len=41.*_adjust"):
        fastattn.flex_attention(*given, block_mask=blocks, enable_gqa=True)
    cropped = blocks._adjust(M, N)
    if cropped.shape[-2:] != (M, N):
        pytest.skip("torch rounds the lengths of a cropped block mask up to whole blocks")
    out = fastattn.flex_attention(*given, block_mask=cropped, enable_gqa=True)
    close(out, exact(*given, mask_mod=MASK_MODS["causal"])[0], torch.float32)


def test_block_masks_of_other_lengths_and_slices_are_refused():
    q, k, v = tensors()
    made = block_mask("no function")[0]
    with pytest.raises(ValueError, match="q_len=36"):
        fastattn.flex_attention(q[:, :, 1:], k, v, block_mask=made, enable_gqa=True)
    skip_without(NO_SLICED_BLOCK_MASKS)
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        fastattn.flex_attention(q, k, v, block_mask=made[:, :], enable_gqa=True)


def test_a_torch_without_aux_requests_refuses_them(monkeypatch):
    monkeypatch.setattr(flex, "TORCH_VERSION", (2, 8))
    with pytest.raises(NotImplementedError, match="return_aux: got one with torch 2"):
        fastattn.flex_attention(*tensors(), enable_gqa=True, return_aux=object())
