"""The CPU kernels execute no more instructions than recorded, and the check can fail."""

from pathlib import Path

import pytest

from bench.instructions import x86 as instructions
from bench.instructions.x86 import OTHER_COMPILER, SAME_COMPILER, Counts, compare
from fastattn.backends.native import libraries

reason = instructions.unavailable()
needs_valgrind = pytest.mark.skipif(bool(reason), reason=str(reason))


# --------------------------------------------------------------------------------- what is executed


@pytest.mark.slow
@needs_valgrind
@pytest.mark.skipif(
    bool(libraries.cpu_unavailable()) or not set(instructions.ISAS) <= set(libraries.cpu_isas()),
    reason=f"the chip or the build lacks one of {instructions.ISAS}",
)
def test_no_more_instructions_than_recorded(capsys):
    status = instructions.check()
    assert status == 0, capsys.readouterr().out


@pytest.mark.slow
@needs_valgrind
def test_counts_are_the_same_in_every_run(tmp_path):
    program = instructions.build(libraries.cpu().path.resolve(), tmp_path)
    first, second = (instructions.count(program, "generic", "decode") for _ in range(2))
    assert first == pytest.approx(second, rel=1e-4)


@needs_valgrind
@pytest.mark.parametrize("isa, case", [("avx3", "decode"), ("generic", "forward nothing")])
def test_instructions_of_unknown_cases_raise(tmp_path, isa, case):
    program = instructions.build(libraries.cpu().path.resolve(), tmp_path)
    wrong = isa if isa == "avx3" else case
    with pytest.raises(RuntimeError, match=f"got {wrong}, expected"):
        instructions.count(program, isa, case)


@needs_valgrind
def test_a_program_without_the_call_has_no_count():
    with pytest.raises(RuntimeError, match="expected 'Collected : <count>'"):
        instructions.count(Path("true"), "avx2", "decode")


@pytest.mark.parametrize(
    "code, expected",
    [
        (b"\0GCC: (Debian 12.2.0-14+deb12u1) 12.2.0\0", "GCC 12.2.0"),
        (b"\0GCC: (GNU) 4.0.0\0Debian clang version 14.0.6\0", "clang 14.0.6"),
        (b"\0", "unknown"),
    ],
)
def test_compiler_is_read_from_the_library(tmp_path, code, expected):
    library = tmp_path / "library.so"
    library.write_bytes(code)
    assert instructions.compiler_of(library) == expected


# ----------------------------------------------------------------------------------- the comparison

RECORD = Counts("GCC 12.2.0", {"avx2 decode": 1000, "avx2 forward full": 2000})


def words(counts: dict[str, int], compiler: str = RECORD.compiler) -> list[str]:
    return [v.word for v in compare(Counts(compiler, RECORD.instructions | counts), RECORD)]


SAME, OTHER = RECORD.compiler, "clang 14.0.6"


@pytest.mark.parametrize(
    "compiler, word, counts",
    [
        (SAME, "ok", (1000, 1020, 980)),
        (SAME, "more", (1050,)),
        (SAME, "fewer", (950,)),
        (OTHER, "ok", (1050, 1250)),
        (OTHER, "more", (1300,)),
        (OTHER, "fewer", (700,)),
    ],
)
def test_another_compiler_is_allowed_more(compiler, word, counts):
    assert SAME_COMPILER == 0.02 and OTHER_COMPILER == 0.25
    for count in counts:
        assert words({"avx2 decode": count}, compiler) == [word, "ok"]


def test_cases_and_records_must_match():
    assert words({"avx2 new": 1}) == ["ok", "ok", "no record"]
    got = Counts(RECORD.compiler, {"avx2 decode": 1000})
    assert [v.word for v in compare(got, RECORD)] == ["ok", "no case"]


@pytest.fixture
def counting(monkeypatch, tmp_path):
    """A function that sets the next counts; the record file is a copy of RECORD."""
    monkeypatch.setattr(instructions, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(instructions, "unavailable", lambda: None)
    instructions.accept([RECORD], instructions.RECORD)

    def count(counts: dict[str, int]) -> None:
        counts = RECORD.instructions | counts
        monkeypatch.setattr(instructions, "counted", lambda: Counts(RECORD.compiler, counts))

    return count


@pytest.mark.parametrize("count, status", [(1000, 0), (950, 0), (1050, 1)])
def test_exit_status(counting, capsys, count, status):
    counting({"avx2 decode": count})
    assert instructions.check() == status
    assert ("--accept" in capsys.readouterr().out) == (count != 1000)


def test_accept_makes_the_record(counting):
    counting({"avx2 decode": 1050, "avx2 new": 1})
    assert instructions.check() == 1
    assert instructions.check(True) == 0
    assert instructions.check() == 0
