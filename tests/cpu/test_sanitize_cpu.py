"""`make sanitize-cpu`: the calls it runs, its output, and that it detects faults.

Faults are seeded in a copy of the sources, compiled for one instruction set and float32 only.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.backends.native import libraries
from fastattn.dispatch import operation
from tests.cpu.test_amx import TILED
from tests.gpu_emulation.emulator import compiler
from tests.sanitize_cpu import __main__ as command
from tests.sanitize_cpu import builds, calls, guards, watch
from tests.support import build_lock
from tests.support.backends import not_interpreted, variant
from tests.support.cases import DTYPES, Dims, build
from tests.support.checkout import ROOT
from tests.support.kernel_builds import ONLY_FLOAT32
from tests.support.marks import parametrize

pytestmark = not_interpreted


# ---------------------------------------------------------------------------------- its output

SCRIPT = """
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("of 6")
if WHAT == "nothing":
    sys.exit()
for n in range(int(given["--first"]), 6, 2):
    print("begin", n, f"address:call/{n}", flush=True)
    if WHAT == "raises" and n == 3:
        print("end ValueError: no")
        continue
    if WHAT == "dies" and n == 2:
        print("==1==ERROR: AddressSanitizer: heap-buffer-overflow", file=sys.stderr, flush=True)
        os._exit(66)
    print("end")
print("done")
"""


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A function that makes workers run SCRIPT in place of calls."""

    def use(what):
        file = tmp_path / "worker.py"
        file.write_text(f"WHAT = {what!r}\n{SCRIPT}")
        monkeypatch.setattr(watch, "COMMAND", [sys.executable, str(file)])
        monkeypatch.setattr(builds, "preloaded", lambda sanitizers: "")

    return use


@pytest.mark.parametrize("what, findings", [("ends", 0), ("raises", 1), ("dies", 1)])
def test_the_last_line_and_the_status(what, findings, script, capsys):
    script(what)
    given = ["--parts", "address", "--libraries", "none", "--workers", "2", "--minutes", "0.01"]
    status = command.main(given if what == "ends" else given[:-2])
    lines = capsys.readouterr().out.splitlines()
    assert status == (findings > 0)
    *_, seconds, _, cases, _, found, _ = lines[-1].replace(",", "").split()
    assert lines[-1].startswith("sanitize-cpu: ") and int(seconds) < 60
    assert int(cases) >= 6 and int(found) == findings
    if findings:
        assert "repeat it: python -m tests.sanitize_cpu --seed 1 --case address:call/" in (
            "\n".join(lines)
        )
    if what == "dies":
        assert any("heap-buffer-overflow" in x for x in lines)


def test_no_case_is_a_failure(script, capsys):
    script("nothing")
    assert command.main(["--parts", "address", "--libraries", "none"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(" 0 cases, 0 findings")


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--parts", "address,nonsense"])
    assert "--parts: got nonsense, expected some of" in capsys.readouterr().err


def test_a_failed_build_is_reported(monkeypatch, capsys):
    def fail(sanitizers):
        raise builds.Failed("no such compiler")

    monkeypatch.setattr(builds, "libraries", fail)
    assert command.main(["--parts", "address,threads"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(" 0 cases, 2 findings")


# ------------------------------------------------------------------------------- what it runs


def run_on(backend):
    base.register(backend)
    operation.forget_plans()  # which keep a backend


@pytest.fixture
def guarded_backend():
    before = base.get("cpu")
    found = guards.GuardedCpu()
    run_on(found)
    yield found
    run_on(before)


# This machine's best set; and tiles, which read keys and rows 32 at a time.
BEST = libraries.cpu_isa()
GUARDED = [("float32", BEST), *(("bfloat16", isa) for isa in TILED)]
guarded_calls = pytest.mark.parametrize("dtype, isa", GUARDED)


@guarded_calls
@pytest.mark.parametrize("kind", sorted(calls.KINDS.keys() - {"indexer"}))
@pytest.mark.parametrize("place", guards.PLACES)
def test_calls_are_right_between_guard_pages(kind, place, dtype, isa, guarded_backend, one_thread):
    guarded_backend.place, before = place, guards.Guarded.launches
    with variant(isa):
        for seed, D in enumerate((1, 33, 130, 577, 1000)):
            calls.make((kind, D, dtype, isa), seed)
    assert guards.Guarded.launches > before


EDGES = (1, 1, 32), (3, 47, 33), (16, 31, 64), (17, 33, 96), (70, 129, 32), (130, 257, 64)


@guarded_calls
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_guard_pages_change_no_bit(dtype, isa, causal, guarded_backend, one_thread):
    for m, n, d in EDGES:
        problem = build(Dims(1, 2, 1, m, n, d, d), (), DTYPES[dtype])
        problem.kwargs["causal"] = causal
        with variant(isa):
            run_on(guarded_backend)
            found = problem.run(fastattn.attention, backend="cpu")
            run_on(guards.Cpu())
            expected = problem.run(fastattn.attention, backend="cpu")
        for name, x in expected.items():
            assert torch.equal(x, found[name]), (m, n, d, name)


TOUCH = """
import ctypes, sys
sys.path.insert(0, {root!r})
import torch
from tests.sanitize_cpu import guards
x = torch.zeros(3, 7)[:, :5]
with guards.moved([x], {place!r}) as (y,):
    assert torch.equal(x, y) and y.stride() == (7, 1)
    y += 1
    print("nothing yet", flush=True)
    ctypes.memset(y.data_ptr() + {offset}, 0, 1)
"""


@parametrize(
    "place, offset, dies",
    [("last", 76, True), ("last", 75, False), ("first", -1, True), ("first", 0, False)],
    fast=1,
)
def test_the_byte_beyond_a_tensor_is_protected(place, offset, dies):
    text = TOUCH.format(root=str(ROOT), place=place, offset=offset)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert "nothing yet" in done.stdout, done.stderr
    assert (done.returncode != 0) == dies


# --------------------------------------------------------------------------- what it must notice


@dataclass(frozen=True)
class Fault:
    file: str
    old: str
    new: str
    case: str
    said: str


FAULTS = {
    "scratch of half its size": Fault(
        "cpu/runtime/thread_memory.h",
        "allocate_lines(size_)",
        "allocate_lines(size_ / 2)",
        "address:dense/64/float32/generic/last",
        "heap-buffer-overflow",
    ),
    "a count that threads share": Fault(
        "cpu/runtime/library.cpp",
        "    run(task, scratch);",
        "    static int64_t sum; run(task, scratch), ++sum;",
        "threads:dense/61/float32/generic",
        "ThreadSanitizer: data race",
    ),
}
FLAGS = ["-std=gnu++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-w"]


def compile_with(sanitizers, *arguments):
    more = ["-DFA_STD_THREADS"] if sanitizers == builds.THREAD else ["-fopenmp"]
    watched = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *more]
    command = [*compiler(), *FLAGS, *watched, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def kernels(sanitizers):
    """The object file of the kernels, without a fault, compiled once."""
    files = sorted(x for x in (ROOT / "csrc" / "cpu").rglob("*.h") if x.name != "packed_batch.h")
    key = build_lock.digest(
        *files, ROOT / "csrc" / "cpu" / "unit.cpp", FLAGS, sanitizers, compiler()
    )
    name = f"sanitized-{sanitizers.replace(',', '-')}"

    def make():
        sources = build_lock.FOLDER / f"{name}-sources"
        shutil.copytree(ROOT / "csrc", sources, dirs_exist_ok=True)
        isa, target = sources / "cpu" / "unit.cpp", build_lock.FOLDER / f"{name}.o"
        compile_with(sanitizers, ONLY_FLOAT32, "-DFA_ISA=generic", "-c", isa, "-o", target)
        return target

    return build_lock.made(name, key, make)


def library(fault, folder):
    """Build a library with the given fault, under the name that workers load."""
    sanitizers = builds.THREAD if fault.case.startswith("threads") else builds.ADDRESS
    sources = folder / "csrc"
    shutil.copytree(ROOT / "csrc", sources, ignore=shutil.ignore_patterns("cuda"))
    file = sources / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.old, fault.new))
    runtime = [sources / "cpu" / "runtime" / f"{x}.cpp" for x in ("library", "kernel_choice")]
    compile_with(
        sanitizers, "-shared", kernels(sanitizers), *runtime, "-o", folder / "libfastattn_cpu.so"
    )
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_of_a_fault_is_in_its_file(name):
    fault = FAULTS[name]
    assert (ROOT / "csrc" / fault.file).read_text().count(fault.old) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_detected(name, tmp_path):
    fault = FAULTS[name]
    given = ["--libraries", library(fault, tmp_path), "--case", fault.case]
    for seed in range(1, 6):  # some calls of this kind are too small to show the fault
        status, output = run_command(*given, "--seed", seed)
        if status:
            break
    assert status == 1 and fault.said in output, output
    assert output.splitlines()[-1].endswith(" 1 cases, 1 findings")


def run_command(*arguments):
    line = [sys.executable, "-m", "tests.sanitize_cpu", *map(str, arguments)]
    done = subprocess.run(line, cwd=Path(ROOT), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr
