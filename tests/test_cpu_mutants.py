"""Seeded faults: each breaks one line of the C++ kernels, and the slice named with it must notice.

The kernels are compiled for one instruction set, in float32 alone and without optimisation, in
three seconds each. A fault that its slice does not see is a hole in the suite, and fails here.
"""

import shutil
import subprocess
from typing import NamedTuple

import once
import pytest
import torch
from emulator import ROOT, compiler
from judge import Verdict
from runners import INTERPRETED
from slices import problems
from test_weights import about_weights

import fastattn
from fastattn import native

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
a key too many where length % 128 is 127: band.h: length_edges
-most(0, least(p.lengths[b], p.N)) : p.N;
+most(0, least(p.lengths[b] + (p.lengths[b] % 128 == 127), p.N)) : p.N;
lengths ignored: band.h: lengths
-return p.lengths ? most(0, least(p.lengths[b], p.N)) : p.N;
+return p.N;
diagonal from N, not the length: band.h: bottom_right+lengths
-key_length(p, b) - p.M : 0
+p.N - p.M : 0
key heads in turn, not in runs: band.h: weights+gqa
-return h / (p.H / p.Hk);
+return h % p.Hk;
band one key short on the right: band.h: causal
-i1 - 1 + shift + p.right + 1, key_length
+i1 - 1 + shift + p.right, key_length
band one key short on the left: band.h: window
-return clip(i0 + shift - p.left, i1 - 1
+return clip(i0 + shift - p.left + 1, i1 - 1
whole blocks by their last row: band.h: causal
-i0 + shift + p.right + 1, key_length
+i1 - 1 + shift + p.right + 1, key_length
whole blocks by their first row: band.h: left_window
-return clip(i1 - 1 + shift - p.left, i0
+return clip(i0 + shift - p.left, i0
kept values not scaled: philox.h: dropout
-1.0 / (1.0 - p)};
+1.0};
p = 1 keeps all: philox.h: dropout_of_all
-if (p >= 1.0) return {0xFFFFFFFFu, 0.0};
+if (p >= 1.0) return {0, 1.0};
nine rounds: philox.h: dropout
-constexpr int rounds = 10;
+constexpr int rounds = 9;
three keys lost at a left edge after key 256: cpu/tile.h: far_bands
-lo = std::max(J0, seen.lo / 4 * 4), hi
+lo = std::max(J0, (seen.lo + (seen.lo > 256 ? 3 : 0)) / 4 * 4), hi
the last keys of a block lost: cpu/tile.h: plain
-hi = std::min(J0 + kTileKeys, seen.hi);
+hi = std::min(J0 + kTileKeys - 1, seen.hi);
padding looked up in the first key alone: cpu/tile.h: padding_mask
-!= first) return Shown::some;
+!= first) continue;
a row's mask taken for padding: cpu/tile.h: triangles
-a.dtype != FA_BOOL || a.row != 0)
+a.dtype != FA_BOOL)
ALiBi's sign: cpu/tile.h: alibi
-return x - absolute<R>(at[v] - R(j)) * m; });
+return x + absolute<R>(at[v] - R(j)) * m; });
ALiBi of the first item: cpu/tile.h: alibi_batch
-rows.b * p.slopes.stride[0] + rows.h
+0 * p.slopes.stride[0] + rows.h
ALiBi without the diagonal: cpu/tile.h: alibi+bottom_right+few_queries
-const R first = R(rows.i0 + diagonal(p, rows.b) - keys.j0);
+const R first = R(rows.i0 - keys.j0);
a cap without its size: cpu/tile.h: softcap
-return t * c;
+return t;
softcap's derivative forgotten: cpu/tile.h: softcap
-V(R(1) - t * t));
+V(R(1) - t));
the derivative of the first key: cpu/tile.h: softcap
-x * load(derivative + j * lanes + v * W);
+x * load(derivative + v * W);
ALiBi before the cap: cpu/tile.h: softcap+alibi
-if (p.softcap > 0) softcap(R(p.softcap), keys.count, s, derivative);
-    if (p.slopes.data) alibi(p, rows, keys, s);
+if (p.slopes.data) alibi(p, rows, keys, s);
+    if (p.softcap > 0) softcap(R(p.softcap), keys.count, s, derivative);
a bool mask adds: cpu/tile.h: nan_scores
-return add < R(0) ? add : x; });
+return add + x; });
a mask's row of the first query: cpu/tile.h: float_mask
-each_lanes(a, rows.i0, rows.count, keys.j0
+each_lanes(a, 0, rows.count, keys.j0
padding from the first block: cpu/tile.h: padding_mask
-copy_rows(a, 0, 1, keys.j0, keys.count, scratch
+copy_rows(a, 0, 1, 0, keys.count, scratch
a band wrong at one number of vectors: cpu/tile.h: band_widths
-hi[l] = R(std::clamp<int64_t>(first + l + p.right, -1
+hi[l] = R(std::clamp<int64_t>(first + l + p.right + (NV == 2), -1
a band wrong at one width: cpu/tile.h: band_widths
-lo[l] = R(std::clamp<int64_t>(first + l - p.left, -1
+lo[l] = R(std::clamp<int64_t>(first + l - p.left + (p.left == 31), -1
the maximum forgotten: cpu/tile.h: plain
-store(m + v * W, top[v]);
+;
the sum not rescaled: cpu/tile.h: plain
-load(l + v * W) * load(rescale + v * W) + sum[v]
+load(l + v * W) + sum[v]
the tail forgotten: cpu/tile.h: far_rows
-exp(V((x - lse[v]) - tail[v]))
+exp(V(x - lse[v]))
dropout rows past 4096: cpu/tile.h: far_draws
-c1[x] = uint32_t(rows.i0 + l + x);
+c1[x] = uint32_t(rows.i0 + l + x) & 0xFFF;
one mask of dropout for all heads: cpu/tile.h: dropout
-c2 = splat(uint32_t(rows.h))
+c2 = splat(uint32_t(0))
one mask of dropout for all items: cpu/tile.h: dropout
-c3 = splat(uint32_t(rows.b))
+c3 = splat(uint32_t(0))
another word of a draw: cpu/tile.h: dropout
-store(words + kMaxLanes + l, c1);
+store(words + kMaxLanes + l, c2);
dP not dropped: cpu/tile.h: dropout
-br[l] = w[l] >= rule.threshold ? br[l] * factor : R(0);
+br[l] = br[l] * factor;
tanh by the far formula near 0: cpu/simd.h: weak_softcap
-a < R(0.625) ? near : far
+a < R(0) ? near : far
tanh's sign: cpu/simd.h: softcap
-return x < R(0) ? -t : t;
+return t;
heads taken for alike in spite of a mask: cpu/tile.h: decode+head_bias_grad
-(p.mask.stride[1] == 0 && p.mask.stride[2] == 0)
+(p.mask.stride[2] == 0)
heads taken for alike in spite of ALiBi: cpu/tile.h: decode+alibi
-return !p.slopes.data && p.dropout_p == 0 &&
+return p.dropout_p == 0 &&
heads taken for alike in spite of dropout: cpu/tile.h: decode+dropout
-!p.slopes.data && p.dropout_p == 0 &&
+!p.slopes.data &&
the last chunk of keys dropped: cpu/decode.h: decode
-(p.N + kChunkKeys - 1) / kChunkKeys
+p.N / kChunkKeys
every chunk weighs the same: cpu/decode.h: decode
-l += weight * from.l[at];
+l += from.l[at];
a sink for every chunk's head: cpu/decode.h: decode+sinks
-p.sinks.dtype, h * p.sinks.stride[1])
+p.sinks.dtype, 0 * p.sinks.stride[1])
the last keys of a row count as keys: cpu/few_rows.h: decode
-std::fill(s + keys, s + end, -kInf<R>);
+std::fill(s + keys, s + end, R(0));
a sink with a value of 1: cpu/forward.h: sinks
-sink == -kInf<R> ? R(0) : R(1));
+sink == -kInf<R> ? R(0) : R(2));
values from the start of a block: cpu/forward.h: far_bands
-v.data += (keys.j0 - J0) / pair * v.stride;
+;
delta without dLSE: cpu/backward.h: lse_loss
-sum -= read<R>(p.dlse.data, p.dlse.dtype,
+sum -= 0 * read<R>(p.dlse.data, p.dlse.dtype,
dQ from the start of a block: cpu/backward.h: far_bands
-k_across.data + first / pair * k_across.stride
+k_across.data
gradients of keys from one head: cpu/backward.h: gqa
-const int64_t all = group * G::tiles(p);
+const int64_t all = G::tiles(p);
dV of what was not dropped: cpu/backward.h: dropout
-p.dropout_p > 0 ? buf.dropped : buf.s;
+buf.s;
the last heads of a group lost: cpu/forward.h: shared_heads
-return (group(p) + heads_per_task(p) - 1) / heads_per_task(p);
+return group(p) / heads_per_task(p);
one head of a task computed: cpu/forward.h: shared_heads
-std::min(begin_head + heads_per_task(p), end_head)
+std::min(begin_head + 1, end_head)
tasks count heads by key heads: cpu/forward.h: shared_heads
-hk = at % each / shares(p), end_head
+hk = at % p.Hk, end_head
V not moved on between fetches: cpu/forward.h: shared_heads
-{v.data + c, v.stride}, weights
+{v.data, v.stride}, weights
the last segment forgotten: cpu/backward.h: grouped_rows
-for (int64_t s = 1; s < G::segments(p); ++s)
+for (int64_t s = 1; s + 1 < G::segments(p); ++s)
the gradient of a sink has the other sign: cpu/backward.h: sinks
-double sum = 0;
+double sum = -0.5;
dS without delta: cpu/gradient.h: plain
-* (dp - shift[v]);
+* dp;
dK without the scale: cpu/backward.h: plain
-G::padded(p.D), R(p.scale));
+G::padded(p.D));
a mask's gradient of one item: cpu/mask_gradient.h: head_bias_grad
-b < (sum_b ? p.B : item + 1)
+b < item + 1
a mask's gradient of one head: cpu/mask_gradient.h: key_bias_grad
-h < (sum_h ? p.H : head + 1)
+h < head + 1
a mask's gradient where nobody looks: cpu/mask_gradient.h: bias_grad+window
-clear(l, seen.hi, p.N);
+;
the mean over heads is their sum: cpu/weights.h: weights
-R(1) / R(heads));
+R(1));
weights without dropout: cpu/weights.h: weights+dropout
-if (p.dropout_p > 0) T::dropout(p, rows, keys, buf.s, nullptr);
+;
"""


def faults():
    """{title: Fault}. An edit of several lines has a sign on each."""
    found, lines = {}, FAULTS.strip().splitlines()
    while lines:
        title, file, seen_by = lines.pop(0).split(": ")
        parts = {"-": [], "+": []}
        while lines and lines[0][0] in "-+":
            line = lines.pop(0)
            parts[line[0]].append(line[1:])
        found[title] = Fault(file, *("\n".join(parts[sign]) for sign in "-+"), seen_by)
    return found


FAULT = faults()
SLICES = sorted({fault.seen_by for fault in FAULT.values()})
# As CMake has them, but unoptimised: what is compiled is run for a moment.
FLAGS = ["-std=gnu++17", "-O0", "-fPIC", "-ffp-contract=fast", "-fno-trapping-math", "-w"]
FLAGS += ["-fvisibility=hidden", "-fopenmp"]
ONLY_FLOAT32 = "if (p.q.dtype == FA_F64) return plan_with<Plain<double>>(p, pass);"


def build(sources, folder):
    """The library of the kernels in `sources`, for the instruction set that every machine has."""
    isa = sources / "cpu" / "isa.cpp"
    text = isa.read_text()
    assert ONLY_FLOAT32 in text
    isa.write_text(text.replace(ONLY_FLOAT32, ""))
    objects = [folder / "isa.o", library_object(sources)]
    run(*FLAGS, "-DFA_ISA=generic", "-c", isa, "-o", objects[0])
    run("-shared", "-fopenmp", *objects, "-o", folder / "mutant.so")
    return folder / "mutant.so"


def library_object(sources):
    """What no fault is in, compiled once."""
    headers = [ROOT / "csrc" / "abi.h", ROOT / "csrc" / "cpu" / "plan.h"]
    source = sources / "cpu" / "library.cpp"
    key = once.digest(ROOT / "csrc" / "cpu" / "library.cpp", *headers, FLAGS, compiler())

    def make():
        target = once.FOLDER / "library-of-mutants.o"
        run(*FLAGS, "-c", source, "-o", target)
        return target

    return once.made("cpu-mutants", key, make)


def run(*arguments):
    command = [*compiler(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kernels_of(monkeypatch, tmp_path):
    """A function that runs the backend cpu on kernels with this edit."""

    def use(file=None, old="", new=""):
        sources = tmp_path / "csrc"
        shutil.copytree(ROOT / "csrc", sources, ignore=shutil.ignore_patterns("cuda"))
        if file:
            text = (sources / file).read_text()
            times = text.count(old)
            assert times == 1, f"{old!r} is in {file} {times} times"
            (sources / file).write_text(text.replace(old, new))
        library = native.CpuLibrary(build(sources, tmp_path))
        library.poison(1)
        monkeypatch.setattr(native, "cpu", lambda: library)

    return use


def nan_scores():
    """A key of NaN that a bool mask hides is not seen: its score is replaced."""
    (problem, *_) = problems("bool_mask")
    clean = problem.run(fastattn.attention, backward=False, backend="cpu")["out"]
    problem.kwargs["mask"][..., 3] = False
    hidden = problem.run(fastattn.attention, backward=False, backend="cpu")["out"]
    problem.k[:, :, 3] = torch.nan
    spoiled = problem.run(fastattn.attention, backward=False, backend="cpu")["out"]
    assert not torch.equal(clean, hidden)
    return [] if torch.equal(hidden, spoiled) else ["a hidden NaN is seen"]


def of_all_dropped():
    for problem in problems("dropout"):
        problem.kwargs["dropout_p"] = 1.0
        yield from Verdict(problem).complaints(fastattn.attention, backend="cpu")


def of_weights(features):
    for problem in problems(features or "plain"):
        for average in (False, True):
            yield from about_weights("cpu", problem, average)


verdicts = {}


def complaints(name):
    """What the slice says of the kernels in use."""
    if name == "nan_scores":
        yield from nan_scores()
    elif name == "dropout_of_all":
        yield from of_all_dropped()
    elif name.startswith("weights"):
        yield from of_weights(name.partition("+")[2])
    else:
        for at, problem in enumerate(problems(name)):
            if (name, at) not in verdicts:
                verdicts[name, at] = Verdict(problem)
            yield from verdicts[name, at].complaints(fastattn.attention, backend="cpu")


@pytest.mark.parametrize("what", FAULT)
def test_a_fault_is_noticed(what, kernels_of):
    fault = FAULT[what]
    kernels_of(fault.file, fault.old, fault.new)
    assert any(complaints(fault.seen_by)), f"{fault.seen_by} did not notice"


@pytest.mark.parametrize("name", SLICES)
def test_without_a_fault_there_is_nothing_to_notice(name):
    assert not list(complaints(name))


def test_kernels_compiled_here_are_right(kernels_of):
    kernels_of()
    for name in ("plain", "decode", "weights", "softcap+alibi"):
        assert not list(complaints(name))
