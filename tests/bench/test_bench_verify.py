"""The harness's judge: every peer is verified before it is timed; failing ones are not timed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastattn
from bench.cases import FORWARD
from bench.masks import DROPOUT_P, MASKS, SEED
from bench.measure import records, timing, verify
from bench.measure.verify import Judge, Oracle, relative_errors
from bench.peers.registry import BASELINE, PEERS, SUBJECT, Peer, arguments
from bench.report import console
from tests.support.bench_helpers import case, cells
from tests.support.marks import parametrize

REAL = fastattn.attention
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def timed(monkeypatch) -> list[str]:
    """The names of the peers that the harness times."""
    names: list[str] = []
    real = timing.interleaved

    def spy(programs, *rest, **options):
        names.extend(programs)
        return real(programs, *rest, **options)

    monkeypatch.setattr(timing, "interleaved", spy)
    return names


def wrong_output(q, k, v, **options):
    return REAL(q, k, v, **options) * 1.01


def wrong_gradient(q, k, v, **options):
    """The right output, and a dv with an error of 1%."""
    return REAL(q, k, v.detach() + 1.01 * (v - v.detach()), **options)


def not_finite(q, k, v, **options):
    out = REAL(q, k, v, **options)
    return torch.where(torch.arange(out.shape[-2])[:, None] == 3, float("nan"), out)


def raises(q, k, v, **options):
    raise RuntimeError("no such kernel")


@parametrize("dtype", ["bfloat16", "float32", "float16"], fast=1)
@pytest.mark.parametrize(
    "kernel, reason",
    [
        (wrong_output, "out is off by"),
        (not_finite, "out is not finite"),
        (raises, "no such kernel"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_wrong_kernel_is_shown_as_failed_and_never_timed(
    kernel, reason, dtype, monkeypatch, timed
):
    monkeypatch.setattr(fastattn, "attention", kernel)
    found = cells(case("full", dtype), case("causal", dtype))
    assert len(found) == 6 and timed == []
    for record in found:
        assert record["status"] == "failed" and reason in record["reason"]
        assert record["timings"] == []
        assert "FAILED, not timed" in console.one_line(record)
    assert "FAILED" in "\n".join(console.table(found))


# For each mask, options that make the call ignore a part of it.
FORGOTTEN = {
    "full": {"scale": 0.26},
    "causal": {"causal": False},
    "window": {"window": (254, 0)},
    "padding": {"key_lengths": torch.tensor([299])},
    "bias": {"mask": None},
    "dropout": {"seed": SEED + 1},
    "padding mask": {"mask": None},
    "learned bias": {"mask": None},
    "full, bool": {"causal": True},
    "causal, float": {"mask": None},
    "ALiBi": {"alibi_slopes": None},
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_call_with_another_mask_fails(mask, monkeypatch, timed):
    """The window is wrong by one key in 256, the padding by one in 300."""
    monkeypatch.setattr(
        fastattn, "attention", lambda q, k, v, **o: REAL(q, k, v, **o | FORGOTTEN[mask])
    )
    (record,) = cells(case(mask, N=400), passes=(FORWARD,))
    assert record["status"] == "failed" and "off by" in record["reason"] and timed == []


@parametrize("mask", MASKS, fast=2)
@parametrize("sizes", [{}, {"Hk": 2}, {"M": 13, "Hk": 1}], ids=["MHA", "GQA", "few"], fast=2)
def test_every_available_peer_passes_or_has_a_reason(mask, sizes):
    names = tuple(name for name in PEERS if name != "flex")  # it compiles for half a minute
    for record in cells(case(mask, **sizes), names=names):
        assert record["status"] == "ok" and record["reason"] == ""
        for name, found in record["peers"].items():
            if name in (SUBJECT, BASELINE, "torch-math", "fastattn-reference"):
                assert not found["reason"], name
            else:
                assert found["reason"] == "" or found["reason"].startswith(("declined", "raised"))


def test_a_row_may_be_as_wrong_as_torchs_own():
    """Up to three times its bound, and only where torch's worst row is two thirds as wrong."""
    oracle = Oracle(case("causal", "bfloat16"), gradients=True)
    dq = oracle.expected["dq"]
    scale = dq.norm(dim=-1).square().mean().sqrt()

    def judged(error, torchs):
        oracle.worst_rows_of_torch = {"dq": torchs}
        wrong = dq.clone()
        wrong[0, 0, 0, 0] += error * max(scale, dq[0, 0, 0].norm())
        return oracle.judge({"dq": wrong.flatten(0, 1)[None]}).reason

    assert "worst row by 5.0e-02 (at most 4e-02)" in judged(0.05, 0.0)
    assert "(at most 5e-02)" in judged(0.055, 0.032)
    assert judged(0.05, 0.04) == "" and judged(0.039, 0.0) == ""
    assert "worst row by 1.3e-01 (at most 4e-02)" in judged(0.13, 1.0)


def test_a_wrong_gradient_fails_the_training_passes_alone(monkeypatch, timed):
    monkeypatch.setattr(fastattn, "attention", wrong_gradient)
    for record in cells(case("full")):
        if record["pass"] == FORWARD:
            assert record["status"] == "ok" and record["timings"]
        else:
            assert record["status"] == "failed" and record["reason"].startswith("dv is off by")
            assert record["timings"] == []
    assert set(timed) == {SUBJECT, BASELINE}


@pytest.mark.slow
def test_a_failed_baseline_gives_times_without_a_ratio(monkeypatch, timed):
    monkeypatch.setattr(F, "scaled_dot_product_attention", raises)
    (record,) = cells(case("full"), passes=(FORWARD,))
    assert record["status"] == "ok" and set(timed) == {SUBJECT}
    assert all(records.speedup_of(entry) is None for entry in record["timings"])
    assert "no such kernel" in record["peers"][BASELINE]["reason"]
    assert "\n".join(console.table([record]))


def test_another_dropout_generator_is_judged_without_dropout():
    """The result has a note about that. A peer that is wrong in everything else still fails."""
    (record,) = cells(case("dropout"), passes=(FORWARD,))
    ours, theirs = record["peers"][SUBJECT], record["peers"][BASELINE]
    assert ours["note"] == "" and "without dropout" in theirs["note"] and not theirs["reason"]
    torchs = PEERS[BASELINE]
    wrong = Peer("wrong", lambda case: lambda x: 1.01 * torchs.prepare(case)(x))
    assert "off by" in Judge(case("dropout"), gradients=False)(wrong, FORWARD).reason


# --- the oracle ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"H": 8, "Hk": 4}], ids=["MHA", "GQA"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_blocked_oracle_is_the_reference(mask, sizes, monkeypatch):
    """Blocks of a few rows: each sees its own keys only."""
    chosen_case = case(mask, N=300 if mask == "window" else 40, **sizes)
    n = chosen_case.N
    monkeypatch.setattr(verify, "BLOCK_ELEMENTS", (40 if n == 300 else 7) * n * chosen_case.H)
    oracle = Oracle(chosen_case, gradients=True)
    inputs = oracle.inputs
    leaves = [getattr(inputs, name).double().requires_grad_() for name in chosen_case.leaves]
    given = arguments(chosen_case)
    if chosen_case.rule.added:
        given["mask"] = leaves[3] if len(leaves) == 4 else inputs.bias.double()
    out = fastattn.reference.attention(*leaves[:3], **given)
    gradients = torch.autograd.grad(out, leaves, inputs.dout.double())
    names = ["out", *(f"d{name}" for name in chosen_case.leaves)]
    for name, expected in zip(names, (out, *gradients), strict=True):
        torch.testing.assert_close(
            oracle.expected[name], oracle.select(expected), rtol=1e-11, atol=1e-12
        )


def test_the_oracle_repeats_our_draws_in_blocks():
    chosen_case = case("dropout", B=2, N=37)
    whole = fastattn.reference.keep_mask((2, 4, 37, 37), DROPOUT_P, SEED).flatten(0, 1)
    some = verify.keep_mask_of_rows(torch.tensor([[1, 2], [5, 7]]), chosen_case, 5, 20)
    assert torch.equal(some, whole[[[1, 2], [5, 7]], 5:20])


def test_one_wrong_row_is_seen_among_larger_ones():
    """Causal rows shrink with their index: a norm over all rows hides an error in the last."""
    size = torch.arange(1, 1025, dtype=torch.float64).rsqrt()[:, None]
    expected = torch.randn(1, 1024, 16, dtype=torch.float64) * size
    actual = expected.clone()
    actual[0, -1] = 0
    whole, worst = relative_errors(actual, expected)
    assert whole < 0.05 and worst > 0.1
    assert relative_errors(expected, expected) == (0.0, 0.0)
