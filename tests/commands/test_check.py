"""`python -m fastattn check`: planted faults are found, each pair is in a row."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch

from fastattn import __main__
from fastattn.backends import base
from fastattn.backends.native import cpu, libraries
from fastattn.call.spec import UNLIMITED
from fastattn.commands import check, sample_calls
from fastattn.commands.check import Expected
from fastattn.commands.covering import covering
from fastattn.commands.sample_calls import FACTORS, excludes
from tests.support.backends import INTERPRETED, needs_triton
from tests.support.fresh_python import python

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="about the native library")
SMALL = {"M": (5, 1, 33), "N": (17, 1, 65), "D, Dv": ((32, 32), (16, 8), (64, 64))}


ROWS = functools.cache(lambda seed: covering(FACTORS | SMALL, excludes, seed))
EXPECTED = functools.cache(lambda number, seed: Expected(CALLS(number, seed)))
CALLS = functools.cache(lambda number, seed: sample_calls.made(ROWS(seed)[number], seed + number))


@pytest.fixture
def small(threads, monkeypatch):
    """Calls of small sizes; the oracle computes them once for all tests."""
    threads(1)
    numbers = {id(CALLS(number, 0)): number for number in range(len(ROWS(0)))}
    monkeypatch.setattr(check, "covering", lambda factors, excludes, seed: ROWS(seed))
    monkeypatch.setattr(check, "FIXED", ())
    monkeypatch.setattr(check, "made", lambda row, seed: CALLS(ROWS(0).index(row), 0))
    monkeypatch.setattr(check, "Expected", lambda call: EXPECTED(numbers[id(call)], 0))


def checked(capsys, *arguments):
    """(exit status, printed lines) of the command on one instruction set."""
    status = __main__.main(["check", "--device", "cpu", *arguments])
    return status, capsys.readouterr().out.splitlines()


GENERIC = ("--backend", "cpu", "--isa", "generic")


# ------------------------------------------------------------------------------------- the rows


def test_each_pair_of_levels_that_may_meet_is_in_a_row():
    rows = covering(FACTORS, excludes)
    levels = [(name, x) for name, some in FACTORS.items() for x in some]
    missing = [
        (one, other)
        for one, other in itertools.combinations(levels, 2)
        if one[0] != other[0]
        and not excludes(*one, *other)
        and not excludes(*other, *one)
        and not any(row[one[0]] == one[1] and row[other[0]] == other[1] for row in rows)
    ]
    assert not missing and len(rows) < 70
    for row in rows:
        assert row.keys() == FACTORS.keys()
        assert not any(excludes(*x, *y) for x, y in itertools.permutations(row.items(), 2))


def test_a_seed_draws_the_same_rows_again_and_another_seed_others():
    few = {name: FACTORS[name] for name in ("M", "N", "heads", "band")}
    one, again, other = (covering(few, excludes, seed) for seed in (1, 1, 2))
    assert one == again != other


def test_a_pair_that_others_exclude_ends_the_search():
    """a=1 leaves no level of c beside b=1."""

    def forbidden(f, a, g, b):
        return (f, a, g, b) in (("a", 1, "c", 0), ("b", 1, "c", 1))

    rows = covering(dict(a=(0, 1), b=(0, 1), c=(0, 1)), forbidden)
    assert rows and not any(row["a"] == row["b"] == 1 for row in rows)


# ---------------------------------------------------------------------------------- the verdict


@not_interpreted
def test_the_kernels_are_right(small, capsys):
    status, lines = checked(capsys, *GENERIC)
    assert status == 0, lines
    assert re.fullmatch(
        r"cpu generic: \d+ calls, worst error [\d.]+ of the bound .+: right", lines[-1]
    )


@not_interpreted
def test_every_instruction_set_has_a_verdict(small, capsys):
    """The model of AMX's tiles is none: it is for tests. The choice of before is restored."""
    before = libraries.cpu_units()
    status, lines = checked(capsys, "--call", "3")
    assert status == 0
    names = [x for x in libraries.cpu_isas() if x != "amx_model"]
    assert [x.partition(":")[0] for x in lines] == [f"cpu {x}" for x in names]
    assert libraries.cpu_units() == before


def replaced(**changes):
    """A fault: kernels run another call, with these fields of the spec."""

    def planted(method):
        def run(self, spec, *given):
            fields = {x: change(spec) for x, change in changes.items()}
            return method(self, dataclasses.replace(spec, **fields), *given)

        return run

    return planted


def negated(name):
    """A fault: the gradient of one tensor has the wrong sign."""

    def planted(method):
        def run(self, *given):
            found = method(self, *given)
            return found | {name: -found[name]} if name in found else found

        return run

    return planted


def with_nan(method):
    """A fault: empty rows are NaN."""

    def run(self, *given):
        out, normaliser = method(self, *given)
        empty = normaliser[0] == -torch.inf
        empty = empty.squeeze(0) if out.ndim == 3 else empty
        return out.masked_fill(empty[..., None], torch.nan), normaliser

    return run


def raising(method):
    def run(self, *given):
        raise RuntimeError("the kernel is gone")

    return run


def changed(change):
    """A fault: kernels get other tensors than the caller's, or return another output."""

    def planted(method):
        def run(self, spec, t):
            return change(spec, t, lambda t: method(self, spec, t))

        return run

    return planted


def without_the_last_column(spec, t, run):
    out, normaliser = run(t)
    if spec.Dv % 8:
        out[..., -1] = 0
    return out, normaliser


def with_one_mask(spec, t, run):
    mask = t.mask
    if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        mask = mask[:, :1].expand(mask.shape)
    return run(t._replace(mask=mask))


def with_a_rounded_mask(spec, t, run):
    if spec.dtype.itemsize == 2 and t.mask is not None and t.mask.dtype == torch.float32:
        t = t._replace(mask=t.mask.round())
    return run(t)


def without_a_block_in_decoding(spec, t, run):
    if spec.M == 1 and not spec.packed and spec.N >= 300:
        t = t._replace(k=t.k.clone().index_fill_(2, torch.arange(256, 264), 0))
    return run(t)


OF_LEVELS = {
    "the last of an odd number of columns": without_the_last_column,
    "one mask for all heads": with_one_mask,
    "a float32 mask is rounded": with_a_rounded_mask,
    "a block of keys of one row": without_a_block_in_decoding,
}


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize("fault", OF_LEVELS)
def test_a_fault_of_few_levels_is_found(fault, monkeypatch, capsys, threads):
    """In the calls of the command; those of some levels are left out to save time."""
    threads(1)

    def levels(row):
        decoded = row["M"] == 1 and row["form"] == "dense" and row["N"] >= 300
        return decoded or row["D, Dv"] == (33, 17) or row["mask"] in ("of heads", "float32")

    of_all = check.covering
    monkeypatch.setattr(check, "covering", lambda *g: [x for x in of_all(*g) if levels(x)])
    assert checked(capsys, *GENERIC)[0] == 0
    monkeypatch.setattr(cpu.Cpu, "fast_plan", lambda *given: None)
    monkeypatch.setattr(cpu.Cpu, "forward", changed(OF_LEVELS[fault])(cpu.Cpu.forward))
    status, lines = checked(capsys, *GENERIC)
    assert status == 1 and re.search(r": WRONG in \d+$", lines[-1]), lines[-1]


FAULTS = {
    "the scale is off by a hundredth": ("forward", replaced(scale=lambda x: x.scale * 1.01)),
    "causal is dropped": ("forward", replaced(right=lambda x: UNLIMITED)),
    "softcap is dropped": ("forward", replaced(softcap=lambda x: 0.0)),
    "other numbers are dropped": ("forward", replaced(dropout_p=lambda x: x.dropout_p / 2)),
    "causal is dropped in backward": ("backward", replaced(right=lambda x: UNLIMITED)),
    "the scale is off in backward": ("backward", replaced(scale=lambda x: x.scale * 1.05)),
    "the sign of dq": ("backward", negated("q")),
    "the sign of dk": ("backward", negated("k")),
    "the sign of the mask's gradient": ("backward", negated("mask")),
    "the sign of the sinks' gradient": ("backward", negated("sinks")),
    "empty rows are NaN": ("forward", with_nan),
    "a kernel raises": ("backward", raising),
}


@not_interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, small, monkeypatch, capsys):
    where, planted = FAULTS[fault]
    # Calls that the extension launches itself do not come to these methods.
    monkeypatch.setattr(cpu.Cpu, "fast_plan", lambda *given: None)
    monkeypatch.setattr(cpu.Cpu, where, planted(getattr(cpu.Cpu, where)))
    status, lines = checked(capsys, *GENERIC)
    assert status == 1 and re.search(r": WRONG in \d+$", lines[-1]), lines[-1]
    assert len([x for x in lines if " check --device " in x]) <= check.SHOWN


@not_interpreted
def test_the_printed_command_repeats_the_call(small, monkeypatch, capsys):
    right = cpu.Cpu.backward
    monkeypatch.setattr(cpu.Cpu, "backward", negated("k")(right))
    _, lines = checked(capsys, *GENERIC)
    first = next(x for x in lines if " check --device " in x)
    status, again = checked(capsys, *first.split()[6:])
    assert status == 1 and again[:3] == lines[:3]
    monkeypatch.setattr(cpu.Cpu, "backward", right)
    assert checked(capsys, *first.split()[6:])[0] == 0


@not_interpreted
def test_a_backend_that_declines_everything_is_not_called_right(small, monkeypatch, capsys):
    def declines(name, spec, device):
        return ["no"]

    monkeypatch.setattr(base, "_declines", declines)
    check.forget_plans()
    status, lines = checked(capsys, *GENERIC, "--call", "0")
    assert status == 2 and lines[-1] == "cpu generic: none of 1 calls ran: nothing is known"
    check.forget_plans()


@not_interpreted
def test_the_time_ends_it(small, capsys):
    status, lines = checked(capsys, *GENERIC, "--minutes", "1e-9")
    assert status == 2 and "none of" in lines[-1]
    verdict = check.Verdict(check.Way("cpu", "cpu", "avx2"), of=9, calls=4, declined=2, worst=0.5)
    text = "cpu avx2: 4 calls (2 more declined) (3 more not reached in the time)"
    assert str(verdict) == f"{text}, worst error 0.5 of the bound (out): right"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--isa", "mmx"], "got None, mmx, expected one of "),
        (["--backend", "gpu"], "got gpu, None, expected one of "),
        (["--minutes", "0"], "--minutes: got 0, expected more than 0"),
        (["--minutes", "nan"], "--minutes: got nan, expected more than 0"),
        (["--call", "1000"], "--call: got 1000, expected 0 to "),
    ],
)
def test_what_is_not_there_is_refused(arguments, message, capsys):
    assert __main__.main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(base.get("cuda").__class__, "unavailable", lambda self: "no GPU here")
    __main__.main(["check", "--minutes", "1e-9"])
    assert "cuda: not checked: no GPU here" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "tune"])
def test_a_library_that_does_not_load_is_named(command, tmp_path):
    """Whatever else could not run: no traceback."""
    library = tmp_path / "broken.so"
    library.write_text("no library")
    program = f"""
import sys
from fastattn.__main__ import main
sys.stderr = sys.stdout
sys.exit(0 if main(["{command}", "--device", "cpu"]) == 2 else 3)
"""
    said = python("-W", "ignore", "-c", program, FASTATTN_LIBRARY=str(library)).stdout
    assert "the native library does not load: " in said and "Traceback" not in said


def test_an_unknown_command_names_the_commands(capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["chek"])
    assert "got 'chek', expected one of check, tune, or an option" in capsys.readouterr().err


@needs_triton
@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter")
def test_triton_is_checked_where_its_interpreter_is(small, capsys):
    status, lines = checked(capsys, "--backend", "triton", "--call", "0")
    assert status == 0 and lines[-1].startswith("triton: 1 calls, worst error"), lines


@not_interpreted
def test_an_installed_package_needs_nothing_beside(tmp_path):
    """Neither the tests nor the benchmark, nor numpy."""
    program = """
import sys
for name in ("numpy", "tests", "bench"):
    sys.modules[name] = None
from fastattn.__main__ import main
sys.exit(main(["check", "--device", "cpu", "--isa", "generic", "--call", "0"]))
"""
    assert python("-W", "ignore", "-c", program).stdout.endswith(": right\n")


# ------------------------------------------------------------------------------------ the oracle


def test_the_oracle_of_a_packed_call_is_that_of_its_sequences():
    """Against one dense call, of the sequence with all keys."""
    row = {name: some[0] for name, some in FACTORS.items()}
    row |= dict(form="packed", dtype="float64", M=6, N=8, alibi="of items", lse=True)
    call = sample_calls.made(row, 0)
    found = call.by_oracle(torch.float64)
    starts, ends = call.given["cu_q"].tolist(), call.given["cu_k"].tolist()
    rows, keys = slice(*starts[1:3]), slice(*ends[1:3])
    q, k, v = (call.tensors[x][y].transpose(0, 1)[None] for x, y in zip("qkv", (rows, keys, keys)))
    slopes = call.given["alibi_slopes"][1:2]
    alone = torch.softmax(
        q @ k.mT / 8 - slopes[..., None, None] * (torch.arange(4)[:, None] - torch.arange(8)).abs(),
        -1,
    )
    torch.testing.assert_close(found["out"][rows], (alone @ v)[0].transpose(0, 1))
