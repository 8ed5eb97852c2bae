"""A look at the indices of captured tensors before a call, under FASTATTN_CHECK=1."""

import triton
import triton.language as tl

from .block_mask import added
from .score import (
    SIZES,
    Keys,
    call_of,
    indices,
    item_of,
    key_range,
    rows_of,
    tile_of_program,
    visible,
)


@triton.jit(do_not_specialize=SIZES)
def index_check_kernel(
    errors,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """errors (programs,) int32: 1 for a tile of rows of which one has a key where a program
    indexes a captured tensor out of range, and which at most functions hide; else 0. F is without
    the mask_mod."""
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    tile, b, h = tile_of_program(call.M, T.BM, call.H, call.together, False)
    i0 = tile * T.BM
    item = item_of(b, call, extras, F)
    i1 = tl.minimum(i0 + T.BM, item.M)
    wrong = tl.full([T.BM, T.BN], 0, tl.int32)
    if i0 < item.M:
        rows = rows_of((i0 + tl.arange(0, T.BM))[:, None], h, item, call, extras, F)
        blocks = key_range(i0, i1, item, call, T.BN)
        for j0 in range(blocks.first, blocks.last, T.BN):
            keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
            seen = visible(rows, keys, item, call, F)
            seen &= added(rows, keys, call, extras, F, T.BM, T.BN) > float("-inf")
            b_at, h_at, i_at, j_at = indices(rows, keys, call, extras, F)
            outside = F.outside(b_at, h_at, i_at, j_at, extras.captured)
            wrong |= (seen & outside).to(tl.int32)
    tl.store(errors + tl.program_id(0), tl.max(tl.max(wrong, 1), 0))
