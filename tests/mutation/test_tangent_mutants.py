"""Seeded faults in the passes that take tangents, as in test_cpu_mutants: each breaks one term, and
the named case must fail, in float32."""

import pytest
import torch

from tests.mutation.test_cpu_mutants import edits, kernels_of  # noqa: F401
from tests.semantics.test_tangents import probability_sums
from tests.support.backends import INTERPRETED
from tests.support.cases import FEATURE, Dims, build
from tests.support.tangents import complaints, directions, exact, passes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
]

# Title: file: the features that detect it; then the code, and the fault.
FAULTS = r"""
softcap's second derivative is half: cpu/score/tile.h: softcap
-(R(-2) * inverse)
+(R(-1) * inverse)
softcap's second derivative without its factor: cpu/score/tile.h: softcap
-store(bent, V(x * load(bent)));
+store(bent, V(load(bent)));
tangents of scores without softcap's derivative: cpu/score/tile.h: softcap
-return x * load(derivative + j * lanes + v * W);
+return x;
a mask's tangent is ignored in scores: cpu/score/tile.h: bias_grad
-if (p.mask_t.data)
+if (false)
a sink's tangent is ignored in the LSE: cpu/forward/jvp.h: sinks
-seen ? of_sink(p.sinks_t, R(0)) : R(0)
+R(0)
mu is not rescaled: cpu/forward/jvp.h: plain
-load(buf.mu + v * T::W) * load(buf.rescale + v * T::W);
+load(buf.mu + v * T::W);
out_t without the tangent of values: cpu/forward/jvp.h: plain
-add(across(value_tangents_of(p, rows.b, hk), buf.v_t), buf.s, buf.out_t, !buf.s_t);
+;
out_t without the tangent of the LSE: cpu/forward/jvp.h: plain
-- load(lse_t + v * T::W) * out;
+;
only the first product is dropped: cpu/forward/jvp.h: dropout
-T::dropout(p, rows, keys, buf.s, buf.s_t);
+T::dropout(p, rows, keys, buf.s, nullptr);
hidden keys change the LSE's tangent: cpu/forward/jvp.h: hidden
-x = e == R(0) ? V{} : V(e * load(buf.s_t + at));
+x = V(e * load(buf.s_t + at));
hidden keys change dS's tangent: cpu/backward/gradient_tangent.h: hidden
-return none ? V{} : normal_or_zero<R>(y);
+return normal_or_zero<R>(y);
q k_t omitted: cpu/forward/jvp.h: plain
-for (int64_t c = 0; c < columns;
+for (int64_t c = columns; c < columns;
long products omit their end: cpu/forward/jvp.h: wide
-for (int64_t c = 0; c < columns;
+for (int64_t c = 0; c < columns && c < Dots::longest;
probabilities' tangent without the LSE's: cpu/backward/gradient_tangent.h: plain
-load(buf.s_t + x) - lse_t[v];
+load(buf.s_t + x);
dS_t without the tangent of probabilities: cpu/backward/gradient_tangent.h: plain
-const V ds_t = p_t * by + probability
+const V ds_t = probability
dS_t without dP_t: cpu/backward/gradient_tangent.h: plain
-(z * load(buf.dp_t + x) - delta_t[v]);
+(V{} - delta_t[v]);
dS_t without delta_t: cpu/backward/gradient_tangent.h: plain
-(z * load(buf.dp_t + x) - delta_t[v]);
+(z * load(buf.dp_t + x));
dP_t is not dropped: cpu/backward/gradient_tangent.h: dropout
-(z * load(buf.dp_t + x) - delta_t[v]);
+(load(buf.dp_t + x) - delta_t[v]);
dP is not dropped: cpu/backward/gradient_tangent.h: dropout
-by = z * load(buf.ds + x) - delta[v]
+by = load(buf.ds + x) - delta[v]
the weights of dV_t are not dropped: cpu/backward/gradient_tangent.h: dropout
-visible(p_t * z)
+visible(p_t)
the weights of dO_t are not dropped: cpu/backward/gradient_tangent.h: dropout
-Moved{probability * z,
+Moved{probability,
dS_t without softcap's second derivative: cpu/backward/backward_jvp.h: softcap
-T::product_gradient(p, ds, buf.second + x);
+V{};
dS without softcap's derivative: cpu/backward/backward_jvp.h: softcap
-ds = T::product_gradient(p, ds, buf.derivative + x);
+;
dV_t without P_t: cpu/backward/backward_jvp.h: plain
-if (lse) add_rows(buf.s_t, p.dout,
+if (false) add_rows(buf.s_t, p.dout,
dV_t without dO_t: cpu/backward/backward_jvp.h: plain
-if (buf.dout_t) add_rows(
+if (false) add_rows(
dK_t without q: cpu/backward/backward_jvp.h: plain
-add_rows(buf.ds_t, p.q, p.D, buf.q_across, buf.dk, R(p.scale));
+;
dK_t without q_t: cpu/backward/backward_jvp.h: plain
-if (buf.q_t) add_rows(
+if (false) add_rows(
dK_t without the scale: cpu/backward/backward_jvp.h: plain
-buf.q_t_across, buf.dk, R(p.scale));
+buf.q_t_across, buf.dk, R(1));
dQ_t without k: cpu/backward/backward_jvp.h: plain
-add_keys(buf.ds_t, k);
+;
dQ_t without k_t: cpu/backward/backward_jvp.h: plain
-if (k_t.data) add_keys(
+if (false) add_keys(
keys are read from the start of a block: cpu/backward/backward_jvp.h: window
-x.data + first * x.stride,
+x.data,
delta_t without out_t: cpu/backward/backward_jvp.h: plain
-B::add_products(p, p.out_t, p.dout, rows, w.delta_t + at);
+;
delta_t without dO_t: cpu/backward/backward_jvp.h: plain
-if (p.dout_t.data) B::add_products(
+if (false) B::add_products(
delta_t without dlse_t: cpu/backward/backward_jvp.h: lse_loss
-if (p.dlse_t.data) B::subtract(
+if (false) B::subtract(
the sink's gradient without the tangent of its probability: cpu/backward/backward_jvp.h: sinks
-((sink_t - double(w.lse_t[at])) * double(w.delta[at])
+((0.0) * double(w.delta[at])
the sink's gradient without delta_t: cpu/backward/backward_jvp.h: sinks
-double(w.delta_t[at]));
+0.0);
a mask's gradient tangent is dS, not dS_t: cpu/backward/backward_jvp.h: bias_grad
-if (keep) store(buf.sum + x, ds_t);
+if (keep) store(buf.sum + x, ds);
a broadcast mask's gradient tangent is dS, not dS_t: cpu/backward/gradient_tangent.h: key_bias_grad
-store(buf.ds + x, moved.ds_t);
+store(buf.ds + x, moved.ds);
the LSE is not recomputed for another kernel's scores: cpu/backward/backward_jvp.h: few huge
-if (kRescored) read_from.lse = own_lse(p);
+;
"""
FAULT = {tuple(title.split(": ")): edit for title, edit in edits(FAULTS).items()}
seen = {}


def built(features):
    if features == "wide":
        return build(Dims(1, 1, 1, 9, 140, 130, 8), (), torch.float32)
    known = [FEATURE[features]] if features in FEATURE else []
    return build(Dims(1, 2, 2, 40, 150, 8, 8), known, torch.float32)


def hidden():
    """Results that are not finite if a mask's tangent is NaN where the mask hides."""
    problem = built("bias_grad")
    moves, *incoming = directions(problem)
    moves["mask"].masked_fill_(problem.kwargs["mask"] == -torch.inf, torch.nan)
    found = passes("cpu", problem, moves, *incoming)
    return [name for name, x in found.items() if not x.isfinite().all()]


def few_huge():
    """Huge logits of few rows: the forward pass rounds their scores differently."""
    problem = build(Dims(1, 1, 1, 2, 150, 64, 8), (), torch.float32)
    problem.q *= 1e8
    _, total, _ = probability_sums("cpu", problem)
    off = abs(total.item() - 2)
    return [f"probabilities of 2 rows sum to 2 but for {off:.2g}"] if off > 0.01 else []


def detected(features):
    """The complaints of a case about the current kernels."""
    if special := {"hidden": hidden, "few huge": few_huge}.get(features):
        return special()
    if features not in seen:
        problem = built(features)
        given = directions(problem)
        seen[features] = problem, exact(problem, *given), given
    problem, wanted, given = seen[features]
    return [
        line
        for known in (True, False)
        for line in complaints("cpu", problem, wanted, given, known=known)
    ]


@pytest.mark.parametrize("fault", FAULT, ids=lambda x: x[0])
def test_a_fault_is_detected(fault, kernels_of):  # noqa: F811
    _, file, features = fault
    kernels_of(file, *FAULT[fault])
    assert detected(features), f"{features} did not detect it"


@pytest.mark.parametrize("features", sorted({x[2] for x in FAULT}))
def test_the_source_without_faults_passes(features):
    assert not detected(features)
