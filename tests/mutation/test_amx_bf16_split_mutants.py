"""Seeded faults in the code that only float32 and float16 run on AMX's tiles: planes, sums of two
levels, and their replacement by vectors. As in test_cpu_mutants.py, except that a fault is for one
dtype, and that a test of test_amx_bf16_split.py notices it more often than a slice: most faults
cost only accuracy, or change the bits of a row that had to stay the same.

Each library has the model with the fault, for one dtype, and the vector kernels without it. Both
are compiled with the same flags, so that what vectors compute instead of tiles has the same bits.
"""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import fastattn
from fastattn.backends.native import libraries
from tests.cpu import test_amx_bf16_split as planes
from tests.cpu import test_amx_bf16_split_blocks as blocks
from tests.cpu import test_amx_bf16_split_ranges as ranges
from tests.cpu import test_amx_bf16_split_unseen as unseen_keys
from tests.gpu_emulation.emulator import compiler
from tests.mutation.test_cpu_mutants import (
    AMX_FLAGS,
    FLAGS,
    ON_THE_MODEL,
    complaints,
    edits,
    needs_model,
    run,
)
from tests.semantics import test_accuracy
from tests.support import build_lock
from tests.support.backends import INTERPRETED, variant
from tests.support.cases import DTYPES
from tests.support.checkout import ROOT
from tests.support.edge_cases import problems
from tests.support.error_budget import Verdict

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
    needs_model,
]
MODEL = "amx_model"
PLANES = {"float32": 3, "float16": 2}


class Fault(NamedTuple):
    file: str
    dtype: str
    seen_by: str
    old: str
    new: str


# Title: file: dtype: the judge, from JUDGES or else a slice; then the code as it is, and the fault.
FAULTS = r"""
planes of rows in reverse: cpu/amx/amx_operand.h: float32: plain
-cut_row(from + c, [&](int x, Vec<int32_t> pairs) { store(to + 16 * x, pairs)
+cut_row(from + c, [&](int x, Vec<int32_t> pairs) { store(to + 16 * (P - 1 - x), pairs)
planes of transposed rows in reverse: cpu/amx/amx_operand.h: float32: plain
-cut_row(from[r] + c, [&](int x, Vec<int32_t> pairs) { block[x][r] = pairs; });
+cut_row(from[r] + c, [&](int x, Vec<int32_t> pairs) { block[P - 1 - x][r] = pairs; });
planes of V are stored plane by plane: cpu/amx/amx_operand.h: float32: plain
-store(to + (i * P + x) * 16, block[x][i]);
+store(to + (x * 16 + i) * 16, block[x][i]);
planes of Q and dO in reverse: cpu/amx/amx_operand.h: float32: plain
-store(to + x * ld + c, pairs)
+store(to + (P - 1 - x) * ld + c, pairs)
planes of P for dV in reverse: cpu/amx/amx_operand.h: float16: accuracy
-[&](int x, Vec<int32_t> pairs) { store(to + 16 * x, pairs); });
-    std::fill
+[&](int x, Vec<int32_t> pairs) { store(to + 16 * (P - 1 - x), pairs); });
+    std::fill
planes of dS for dK in reverse: cpu/amx/amx_operand.h: float32: plain
-store(rows + ((j + 16) * P + plane) * 16
+store(rows + ((j + 16) * P + P - 1 - plane) * 16
planes of dropped P in reverse: cpu/amx/amx_operand.h: float32: dropout
-store(to + x * lanes + l, pairs)
+store(to + (P - 1 - x) * lanes + l, pairs)
the last plane dropped: cpu/amx/bf16_split.h: float32: plain
-if (plane == P - 1) return upper_halves(x);
+if (plane == P - 1) return _mm512_setzero_si512();
the last plane truncated: cpu/amx/bf16_split.h: float16: bias
-if (plane == P - 1) return upper_halves(x);
+if (plane == P - 1) return (__m512i)x;
tensors truncated: cpu/amx/bf16_split.h: float32: bias
-nearest ? upper_halves(x) : (__m512i)x;
+(__m512i)x;
the remainder after a plane is the full number: cpu/amx/bf16_split.h: float16: plain
-x -= (Vec<float>)_mm512
+(void)(Vec<float>)_mm512
a product of float32's sums missing: cpu/amx/amx_product.h: float32: plain
-count = 6, a[] = {2, 1, 1, 0, 0, 0}, b[] = {0, 0, 1, 1, 2, 0};
+count = 5, a[] = {2, 1, 0, 0, 0}, b[] = {0, 0, 1, 2, 0};
a product of float16's sums missing: cpu/amx/amx_product.h: float16: plain
-count = 3, a[] = {1, 0, 0}, b[] = {0, 0, 1};
+count = 2, a[] = {1, 0}, b[] = {0, 0};
a product of float16's sums twice: cpu/amx/amx_product.h: float16: plain
-count = 3, a[] = {1, 0, 0}, b[] = {0, 0, 1};
+count = 3, a[] = {1, 1, 0}, b[] = {0, 0, 0};
a product of float32's scores missing: cpu/amx/amx_product.h: float32: accuracy
-count = 5, a[] = {2, 1, 1, 0, 0}, b[] = {0, 0, 1, 1, 2};
+count = 4, a[] = {2, 1, 0, 0}, b[] = {0, 0, 1, 2};
a product of float16's scores missing: cpu/amx/amx_product.h: float16: lse
-count = 3, a[] = {1, 1, 0}, b[] = {0, 1, 1};
+count = 2, a[] = {1, 0}, b[] = {0, 1};
the smaller products of scores skipped: cpu/amx/amx_product.h: float16: plain
-tile_product<Sums::overwrite, Smaller<P>, Largest>
+tile_product<Sums::overwrite, Largest>
all products of scores in one sum: cpu/amx/amx_product.h: float32: head dims
-longest = 8;
+longest = 16;
one level of sums in place of two: cpu/amx/amx_operand.h: float32: long gradients
-template <Sums To = P == 1 ? Sums::go_on : Sums::add, class
+template <Sums To = Sums::go_on, class
one level of sums in place of two, few rows: cpu/amx/amx_operand.h: float32: long keys of few rows
-template <Sums To = P == 1 ? Sums::go_on : Sums::add, class
+template <Sums To = Sums::go_on, class
a block contains all keys: cpu/amx/amx_forward.h: float32: long keys
-P == 1 ? 256 : 128, kChunk
+P == 1 ? 256 : 2048, kChunk
scores overwrite those in use: cpu/amx/amx_forward.h: float16: plain
-kChunks = kMeanwhile ? 2 : 1
+kChunks = 1
P is summed before it is computed: cpu/amx/amx_product.h: float32: plain
-  FA_INLINE void due() { work.rest(); }
+  FA_INLINE void due() {}
P of a chunk is incomplete at the next chunk: cpu/amx/amx_forward.h: float32: plain
-      made.rest();
+
a block's sum not added: cpu/amx/amx_forward.h: float32: plain
-if (P > 1) add(buf.sum, dv, st.out), add
+if (P > 1) add
a block's sum added twice: cpu/amx/amx_forward.h: float16: plain
-if (P > 1) add(buf.sum, dv, st.out), add
+if (P > 1) add(buf.sum, dv, st.out), add(buf.sum, dv, st.out), add
a block's l not added: cpu/amx/amx_forward.h: float32: plain
-, add(buf.sum_l, 1, st.l);
+;
a block's sum stays under the old pivot: cpu/amx/amx_forward.h: float32: rising
-rescale(buf.sum, dv), rescale(buf.sum_l, 1);
+rescale(buf.sum_l, 1);
a block's l stays under the old pivot: cpu/amx/amx_forward.h: float32: rising
-rescale(buf.sum, dv), rescale(buf.sum_l, 1);
+rescale(buf.sum, dv);
tails, planes of P past the last key: cpu/amx/amx_operand.h: float32: right_window
-(round_up(keys, kStep) - keys) * 16 * P, 0
+(round_up(keys, kStep) - keys) * 16, 0
rows of any dtype are read in place: cpu/amx/amx_operand.h: float16: tiles in use
-if (whole && a.dtype == (P == 1 ? FA_BF16 : FA_F32)) {
+if (whole) {
2^30 counts as small enough: cpu/amx/bf16_split.h: float32: large values
-most = power_of_two(30)
+most = power_of_two(31)
zero counts as a value without planes: cpu/amx/bf16_split.h: float32: tiles in use
-_mm512_mask_cmpge_epu32_mask(_mm512_test_epi32_mask(x, x), above
+_mm512_mask_cmpge_epu32_mask(0xffff, above
values without planes are truncated: cpu/amx/amx_operand.h: float32: rows without planes
-return fit == kFits ? row : kZeros;
+return row;
queries are not checked: cpu/amx/amx_forward.h: float32: rows without planes
-if (unfit[i] || (some
+if ((some
values are not checked: cpu/amx/split_fallback.h: float32: rows without planes
-const bool unfit = fits.k[j - fits.J0] != kFits || (fits.v && fits.v[j - fits.J0] != kFits);
+const bool unfit = fits.k[j - fits.J0] != kFits;
the band is not checked with a mask: cpu/amx/split_fallback.h: float32: unseen keys in a window
-if (seen.lo <= j && j < seen.hi &&
+if (
the mask is not checked: cpu/amx/split_fallback.h: float32: unseen keys
-!(mask.data && read
+!(false && read
rows are judged together with their neighbours: cpu/amx/amx_forward.h: float32: rows without planes
-see_unfit_key(p, rows.one(i), {0, p.N}, fits)
+see_unfit_key(p, rows, {0, p.N}, fits)
queries are not checked in gradients: cpu/backward/gradient.h: float32: a tiny query
-fit = !any_unfit(buf.q_unfit, rows.count) &&
+fit = true &&
rows on vectors stay in the tiles' sums: cpu/backward/backward.h: float32: keys without planes
-          std::fill(along, along + whole * part, E{});
-        if (!keep)
+          ;
+        if (!keep)
dQ of rows on vectors added twice: cpu/backward/backward.h: float32: keys without planes
-seen[lane / part].count = 0;
+;
dQ of rows on vectors goes to the first part: cpu/backward/backward.h: float32: keys without planes
-add_on_vectors<NV>(p, here, mine, block.J0, dq_part(p, w, rows, lane), buf);
+add_on_vectors<NV>(p, here, mine, block.J0, dq_part(p, w, rows, 0), buf);
dV on vectors without dropout: cpu/backward/backward.h: float32: keys without planes, dropout
-if (!G::of_weights(p)) add(p.dropout_p > 0 ? buf.dropped : buf.s, p.dout, p.Dv, buf.dv);
+if (!G::of_weights(p)) add(buf.s, p.dout, p.Dv, buf.dv);
dS always has planes: cpu/amx/amx_operand.h: float32: small dS
-return P == 1 || sums_fit(largest);
+return true;
dS never has planes: cpu/amx/amx_operand.h: float32: small dS
-return P == 1 || sums_fit(largest);
+return P == 1;
lanes on vectors are permuted: cpu/amx/amx_decode.h: float32: few rows without planes
-not_served(p)[at] = buf.not_served[t * 16 + l];
+not_served(p)[at] = buf.not_served[l];
rows of lanes on vectors are permuted: cpu/amx/amx_decode.h: float32: few rows without planes, mask
-heads.rows(l / heads.M).one(l % heads.M), keys
+heads.rows(l / heads.M).one(l % heads.count), keys
rescored rows are not marked: cpu/amx/amx_forward.h: float32: far scores
-mark_scores(p, rows, i, not_served[t] >> i & 1);
+mark_scores(p, rows, i, false);
rescored few rows are not marked: cpu/amx/amx_decode.h: float32: far scores of few rows
-mark_scores(p, rows, i, unfit);
+mark_scores(p, rows, i, false);
marks are ignored: cpu/amx/split_fallback.h: float32: far scores
-if ((bits(tail[i]) & 1) || q_unfit
+if (q_unfit
all lanes are rescored if one is: cpu/amx/split_fallback.h: float32: far scores
-if ((which >> (at % (NV * 16))) & 1) s[at]
+s[at]
rows on vectors share visible keys: cpu/amx/split_fallback.h: float32: own keys
-if (any(std::min(a.hi, b.hi), std::max(a.hi, b.hi))) return false;
+;
hidden keys are not zeroed on vectors: cpu/amx/split_fallback.h: float32: outside a window
-std::fill_n(buf + j * columns, columns, 0.0f);
+;
float32 stays on the tiles: cpu/runtime/library.cpp: float32: choice
-float32_on_tiles = on != 0;
+float32_on_tiles = true;
large scales are not checked: cpu/runtime/library.cpp: float32: scale
-on_tiles(p.q.dtype) && (p.q.dtype == FA_BF16 || (-most < p.scale && p.scale < most))
+on_tiles(p.q.dtype)
"""


def without_planes(dtype, band="causal", shape="100 rows"):
    blocks.test_a_row_without_bf16_split_runs_on_vector_kernels(MODEL, dtype, "nan", band, shape)


def large_values(dtype):
    for name in "qkv":
        blocks.test_the_first_values_without_bf16_split(MODEL, blocks.LARGEST, name, "100 rows")


def far_scores(dtype, m):
    for name in "qkv":
        blocks.test_a_neighbour_without_bf16_split_changes_no_score(MODEL, 1e4, m, name, 1e-31)


def long_gradients(dtype):
    planes.test_errs_less_than_torch_in_long_gradients(MODEL, 48, 2048, ("dq",))


def tiny_query(dtype):
    ranges.test_small_and_large_values_err_no_more(MODEL, "one of q 1e-40")


def long_keys_of_few_rows(dtype):
    planes.test_errs_no_more_than_torch_on_long_keys(MODEL, 3, dtype)


def large_scale(dtype):
    planes.test_a_scale_that_makes_tiny_products_visible_runs_on_vector_kernels(MODEL, 127, True)


def opaque_to_dynamo(dtype, how="mask"):
    unseen_keys.test_a_key_hidden_from_all_rows_changes_no_bit(MODEL, how, "70 rows", dtype)


def featured(name):
    return lambda dtype: blocks.test_features_where_keys_have_no_bf16_split(MODEL, name)


def rising(dtype):
    for problem in problems("rising", DTYPES[dtype]):
        with variant(MODEL):
            assert not Verdict(problem).complaints(fastattn.attention, backend="cpu")


# name -> a function of the dtype that fails if it notices a fault
JUDGES = {
    "accuracy": lambda dtype: planes.test_errs_no_more_than_torch(MODEL, 300, 128, False, dtype),
    "bias": lambda dtype: planes.test_rounding_has_no_sign(MODEL, dtype),
    "head dims": lambda dtype: test_accuracy.test_does_not_grow_with_the_head_dim(MODEL, None),
    "long keys": lambda dtype: planes.test_errs_no_more_than_torch_on_long_keys(MODEL, 48, dtype),
    "long keys of few rows": long_keys_of_few_rows,
    "long gradients": long_gradients,
    "rising": rising,
    "lse": lambda dtype: planes.test_lse_is_float32_for_every_dtype_of_q(MODEL, 100, dtype),
    "a tiny query": tiny_query,
    "rows without planes": without_planes,
    "few rows without planes": partial(without_planes, band="full", shape="12 rows of 8 heads"),
    "few rows without planes, mask": partial(
        without_planes, band="mask", shape="12 rows of 8 heads"
    ),
    "far scores": partial(far_scores, m=64),
    "far scores of few rows": partial(far_scores, m=12),
    "what is theirs": lambda dtype: blocks.test_rows_on_vector_kernels_see_their_own_keys(MODEL),
    "behind a window": lambda dtype: blocks.test_nan_keys_outside_a_window_change_nothing(MODEL),
    "large values": large_values,
    "unseen keys": opaque_to_dynamo,
    "unseen keys in a window": partial(opaque_to_dynamo, how="mask in a window"),
    "keys without planes": featured("plain"),
    "keys without planes, dropout": featured("dropout"),
    "small dS": lambda dtype: blocks.test_small_gradients_of_scores_run_on_vector_kernels(MODEL),
    "tiles in use": lambda dtype: planes.test_the_tiles_are_in_use(MODEL, dtype, 70, 64),
    "choice": lambda dtype: planes.test_float32_can_be_left_to_the_vector_kernels(MODEL),
    "scale": large_scale,
}


def judge(name, dtype):
    """Fails if the judge notices a fault."""
    if name in JUDGES:
        return JUDGES[name](dtype)
    with variant(MODEL):
        found = list(complaints(name, DTYPES[dtype]))
    assert not found


def faults():
    """{title: Fault}"""
    found = {}
    for first, edit in edits(FAULTS).items():
        title, file, dtype, seen_by = first.split(": ")
        found[title] = Fault(file, dtype, seen_by, *edit)
    return found


FAULT = faults()
# The library beside the model: the vector kernels, under every other ISA name it knows.
SETS = ("AVX2", "AVX512", "AMX_BF16", "AMX_MODEL")
NAMED = [*(f"-DFA_HAS_{x}" for x in SETS), "-Dgeneric=avx512", "-Davx2=avx512"]
NAMED += [f"-Damx_bf16={MODEL}"]
LIBRARY, KERNELS = "cpu/runtime/library.cpp", "cpu/kernels_for_isa.cpp"
BESIDE = {LIBRARY: NAMED, KERNELS: [*AMX_FLAGS, "-DFA_ISA=avx512"]}


def without_fault(name):
    """The object of a source file in csrc, compiled once."""
    headers = [x for x in sorted((ROOT / "csrc").rglob("*.h")) if "cuda" not in x.parts]
    source, flags = ROOT / "csrc" / name, [*FLAGS, *BESIDE[name]]

    def make():
        target = build_lock.FOLDER / f"{Path(name).stem}-of-planes-mutants.o"
        run(*flags, "-c", source, "-o", target)
        return target

    key = build_lock.digest(source, *headers, flags, compiler())
    return build_lock.made(f"planes-mutants-{Path(name).stem}", key, make)


@pytest.fixture
def kernels_of(monkeypatch, tmp_path):
    """A function that makes the CPU backend use kernels of this dtype with this edit."""

    def use(dtype, file=None, old="", new=""):
        sources = tmp_path / "csrc"
        shutil.copytree(ROOT / "csrc", sources, ignore=shutil.ignore_patterns("cuda"))
        if file:
            text = (sources / file).read_text()
            times = text.count(old)
            assert times == 1, f"{old!r} is in {file} {times} times"
            (sources / file).write_text(text.replace(old, new))
        isa = sources / KERNELS
        ours = f"plan_with<{PLANES[dtype]}>(p, pass)"
        isa.write_text(re.sub(r"plan_with<\d>\(p, pass\)", ours, isa.read_text()))
        objects = [tmp_path / "model.o", without_fault(KERNELS), tmp_path / "library.o"]
        run(*FLAGS, *ON_THE_MODEL, f"-DFA_ISA={MODEL}", "-c", isa, "-o", objects[0])
        if file == LIBRARY:
            run(*FLAGS, *NAMED, "-c", sources / file, "-o", objects[2])
        else:
            objects[2] = without_fault(LIBRARY)
        path = tmp_path / "mutant.so"
        run("-shared", "-fopenmp", *objects, "-o", path)
        library = libraries.CpuLibrary(path)
        library.poison(1)
        monkeypatch.setattr(libraries, "cpu", lambda: library)
        monkeypatch.setenv("FASTATTN_LIBRARY", str(path))  # for tests that start processes

    return use


@pytest.mark.parametrize("what", FAULT)
def test_a_fault_of_bf16_splits_is_detected(what, kernels_of):
    fault = FAULT[what]
    kernels_of(fault.dtype, fault.file, fault.old, fault.new)
    try:
        judge(fault.seen_by, fault.dtype)
    except AssertionError:
        return
    pytest.fail(f"{fault.seen_by} did not detect it")


@pytest.mark.parametrize("dtype", PLANES)
def test_the_source_without_faults_of_bf16_splits_passes(dtype, kernels_of):
    kernels_of(dtype)
    for name in sorted({fault.seen_by for fault in FAULT.values() if fault.dtype == dtype}):
        judge(name, dtype)
