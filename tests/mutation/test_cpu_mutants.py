"""Seeded faults: each breaks one line of the C++ kernels, and the slice named with it must notice.

The kernels are compiled for one instruction set, in float32 only and without optimisation, in three
seconds each; those on AMX's tiles for the tile model, in bfloat16. If its slice does not notice a
fault, the suite has a gap, and the test of that fault fails.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.backends.native import libraries
from fastattn.call.int4 import INT4
from tests.gpu_emulation.emulator import compiler
from tests.kv_cache import test_new_rows
from tests.semantics import test_extents
from tests.semantics.test_extents import CASES as WRITTEN
from tests.semantics.test_extents import changed, refuse
from tests.semantics.test_int4 import kept as kept_int4
from tests.semantics.test_packed import FEW, batch
from tests.semantics.test_paged import in_pages
from tests.semantics.test_storage import exact as exact_bytes
from tests.semantics.test_storage import kept
from tests.semantics.test_storage import run as run_packed
from tests.semantics.test_weights import about_weights
from tests.support import build_lock, cases, vmap_dropout
from tests.support.backends import INTERPRETED, variant
from tests.support.cases import FEATURE
from tests.support.checkout import ROOT
from tests.support.edge_cases import problems
from tests.support.error_budget import Verdict

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
]


class Fault(NamedTuple):
    file: str
    old: str
    new: str
    seen_by: str


# Title: file: the slice that notices; then the code as it is, and the fault.
FAULTS = r"""
a key too many where length % 128 is 127: common/band.h: length_edges
-most(0, least(p.lengths[b], all_keys(p))) : all_keys(p);
+most(0, least(p.lengths[b] + (p.lengths[b] % 128 == 127), all_keys(p))) : all_keys(p);
lengths ignored: common/band.h: lengths
-return p.lengths ? most(0, least(p.lengths[b], all_keys(p))) : all_keys(p);
+return all_keys(p);
diagonal from N, not the length: common/band.h: bottom_right+lengths
-p.bottom_right ? whole_length(p, b) - (
+p.bottom_right ? all_keys(p) - (
keys after a part are ignored: common/band.h: bottom_right+place
-return p.at_key + p.N + p.keys_after;
+return p.at_key + p.N;
lengths are counted from a part's first key: common/band.h: lengths+place
-least(whole_length(p, b) - p.at_key, p.N)
+least(whole_length(p, b), p.N)
rows after a part are ignored: common/band.h: bottom_right+place
-(p.at_row + p.M + p.rows_after)
+(p.at_row + p.M)
rows are counted from a part's first row: common/band.h: window+place
-return shift + p.at_row - p.at_key;
+return shift - p.at_key;
key heads are interleaved: common/band.h: weights+gqa
-return h / (p.H / p.Hk);
+return h % p.Hk;
band one key short on the right: common/band.h: causal
-i1 - 1 + shift + p.right + 1, key_length
+i1 - 1 + shift + p.right, key_length
band one key short on the left: common/band.h: window
-return clip(i0 + shift - p.left, i1 - 1
+return clip(i0 + shift - p.left + 1, i1 - 1
whole blocks are judged by their last row: common/band.h: causal
-i0 + shift + p.right + 1, key_length
+i1 - 1 + shift + p.right + 1, key_length
whole blocks are judged by their first row: common/band.h: left_window
-return clip(i1 - 1 + shift - p.left, i0
+return clip(i0 + shift - p.left, i0
kept values not scaled: common/philox.h: dropout
-1.0 / (1.0 - p)};
+1.0};
p = 1 keeps all: common/philox.h: dropout_of_all
-if (p >= 1.0) return {0xFFFFFFFFu, 0.0};
+if (p >= 1.0) return {0, 1.0};
nine rounds: common/philox.h: dropout
-constexpr int rounds = 10;
+constexpr int rounds = 9;
draws by key numbers within a part: cpu/score/tile.h: dropout+place
-const int64_t first = p.at_key + keys.j0;
+const int64_t first = keys.j0;
draws in fours that start at a part's first key: cpu/score/tile.h: dropout+place
-for (int64_t j = -(first % 4); j < keys.count; j += 4) {
+for (int64_t j = 0; j < keys.count; j += 4) {
draws by row numbers within a part: cpu/score/tile.h: dropout+place
-uint32_t(p.at_row + rows.i0 + l + x);
+uint32_t(rows.i0 + l + x);
draws by head numbers within a part: cpu/score/tile.h: dropout+place
-drawn(p.at_head, rows.h,
+drawn(0, rows.h,
draws by item numbers within a part: cpu/score/tile.h: dropout+place
-drawn(p.at_item, rows.b,
+drawn(0, rows.b,
draws of folded items do not repeat: cpu/score/tile.h: folded
-rows.b, p.items_again);
+rows.b, 0);
draws of folded heads do not repeat: cpu/score/tile.h: folded
-rows.h, p.heads_again);
+rows.h, 0);
draws of folded heads do not repeat, on tiles: cpu/score/tile.h: folded
-rows.h, p.heads_again);
+rows.h, 0);
draws repeat at the larger call's first item: common/philox.h: folded
-if (period) x = static_cast<uint32_t>(x) % static_cast<uint32_t>(period);
+if (period) x = (first + x) % period - first;
three keys lost at a left edge after key 256: cpu/mask/visible_keys.h: far_bands
-lo = std::max(J0, seen.lo / first * first), hi
+lo = std::max(J0, (seen.lo + (seen.lo > 256 ? 3 : 0)) / first * first), hi
the last keys of a block lost: cpu/mask/visible_keys.h: plain
-hi = std::min(J0 + width, seen.hi);
+hi = std::min(J0 + width - 1, seen.hi);
padding is searched in the first keys only: cpu/mask/mask_classes.h: masks_of_heads
-j < j1 && !mixed(all); j += kKeys)
+j <= j0; j += kKeys)
a mask of one row counts as padding: cpu/mask/mask_classes.h: masks_of_heads
-i < (a.row == 0 ? i0 + 1 : i1); ++i)
+i < i0 + 1; ++i)
a tile of only finfo.min counts as -inf: cpu/mask/visible_keys.h: least
-if (scores[i] != -kInf<R> || !hidden(MaskClasses::scan(a, row.i0, row.end(), seen.lo, seen.hi)))
+if (scores[i] != -kInf<R>)
ALiBi with the opposite sign: cpu/score/tile.h: alibi
-return x - absolute<R>(at[v] - R(j)) * m; });
+return x + absolute<R>(at[v] - R(j)) * m; });
ALiBi of the first item: cpu/score/tile.h: alibi_batch
-rows.b * p.slopes.stride[0] + rows.h
+0 * p.slopes.stride[0] + rows.h
ALiBi without the diagonal: cpu/score/tile.h: alibi+bottom_right+few_queries
-const R first = R(rows.i0 + diagonal(p, rows.b) - keys.j0);
+const R first = R(rows.i0 - keys.j0);
a softcap without its factor: cpu/score/tile.h: softcap
-return t * c;
+return t;
softcap's derivative is wrong: cpu/score/tile.h: softcap
-V(R(1) - t * t));
+V(R(1) - t));
every key has softcap's derivative of the first: cpu/score/tile.h: softcap
-x, derivative + j * lanes + v * W);
+x, derivative + v * W);
ALiBi before softcap: cpu/score/tile.h: softcap+alibi
-if (p.softcap > 0) softcap(R(p.softcap), keys.count, s, derivative, second);
-    if (p.slopes.data) alibi(p, rows, keys, s);
+if (p.slopes.data) alibi(p, rows, keys, s);
+    if (p.softcap > 0) softcap(R(p.softcap), keys.count, s, derivative, second);
a bool mask adds: cpu/score/tile.h: nan_scores
-return add < R(0) ? add : x; });
+return add + x; });
every query has the first one's mask row: cpu/score/tile.h: float_mask
-each_lanes(a, rows.i0, rows.count, keys.j0
+each_lanes(a, 0, rows.count, keys.j0
padding from the first block: cpu/score/tile.h: padding_mask
-copy_rows(a, 0, 1, keys.j0, keys.count, scratch
+copy_rows(a, 0, 1, 0, keys.count, scratch
a band wrong at one number of vectors: cpu/score/tile.h: band_widths
-hi = cut(first + v * W + p.right);
+hi = cut(first + v * W + p.right + (NV == 2));
a band wrong at one width: cpu/score/tile.h: band_widths
-lo = cut(first + v * W - p.left), hi
+lo = cut(first + v * W - p.left + (p.left == 31)), hi
the maximum ignored: cpu/score/tile.h: plain
-store(m + v * W, top[v]);
+;
the sum not rescaled: cpu/score/tile.h: plain
-load(l + v * W) * load(rescale + v * W) + sum[v]
+load(l + v * W) + sum[v]
the normaliser of the first vector for all rows: cpu/score/normaliser.h: strips
-sum = load(l + i), logarithm
+sum = load(l), logarithm
the tail is not written: cpu/score/normaliser.h: far_rows
-data[to.at(rows.i0 + i + x, 1)] = tail[x];
+data[to.at(rows.i0 + i + x, 1)] = 0;
the tail omitted: cpu/score/tile.h: far_rows
-exp(V((x - lse[v]) - tail[v]))
+exp(V(x - lse[v]))
dropout rows past 4096: cpu/score/tile.h: far_draws
-c1[x] = uint32_t(p.at_row + rows.i0 + l + x);
+c1[x] = uint32_t(p.at_row + rows.i0 + l + x) & 0xFFF;
one mask of dropout for all heads: cpu/score/tile.h: dropout
-c2 = splat(head)
+c2 = splat(uint32_t(0))
one mask of dropout for all items: cpu/score/tile.h: dropout
-c3 = splat(item)
+c3 = splat(uint32_t(0))
a draw takes another word: cpu/score/tile.h: dropout
-store(words + kMaxLanes + l, c1);
+store(words + kMaxLanes + l, c2);
dP not dropped: cpu/score/tile.h: dropout
-br[l] = w[l] >= rule.threshold ? br[l] * factor : R(0);
+br[l] = br[l] * factor;
tanh near 0 with the formula for large arguments: cpu/base/exp_tanh.h: weak_softcap
-a < R(0.625) ? near : far
+a < R(0) ? near : far
tanh without its sign: cpu/base/exp_tanh.h: softcap
-return x < R(0) ? -t : t;
+return t;
heads with different masks count as equal: cpu/score/tile.h: decode+head_bias_grad
-(p.mask.stride[1] == 0 && p.mask.stride[2] == 0)
+(p.mask.stride[2] == 0)
heads with different ALiBi slopes count as equal: cpu/score/tile.h: decode+alibi
-return !p.mod.code && !p.slopes.data && p.dropout_p == 0 &&
+return !p.mod.code && p.dropout_p == 0 &&
heads with different dropout count as equal: cpu/score/tile.h: decode+dropout
-!p.slopes.data && p.dropout_p == 0 &&
+!p.slopes.data &&
the last chunk of keys dropped: cpu/forward/decode.h: decode
-(p.N + kChunkKeys - 1) / kChunkKeys
+p.N / kChunkKeys
every chunk weighs the same: cpu/forward/decode.h: decode
-l += weight * from.l[at];
+l += from.l[at];
a sink is counted in every chunk: cpu/forward/decode.h: decode+sinks
-p.sinks.dtype, h * p.sinks.stride[1])
+p.sinks.dtype, 0 * p.sinks.stride[1])
the last keys of a row count as keys: cpu/forward/few_rows.h: decode
-std::fill(s + keys, s + end, -kInf<R>);
+std::fill(s + keys, s + end, R(0));
few rows are read from the first head: cpu/backward/few_gradients.h: few_rows
-const int64_t first = h * p.M;
+const int64_t first = 0;
few rows have the first row's LSE: cpu/backward/few_gradients.h: few_rows
-const R lse = normaliser.lse[i], tail
+const R lse = normaliser.lse[0], tail
few rows have the first row's delta: cpu/backward/few_gradients.h: few_rows
-(load(ds + j) - delta[i]);
+(load(ds + j) - delta[0]);
few rows have the first head's LSE: cpu/backward/few_gradients.h: few_rows
-buf.seen[h], w.normaliser.from(lane(h)), w.delta
+buf.seen[h], w.normaliser.from(lane(0)), w.delta
few rows' dK without its scale: cpu/backward/few_gradients.h: few_rows
-outer(dk, keys, buf.ds, buf.q_rows, n, p.D, R(p.scale),
+outer(dk, keys, buf.ds, buf.q_rows, n, p.D, R(1),
few rows' dQ without its scale: cpu/backward/few_gradients.h: few_rows
-row[c] *= R(p.scale);
+row[c] *= R(1);
few rows' dQ without its last part: cpu/backward/few_gradients.h: few_rows
-c < Chunks::chunks(p); ++c) {
+c + 1 < Chunks::chunks(p); ++c) {
few rows' parts of dQ are the first part: cpu/backward/few_gradients.h: few_rows
-i = row % p.M;
+i = 0 * row;
few rows' dK and dV begin at the first key: cpu/backward/few_gradients.h: few_rows
-static_cast<R*>(data) + to.at(keys.j0 + j) : buf.written;
+static_cast<R*>(data) + to.at(j) : buf.written;
few rows' dK and dV of a part are the first key's: cpu/backward/few_gradients.h: few_rows
-columns, c + i * ld);
+columns, c);
few rows' dK and dV end with whole vectors: cpu/backward/few_gradients.h: few_rows
-if (columns > 0) outer_columns<(NV + 1) / 2>(x, y, ldy, rows, keys, columns, to, later);
+;
a few rows' last key counts as hidden: cpu/backward/few_gradients.h: few_rows+lengths
-clear(p, of, seen.end(), J1);
+clear(p, of, seen.end() - 1, J1);
a few rows' first key counts as hidden: cpu/backward/few_gradients.h: few_rows
-any ? seen.j0 : J1);
+any ? seen.j0 + 1 : J1);
few rows see a block that a mask hides: cpu/backward/few_gradients.h: masks_of_heads
-scores.clear(p.M);
+;
few rows' dV without dropout: cpu/backward/few_gradients.h: few_rows+dropout
-buf.dropped ? buf.dropped : buf.s;
+buf.s;
few rows' dP is not dropped: cpu/backward/few_gradients.h: few_rows+dropout
-load(at.ds + x) * factor
+load(at.ds + x)
few rows' softcap has no derivative: cpu/backward/few_gradients.h: few_rows+softcap
-T::product_gradient(p, load(at.ds + x), by)
+load(at.ds + x)
few rows' scores without features: cpu/backward/few_gradients.h: few_rows+alibi
-store(at.s + x, score);
+;
few rows' dmask begins at the first key: cpu/backward/few_gradients.h: few_rows+head_bias_grad
-to.at(i, keys.j0), to.step, keys.count, ds);
+to.at(i), to.step, keys.count, ds);
a sink with a value of 1: cpu/forward/forward.h: sinks
-sink == -kInf<R> ? R(0) : R(1));
+sink == -kInf<R> ? R(0) : R(2));
values are read from the start of a block: cpu/forward/forward.h: far_bands
-value_rows.data + (keys.j0 - J0) / pair * value_rows.stride
+value_rows.data
delta without dLSE: cpu/backward/backward.h: lse_loss
-if (p.dlse.data) subtract(p.dlse, rows, delta);
+;
dQ starts at the first key of a block: cpu/backward/backward.h: far_bands
-k_across.data + first / pair * k_across.stride
+k_across.data
gradients of keys from one head: cpu/backward/backward.h: gqa
-const int64_t all = group * G::tiles(p);
+const int64_t all = G::tiles(p);
dV without dropout: cpu/backward/backward.h: dropout
-p.dropout_p > 0 ? buf.dropped : buf.s;
+buf.s;
the last heads of a group lost: cpu/forward/forward.h: shared_heads
-return (group(p) + heads_per_task(p) - 1) / heads_per_task(p);
+return group(p) / heads_per_task(p);
one head of a task computed: cpu/forward/forward.h: shared_heads
-std::min(here.head + heads, (here.hk + 1) * in_group)
+std::min(here.head + 1, (here.hk + 1) * in_group)
tasks count heads by key heads: cpu/forward/forward.h: shared_heads
-hk = share / of_head;
+hk = share % p.Hk;
columns of V are those of the first register tile: cpu/forward/forward.h: shared_heads
-v.data + of.lo / pair * v.stride + c, v.stride
+v.data + of.lo / pair * v.stride, v.stride
the tail of V begins at its first column: cpu/forward/forward.h: strips
-({v.data + columns, v.stride}, weights
+({v.data, v.stride}, weights
the first key of a group of rows lost: cpu/mask/visible_keys.h: strips
-std::max<int64_t>(lo + i, 0) / 4 * 4;
+(std::max<int64_t>(lo + i, 0) + 1) / 4 * 4;
the last key of a group of rows lost: cpu/mask/visible_keys.h: strips
-(std::max<int64_t>(hi + i + n - 1, 0) + 3) / 4 * 4;
+(std::max<int64_t>(hi + i + n - 1, 0) + 2) / 4 * 4;
a vector that sees nothing sees the last keys: cpu/mask/visible_keys.h: strips
-return {std::min(first, count), std::min(end, count)};
+return {std::min(first, count / 4 * 4), std::min(end, count)};
strips end only where a vector begins: cpu/mask/visible_keys.h: strips
-next = std::min(hi[v], end < NV ? lo[end] : last);
+next = end < NV ? lo[end] : last;
the first vector of a strip left out: cpu/mask/visible_keys.h: strips
-while (hi[v] <= j) ++v;
+while (hi[v] <= j + 4 && v + 1 < NV) ++v;
weights outside of strips are not 0: cpu/forward/forward.h: strips
-const R outside = p.mod.code ? -kInf<R> : R(0);
+const R outside = -kInf<R>;
queries of a strip from the first vector: cpu/forward/forward.h: strips
-st.q + lane, p.D, here,
+st.q, p.D, here,
scores of a strip in the first vector: cpu/forward/forward.h: strips
-buf.s + j * T::lanes + lane, T::lanes);
+buf.s + j * T::lanes, T::lanes);
values of a group of rows from the tile's first key: cpu/forward/forward.h: strips
-v.data + of.lo / pair * v.stride + c, v.stride
+v.data + c, v.stride
a tile is divided at its first block: cpu/forward/forward.h: plain
-keys.end() >= key_range(p, rows.b, rows.i0, rows.end()).hi &&
+keys.end() > 0 &&
rows without keys keep what memory had: cpu/forward/forward.h: length_edges
-if (!st.begun) std::fill_n(st.out, rows.count * columns, R(0));
+;
the last segment omitted: cpu/backward/backward.h: grouped_rows
-for (int64_t s = 1; s < G::segments(p); ++s)
+for (int64_t s = 1; s + 1 < G::segments(p); ++s)
the gradient of a sink has the other sign: cpu/backward/backward.h: sinks
-double sum = 0;
+double sum = -0.5;
dS without delta: cpu/backward/gradient.h: plain
-* (dp - shift[v]);
+* dp;
dK without the scale: cpu/backward/backward.h: plain
-G::padded(p.D), R(p.scale));
+G::padded(p.D));
a mask's gradient of one item: cpu/backward/mask_gradient.h: head_bias_grad
-b < (sum_b ? p.B : item + 1)
+b < item + 1
a mask's gradient of one head: cpu/backward/mask_gradient.h: key_bias_grad
-h < (sum_h ? p.H : head + 1)
+h < head + 1
a mask's gradient at hidden keys is not zeroed: cpu/backward/mask_gradient.h: bias_grad+window
-clear(l, seen.hi, p.N);
+;
finfo.min counts as -inf: common/mask_bits.h: dense_masks
-Bits(kLeast) : below;
+Bits(kHidden) : below;
every word of a mask is the last: cpu/mask/mask_classes.h: dense_masks
-other |= words[i] ^ first;
+other = words[i] ^ first;
a mask's second item is the first: cpu/mask/mask_classes.h: dense_masks
-data + (b * item + h * head)
+data + h * head
a mask's second head is the first: cpu/mask/mask_classes.h: dense_masks
-data + (b * item + h * head)
+data + b * item
the last keys of a tile are like the first: cpu/mask/mask_classes.h: dense_masks
-g <= (j1 - 1) / kKeys; ++g)
+g <= j0 / kKeys; ++g)
columns of a mask from the first row: cpu/mask/mask_classes.h: dense_masks
-a.at(i0, j), 1, rows);
+a.at(0, j), 1, rows);
rows with only finfo.min so far stop there: cpu/mask/visible_keys.h: dense_masks
-    return tiles;
+    return false;
gradients where every score is finfo.min: cpu/mask/visible_keys.h: dense_masks
-    if (!(scores[i] > R(-0x1p126))) return kHidden;
+    ;
a mask that hides few keys is not read: cpu/score/tile.h: dense_masks
-p.mask.data && classes_in(p, rows, keys) != kVisible;
+p.mask.data && !(classes_in(p, rows, keys) & kVisible);
a mask's gradient in skipped parts is not zeroed: cpu/backward/mask_gradient.h: dense_masks
-l < rows.count && left.count < keys.count; ++l)
+l < 0; ++l)
the last visible block is dropped: cpu/mask/visible_keys.h: dense_masks
-hi = (hi - 1) / step * step;
+hi = (hi - 1) / step * step - 1;
the mean over heads is their sum: cpu/forward/weights.h: weights
-R(1) / R(heads));
+R(1));
weights without dropout: cpu/forward/weights.h: weights+dropout
-if (p.dropout_p > 0) T::dropout(p, rows, keys, buf.s, nullptr);
+;
packing on tiles, a row past the last: cpu/amx/amx_operand.h: tile_edges
-if (r >= rows) return kZeros;
+if (r > rows) return kZeros;
packing on tiles, columns past the last are not 0: cpu/amx/amx_operand.h: plain
-std::fill(buf + x * ld + columns, buf + (x + 1) * ld, Source(0));
+;
packing on tiles, a column's stride ignored: cpu/amx/amx_operand.h: tile_edges+column_major
-const bool whole = a.step == 1 && columns % kStep == 0;
+const bool whole = columns % kStep == 0;
packing on tiles, V of the next step is that of the first: cpu/amx/amx_operand.h: plain
-: row(a, r0, at + x, rows,
+: row(a, r0, x, rows,
packing on tiles, values past a length: cpu/amx/amx_forward.h: length_edges
-key_length(p, b)) - J0;
+p.N) - J0;
packing on tiles, values of the first head: cpu/amx/amx_forward.h: plain
-(b * p.Hk + hk) * padded_keys(p), all
+b * p.Hk * padded_keys(p), all
pairs on tiles swapped: cpu/amx/bf16_split.h: plain
-_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
+_mm512_or_si512(hi, _mm512_slli_epi32(lo, 16));
pairs on tiles of P swapped: cpu/amx/bf16_split.h: plain
-_mm512_srli_epi32(first, 16), second);
+_mm512_srli_epi32(second, 16), first);
pairs on tiles from neighbouring rows: cpu/amx/amx_operand.h: dropout
-load(tile + l + 16 * lanes)
+load(tile + l + lanes)
pairs on tiles of dS swapped: cpu/amx/amx_operand.h: plain
-store(to + plane * 32, pair_up(half[0], half[2]));
+store(to + plane * 32, pair_up(half[2], half[0]));
pairs on tiles truncated, not rounded: cpu/amx/bf16_split.h: bias
-return _mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000));
+return (__m512i)x;
tails on tiles, keys past the last have weights: cpu/amx/amx_softmax.h: tile_edges
-store(s + at, splat(-kInf<float>));
+store(s + at, splat(0.0f));
tails on tiles, dS past the last key: cpu/amx/amx_operand.h: right_window
-x[i] = key < keys ? value(key, i % 2) : Vec<float>{};
+x[i] = value(key, i % 2);
tails on tiles, P past the last key: cpu/amx/amx_operand.h: right_window
-std::fill(to, to + (round_up(keys, kStep) - keys) * 16 * P, 0);
+;
tails on tiles, the last 32 lanes of 128 omitted: cpu/backward/backward.h: tile_edges
-parts = (rows.count + part - 1) / part;
+parts = std::min<int64_t>(3, (rows.count + part - 1) / part);
dS on tiles starts at the first key of a block: cpu/backward/backward.h: far_bands
-Op::multiply_add(k_turned + (seen[x].j0 - block.J0) * d, part
+Op::multiply_add(k_turned, part
hidden keys after a part's band are not zeroed on tiles: cpu/backward/backward.h: causal
-std::fill(along + end * part, along + whole * part, E{});
+;
hidden keys before a part's band are not zeroed on tiles: cpu/backward/backward.h: left_window
-std::fill(along, along + skipped * part, E{});
+;
the second tile of lanes is the first: cpu/amx/amx_product.h: plain
-amx::load<5>(b.tile(16, 0), b.stride());
+amx::load<5>(b.tile(0, 0), b.stride());
a step of the head dim omitted: cpu/amx/amx_product.h: plain
-for (int64_t x = 0; x < steps; ++x)
+for (int64_t x = 0; x + 1 < steps; ++x)
the lazy pivot stays at the first: cpu/amx/amx_softmax.h: rising
-top[v], pivot(v) + kRise, _CMP_GT_OQ);
+top[v], pivot(v) == -kInf<float> ? pivot(v) : splat(kInf<float>), _CMP_GT_OQ);
the lazy pivot moves and O does not: cpu/amx/amx_forward.h: rising
-rescale(st.out, dv);
+;
the lazy pivot moves and O of a few rows does not: cpu/amx/amx_decode.h: rising
-load(st.out + at) * buf.rescale[at / dv]
+load(st.out + at)
the lazy pivot moves and l does not: cpu/amx/amx_softmax.h: rising
-store(l + v * W, V(load(l + v * W) * change));
+;
the lazy pivot of one lane moves all lanes: cpu/amx/amx_softmax.h: rising
-_mm512_mask_mov_ps(old, up[v], top[v]);
+up[v] ? top[v] : old;
the largest score is searched in every fourth key: cpu/amx/amx_softmax.h: rising
-max_or_second(of[0][v], of[1][v])
+of[0][v]
the largest score is not searched in the last keys: cpu/amx/amx_softmax.h: rising
-for (; j < keys; ++j) take(j, 0);
+;
the vector kernels omit the last part of P: cpu/amx/amx_softmax.h: plain
-here.next_ < here.end_
+here.next_ + 1 < here.end_
P under the old pivot is summed under the new: cpu/amx/amx_forward.h: rising
-        sum(j);
+
P of earlier chunks is overwritten: cpu/amx/amx_forward.h: plain
-buf.p + (j - keys.j0) * kLanesUsed;
+buf.p;
rows of a few heads use one head's features: cpu/amx/amx_decode.h: few_heads+alibi
-f(heads.rows(x), one);
+f(heads.rows(0), one);
lanes of a few heads are permuted: cpu/amx/amx_decode.h: few_heads
-heads.h + l / heads.M), l % heads.M, 0,
+heads.h + l % heads.count), l / heads.count, 0,
every tile of keys in pages is the first: cpu/amx/amx_decode.h: pages
-here{of[j / kKeys].data,
+here{of[0].data,
a chunk too many for a few rows on tiles: cpu/forward/decode.h: few_heads
-(chunk + 1) * kChunkKeys, seen.hi);
+(chunk + 2) * kChunkKeys, seen.hi);
rows in eight bits have the first row's scale: cpu/base/matrix_view.h: storage
-later += row_by, by += scale_by)
+later += row_by)
rows in eight bits have the first page's scale: cpu/base/matrix_view.h: storage
-+ scale.at(at) + block * scale_apart;
++ scale.at(at);
rows in eight bits have the first head's scale: cpu/base/matrix_view.h: storage
-plane(scale, b, hk), scale.stride[0]
+plane(scale, b, 0), scale.stride[0]
values in eight bits have the scales of keys: cpu/base/matrix_view.h: storage
-key_plane(p, p.v, p.v_scale, b, hk)
+key_plane(p, p.v, p.k_scale, b, hk)
rows in eight bits are read from the first page: cpu/base/matrix_view.h: storage
-Plane::at(at, c) + block * apart;
+Plane::at(at, c);
columns in eight bits are read as contiguous: cpu/base/matrix_view.h: storage
-row[i] = src[i * step];
+row[i] = src[i];
the NaN of float8 is read as a number: cpu/base/quantised.h: storage
-Halves(most == int16_t(0x3F80)) & int16_t(0x7C00)
+Halves(most == int16_t(0x3F80)) & int16_t(0)
float8 is converted without the exponent's offset: cpu/base/quantised.h: storage
-kWidened = DTYPE == FA_E4M3 ? 256.0f : 1.0f;
+kWidened = 1.0f;
decoded bfloat16 repeats its first number: cpu/base/stored.h: stored
-from_bf16(uint16_t(bits[l]));
+from_bf16(uint16_t(bits[0]));
decoded float16 has no sign: cpu/base/stored.h: stored
-{ return widen_halves(bits); }
+{ return widen_halves(bits & int16_t(0x7FFF)); }
decoded float8 has no offset: cpu/base/stored.h: stored
-factor = kWidened<DTYPE>;
+factor = 1;
the last column of a decoded row is lost: cpu/base/stored.h: stored
-std::memcpy(&bits, row + c, n * sizeof(S));
+std::memcpy(&bits, row + c, (n - 1) * sizeof(S));
decoded columns apart are read as contiguous: cpu/base/stored.h: stored
-row[c * a.step];
+row[c];
decoded rows that are copied are the first one: cpu/base/stored.h: stored
-static_cast<const S*>(a.data) + a.at(r0 + r);
+static_cast<const S*>(a.data) + a.at(r0);
decoded rows of several pages are read as contiguous: cpu/forward/decode.h: stored
-ld == size && a.one_block(j, n))
+ld == size)
a decoded block of several pages repeats its first keys: cpu/forward/decode.h: stored
-make(j, std::min(kKeys, keys.count - j)
+make(0, std::min(kKeys, keys.count - j)
decoded keys have no scales: cpu/forward/decode.h: stored
-multiply(lanes.count, keys.count, buf.k_scales, buf.s);
+;
decoded values have the scales of keys: cpu/forward/decode.h: stored
-multiply(lanes.count, keys.count, buf.v_scales, buf.s);
+multiply(lanes.count, keys.count, buf.k_scales, buf.s);
every decoded block has the first one's scales: cpu/forward/decode.h: stored
-a.each_scaled(keys.j0, keys.count, 0,
+a.each_scaled(0, keys.count, 0,
decoded rows in pages have the first page's scales: cpu/base/matrix_view.h: stored
-+ scale.at(at) + block * scale_apart;
++ scale.at(at);
the halves of a byte of four bits are exchanged: cpu/base/quantised.h: stored
->> (c < 16 ? 0 : 4) & 15;
+>> (c < 16 ? 4 : 0) & 15;
four bits have no minimum: cpu/base/quantised.h: stored
-number(scale_and_minimum() & 0xFFFF0000u);
+0.0f;
four bits have their minimum as scale: cpu/base/quantised.h: stored
-number(scale_and_minimum() << 16);
+number(scale_and_minimum());
decoded four bits of two blocks are of the first: cpu/forward/int4_vector.h: four_bits
-block[b].data = of_row < n ? row + of_row * Int4Block::bytes : kMissing;
+block[b].data = of_row < n ? row : kMissing;
half a vector of decoded four bits is not the second row's: cpu/forward/int4_vector.h: four_bits
-const uint8_t* row = b < kBlocks / SHARE ? first : second;
+const uint8_t* row = first;
decoded four bits have their minimum as scale: cpu/forward/int4_vector.h: four_bits
-(Vec<float>)(factors << 16)
+(Vec<float>)(factors & 0xFFFF0000u)
four bits times integers lack every other column: cpu/forward/int4_rows.h: four_bits
-& 0x000F000Fu;
+& 0x0000000Fu;
the integers of q are of other columns: cpu/forward/int4_rows.h: four_bits
-high = scaled(k + V::kSteps / 2);
+high = scaled(k);
the integers of q have the size of another row: cpu/forward/int4_rows.h: four_bits
-tail = q + r * ldq + tail_at(columns);
+tail = q + tail_at(columns);
sums of q lack its size: cpu/forward/int4_rows.h: four_bits
-sum += low + high;
+sum += (low + high) / up / by;
decoded four bits have no minimum in scores: cpu/forward/int4_rows.h: four_bits
-of_row[r] += x.minimum * load(sums + r * ldq);
+;
decoded four bits have no minimum in outputs: cpu/forward/int4_rows.h: four_bits
-minima[r] += of_key * x.minimum;
+;
the second row of half a vector has the first one's P: cpu/forward/int4_rows.h: four_bits
-Int4Rows::half(splat(of_row[0]), splat(of_row[SHARE - 1]))
+Int4Rows::half(splat(of_row[0]), splat(of_row[0]))
columns of the output are in the order of q: cpu/forward/int4_rows.h: four_bits
-{ to[c] += out[at]; }
+{ to[at % Dv] += out[at]; }
keys past the last repeat another, in four bits: cpu/forward/int4_rows.h: four_bits
-&k.data[std::min(j + i, keys - 1) * k.stride].bits;
+&k.data[std::min(j + i, keys - 2) * k.stride].bits;
scores of integers have the unit of another row: cpu/forward/int8_rows.h: integers
-KEYS, q[r * ldq + unit_at(columns)]);
+KEYS, q[unit_at(columns)]);
the largest number of q is looked for in some columns: cpu/forward/int8_rows.h: integers
-c < columns; c += W) most = larger(
+c < W; c += W) most = larger(
the largest number has no integer: cpu/forward/int8_rows.h: integers
-top : 32767.0f / top;
+top : 32769.0f / top;
rows that are not finite are multiplied as integers: cpu/forward/int8_rows.h: integers
-(usual | (most == 0)) ? unit : none;
+unit;
only the first of four rows is asked for integers: cpu/forward/int8_rows.h: integers
-integers(r) && integers(r + 1) && integers(r + 2) && integers(r + 3)
+integers(r)
pairs of columns overlap: cpu/forward/few_rows.h: integers
-return numbers(row, at * each);
+return numbers(row, at);
integers of P are of the first keys: cpu/forward/int8_rows.h: integers
-weights[r].integers + j0 + j,
+weights[r].integers + j,
integers of P have the unit of the first keys: cpu/forward/int8_rows.h: integers
-weights[r].unit[j0 / kKeys]));
+weights[r].unit[0]));
the largest P is that of the first keys: cpu/forward/int8_rows.h: integers
-most[x] = size_of(load(p + x * W));
+most[x] = size_of(load(p));
the second value of a pair is the first: cpu/forward/int8_rows.h: integers
-if (j + 1 < keys) second += v.stride;
+;
values of a pair of vectors are the first one's: cpu/forward/int8_rows.h: integers
-numbers(second, at), low, high);
+numbers(second, c), low, high);
the last columns of sums of integers are lost: cpu/forward/int8_rows.h: integers
-if (c < Dv) rows_of<
+if (c < 0) rows_of<
columns of sums of integers are in the order of pairs: cpu/forward/int8_rows.h: integers
-to + column_in_eights(c));
+to + c);
columns of sums without integers are in the order of rows: cpu/forward/int8_rows.h: integers
-out[c] += sum[column_in_eights(c)];
+out[c] += sum[c];
bytes of int8 are without sign: cpu/base/stored.h: integers_of_avx2
-_mm256_cvtepi8_epi16((__m128i)bytes)
+_mm256_cvtepu8_epi16((__m128i)bytes)
the second of a pair of products is lost: cpu/forward/integers.h: integers_of_avx2
-(Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
+(Words)_mm256_madd_epi16((__m256i)a, (__m256i)(b & 0xFFFFu));
integers lack their lowest bits: cpu/forward/integers.h: integers_of_avx2
-__builtin_convertvector(rounded(x), Halves);
+__builtin_convertvector(rounded(x) & 0xFF00u, Halves);
scales side by side are the first ones: cpu/forward/decode.h: integers
-a.scale_of(keys.j0), keys.count
+a.scale_of(0), keys.count
scales side by side are of the first page: cpu/base/matrix_view.h: integers
-in_pages(scale, scale_apart, r, 0);
+in_pages(scale, 0, r, 0);
numbers of tables have no sign: cpu/forward/e4m3_rows.h: tables
-look_up(bytes, high), 0xEA);
+look_up(bytes, high), 0xAA);
NaN of tables is a number: cpu/forward/e4m3_rows.h: tables
-return 0x7FC0;
+return 0x43F0;
subnormals of tables are normal: cpu/forward/e4m3_rows.h: tables
-fraction < 8; --exponent) fraction *= 2;
+fraction < 0; --exponent) fraction *= 2;
odd columns of tables are even ones: cpu/forward/e4m3_rows.h: tables
-to[1] = (Vec<float>)(a & 0xFFFF0000u);
+to[1] = (Vec<float>)(a << 16);
columns of tables are in another order: cpu/forward/e4m3_rows.h: tables
-vector / 2 * 8 + l % 4 * 2
+vector / 2 * 2 + l % 4 * 4
keys of tables past the last repeat another: cpu/forward/e4m3_rows.h: tables
-std::min(j + i, keys - 1) * k.stride + c
+std::min(j + i, keys - 2) * k.stride + c
rows share P with the first, in tables: cpu/forward/e4m3_rows.h: tables
-p[r * kTileKeys + j] * x[g];
+p[j] * x[g];
NaN of some columns is a number: cpu/base/stored.h: nan_columns
-if (whole == columns) continue;
+continue;
NaN of later rows is a number: cpu/base/stored.h: nan_columns
-row = a.data + r * a.stride;
+row = a.data;
negative NaN is a number: cpu/base/stored.h: nan_columns
-bits & uint8_t(0x7F)), most
+bits & uint8_t(0xFF)), most
four bits of many rows are of the first block: cpu/base/quantised.h: stored
-block{row + (c + i) / Int4Block::columns * Int4Block::bytes};
+block{row};
four bits of many rows are the first row: cpu/base/matrix_view.h: stored
-static_cast<const uint8_t*>(data) + at(r + x);
+static_cast<const uint8_t*>(data) + at(r);
bytes of four bits apart are read as contiguous: cpu/base/matrix_view.h: stored
-bytes[i] = row[i * step];
+bytes[i] = row[i];
the last decoded keys repeat another: cpu/forward/few_rows.h: stored
-std::min(j + x, keys - 1) * k.stride
+std::min(j + x, keys - 2) * k.stride
the size of a mask's gradient is not checked: common/extents.h: extents
-check(FA_WRITES_DMASK, p.dmask, {p.B, p.H, p.M, p.N}, true);
+;
the part of a mask's gradient per sequence is not checked: common/extents.h: extents
-summed && size[at] == 1 && !(at == 0 && p.cu_q);
+summed && size[at] == 1;
the part of the sinks' gradient per sequence is not checked: common/extents.h: extents
-{p.cu_q ? p.B : 1, p.H, 1, 1}
+{1, p.H, 1, 1}
the number of columns is not checked: common/extents.h: extents
-at < 4 && !absent
+at < 3 && !absent
a packed batch is checked with one sequence's rows: common/extents.h: extents
-M = p.cu_q ? p.T : p.M, N
+M = p.M, N
tangents computed with out are not checked: common/extents.h: extents
-if (pass == FA_JVP || pass == FA_FORWARD_JVP) {
+if (pass == FA_JVP) {
rows of a part count from 0: cpu/score/score_mod.h: score_mods
-to[l] = I(p.at_row + std::min(
+to[l] = I(std::min(
keys count from the tile's first: cpu/score/score_mod.h: score_mods
-std::min(call.keys.j0 + j + l, p.N - 1)
+std::min(j + l, p.N - 1)
the second step of a tile repeats the keys of the first: cpu/score/score_mod.h: score_mods
-std::min(call.keys.j0 + j + l, p.N - 1)
+std::min(call.keys.j0 + l, p.N - 1)
constant values of other rows are kept: cpu/score/score_mod.h: score_mods
-made.i0 != rows.i0 || made.h
+made.h
constant values of other heads are kept: cpu/score/score_mod.h: score_mods
-|| made.h != rows.h ||
+||
quotients round towards zero: cpu/score/score_mod.h: score_mods
-return x % d != 0 && (x < 0) != (d < 0) ? q - 1 : q;
+return q;
an exact multiple falls below: cpu/score/score_mod.h: score_mods
-q[l] = I(std::floor((double(x[l]) + 0.5) * inverse));
+q[l] = I(std::floor((double(x[l]) - 0.5) * inverse));
remainders are by one more: cpu/score/score_mod.h: score_mods
-d == VI{} ? VI{} : x - q * d;
+d == VI{} ? VI{} : x - q * (d + 1);
a turned table is not turned: cpu/score/score_mod.h: score_mods
-found[l] = turned[W - 1 - l];
+found[l] = turned[l];
a table that does not fall is read as one that does: cpu/score/score_mod.h: score_mods
-if (!falls(at)) return gather(table, at);
+if (at[0] == at[1]) return gather(table, at);
choices are turned: cpu/score/score_mod.h: score_mods
-Vec<E>(test != VI{} ? x : y));
+Vec<E>(test != VI{} ? y : x));
hidden keys have the least number: cpu/score/score_mod.h: score_mods
-load(at) : splat(-kInf<R>)));
+load(at) : splat(R(-1))));
gradients of all keys go to the first: cpu/score/score_mod.h: score_mods
-if (one_index && r + 1 < s.rows) continue;
+if (r + 1 < s.rows) continue;
gradients of a factor are those of a term: cpu/score/score_mod.h: score_mods
-g * take<R>(factor, r, l));
+g);
an index out of range is not reported: cpu/score/score_mod.h: score_mods
-if (wrong[s.in[0].splat ? 0 : l] && !(at[l] == -kInf<R>))
+if (false)
an index of a hidden pair is reported: cpu/score/score_mod.h: score_mods
-if (wrong[s.in[0].splat ? 0 : l] && !(at[l] == -kInf<R>))
+if (wrong[s.in[0].splat ? 0 : l])
a mixed block is shown: cpu/mask/visible_keys.h: score_mods
-return none ? FA_NO_PAIR : all ? FA_ALL_PAIRS : FA_SOME_PAIRS;
+return none ? FA_NO_PAIR : FA_ALL_PAIRS;
a mixed block is hidden: cpu/mask/visible_keys.h: score_mods
-none &= found == FA_NO_PAIR;
+none &= found != FA_ALL_PAIRS;
a part of captured gradients is left out: cpu/backward/backward.h: score_mods
-for (int64_t part = 0; part < G::captured_parts(p); ++part) sum +=
+for (int64_t part = 1; part < G::captured_parts(p); ++part) sum +=
captured gradients begin with what was there: cpu/backward/backward.h: score_mods
-std::fill_n(w.captured + part * n, n, R(0));
+std::fill_n(w.captured + part * n, n / 2, R(0));
the derivative by products is forgotten: cpu/score/tile.h: score_mods
-p.softcap > 0 || (p.mod.code && code_of(p.mod).derivative);
+p.softcap > 0;
a mask_mod hides before a bool mask shows: cpu/score/tile.h: score_mods
-if (p.mod.code) ScoreMod<R>::mask(mod);
+if (p.mod.code && !p.mask.data) ScoreMod<R>::mask(mod);
classes of another sequence: cpu/score/sequence.h: score_mods
-p.mod.classes = moved(p.mod.classes, 0, b);
+;
captured gradients of all sequences are one: cpu/score/sequence.h: score_mods
-b * captured_floats(p.mod) * item_size(p.lse.dtype);
+0 * captured_floats(p.mod) * item_size(p.lse.dtype);
numbers of eight bits are cut off: cpu/runtime/row_quantiser.h: new_rows
-same_bits<uint32_t>(x + 0x1.8p23f); }
+uint32_t(int32_t(x)); }
the number after the largest has a scale: cpu/runtime/row_quantiser.h: new_rows
-exact < highest ? exact : highest;
+exact;
a row with a NaN has a scale: cpu/runtime/row_quantiser.h: new_rows
-!(size <= R(FLT_MAX)) ? NAN
+size > R(FLT_MAX) ? NAN
halves of float8 are rounded up: cpu/runtime/row_quantiser.h: new_rows
-const uint32_t odd = size >> kCut & 1;
+const uint32_t odd = 1;
float8 has no subnormal numbers in its last binade: cpu/runtime/row_quantiser.h: new_rows
-(size < (128u - BIAS) << 23
+(size < (127u - BIAS) << 23
subnormal numbers of float16 are 0: cpu/runtime/row_quantiser.h: new_rows
-rest < 0x400    ? tiny
+rest < 0x400    ? 0u
a minimum above numbers of its block: cpu/runtime/row_quantiser.h: new_rows
-return R(of_bf16(y)) > x ? uint16_t((y & 0x8000u) ? y + 1 : y - 1) : y;
+return y;
a scale with which a block ends before its largest number: cpu/runtime/row_quantiser.h: new_rows
-return R(of_bf16(y)) < x ? uint16_t(y + 1) : y;
+return y;
a minimum of -0: cpu/runtime/row_quantiser.h: new_rows
-bf16_below(low + R(0));
+bf16_below(low);
blocks of huge numbers are kept: cpu/runtime/row_quantiser.h: new_rows
-<= R(of_bf16(0x7F7F))
+<= R(FLT_MAX)
sequences begin at the first new row: cpu/runtime/append.h: new_rows
-p.offsets ? first * p.x.stride[1] : b * p.x.stride[0];
+b * p.x.stride[0];
new rows begin at the first of a page: cpu/runtime/append.h: new_rows
-position = key % p.page;
+position = i % p.page;
scales of all heads are the first one's: cpu/runtime/append.h: new_rows
-p.scales + place(p.scale_stride, h) : nullptr);
+p.scales + place(p.scale_stride, 0) : nullptr);
rows of several items in a task are the first one's: cpu/runtime/append.h: new_rows
-p.offsets + p.B + 1, at) -
+p.offsets + p.B + 1, task * kRowsOfTask) -
"""


def edits(text):
    """{first line: (old, new)}. Each line of an edit starts with - or +."""
    found, lines = {}, text.strip().splitlines()
    while lines:
        title, parts = lines.pop(0), {"-": [], "+": []}
        while lines and lines[0][0] in "-+":
            line = lines.pop(0)
            parts[line[0]].append(line[1:])
        found[title] = tuple("\n".join(parts[sign]) for sign in "-+")
    return found


def faults():
    """{title: Fault}"""
    found = {tuple(x.split(": ")): edit for x, edit in edits(FAULTS).items()}
    return {title: Fault(file, *edit, slice) for (title, file, slice), edit in found.items()}


FAULT = faults()
SLICES = sorted({fault.seen_by for fault in FAULT.values()})
# CMake's flags without optimisation: the compiled code runs only briefly.
FLAGS = ["-std=gnu++17", "-O0", "-fPIC", "-ffp-contract=fast", "-fno-trapping-math", "-w"]
FLAGS += ["-fvisibility=hidden", "-fopenmp"]
AMX_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ON_THE_MODEL = [*AMX_FLAGS, "-DFA_AMX", "-DFA_AMX_MODEL"]
WITH_AVX2 = AMX_FLAGS[:3]
# The instructions that a slice is about, and the set that has them.
ISA_OF = dict(four_bits="avx2", integers_of_avx2="avx2", integers="avx512", tables="avx512")
FLAGS_OF = {name: WITH_AVX2 if isa == "avx2" else AMX_FLAGS for name, isa in ISA_OF.items()}
ONLY_FLOAT32 = "if (p.q.dtype == FA_F64) return plan_with<Plain<double>>(p, pass);"


def build(sources, folder, *more):
    """Build the kernels in `sources` for the ISA "generic", which every machine has."""
    isa = sources / "cpu" / "kernels_for_isa.cpp"
    text = isa.read_text()
    assert ONLY_FLOAT32 in text
    isa.write_text(text.replace(ONLY_FLOAT32, ""))
    objects = [folder / "isa.o", library_object(sources, folder)]
    run(*FLAGS, *more, "-DFA_ISA=generic", "-c", isa, "-o", objects[0])
    run("-shared", "-fopenmp", *objects, "-o", folder / "mutant.so")
    return folder / "mutant.so"


def library_object(sources, folder):
    """The code that calls the kernels: compiled once, unless the fault is in it."""
    names = (
        "cpu/runtime/library.cpp",
        "cpu/base/plan.h",
        "cpu/runtime/append.h",
        "cpu/runtime/packed_batch.h",
        "cpu/runtime/row_quantiser.h",
        "cpu/score/sequence.h",
        "cpu/score/score_mod_ops.h",
        "cpu/runtime/threads.h",
        "abi.h",
        "common/extents.h",
    )
    parts = [Path(name) for name in names]
    whole, own = ([x / part for part in parts] for x in (ROOT / "csrc", sources))

    def make(target=build_lock.FOLDER / "library-of-mutants.o"):
        run(*FLAGS, "-c", own[0], "-o", target)
        return target

    if any(x.read_bytes() != y.read_bytes() for x, y in zip(whole, own, strict=True)):
        return make(folder / "library.o")
    return build_lock.made("cpu-mutants", build_lock.digest(*whole, FLAGS, compiler()), make)


def run(*arguments):
    command = [*compiler(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kernels_of(monkeypatch, tmp_path):
    """A function that makes the CPU backend use kernels with this edit."""

    def use(file=None, old="", new="", flags=()):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a library is loaded once by a path
        sources = folder / "csrc"
        shutil.copytree(ROOT / "csrc", sources, ignore=shutil.ignore_patterns("cuda"))
        if file:
            text = (sources / file).read_text()
            times = text.count(old)
            assert times == 1, f"{old!r} is in {file} {times} times"
            (sources / file).write_text(text.replace(old, new))
        library = libraries.CpuLibrary(build(sources, folder, *flags))
        library.poison(1)
        monkeypatch.setattr(libraries, "cpu", lambda: library)

    return use


def is_tiled(what):
    """Is the fault in code that runs only on AMX's tiles?"""
    return FAULT[what].file.startswith("cpu/amx/") or "on tiles" in what


def nan_scores():
    """A NaN key that a bool mask hides has no effect: its score is replaced."""
    (problem, *_) = problems("bool_mask")
    clean = problem.run(fastattn.attention, backward=False, backend="cpu")["out"]
    problem.kwargs["mask"][..., 3] = False
    hidden = problem.run(fastattn.attention, backward=False, backend="cpu")["out"]
    problem.k[:, :, 3] = torch.nan
    spoiled = problem.run(fastattn.attention, backward=False, backend="cpu")["out"]
    assert not torch.equal(clean, hidden)
    return [] if torch.equal(hidden, spoiled) else ["a hidden NaN is seen"]


def exactly(problem):
    return problem.to(torch.float64).run(fastattn.reference.attention, backward=False)["out"]


def bias():
    """Rounding is unbiased: a mean of positive values is off by less than 1/8 of its bound."""
    problem = cases.build(cases.Dims(1, 2, 2, 130, 600, 32, 32), (), torch.bfloat16)
    problem.v.abs_()
    out, exact = problem.run(fastattn.attention, False, backend="cpu")["out"], exactly(problem)
    off = float((out.double() - exact).mean() / exact.mean())
    return [f"the mean is off by {off:.1e}"] if abs(off) > 2.0**-12 else []


def storage():
    """Quantised rows of eight bits give the results of their values, contiguous and in pages."""
    for dtype in (torch.int8, torch.float8_e4m3fn):
        made = batch((FEATURE["gqa"],), torch.float32, (*FEW, (40, 30)))
        made.given, plain = kept(made, dtype)
        apart = made.given | dict(v=made.given["v"].repeat_interleave(2, -1)[..., ::2])
        expected = run_packed(plain, "cpu")
        for where, given in (("", made.given), (" in pages", in_pages(made, 5)), (" apart", apart)):
            out = run_packed(given, "cpu")[0]
            if not torch.equal(out[made.rows[-1]], expected[0][made.rows[-1]]):
                yield f"{dtype}{where} has other bits"
            if not torch.allclose(out, expected[0], rtol=1e-4, atol=1e-4):
                yield f"{dtype}{where} has other numbers"
    ones, nan = torch.ones(1, 1), torch.full((1, 1, 1), 127, dtype=torch.uint8)
    nan, cu = nan.view(torch.float8_e4m3fn), torch.tensor([0, 1])
    given = dict(q=ones[None], k=ones[None].to(nan.dtype), v=nan, cu_q=cu, cu_k=cu)
    if not run_packed(given | dict(k_scale=ones, v_scale=ones), "cpu")[0].isnan():
        yield "NaN is a number"


STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, INT4)


def stored():
    """One row on keys of each type in memory, and many on four bits: contiguous, columns apart, and
    in pages."""
    for dtype in STORED:
        bytes_ = dtype.itemsize == 1
        sizes = ((1, 205), (1, 39), *((40, 30),) * (dtype == INT4))
        d = 64 if dtype == INT4 else 33
        made = batch((), torch.float32 if bytes_ else dtype, sizes, d=d)
        plain = made.given
        if dtype == INT4:
            made.given, plain = kept_int4(made)
        elif bytes_:
            made.given, plain = kept(made, dtype)
        wide = {x: y.double() if x in ("q", "k", "v") else y for x, y in plain.items()}
        expected = run_packed(wide, "reference")[0]
        apart = {x: made.given[x].repeat_interleave(2, -1)[..., ::2] for x in "kv"}
        lying = {"": made.given, " in pages": in_pages(made, 5), " apart": made.given | apart}
        for where, given in lying.items():
            off = (run_packed(given, "cpu")[0].double() - expected).abs().max()
            if not off < (1e-3 if bytes_ else 2.0**-7) * expected.abs().max():
                yield f"{dtype}{where} is off by {off:.1g}"


def few_rows(dtype, d):
    """One row, four and one of heads that share keys, each with q of another size."""
    made = batch((FEATURE["mqa"],), dtype, ((1, 205), (4, 38), (1, 17)), d=d)
    scales = 4.0 ** torch.arange(len(made.given["q"]))
    made.given["q"] = made.given["q"] / scales[:, None, None].to(dtype)
    return made


def four_bits():
    """One row and a few on four bits, as floats and as integers: rows of half a vector, of whole
    ones, and of both."""
    for dtype, far in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)):
        for d in (32, 64, 96):
            made = few_rows(dtype, d)
            stored, plain = kept_int4(made)
            expected = run_packed(plain, "reference")
            for x, y in zip(run_packed(stored, "cpu"), expected, strict=True):
                off = (x.double() - y).abs().max()
                if not off < far * y.abs().max():
                    yield f"{dtype}, {d} columns: off by {off:.1g}"


def integers():
    """One row and a few of bfloat16 on int8, one without integers, and values without them."""
    for d in (64, 96, 160):
        made = few_rows(torch.bfloat16, d)
        made.given["q"][2, 1] *= 1e-30
        made.given, _ = kept(made, torch.int8)
        for by in (1, 1e-36):
            made.given["v_scale"] *= by
            yield from complaints_of_bytes(made, 2.0**-6, f"{d} columns, {by}")


integers_of_avx2 = integers


def tables():
    """One row and a few on every number of float8_e4m3fn, and a value of NaN."""
    for dtype, far in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)):
        made = few_rows(dtype, 128)
        made.given, _ = kept(made, torch.float8_e4m3fn)
        made.given["v"].view(torch.uint8).flatten()[: 126 * 256] = torch.arange(126).repeat(256)
        yield from complaints_of_bytes(made, far, f"{dtype}")
        made.given["v"].view(torch.uint8)[3, 0, 77] = 127
        yield from complaints_of_bytes(made, far, f"{dtype} and NaN")


def complaints_of_bytes(made, far, what):
    expected = exact_bytes(made.given)
    pages = {f" in pages of {n}": in_pages(made, n) for n in (5, 128)}
    for where, given in ({"": made.given} | pages).items():
        for x, y in zip(run_packed(given, "cpu"), expected, strict=True):
            number = y.isfinite()
            off = (x.double() - y)[number].abs().max()
            if not torch.equal(x.isfinite(), number) or not off < far * y[number].abs().max():
                yield f"{what}{where}: off by {off:.1g}"


def nan_columns():
    """A NaN of float8 makes its column NaN, and no other."""
    for pattern, key, column in ((127, 5, 39), (255, 9, 3), (127, 60, 38)):
        made = batch((), torch.float32, ((1, 70),), d=40)
        made.given, _ = kept(made, torch.float8_e4m3fn)
        expected = run_packed(made.given, "cpu")[0].isnan()
        made.given["v"].view(torch.uint8)[key, :, column] = pattern
        expected[..., column] = True
        if not torch.equal(run_packed(made.given, "cpu")[0].isnan(), expected):
            yield f"pattern {pattern} of key {key} and column {column}"


def pages():
    """Few rows, where each tile is inside one page: the bits are those of contiguous keys."""
    made = batch((), torch.bfloat16, ((1, 300), (3, 44)), d=32)
    if not torch.equal(*(run_packed(x, "cpu")[0] for x in (made.given, in_pages(made, 16)))):
        yield "pages have other bits"


def masks_of_heads():
    """A few rows of heads that share a key head. A mask hides a block of keys from one head and,
    from the others, keys inside a block: for all rows, or for a single row in the middle."""
    for rows in (1, 3):
        problem = cases.build(cases.Dims(1, 3, 1, rows, 300, 16, 16), (), torch.float32)
        mask = torch.ones(1, 3, rows, 300, dtype=torch.bool)
        mask[:, 2, :, :128] = mask[:, 1, :, 70:100] = mask[:, 0, rows // 2, 70:100] = False
        problem.kwargs["mask"] = mask
        problem.name += f":masks of heads, {rows}"
        yield from Verdict(problem).complaints(fastattn.attention, backend="cpu")


def least():
    """Tiles of rows with only finfo.min in the mask give the mean; rows of -inf give 0."""
    problem = cases.build(cases.Dims(1, 2, 1, 130, 300, 8, 8), (), torch.float32)
    problem.q, problem.k = (x.round().clamp(-2, 2) for x in (problem.q, problem.k))
    problem.kwargs["mask"] = torch.zeros(130, 300)
    problem.kwargs["mask"][:100] = torch.finfo(torch.float32).min
    problem.kwargs["mask"][3] = -torch.inf
    yield from Verdict(problem).complaints(fastattn.attention, backend="cpu")


def score_mods():
    """Functions of each kind of index and operator, with gradients, beside the oracle's backend."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 16, generator=draw).unbind()
    rows = torch.randn(260, 2, 16, generator=draw)
    cu, documents = torch.tensor([0, 60, 60, 260]), torch.arange(400) // 90
    table = torch.randn(2, 400, generator=draw)
    functions = {
        "by distance": lambda t: lambda s, b, h, i, j: s + t[h, i - j + 180] * (1 + b),
        "turned": lambda t: lambda s, b, h, i, j: s * t[h, j - i + 180],
        "buckets": lambda t: lambda s, b, h, i, j: s + t[h, (i - j) % 7] + t[0, (i - j) // 6 + 40],
        "quotients": lambda t: lambda s, b, h, i, j: s + t[h, (i - j) // (j % 5 - 7)],
        "of keys": lambda t: lambda s, b, h, i, j: torch.where(j % 3 == 0, s * t[h, j], t[1, i]),
        "of heads": lambda t: lambda s, b, h, i, j: torch.tanh(s * t[h, 0]) * 2,
        "of rows": lambda t: lambda s, b, h, i, j: s * t[h, i * 2],
    }
    calls = {
        "whole": dict(mask_mod=lambda b, h, i, j: documents[i] <= documents[j] + h),
        "beside a mask": dict(
            mask_mod=lambda b, h, i, j: (i + j) % 3 > 0,
            mask=torch.rand(70, 70, generator=draw) > 0.2,
        ),
        "a part": dict(place=fastattn.Place(row=20, key=30, head=0)),
    }

    def results(backend, how, make):
        leaves = [x.clone().requires_grad_() for x in ((rows,) * 3 if how is None else (q, k, v))]
        t = table.clone().requires_grad_()
        if how is None:
            mod = dict(mask_mod=lambda b, h, i, j: (i - j).abs() < 40 * (b + 1))
            out = fastattn.attention_packed(
                *leaves, cu, cu, score_mod=make(t), backend=backend, **mod
            )
        else:
            out = fastattn.attention(*leaves, score_mod=make(t), backend=backend, **how)
        grads = torch.autograd.grad((out * torch.arange(16.0).sin()).sum(), [*leaves, t])
        return out.detach(), *grads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "runs_programs", lambda *given: True)
        for name, make in functions.items():
            for how in (*calls.values(), None):
                pairs = zip(*(results(x, how, make) for x in ("cpu", "reference")))
                for got, right in pairs:
                    most = float(right.abs().max())
                    if not torch.allclose(got, right, rtol=1e-3, atol=1e-3 * most):
                        yield f"{name}: off by {(got - right).abs().max():.2g}"
        yield from _grouped_heads(q, k, v, table)
        yield from _long_documents()
        yield from _out_of_range(q, k, v)


def _grouped_heads(q, k, v, table):
    """One tile of rows for each of two heads, which share keys: one task of backward has both."""

    def run(backend):
        score = lambda s, b, h, i, j: s * table[h, j] + table[h, 3] * j  # noqa: E731
        rows = q[:, :, :10].clone().requires_grad_()
        out = fastattn.attention(rows, k[:, :1], v[:, :1], backend=backend, score_mod=score)
        return torch.autograd.grad(out.sin().sum(), rows)[0]

    off = (run("cpu") - run("reference")).abs().max()
    return [] if off < 1e-3 else [f"grouped heads: off by {off:.2g}"]


def _long_documents():
    """Long enough for classes of blocks."""
    q, k, v = torch.randn(3, 1, 1, 260, 8).unbind()
    of = torch.arange(260) // 100

    def run(backend):
        return fastattn.attention(
            q, k, v, backend=backend, mask_mod=lambda b, h, i, j: (of[i] == of[j]) & (i >= j)
        )

    off = (run("cpu") - run("reference")).abs().max()
    return [] if off < 1e-4 else [f"documents: off by {off:.2g}"]


def _out_of_range(q, k, v):
    short = torch.randn(70)
    for causal in (True, False):
        try:
            fastattn.attention(
                q,
                k,
                v,
                score_mod=lambda s, b, h, i, j: s + short[i - j + 69 * (i < j)],
                causal=causal,
            )
            fastattn.attention(
                q,
                k,
                v,
                score_mod=lambda s, b, h, i, j: s + short[i - j + 100 * (i < j)],
                causal=causal,
            )
        except IndexError:
            if causal:
                yield "an index of a hidden pair is refused"
        else:
            if not causal:
                yield "an index out of range is not refused"


def extents():
    """Output tensors of a wrong size are refused, right ones are not. The tensors are too large, so
    that no fault writes past their end."""
    for which, name, packed in WRITTEN:
        try:
            for dim in range(test_extents.dimensions(which, name, packed)):
                refuse(which, name, changed(dim, 1), packed)
            if packed and name == "dmask":
                refuse(which, name, lambda shape: (1, *shape[1:]), packed)
        except (AssertionError, RuntimeError, pytest.fail.Exception) as error:
            yield f"{name}: {error}"


def new_rows():
    """Rows that are appended to a cache."""
    yield from test_new_rows.complaints()


def rising():
    """A tighter bound than the judge's: its baseline has 16-bit logits, which are large here."""
    for problem in problems("rising", torch.bfloat16):
        out = problem.run(fastattn.attention, False, backend="cpu")["out"]
        error = (out.double() - exactly(problem)).abs().max()
        if not error < 0.03:
            yield f"{problem.name}: an error of {error:.2g}"


def of_all_dropped():
    for problem in problems("dropout"):
        problem.kwargs["dropout_p"] = 1.0
        yield from Verdict(problem).complaints(fastattn.attention, backend="cpu")


def of_weights(features):
    for problem in problems(features or "plain"):
        for average in (False, True):
            yield from about_weights("cpu", problem, average)


verdicts = {}
FOLDED = ("items heads", "heads items")  # of mapped dimensions
OTHERS = ("nan_scores", "bias", "pages", "rising", "storage", "masks_of_heads", "least", "extents")
OTHERS += ("score_mods", "stored", "four_bits", "nan_columns", "new_rows")
OTHERS += ("integers", "integers_of_avx2", "tables")


def complaints(name, dtype=torch.float32):
    """The complaints of the named slice about the kernels in use."""
    if name in OTHERS:
        yield from globals()[name]()
    elif name == "folded":
        yield from vmap_dropout.complaints("cpu", dtype, FOLDED)
    elif name == "dropout_of_all":
        yield from of_all_dropped()
    elif name.startswith("weights"):
        yield from of_weights(name.partition("+")[2])
    else:
        for at, problem in enumerate(problems(name, dtype)):
            if (name, dtype, at) not in verdicts:
                verdicts[name, dtype, at] = Verdict(problem)
            yield from verdicts[name, dtype, at].complaints(fastattn.attention, backend="cpu")


needs_model = pytest.mark.skipif(
    bool(libraries.cpu_unavailable()) or "amx_model" not in libraries.cpu_isas(),
    reason="AMX's model needs AVX-512",
)


def detected(what, kernels_of, dtype=torch.float32):
    fault = FAULT[what]
    flags = ON_THE_MODEL if dtype == torch.bfloat16 else FLAGS_OF.get(fault.seen_by, ())
    kernels_of(fault.file, fault.old, fault.new, flags)
    assert any(complaints(fault.seen_by, dtype)), f"{fault.seen_by} did not detect it"


@pytest.mark.parametrize("what", [x for x in FAULT if not is_tiled(x)])
def test_a_fault_is_detected(what, kernels_of):
    needed = ISA_OF.get(FAULT[what].seen_by, "generic")
    if needed not in libraries.cpu_isas():
        pytest.skip(f"needs {needed}")
    if FAULT[what].seen_by == "tables" and "avx512vbmi" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs VBMI")
    detected(what, kernels_of)


def test_vnni_changes_no_bits(kernels_of):
    """It adds products to a sum, which takes two instructions without it."""
    if "avx512" not in libraries.cpu_isas():
        pytest.skip("needs AVX-512")
    vnni = '__builtin_cpu_supports("avx512vnni")'
    made = few_rows(torch.bfloat16, 96)
    stored = kept(made, torch.int8)[0], kept_int4(made)[0]
    with_it, without = [], []
    for results, found in ((with_it, vnni), (without, "false")):
        kernels_of("cpu/forward/integers.h", vnni, found, AMX_FLAGS)
        results += [x for given in stored for x in run_packed(given, "cpu")]
    assert all(map(torch.equal, with_it, without))


@needs_model
@pytest.mark.parametrize("what", [x for x in FAULT if is_tiled(x)])
def test_a_fault_on_tiles_is_detected(what, kernels_of):
    detected(what, kernels_of, torch.bfloat16)


@pytest.mark.parametrize("name", SLICES)
def test_the_source_without_faults_passes(name):
    assert not list(complaints(name))


@needs_model
@pytest.mark.parametrize("name", sorted({FAULT[x].seen_by for x in filter(is_tiled, FAULT)}))
def test_the_source_without_faults_on_tiles_passes(name):
    with variant("amx_model"):
        assert not list(complaints(name, torch.bfloat16))


def test_kernels_compiled_here_are_right(kernels_of):
    kernels_of()
    for name in ("plain", "decode", "weights", "softcap+alibi"):
        assert not list(complaints(name))
