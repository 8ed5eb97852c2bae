"""M x N masks: blocks that hide all keys are skipped, blocks that hide none are not read, and
results are bit for bit those of adding every number of the mask.

`PLAIN` masks have the same patterns in numbers that no kernel recognises as structure: adding 1e-30
changes no score near 1, and -3.3e38 gives a probability of 0 if the row sees another key.
"""

from dataclasses import replace

import pytest
import torch

import fastattn
from tests.support.backends import (
    INTERPRETED,
    declares,
    every_backend,
    everywhere,
    looked_at,
    on_variants,
    passed,
    small,
)
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")
M, N = small((201, 455), (50, 70))
BLOCK = small(97, 33)
PATTERNS = {
    "causal": lambda i, j: j <= i,
    "left padding": lambda i, j: (j <= i + N - M) & (j >= N // 3),
    "right padding": lambda i, j: (j <= i + N - M) & (j < N // 2),
    "blocks": lambda i, j: i // BLOCK == j // BLOCK,
    "all": lambda i, j: j >= 0,
    "a row of none": lambda i, j: i != M // 2,
    "one hidden": lambda i, j: (i != M // 2 + 1) | (j != N // 2 + 3),
    "one visible": lambda i, j: (j < 3) | (i == M - 7) & (j == N - 9),
    "in turn": lambda i, j: (i + j) % 2 == 0,
}
# For few rows and more keys than one task has.
LONG = small(1101, 70)
FEW = {
    "a cache": lambda i, j, m: j < LONG // 4 + i,
    "left padding": lambda i, j, m: (j >= LONG // 3) & (j <= i + LONG - m),
    "parts": lambda i, j, m: j // BLOCK % 3 == 1,
    "nothing hidden": lambda i, j, m: j >= 0,
    "the last row of none": lambda i, j, m: (i < m - 1) | (m == 1),
    "one visible": lambda i, j, m: (j == LONG - 2) | (i == m - 1) & (j == 3),
    "in turn": lambda i, j, m: (i + j) % 2 == 0,
}
FORMS = {"-inf": (0.0, -torch.inf), "finfo.min": (0.0, None), "PLAIN": (1e-30, -3.3e38)}


@pytest.fixture(autouse=True)
def looked_at_by_triton():
    with looked_at():
        yield


def keep(pattern):
    return PATTERNS[pattern](torch.arange(M)[:, None], torch.arange(N)).expand(M, N).clone()


def mask_of(form, shown, dtype):
    """`shown` as a bool mask, or in numbers."""
    if form == "bool":
        return shown
    visible, hidden = FORMS[form]
    if dtype == torch.float16:  # its range excludes both numbers
        dtype = torch.float32
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.full(shown.shape, visible, dtype=dtype).masked_fill(~shown, hidden)


def case(pattern, form, dtype, others="", dims=None, shown=None):
    features = [FEATURE[x] for x in others.split("+") if x]
    problem = build(dims or Dims(1, 2, 1, M, N, 16, 24), features, dtype, seed=5)
    problem.name += f":{pattern}, {form}"
    problem.kwargs["mask"] = mask_of(form, keep(pattern) if shown is None else shown, dtype)
    return problem


def few_rows(m, pattern, form, dtype, others=""):
    shown = FEW[pattern](torch.arange(m)[:, None], torch.arange(LONG), m).expand(m, LONG).clone()
    return case(pattern, form, dtype, others, Dims(1, 4, 2, m, LONG, 16, 24), shown)


def results(problem, name):
    return problem.run(fastattn.attention, backend=name)


def same(found, expected):
    return [x for x in expected if not torch.equal(found[x], expected[x])]


BESIDE = dict(zip(PATTERNS, ("", "dropout", "sinks", "softcap", "lse_loss"), strict=False))
NO_MEAN = [x for x in PATTERNS if x != "a row of none"]  # PLAIN gives it the mean of other scores


@pytest.mark.skipif(INTERPRETED, reason="Triton's scores have another unit where nothing is added")
@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@parametrize("pattern", NO_MEAN, fast=3)
def test_bits_are_those_of_every_number_added(name, pattern, dtype):
    """Outputs and gradients, on every instruction set."""
    declares(name, DTYPES[dtype])
    given = DTYPES[dtype], BESIDE.get(pattern, "")
    for isa in on_variants(name, DTYPES[dtype]):
        expected = results(case(pattern, "PLAIN", *given), name)
        for form in ("bool", "-inf", "finfo.min"):
            found = results(case(pattern, form, *given), name)
            assert not (off := same(found, expected)), f"{isa}, {form}: {off}"


@pytest.mark.skipif(INTERPRETED, reason="Triton's scores have another unit where nothing is added")
@every_backend
@parametrize("dtype", DTYPES, fast=1)
@parametrize("rows", [1, 5, 16], fast=2)
def test_bits_of_few_rows_are_those_of_every_number_added(name, rows, dtype):
    declares(name, DTYPES[dtype])
    for others, pattern in zip(("", "dropout", "", "softcap", "", "alibi", ""), FEW, strict=True):
        if pattern == "the last row of none":
            continue  # in PLAIN it is a mean
        given = DTYPES[dtype], others
        for isa in on_variants(name, DTYPES[dtype]):
            expected = results(few_rows(rows, pattern, "PLAIN", *given), name)
            for form in ("bool", "-inf", "finfo.min"):
                found = results(few_rows(rows, pattern, form, *given), name)
                assert not (off := same(found, expected)), f"{isa}, {pattern}, {form}: {off}"


def spoiled(problem, begin, end):
    """The problem with NaN in keys and values of [begin, end)."""
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, begin:end] = v[:, :, begin:end] = torch.nan
    return replace(problem, k=k, v=v)


@pytest.mark.skipif(INTERPRETED, reason="Triton reads a mask of few rows")
@every_backend
@parametrize("lies", ["as it is", "column by column", "apart", "a head's own"], fast=2)
@pytest.mark.parametrize("form", ["bool", "-inf"])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_hidden_keys_of_few_rows_are_not_read(name, rows, form, lies):
    """A NaN value that is read makes a sum NaN, whatever its probability."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for company in (False, True):
            problem = few_rows(rows, "a cache", form, dtype)
            mask = problem.kwargs["mask"]
            if lies == "column by column":
                mask = mask.mT.contiguous().mT
            elif lies == "apart":
                mask = mask.repeat_interleave(3, -1)[..., ::3]
            elif lies == "a head's own":
                mask = mask.expand(1, 4, -1, -1).clone()
            problem.kwargs |= dict(mask=mask, row_invariant=company)
            for isa in on_variants(name, dtype):
                expected = results(problem, name)
                found = results(spoiled(problem, 512, LONG), name)
                assert not (off := same(found, expected)), f"{isa}, {dtype}, {company}: {off}"


@every_backend
def test_fully_hidden_rows_with_rows_of_finfo_min(name):
    """What finfo.min hides from a tile is not read for rows of it that -inf hides fully."""
    problem = case("causal", "finfo.min", torch.float32)
    problem.kwargs["mask"][:: small(20, 9)] = -torch.inf
    for isa in on_variants(name, torch.float32):
        found = results(spoiled(problem, small(256, 64), N), name)
        # The bits may differ: AMX tiles leave rows to vectors for a NaN that is not hidden by -inf.
        assert not (off := [x for x in found if found[x].isnan().any()]), f"{isa}: {off}"
        assert not found["out"][:, :, :: small(20, 9)].any()


@every_backend
@pytest.mark.parametrize("pattern", ["causal", "left padding", "one visible"])
def test_a_row_of_finfo_min_is_the_mean(name, pattern, threads):
    """All keys of some rows in a tile are finfo.min, while other rows of the tile have scores."""
    for dtype in (torch.float32, torch.bfloat16):
        problem = case(pattern, "finfo.min", dtype)
        rows = torch.tensor([5, 6, 7, 8, *range(*small((64, 161), (32, M))), M - 1])
        problem.kwargs["mask"][rows] = torch.finfo(dtype).min
        problem.kwargs["mask"][4] = problem.kwargs["mask"][11] = -torch.inf
        for isa in on_variants(name, dtype):
            out = results(problem, name)["out"]
            mean = problem.v.double().mean(2, keepdim=True).expand(1, 2, len(rows), -1)
            assert not out[:, :, [4, 11]].any(), isa
            tolerance = 4 * torch.finfo(dtype).eps
            found = out[:, :, rows].double()
            torch.testing.assert_close(found, mean, rtol=0, atol=tolerance, msg=str(isa))


@every_backend
@pytest.mark.parametrize("pattern", ["left padding", "blocks"])
def test_parts_that_are_skipped_change_no_order(name, pattern, threads):
    """Blocks add to dq in a fixed order: a skipped block passes its turn on."""
    for form in ("-inf", "finfo.min"):
        problem = case(pattern, form, torch.float32)
        for isa in on_variants(name, torch.float32):
            threads(1)
            first = results(problem, name)
            for count in small((2, 3, 7), ()):
                threads(count)
                assert not same(results(problem, name), first), (isa, count)


@every_backend
def test_nearly_structure(name):
    """-1e9 and NaN are ordinary numbers in a mask: their rows get them added."""
    found, problem = [], case("causal", "-inf", torch.float32)
    problem.q, problem.k = (x.round().clamp(-2, 2) for x in (problem.q, problem.k))
    mask = torch.where(keep("causal"), 0.0, -1e9)
    mask[: M // 2] = -1e9  # whole rows: their scores keep differences in steps of 64
    problem.kwargs["mask"] = mask
    found += everywhere(name, Verdict(problem))
    passed(found)
    spoiled = problem.kwargs["mask"].clone()
    spoiled[M // 2 + 2, N // 2] = torch.nan
    for isa in on_variants(name, torch.float32):
        clean = results(problem, name)["out"]
        out = results(replace(problem, kwargs=dict(mask=spoiled)), name)["out"]
        assert out[:, :, M // 2 + 2].isnan().all(), isa
        out[:, :, M // 2 + 2] = clean[:, :, M // 2 + 2]
        assert torch.equal(out, clean), isa
