"""Seeded faults in attention to selected keys and in their choice, as in test_cpu_mutants: in C++ a
case of this file must fail, in Python a test of tests/semantics."""

import itertools
import subprocess
import sys

import pytest
import torch

import fastattn
from tests.mutation.test_cpu_mutants import edits, kernels_of  # noqa: F401
from tests.semantics import test_paged_gradients
from tests.semantics import test_selected as selected
from tests.semantics.test_selection import by_sorting, whole
from tests.support.backends import INTERPRETED
from tests.support.checkout import ROOT

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
]

# Title: file: the case that detects it; then the code, and the fault.
FAULTS = r"""
dV of weights that were not dropped: cpu/backward/paged_gradients.h: dropout
-const R* weights = buf.dropped ? buf.dropped : buf.s;
+const R* weights = buf.s;
dK without the scale: cpu/backward/paged_gradients.h: plain
-add_products(p, w.ds + j, buf.q, rows, n, p.D, R(p.scale));
+add_products(p, w.ds + j, buf.q, rows, n, p.D, R(1));
sums of a page forget earlier rows: cpu/backward/paged_gradients.h: plain
-store(at, Vec<R>(load(at) + sum * factor));
+store(at, Vec<R>(sum * factor));
the last columns forget earlier rows: cpu/backward/paged_gradients.h: plain
-at[l] += sum[l] * factor;
+at[l] = sum[l] * factor;
a task leaves out its first page: cpu/backward/paged_gradients.h: plain
-std::lower_bound(table, last, lo);
+std::upper_bound(table, last, lo);
a task leaves out its first page of a table in any order: cpu/backward/paged_gradients.h: any_order
-page >= lo && page < hi
+page > lo && page < hi
only the first run of a table in any order: cpu/backward/paged_gradients.h: any_order
-first = end;
+break;
every table is taken for ascending: cpu/backward/paged_gradients.h: any_order
-.ascending[b] = std::is_sorted(one.pages, one.pages + count);
+.ascending[b] = true;
a range that ends before the table is searched: cpu/backward/paged_gradients.h: threads
-table[0] >= hi || last[-1] < lo
+table[0] > lo || last[-1] < lo
a page has two owners: cpu/backward/paged_gradients.h: threads
-hi = p.P * (range + 1) / ranges(p);
+hi = p.P * (range + 1) / ranges(p) + 1;
a page has no owner: cpu/backward/paged_gradients.h: threads
-lo = p.P * range / ranges(p),
+lo = (p.P * range + ranges(p) - 1) / ranges(p) + (range > 0),
keys past the last one of a partial block: cpu/backward/paged_gradients.h: blocks
-std::min(end * p.page, p.lengths[b]);
+end * p.page;
the first key head's gradients: cpu/backward/paged_gradients.h: plain
-+ hk * t.stride[1] +
++ 0 * t.stride[1] +
a page's first row for all rows: cpu/backward/paged_gradients.h: blocks
-(j + x) % p.page * t.stride[2];
+0 * t.stride[2];
P and dS of the first sequence: cpu/backward/paged_gradients.h: plain
-(b * p.H + hk * group(p)) * row_length(p);
+(hk * group(p)) * row_length(p);
delta without the gradient of out: cpu/backward/paged_gradients.h: plain
-Backward<Mul>::delta_from_output(one, row, buf.delta + h);
+;
the table of the first sequence: cpu/score/sequence.h: plain
-p.pages += b * p.blocks;
+p.pages += 0;
all rows draw the same: cpu/score/sequence.h: dropout
-p.at_item += b;
+;
equal scores are chosen from the end: cpu/selection/lightning_index.h: index
-(o == least && equal > 0);
+(o == least && n - j <= equal);
one of the equal scores too many: cpu/selection/lightning_index.h: index
-equal = left - std::count_if
+equal = left + 1 - std::count_if
a key after the row's own: cpu/selection/lightning_index.h: index
-i + 1 + (p.bottom_right
+i + 2 + (p.bottom_right
the first row's weights: cpu/selection/lightning_index.h: index
-plane(p.weights, b, h).at(i));
+plane(p.weights, b, h).at(0));
only the last heads count: cpu/selection/lightning_index.h: index
-float(h == 0 ? sum[x] : to[j + x] + sum[x]);
+float(sum[x]);
products below 0 count: cpu/selection/lightning_index.h: index
-relu(s) * w[v];
+s * w[v];
NaN is the highest score: cpu/selection/lightning_index.h: nan
-if (x != x) return 0;
+if (x != x) return ~0u;
"""
FAULT = {tuple(x.split(": ")): edit for x, edit in edits(FAULTS).items()}

# The module: the fault. A test of tests/semantics/test_selected or test_selection must fail.
IN_PYTHON = {
    "selection.key_lists": """
a block named twice counts twice
-& (x[..., 1:] < last)
+& (x[..., 1:] < 0)
repetitions count as ascending
-((first < second) | (second == last))
+((first <= second) | (second == last))
the last block ends where no key is
-(seen[..., None] - found * block)
+(seen[..., None] - found * block + 1)
all blocks are whole
-.clamp(0, block)
+.clamp(block, block)
minus 2 is legal
-if low < -1 or high >= blocks:
+if low < -2 or high >= blocks:
the block after the last is legal
-if low < -1 or high >= blocks:
+if low < -1 or high > blocks:
""",
    "selection.seen": """
rows are aligned at the top
-lengths.to(torch.int64).clamp(0, keys)
+lengths.to(torch.int64)
a row does not see its own key
-(row + shift + 1).clamp(min=0)
+(row + shift).clamp(min=0)
""",
    "selection.attend": """
lists of all groups are of the first key head
-item = item * self.Hk + group * self.Hk // max(self.G, 1)
+item = item * self.Hk + group * 0
sinks do not weaken the output
-(out.to(lse.dtype) * share[..., None])
+(out.to(lse.dtype))
""",
    "selection.highest": """
one of the equal scores too few
-(equal.cumsum(-1) <= left)
+(equal.cumsum(-1) < left)
""",
    "selection.blocks": """
hidden keys are in the means
-k.masked_fill(counted[:, None, :, None] == 0, 0)
+k
a row may leave out its own block
-scores.masked_fill(own, torch.inf)
+scores
""",
}


def gradients(what, threads=1):
    """Complaints about attention_selected against its definition."""
    blocks = (4, 16) if what == "blocks" else (1,)
    given = {"dropout": selected.GIVEN["dropout"], "blocks": dict(causal=True)}.get(what, {})
    for block, (D, Dv) in itertools.product(blocks, ((16, 16), (19, 7))):
        indices = selected.chosen(1, block, 9)
        leaves = selected.tensors(4, 2, D, Dv, torch.float32)
        torch.set_num_threads(threads)
        try:
            selected.close(*selected.in_both("cpu", given, indices, block, leaves), 1e-5)
        except AssertionError as error:
            yield str(error)
        finally:
            torch.set_num_threads(1)


def index():
    for H, causal in itertools.product((3, 70), (False, True)):
        q, k, w = whole(1, H, 9, 5), whole(1, 140, 5), whole(1, H, 9, seed=1)
        scores = (torch.relu(q @ k[:, None].mT) * w[..., None]).sum(1)
        if causal:
            scores = scores.masked_fill(torch.arange(140) > torch.arange(9)[:, None], -torch.inf)
        for count in (2, 50):
            found = fastattn.lightning_index(q, k, w, count, causal=causal)
            if not torch.equal(found[:, 0], by_sorting(scores, count).int()):
                yield f"{H} heads, {count}: other keys"


def any_order():
    torch.set_num_threads(2)
    try:
        test_paged_gradients.close(*test_paged_gradients.in_any_order("cpu"), 1e-5)
    except AssertionError as error:
        yield str(error)
    finally:
        torch.set_num_threads(1)


def nan():
    k = torch.tensor([1.0, torch.nan, 2.0]).view(1, 3, 1)
    found = fastattn.lightning_index(torch.ones(1, 1, 1, 1), k, torch.ones(1, 1, 1), 2)
    return [] if found.flatten().tolist() == [0, 2] else ["NaN is chosen"]


def complaints(case):
    if case == "threads":
        return list(gradients("plain", threads=2))
    return list(
        {"index": index, "nan": nan, "any_order": any_order}.get(case, lambda: gradients(case))()
    )


@pytest.mark.parametrize("fault", FAULT, ids=lambda fault: fault[0])
def test_a_fault_is_detected(fault, kernels_of):  # noqa: F811
    _, file, case = fault
    kernels_of(file, *FAULT[fault])
    assert complaints(case), f"{case} did not detect it"


@pytest.mark.parametrize("case", sorted({case for _, _, case in FAULT}))
def test_the_source_without_faults_passes(case):
    assert not complaints(case)


@pytest.mark.parametrize(
    "module, edit",
    [
        pytest.param(module, edit, id=title)
        for module, text in IN_PYTHON.items()
        for title, edit in edits(text).items()
    ],
)
def test_a_fault_in_python_is_detected(module, edit):
    tests = [f"tests/semantics/test_{x}.py" for x in ("selected", "selection")]
    command = [sys.executable, "-m", "tests.support.altered_module", f"fastattn.{module}", *edit]
    done = subprocess.run([*command, *tests, "-m", ""], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout + done.stderr
