"""Seeded faults: each breaks one line of the Triton kernels, and the named cases must fail.

The cases are those of test_features, with its sizes and budgets. A fault that no case detects is a
gap in the suite, and fails here.
"""

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fastattn
from fastattn.backends.triton import arguments, job, program_source, runtime
from tests.semantics import test_packed, test_paged, test_storage, test_tangents
from tests.semantics.test_weights import about_weights
from tests.support import large_logits, vmap_dropout
from tests.support.backends import INTERPRETED, every_backend, looked_at
from tests.support.cases import FEATURE, Dims, build, negative_logits, square
from tests.support.error_budget import Verdict
from tests.support.large_logit_rows import far_problem
from tests.triton import test_block_mask, test_triton_captured, test_triton_tangents
from tests.triton.test_triton_paged import unchecked

pytestmark = pytest.mark.usefixtures("one_thread")
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)
from triton.runtime.errors import InterpreterError  # noqa: E402


class Fault(NamedTuple):
    file: str
    old: str
    new: str
    seen_by: list[str]


# Title: file: the cases that detect it (features joined by +); then the code, and the fault.
FAULTS = r"""
causal off by one: score.py: causal
-j <= rows.at + call.right
+j < rows.at + call.right
causal shows one key more: score.py: causal
-keep &= j <= rows.at + call.right
+keep &= j <= rows.at + call.right + 1
left edge off by one: score.py: window
-j >= rows.at - call.left
+j > rows.at - call.left
a padding lane is included: score.py: plain lengths
-keep = (j < item.length) &
+keep = (j <= item.length) &
rows past the end are included: score.py: infinite_key
-& (rows.i < item.M)
+& (rows.i <= item.M)
last block of keys dropped: score.py: plain
-tl.minimum(a1 + ahead, end), lo)
+tl.minimum(a1 + ahead, end) // 16 * 16, lo)
first block of a window dropped: score.py: window
-some_hi, some_lo // BLOCK * BLOCK)
+some_hi, (some_lo + BLOCK - 1) // BLOCK * BLOCK)
a masked block counts as whole: score.py: causal
-tl.minimum(every_hi, some_hi) // BLOCK * BLOCK
+(tl.minimum(every_hi, some_hi) + BLOCK - 1) // BLOCK * BLOCK
whole blocks are judged by their first row: score.py: left_window
-lo = tl.maximum(a1 - 1 - back, 0)
+lo = tl.maximum(a0 - back, 0)
lengths ignored: score.py: lengths
-whole = tl.minimum(tl.maximum(tl.load(extras.lengths + b), 0), whole).to(tl.int32)
+pass
diagonal from N, not the length: score.py: bottom_right+lengths
-diagonal = whole - M
+diagonal = N - M
a larger call's keys ignored: score.py: bottom_right+place
-whole += call.at_key + call.keys_after
+pass
lengths from a part's first key: score.py: lengths+place
-tl.maximum(whole - call.at_key, 0), N)
+tl.maximum(whole, 0), N)
a part's keys begin at 0: score.py: window+place
-diagonal -= call.at_key
+pass
a part's rows begin at 0: score.py: window+place
-if F.bottom_right else call.at_row
+if F.bottom_right else 0
rows after a part ignored: score.py: bottom_right+place
-diagonal += -call.rows_after if
+diagonal += 0 if
draws by row numbers within a part: score.py: dropout+place
-i, j0 = i + call.at_row,
+i, j0 = i,
draws by head numbers within a part: score.py: dropout+place
-h + call.at_head
+h
draws of folded heads do not repeat: score.py: folded
-h %= extras.dropout_head_period
+pass
draws of folded items do not repeat: score.py: folded
-b %= extras.dropout_batch_period
+pass
draws of dq differ from forward's: backward.py: folded
-draw = drawn(rows.h, item.b, call, extras, F)
+draw = rows.h, item.b
draws of dk differ from forward's: backward.py: folded
-draw = drawn(h, item.b, call, extras, F)
+draw = h, item.b
draws of a tangent differ from forward's: jvp.py: folded
-draw = drawn(rows.h, item.b, call, extras, F)
+draw = rows.h, item.b
draws of dq_t differ from forward's: backward_jvp.py: folded
-draw = drawn(rows.h, item.b, call, extras, F)
+draw = rows.h, item.b
draws of dk_t differ from forward's: backward_jvp.py: folded
-draw = drawn(h, item.b, call, extras, F)
+draw = h, item.b
draws by item numbers within a part: score.py: dropout+place
-b + call.at_item
+b
draws by key numbers within a part: score.py: dropout+place
-j0 + call.at_key
+j0
a single draw takes another word: score.py: dropout+place
-tl.where(j % 4 < 2, low, high)
+tl.where(j % 4 < 2, high, low)
left and right are swapped in the rows of a key: score.py: causal
-lo, hi = some(a0, a1, call.right, call.left, item.M)
+lo, hi = some(a0, a1, call.left, call.right, item.M)
scale applied twice: score.py: softcap
-tanh(qk * call.reals.per_softcap)
+tanh(qk * call.reals.per_softcap * call.reals.scale)
softcap's derivative is wrong: score.py: softcap
-derivative = 1 - s * s
+derivative = 1.0
softcap after ALiBi's sign: score.py: alibi
-s -= rows.slope
+s += rows.slope
ALiBi's slope of item 0: score.py: alibi_batch
-tl.load(extras.slopes.ptr + b * extras.slopes.sb
+tl.load(extras.slopes.ptr + b * 0
strides of the mask swapped: score.py: float_mask bool_mask
-tl.minimum(i, call.M - 1).to(tl.int64) * extras.mask.sm
+tl.minimum(i, call.M - 1).to(tl.int64) * extras.mask.sd
mask of head 0: score.py: head_bias_grad
-b * extras.mask.sb + h64 * extras.mask.sh
+b * extras.mask.sb + h64 * 0
False in a mask hides nothing: score.py: bool_mask
-tl.where(seen, s, float("-inf"))
+tl.where(seen, s, 0.0)
sum not rescaled: softmax.py: plain
-l * alpha + tl.sum(p, 1)
+l + tl.sum(p, 1)
output not rescaled: forward.py: plain
-tile_v, acc * alpha[:, None], F)
+tile_v, acc, F)
maximum ignored: softmax.py: plain
-return p, m_new, l
+return p, m, l
empty rows are NaN: softmax.py: bool_mask
-tl.maximum(m_new, LOWEST)
+m_new
a sink adds a value: softmax.py: sinks
-acc * decay[:, None], top, l * decay + share
+acc * (decay + share / l)[:, None], top, l * decay + share
sink not counted: softmax.py: sinks+lse_loss
-top, l * decay + share
+top, l * decay
a draw takes another word: score.py: dropout
-tl.join(tl.join(w0, w2), tl.join(w1, w3))
+tl.join(tl.join(w0, w1), tl.join(w2, w3))
one mask for all heads: score.py: dropout
-zero + tl.cast(h, tl.uint32)
+zero
kept values not scaled: forward.py: dropout
-acc *= call.reals.factor
+acc *= 1.0
wrong key head: forward.py: gqa
-hk = h // call.group
+hk = h % (call.H // call.group)
key gradients from one head: backward.py: gqa
-for g in range(groups):
+for g in range(1):
delta without dLSE: backward.py: lse_loss
-total -= tl.load(from_lse
+total -= 0 * tl.load(from_lse
dropout omitted in dP: backward.py: dropout
-dp = tl.where(keep, dp * call.reals.factor, 0.0)
+dp = dp * 1.0
dk without the scale: backward.py: plain
-acc_k * call.reals.scale
+acc_k
mask gradient of the wrong item: backward.py: head_bias_grad
-part.b + others // part.sum_h,
+part.b,
splits weigh the same: decode.py: decode
-weight = rescale(tl.load(partial_m + at), pivot, F)
+weight = rescale(pivot, pivot, F)
last split dropped: decode.py: decode
-hi = tl.minimum(lo + share, every.last)
+hi = tl.minimum(lo + share, every.last - T.BN)
grouped rows share one head: decode.py: decode
-hk * call.group + tl.where(real, r // M, 0)
+hk * call.group + 0 * r
sums not rescaled by the sink: softmax.py: far_sinks
-decay = rescale(m, pivot, F)
+decay = rescale(pivot, pivot, F)
no tail from forward: softmax.py: far_rows
-tl.where(tl.abs(lse) < float("inf"), tail, 0.0)
+tl.where(tl.abs(lse) < 0, tail, 0.0)
a sequence's rows begin at 0: score.py: packed
-q, M = extent(extras.cu_q, b, call.M, F)
+q, M = Start(0, 0), extent(extras.cu_q, b, call.M, F)[1]
a sequence's keys begin at 0: score.py: packed
-k, N = extent(extras.cu_k, b, call.N, F)
+k, N = Start(0, 0), extent(extras.cu_k, b, call.N, F)[1]
a sequence has as many rows as the longest: score.py: packed+bottom_right
-q, M = extent(extras.cu_q, b, call.M, F)
+q, M = extent(extras.cu_q, b, call.M, F)[0], call.M
a sequence has as many keys as the longest: score.py: packed
-k, N = extent(extras.cu_k, b, call.N, F)
+k, N = extent(extras.cu_k, b, call.N, F)[0], call.N
the normaliser's rows begin at 0: tile.py: packed
-* H + h) * M + at.row + i
+* H + h) * M + i
draws of the first sequence: forward.py: packed+dropout
-drawn(rows.h, item.b, call
+drawn(rows.h, item.q.b, call
the slope of the first sequence: score.py: packed+alibi_batch
-b = tl.cast(item.b, tl.int64)
+b = tl.cast(item.q.b, tl.int64)
splits begin at the first row: decode.py: packed_decode
-of_split = Start(split * call.items + item.q.b, item.q.row)
+of_split = Start(split * call.items + item.q.b, 0)
the first sequence's pages: tile.py: paged
-pages.table + tl.cast(b, tl.int64) * pages.blocks + block
+pages.table + block
page sizes are rounded to a power of two: tile.py: paged
-block = j // F.step // pages.steps
+block = j // F.step
rows of a page are rounded to a power of two: tile.py: paged
-j - block * (F.step * pages.steps)
+j - block * F.step
every row of a page is the first: tile.py: paged
-at = at[:, None] + d.to(tl.int64)[None, :] * x.sd
+at = (src + page * x.sb)[:, None] + d.to(tl.int64)[None, :] * x.sd
every tile of a page is the first: tile.py: paged
-load(x, src + page * x.sb, row, rows - j0 + row,
+load(x, src + page * x.sb, 0, rows - j0 + row,
a page's keys end at the sequence's length: tile.py: paged
-load(x, src + page * x.sb, row, rows - j0 + row,
+load(x, src + page * x.sb, row, rows,
a row past the length is gathered: tile.py: paged
-fetch(at, j0 + tl.arange(0, BN) < rows,
+fetch(at, j0 + tl.arange(0, BN) < rows + 1,
a page number below 0 is not clamped: tile.py: paged_by_one
-tl.minimum(tl.maximum(page, 0), pages.count - 1)
+tl.minimum(page, pages.count - 1)
a page number past the last is not clamped: tile.py: paged_by_one
-tl.minimum(tl.maximum(page, 0), pages.count - 1)
+tl.minimum(tl.maximum(page, 0), pages.count)
more keys than the pages have room for: score.py: paged_by_one
-tl.minimum(call.N, extras.pages.room)
+call.N
values of the previous block: forward.py: paged
-tile_v = load_keys(v, v_from, j0, item.length, found,
+tile_v = load_keys(v, v_from, j0, item.length, look_up(0, item.b, 1, extras.pages, F, T.BN, True),
eight-bit rows without their scale: tile.py: eight_bits
-narrow(x * scales[:, None], dtype)
+narrow(x, dtype)
the second product is forgotten: forward.py: wide
-        qk = dot(tile_q[1], tl.trans(more), qk, F)
+
the second product replaces the first: forward.py: wide
-tl.trans(more), qk, F)
+tl.trans(more), qk * 0, F)
the second product takes the first columns: tile.py: wide
-Operand(x.ptr + tl.full([], columns, tl.int64) * x.sd,
+Operand(x.ptr + tl.full([], 0, tl.int64) * x.sd,
columns past the last are multiplied: forward.py: wide
-length, found, F, T.DX, T.BN, T.BX, MASKED)
+length, found, F, T.BX, T.BN, T.BX, MASKED)
few rows leave out the second columns: decode.py: wide_decode
-gather(past(q, T.D), item.q, h, i, real, T.DX, T.BX))
+gather(past(q, T.D), item.q, h, i, real, 0, T.BX))
few rows of another query: decode.py: wide_decode
-head_of(x, at, h) + i.to(tl.int64) * x.sm
+head_of(x, at, h) + (i * 0).to(tl.int64) * x.sm
keys serve as values: forward.py: wide
-        if F.latent:
+        if T.BX:
values with the scales of keys: forward.py: eight_bits
-load_scales(extras.v_scale, v_by,
+load_scales(extras.k_scale, k_by,
one scale for two rows: tile.py: eight_bits
-return tl.load(at, mask=j0 + n < rows, other=0.0)
+return tl.load(at - (n % 2) * x.sm, mask=j0 + n < rows, other=0.0)
the sign of float8 omitted: tile.py: eight_bits
-(bits & 0x80) << 8 | (bits & 0x7F) << 7
+(bits & 0x7F) << 7
no tail from decode: decode.py: far_query
-row < all_rows, lse, tail, call)
+row < all_rows, lse, 0 * tail, call)
tail of another row: softmax.py: far_rows
-to_tail + row, tail
+to_tail + row // 2, tail
tail added to scores: score.py: far_rows
-((s - level) - rest) * LOG2E
+((s - level) + rest) * LOG2E
tail added to the LSE first: score.py: far_rows
-((s - level) - rest) * LOG2E
+(s - (level + rest)) * LOG2E
dq without the tail: backward.py: far_rows
-(level[:, None], rest[:, None]), row_delta
+(level[:, None], 0 * rest[:, None]), row_delta
dk and dv without the tail: backward.py: far_rows
-(level[None, :], rest[None, :])
+(level[None, :], 0 * rest[None, :])
mask gradient without the tail: backward.py: far_rows
-levels = (level[:, None], rest[:, None])
+levels = (level[:, None], 0 * rest[:, None])
weights without the tail: weights.py: far_weights
-rest[:, None]), call, F)
+0 * rest[:, None]), call, F)
tail dropped in base two: score.py: far_logits
-(lse * LOG2E_REST + rest * LOG2E)
+(lse * LOG2E_REST)
rounding of the level dropped: score.py: far_logits
-rest = fma(lse, LOG2E, -level) +
+rest = 0 * level +
log2(e) rounded to 24 bits: score.py: far_logits
-(lse * LOG2E_REST + rest * LOG2E)
+(rest * LOG2E)
tail in base two added to scores: score.py: far_logits
--level) - rest)
+-level) + rest)
tail of the sum omitted: softmax.py: far_logits
-(fma(-lse, LOG2E, m) - lse * LOG2E_REST + log2_l) * LN2
+0 * lse
one row without finfo.min hides finfo.min for all: block_mask.py: blocks
-if tl.max(needs) == 0.0:
+if tl.min(needs) == 0.0:
rows without keys count as rows of finfo.min: block_mask.py: blocks
-(most <= LEAST) & seen
+(most <= LEAST)
a row sees keys outside its band: block_mask.py: blocks
-seen = tl.max(tl.where(near, x, float("-inf")), 1)
+pass
a run continues past a block with hidden keys: block_mask.py: blocks
-begin = tl.where(whole, begin, at + STEP)
+pass
a run continues past the edge of a band: block_mask.py: blocks
-whole = inside & (most == 0)
+whole = (most == 0)
a hidden block is on the list: block_mask.py: blocks
-n += keep.to(tl.int32)
+n += 1
NaN in a mask hides: block_mask.py: nan
-tl.where(found == found, found, 1.0)
+found
lists of the first head: block_mask.py: over_blocks
-b * found.sb + h * found.sh
+b * found.sb + 0 * h
the run is processed twice: block_mask.py: over_blocks
-return Blocks(full, begin, end, tail, listed)
+return Blocks(full, begin, begin, tail, listed)
blocks at the first edge dropped: block_mask.py: over_blocks
-return Blocks(0, full, tail,
+return Blocks(full, full, tail,
list indices are used as block indices: score.py: over_blocks
-block = tl.load(blocks.listed + block)
+pass
a mask of listed blocks is not read: score.py: over_blocks
-not (F.block_mask and PART == WHOLE)
+not F.block_mask
products without the first's tangent: tangent.py: moved
-product = dot(a_t, tl.trans(b), product, F)
+pass
products without the second's tangent: tangent.py: moved
-product = dot(a, tl.trans(b_t), product, F)
+pass
tangents of scores without the scale: tangent.py: moved
-qk_t * (phi * call.reals.scale), 0.0
+qk_t * phi, 0.0
tangents of scores without softcap: tangent.py: moved+softcap
-qk_t * (phi * call.reals.scale), 0.0
+qk_t * call.reals.scale, 0.0
softcap's second derivative has another sign: tangent.py: moved+softcap
-phi_t = -(call.reals
+phi_t = (call.reals
softcap's second derivative without the first derivative: tangent.py: moved+softcap
-* bent * phi * qk_t
+* bent * qk_t
a mask's tangent is ignored: tangent.py: moved+bias_grad
-s_t += moved_mask(
+moved_mask(
a mask's tangent by other strides: tangent.py: moved+bias_grad
-to(tl.int64) * mask_t.sm
+to(tl.int64) * mask_t.sd
a mask's tangent of head 0: tangent.py: moved+bias_grad
-tl.cast(rows.h, tl.int64) * mask_t.sh
+0 * mask_t.sh
hidden keys change the LSE's tangent: jvp.py: moved_hidden
-p_t = tl.where(p > 0, p * s_t, 0.0)
+p_t = p * s_t
a sink's tangent is ignored: jvp.py: moved+sinks+lse_loss
-moved += tl.where(share > 0, share * tl.load(u.sinks + h), 0.0)
+pass
the output without the LSE's tangent: jvp.py: moved
-acc -= moved[:, None] * tile_o.to(tl.float32)
+pass
values' tangents are ignored: jvp.py: moved
-acc = dot(narrow(p, tile_vt.dtype), tile_vt, acc, F)
+pass
dropout omitted in probabilities' tangents: jvp.py: moved+dropout
-p, p_t = tl.where(keep, p, 0.0), tl.where(keep, p_t, 0.0)
+p = tl.where(keep, p, 0.0)
dropout omitted with values' tangents: jvp.py: moved+dropout
-p, p_t = tl.where(keep, p, 0.0), tl.where(keep, p_t, 0.0)
+p_t = tl.where(keep, p_t, 0.0)
kept tangents not scaled: jvp.py: moved+dropout
-acc *= call.reals.factor
+acc *= 1.0
delta_t without dO O_t: backward_jvp.py: moved
-total = tl.sum(tile_do.to(tl.float32) * tile_ot.to(tl.float32), 1)
+total = tl.full([T.BM], 0, tl.float32)
delta_t without dO_t O: backward_jvp.py: moved
-total += tl.sum(tile_dot.to(tl.float32) * tile_o.to(tl.float32), 1)
+pass
delta_t without dLSE_t: backward_jvp.py: moved+sinks+lse_loss
-total -= tl.load(at, mask=inside, other=0.0)
+pass
probabilities' tangents without the LSE's: backward_jvp.py: moved
-live, rate, dropped = p > 0, s_t - lse_t, p
+live, rate, dropped = p > 0, s_t, p
dS without delta: backward_jvp.py: moved
-ds = p * (dp - delta)
+ds = p * dp
dS_t without P_t: backward_jvp.py: moved
-ds_t = ds * rate + p * (dp_t - delta_t)
+ds_t = p * (dp_t - delta_t)
dS_t without dP_t: backward_jvp.py: moved
-ds * rate + p * (dp_t - delta_t)
+ds * rate + p * -delta_t
dS_t without delta_t: backward_jvp.py: moved
-ds * rate + p * (dp_t - delta_t)
+ds * rate + p * dp_t
dS_t without softcap: backward_jvp.py: moved+softcap
-dqk, dqk_t = ds * phi, ds_t * phi
+dqk, dqk_t = ds * phi, ds_t
dS without softcap: backward_jvp.py: moved+softcap
-dqk, dqk_t = ds * phi, ds_t * phi
+dqk, dqk_t = ds, ds_t * phi
softcap's second derivative omitted: backward_jvp.py: moved+softcap
-dqk_t += ds * phi_t
+pass
dropout omitted in dP_t: backward_jvp.py: moved+dropout
-dp_t = tl.where(keep, dp_t * call.reals.factor, 0.0)
+dp_t = dp_t * 1.0
dropout omitted in P_t of dV: backward_jvp.py: moved+dropout
-dropped_t = tl.where(live, dropped * rate, 0.0)
+dropped_t = tl.where(live, p * rate, 0.0)
dropout omitted in P of dV: backward_jvp.py: moved+dropout
-dropped = tl.where(keep, p, 0.0)
+dropped = p
hidden keys change dS's tangent: backward_jvp.py: moved_hidden
-tl.where(live, dqk, 0.0), tl.where(live, dqk_t, 0.0)
+tl.where(live, dqk, 0.0), dqk_t
dQ_t without K_t: backward_jvp.py: moved
-acc = dot(narrow(dqk, tile_k.dtype), tile_kt, acc, F)
+pass
dK_t without Q_t: backward_jvp.py: moved
-dk_t = dot(narrow(dqk, tile_q.dtype), tile_qt, dk_t, F)
+pass
dV_t without dO_t: backward_jvp.py: moved
-dv_t = dot(narrow(p, tile_do.dtype), tile_dot, dv_t, F)
+pass
dV_t without P_t: backward_jvp.py: moved
-dv_t = dot(narrow(p_t, tile_do.dtype), tile_do, dv_t, F)
+pass
dQ_t without the scale: backward_jvp.py: moved
-acc * call.reals.scale, T.D, T.BM
+acc, T.D, T.BM
dK_t without the scale: backward_jvp.py: moved
-acc_k * call.reals.scale
+acc_k
kept dV_t not scaled: backward_jvp.py: moved+dropout
-acc_v *= call.reals.factor
+acc_v *= 1.0
key tangents from one head: backward_jvp.py: moved+gqa
-hk * groups + g, blocks
+hk * groups, blocks
the mask's gradient tangent is that of q.k: backward_jvp.py: moved+bias_grad+softcap
-_, _, _, _, ds_t = gradients_t(
+_, _, _, ds_t, _ = gradients_t(
a sequence's rates begin at 0: backward_jvp.py: moved_packed
-row = rates + row_index(at, h, i, call.H, pitch)
+row = rates + row_index(Start(at.b, 0), h, i, call.H, pitch)
a sequence's tangents begin at 0: tangent.py: moved_packed
-head_of(x, at, h), i0, rows
+head_of(x, at, h) - at.row * x.sm, i0, rows
captured gradients at scores without the scale: backward.py: captured
-s = qk * call.reals.scale
+s = qk
captured gradients from dS of q.k: backward.py: captured
-extras.captured, ds, captured_sums
+extras.captured, dqk, captured_sums
captured gradients of hidden pairs: program_functions.py: captured
-tl.where(ds == 0, 0.0, product(ds, slope))
+product(ds, slope)
captured terms without their sign: program_functions.py: captured_sums
-amount = tl.where(bits < 0, -amount, amount)
+pass
captured terms without their first bit: program_functions.py: captured_sums
-fraction << 1, fraction | 0x800000
+fraction << 1, fraction
subnormal terms in another unit: program_functions.py: captured_sums
-fraction << 1, fraction | 0x800000
+fraction, fraction | 0x800000
captured terms without their exponent in a range: program_functions.py: captured_sums
-digits << (exponent & ((1 << SHIFT) - 1)).to(tl.int64)
+digits
all ranges of exponents are the first: program_functions.py: captured_sums
-exponent >> SHIFT, BUCKETS + which
+0 * exponent, BUCKETS + which
-inf counts as inf: program_functions.py: captured_sums
-tl.where(bits < 0, 1, 0)
+0
NaN counts as inf: program_functions.py: captured_sums
-tl.where(fraction != 0, 2,
+tl.where(fraction < 0, 2,
sums of numbers overlap: program_functions.py: captured_sums
-at * (BUCKETS + NOT_FINITE)
+at * BUCKETS
"""


def faults():
    """{title: Fault}"""
    lines = FAULTS.strip().splitlines()
    for heading, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        title, file, seen_by = heading.split(": ")
        assert old[0] == "-" and new[0] == "+", heading
        yield title, Fault(file, old[1:], new[1:], seen_by.split())


FAULT = dict(faults())


def problems(names):
    """The problems of a case, each with its negative-logit probe where there is one."""
    if names in FAR:
        yield far_problem(FAR[names], "-1e9", "float32")
    elif names == "decode":
        yield build(square(2, 2, 200, 16), (FEATURE["one_query"], FEATURE["gqa"]), torch.float32)
    else:
        features = tuple(FEATURE[name] for name in names.split("+") if name != "plain")
        for dims in (square(2, 2, 37, 17), square(1, 2, 70, 17)):
            problem = build(dims, features, torch.float32)
            yield problem
            yield negative_logits(problem)


verdicts = {}


def infinities_spread():
    """True if the NaN that a key of -inf makes in tile rows past the last reaches a gradient."""
    problem = build(square(1, 1, 5, 8), (), torch.float32)
    problem.k[0, 0, 3] = -torch.inf
    problem = replace(problem, q=problem.q.abs(), needs_grad=("k", "v"))
    found = problem.run(fastattn.attention, backend="triton")
    return not all(x.isfinite().all() for x in found.values())


# Rows with logits far from zero, from a mask or from q.k: these need the tail of the normaliser.
FAR = {"far_rows": "some rows", "far_query": "one query", "far_sinks": "sinks"}


# Cases of test_block_mask.py; each detects one of the faults.
BLOCKS = (
    ("rows of none", "finfo.min", "", "rows"),
    ("rows of none", "finfo.min", "", "keys"),
    ("after", "finfo.min", "lengths", "rows"),
    ("two runs", "bool", "", "rows"),
    ("all", "bool", "causal", "rows"),
    ("gaps", "bool", "", "rows"),
)


def over_blocks():
    """Attention over the blocks that a mask shows, which differ from head to head."""
    i, j = torch.arange(70)[:, None], torch.arange(170)
    shown = [test_block_mask.MASKS[x](i, j).expand(70, 170) for x in ("gaps", "two runs")]
    for names in ("", "window"):
        features = tuple(FEATURE[x] for x in names.split())
        problem = build(Dims(1, 2, 1, 70, 170, 16, 16), features, torch.float32)
        problem.kwargs["mask"] = torch.stack(shown)
        problem.name += ": of blocks"
        if complains(Verdict(problem)):
            return True
    return False


def fails(test, *args):
    try:
        test(*args)
    except AssertionError:
        return True
    return False


def notices(names):
    if names == "blocks":
        return any(fails(test_block_mask.test_blocks, *x) for x in BLOCKS)
    if names == "nan":
        return fails(test_block_mask.test_nan_hides_nothing, "rows")
    if names == "over_blocks":
        with looked_at():
            return over_blocks()
    if names == "infinite_key":
        return infinities_spread()
    if names == "far_logits":
        return any(large_logits.complaints(large_logits.far_logits(torch.float32), "triton"))
    if names == "far_weights":
        problem = far_problem("some rows", "-1e9", "float32")
        return any(about_weights("triton", problem, average=False))
    if names == "folded":
        return any(vmap_dropout.complaints("triton", ways=["items heads"]))
    if names == "captured":
        return of_captured()
    if names == "captured_sums":
        exact = fails(test_triton_captured.test_sums_are_exact_in_any_order, 3)
        return exact or fails(test_triton_captured.test_terms_that_are_not_finite)
    if names.startswith("moved"):
        return of_tangents(names)
    if names.startswith("packed"):
        return of_packed(*names.split("+"))
    if names.startswith("paged"):
        return in_pages(names)
    if names.startswith("eight_bits"):
        return of_eight_bits()
    if names.startswith("wide"):
        return of_two_products(3 if "decode" in names else 20)
    for problem in problems(names):
        verdict = verdicts.setdefault(problem.name, None) or Verdict(problem)
        verdicts[problem.name] = verdict
        if complains(verdict):
            return True
    return False


def of_captured():
    wrong = fails(test_triton_captured.test_beside_other_arguments, "head", "causal, softcap")
    return wrong or fails(test_triton_captured.test_hidden_pairs_have_no_part, "triton", 0.0)


def of_tangents(names):
    if names == "moved_hidden":
        return test_triton_tangents.hidden_leaks()
    if names == "moved_packed":
        return of_packed_tangents()
    features = [FEATURE[x] for x in names.split("+")[1:]]
    problem = build(square(1, 2, 5, 3), features, torch.float32)
    return detected(lambda: test_triton_tangents.wrong(problem))


def of_packed_tangents():
    try:
        test_tangents.test_packed("triton", ())
    except AssertionError:
        return True
    return False


def of_packed(shape, *features):
    """The longest sequence is last, so a fault that uses its length for all stays in memory."""
    sizes = ((0, 5), (1, 40), (3, 170)) if "decode" in shape else ((5, 7), (17, 16), (18, 21))
    made = test_packed.batch([FEATURE[x] for x in features], torch.float32, sizes)
    return detected(lambda: list(test_packed.everywhere("triton", made)))


def in_pages(shape):
    """True if keys in pages give other bits than contiguous keys, or than the clamped table."""
    if "by_one" in shape:
        pairs = [unchecked("triton", "by one", max_k=50)]
    else:
        made = test_packed.batch((), torch.float32, ((5, 7), (17, 16), (18, 70)))
        each = [behind_nan(test_paged.in_pages(made, page)) for page in (5, 64)]
        right, *found = (
            fastattn.attention_packed(**x, return_lse=True, backend="triton")
            for x in (made.given, *each)
        )
        pairs = [(x, right) for x in found]
    return not all(torch.equal(x, y) for pair in pairs for x, y in zip(*pair, strict=True))


def of_eight_bits():
    """True if keys in eight bits give other bits than the dequantised rows."""
    made = test_packed.batch((), torch.float32, ((5, 7), (17, 16), (18, 70)))
    stored, plain = test_storage.kept(made, torch.float8_e4m3fn)
    found, right = (test_storage.run(x, "triton") for x in (stored, plain))
    return not all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


def of_two_products(rows):
    """True if forward of keys with 150 columns, in memory of 160, is wrong."""
    problem = build(Dims(1, 2, 1, rows, 200, 150, 128), (), torch.float32)
    memory = torch.full((*problem.k.shape[:3], 160), torch.nan)
    memory[..., :150] = problem.k
    problem.k = memory[..., :150]
    verdict = Verdict(problem, backward=False)
    return detected(lambda: verdict.complaints(fastattn.attention, backend="triton"))


def behind_nan(given):
    """The same pages after a first page of NaN."""
    pools = {x: torch.cat([torch.full_like(given[x][:1], torch.nan), given[x]]) for x in "kv"}
    return given | pools | dict(block_table=given["block_table"] + 1)


def complains(verdict):
    return detected(lambda: verdict.complaints(fastattn.attention, backend="triton"))


def detected(complaints):
    """True if a fault is detected; a numpy warning counts: memory past a tensor holds any value."""
    try:
        return bool(complaints())
    except InterpreterError as error:
        cause = error
        while cause.__cause__:
            cause = cause.__cause__
        if isinstance(cause, RuntimeWarning):
            return True
        raise


PACKAGE = importlib.import_module("fastattn.kernels")
SOURCE = Path(next(iter(PACKAGE.__path__)))
IN_ORDER = ("tile", "score", "block_mask", "softmax", "forward", "backward", "decode", "weights")
IN_ORDER += ("tangent", "jvp", "backward_jvp", "program_functions")


@pytest.fixture
def kernels_in():
    """A function that loads fastattn.kernels from a folder; the real ones are put back."""
    names = [f"fastattn.kernels.{name}" for name in IN_ORDER]
    before = {name: importlib.import_module(name) for name in names}

    def install(modules):
        cached = runtime.kernels, arguments.flags, arguments.scalars, program_source.functions_of
        for each in cached:
            each.cache_clear()
        for name, module in modules.items():
            sys.modules[name] = module
            setattr(PACKAGE, name.rpartition(".")[2], module)

    def use(folder):
        install({})
        for name in names:
            path = folder / f"{name.rpartition('.')[2]}.py"
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            install({name: module})
            spec.loader.exec_module(module)

    yield use
    install(before)


@every_backend
@pytest.mark.parametrize("what", FAULT)
def test_a_fault_is_detected(name, what, kernels_in, tmp_path):
    fault = FAULT[what]
    folder = tmp_path / "kernels"
    shutil.copytree(SOURCE, folder)
    text = (folder / fault.file).read_text()
    times = text.count(fault.old)
    assert times == 1, f"{fault.old!r} is in {fault.file} {times} times"
    (folder / fault.file).write_text(text.replace(fault.old, fault.new))
    kernels_in(folder)
    assert any(notices(names) for names in fault.seen_by), f"{what}: no test failed"


@every_backend
def test_the_gradient_of_sinks_without_the_tail_is_detected(name, monkeypatch):
    """This gradient is computed outside the kernels, so its fault is not in the table."""
    right = job.Job.sink_gradient

    def forgetful(own, *args):
        own.normaliser = torch.stack((own.normaliser[0], torch.zeros_like(own.normaliser[1])))
        return right(own, *args)

    assert not notices("far_sinks")
    monkeypatch.setattr(job.Job, "sink_gradient", forgetful)
    assert notices("far_sinks")


@every_backend
@pytest.mark.parametrize("names", sorted({x for f in FAULT.values() for x in f.seen_by}))
def test_the_source_without_faults_passes(name, names, kernels_in, tmp_path):
    shutil.copytree(SOURCE, tmp_path / "kernels")
    kernels_in(tmp_path / "kernels")
    assert not notices(names)
