"""python -m bench gpu: the first hour with a GPU, part by part; `make gpu` sets up first.

Each part is a process with a time limit. If a part fails, hangs or lacks a tool, that is recorded
and the next part begins. After each, results/gpu/<device>-first-hour.json and .md are rewritten, so
that an interrupted hour leaves a record and a page of the finished parts. Without a GPU, or with
--rehearse, each kind of part runs in its smallest form, on the tests' emulator of CUDA and a stub
of a driver, to check that all parts work. A rehearsal's files are marked and in results/local.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..measure import isolated_process, machine, nvidia
from ..reporting import results
from . import gpu_session_page

Record = dict[str, Any]
SCHEMA = 1
MINUTES = 60.0
GRACE = (
    15.0  # seconds to exit after an interrupt: a sweep saves its cells, pytest prints its counts
)
REAPED = 60.0  # seconds to wait for killed processes on a busy machine
LINES, COLUMNS = 150, 300  # of a part's output that are kept: the last lines
TOOLS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])

OK, FAILED, TIMEOUT, MISSING, UNDONE = "ok", "failed", "out of time", "tool is missing", "not begun"


class Part(NamedTuple):
    """Commands run in the repository's root. {python} is this Python, {out} a folder for result
    files, {venv} this Python's environment for make, {arch} the GPU's architecture, such as 90."""

    name: str
    limit: float  # seconds
    command: str
    rehearsal: str  # small, with no GPU; "": another part rehearses this kind
    tool: str = ""  # that the command needs


CHECK = 90.0  # seconds of a check, which takes ten where no other process has the cores
TESTS = "{python} -m pytest -q -rfE"
ON_GPU = f"{TESTS} -m gpu"
BENCH = "{python} -m bench"
TINY = "--device cpu --threads 1 --seconds 0.002 --output {out}"
PEERS = "fastattn-cuda torch torch-flash torch-cudnn torch-efficient flash-attn"
SMALL = "--lengths 40 --dims 16 --dtypes bfloat16 --masks full --passes forward --sweep-only"
CHECKED = f"{TESTS} tests/cuda/test_cuda_emulated.py -k 'test_features and plain and bfloat16'"
WARNINGS = f"{TESTS} tests/gpu/test_foreign_warnings.py"
QUICK = f"{TESTS} tests/bench/test_bench_compiling.py -k 'no_peer or sweep_on_a_gpu'"
SM90_CHECK, HANGS = "tests/cuda/test_sm90_check.py", "never_happens or hangs"
OVERLAP = "--compilers cuda --passes forward --dims 64 --features plain"
EMULATOR = (
    "from tests.gpu_emulation import emulated, kernel_classes, probe90;"
    "print(emulated.emulator().path, probe90.emulator().path, kernel_classes.library().path)"
)


def _sanitized(tool: str, limit: float) -> Part:
    """A short run of a sanitizer on plain calls and storage offsets, without torch's caching
    allocator, which would hide accesses beyond a tensor; and without probes, because racecheck
    takes bulk copies for races."""
    few = (
        "tests/gpu/test_gpu.py -k 'cuda and bfloat16 and (test_features and plain or test_storage)'"
    )
    command = f"compute-sanitizer --tool {tool} --error-exitcode 1 {ON_GPU} {few}"
    alone = f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 FASTATTN_SM90=unchecked {command}"
    checked = tool == "memcheck"  # one run of the emulator checks for all four
    return Part(f"sanitizer: {tool}", limit, alone, CHECKED * checked, "compute-sanitizer")


def _tested(file: str, limit: float, rehearsal: str = "") -> Part:
    name = f"tests: {file.rpartition('/')[2]}"
    return Part(name, limit, f"{ON_GPU} tests/{file}.py", rehearsal)


def _checked(name: str, rehearsal: str | None = None) -> Part:
    """A check of the machine by bench/measure/first_contact.py."""
    command = f"{{python}} -m bench.measure.first_contact {name}"
    rehearsal = rehearsal or f"{command} --rehearse"
    return Part(f"check: {name}", CHECK, command, rehearsal)


def _contact(name: str, chosen: str, rehearsal: str = "") -> Part:
    """A part of tests/gpu/test_gpu_contact.py, with the kernels of the cuda backend, which compile
    nothing. Its rehearsal is the same of the emulator."""
    command = f"{ON_GPU} tests/gpu/test_gpu_contact.py -k '({chosen}) and (cuda or sm_90)'"
    small = f"{TESTS} tests/cuda/test_contact_emulated.py -k '({chosen}) and (bfloat16 or repeats)'"
    return Part(f"check: {name}", CHECK, command, rehearsal or small)


def _swept(name: str, limit: float, what: str, rehearsal: str = "") -> Part:
    command = (
        f"{BENCH} sweep --sweep-only --dtypes bfloat16 {what} --peers {PEERS} --output {{out}}"
    )
    return Part(f"sweep: {name}", limit, command, rehearsal)


# First what would make the rest fail or hang: the machine; single instructions; calls that new
# kernels likely get wrong; small shapes of every kernel. Then the most informative parts, because
# an hour may be cut short.
PARTS = (
    Part("build", 1200, "make setup VENV={venv}", f"{{python}} -c {shlex.quote(EMULATOR)}", "make"),
    Part("status", 120, "{python} -m fastattn", "{python} -m fastattn"),
    _checked("driver"),
    _checked("launcher"),
    _checked("versions"),
    _checked("processes"),
    _checked("memory"),
    _checked("fault"),
    _checked("clock", f"{TESTS} tests/bench/test_first_contact.py -k clock_of_short_kernels"),
    Part("check: warnings", CHECK, WARNINGS, WARNINGS),
    Part("check: quick sweep", CHECK, QUICK, QUICK),
    Part(
        "probe",
        300,
        f"{ON_GPU} tests/gpu_emulation/tests/test_probe.py",
        f"{TESTS} tests/gpu_emulation/tests/test_probe.py -k 'emulator_gives and shuffle'",
    ),
    Part(
        "probe: sm_90",
        300,
        f"{ON_GPU} tests/gpu_emulation/tests/test_probe90.py",
        f"{TESTS} tests/gpu_emulation/tests/test_probe90.py {SM90_CHECK}"
        f" -k '{HANGS} or source_gives'",
    ),
    _contact("tensors that TMA cannot copy", "tma"),
    _contact("numbers behind lengths", "behind or neighbour"),
    _contact("repeats", "repeats"),
    _contact("kernels of sm_90 serve", "serve", f"{TESTS} {SM90_CHECK} -k passes"),
    Part("check: overlap", 300, f"{BENCH} ledger --archs {{arch}} {OVERLAP}", "", "nvcc"),
    _tested(
        "gpu/test_gpu_contact",
        600,
        f"{TESTS} tests/cuda/test_contact_emulated.py -k 'small and bfloat16 and 64'",
    ),
    Part(
        "tests: plain",
        300,
        f"{ON_GPU} tests/gpu/test_gpu.py -k 'fused_kernels or test_features and plain'",
        f"{TESTS} tests/cuda/test_cuda_launch.py -k 'square and (runs_where_it_should or graph)'",
    ),
    _tested(
        "package/test_first_call",
        300,
        f"{TESTS} tests/package/test_first_call.py -k 'captured or translate'",
    ),
    Part("launch", 300, f"{BENCH} overhead --output {{out}}", f"{BENCH} overhead {TINY}"),
    _swept(
        "lengths",
        600,
        "--masks full causal --dims 64 128 --lengths 512 2048 8192",
        f"{BENCH} sweep {SMALL} {TINY}",
    ),
    _swept("features", 600, "--masks window padding ALiBi dropout --dims 64 --lengths 4096"),
    Part("decode", 300, f"{BENCH} decode --dtypes bfloat16 --output {{out}}", ""),
    Part("memory", 300, f"{BENCH} memory --output {{out}}", ""),
    *(_sanitized(x, 300) for x in ("memcheck", "racecheck", "synccheck", "initcheck")),
    _tested("gpu/test_gpu", 900),
    _tested("gpu/test_gpu_calls", 600),
    _tested("gpu/test_gpu_streams", 600),
    _tested("gpu/test_gpu_torch", 600),
    _tested("gpu/test_gpu_scale", 600),
    _tested("gpu/test_gpu_pairs", 900),
    _tested("gpu/test_gpu_tangents", 600),
    _tested("gpu/test_gpu_functions", 600),
    _tested("gpu/test_gpu_wide", 600),
    _tested("gpu/test_gpu_selected", 600),
    Part(
        "ledger",
        900,
        f"{BENCH} ledger --archs {{arch}}",
        f"{BENCH} ledger --compilers triton --archs 80 --passes forward --dims 64 --features plain",
    ),
)


def run(
    only: list[str] | None, rehearse: bool, minutes: float, output: Path | None
) -> tuple[Record, Path]:
    """Run the parts; return the record and its path. Ctrl-C ends the hour and keeps finished parts.
    Raises ValueError if torch cannot use the GPU, unless `rehearse` is set."""
    if not rehearse and (why := nvidia.unusable()):
        raise ValueError(f"{why}. --rehearse needs no GPU")
    rehearsal = rehearse or not torch.cuda.is_available()
    chosen = [x for x in PARTS if not only or any(text in x.name for text in only)]
    chosen = [x for x in chosen if x.rehearsal or not rehearsal]
    if not chosen:
        raise ValueError(f"--only: got {only}, expected some of {[x.name for x in PARTS]}")
    folder = output or results.FOLDER / ("local" if rehearsal else "gpu")
    # A process that has used a GPU holds it, so this process leaves the GPU to the parts.
    where = (
        machine.describe("cpu") if rehearsal else isolated_process.once(machine.describe, "cuda")
    )
    name = "rehearsal" if rehearsal else machine.slug(where)
    record = _begun(rehearsal, where, chosen)
    if rehearsal:
        print("A rehearsal: no GPU is used, and nothing here is a measurement of one.", flush=True)
    end = time.monotonic() + 60 * minutes
    path = save(record, folder / f"{name}-first-hour.json")
    try:
        for number, part in enumerate(chosen):
            left = end - time.monotonic()
            if left <= 0:
                break
            heading = f"[{number + 1}/{len(chosen)}] {part.name}"
            limit = min(part.limit, left)
            print(f"{heading}: at most {_minutes(limit)}", flush=True)
            done = perform(part, rehearsal, limit)
            record["parts"][number] = done
            save(record, path)
            print(f"{heading}: {done['status']} in {_minutes(done['seconds'])}: {done['last']}")
        record["complete"] = all(x["status"] != UNDONE for x in record["parts"])
    except KeyboardInterrupt:
        print("\ninterrupted: finished parts are kept", file=sys.stderr)
    return record, save(record, path)


def _begun(rehearsal: bool, where: Record, parts: list[Part]) -> Record:
    return {
        "schema": SCHEMA,
        "kind": "rehearsal of the first hour" if rehearsal else "first hour",
        "rehearsal": rehearsal,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": False,
        "machine": where,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "parts": [_part_record(x, UNDONE, rehearsal, x.limit) for x in parts],
    }


def _part_record(part: Part, status: str, rehearsal: bool, limit: float, **more: Any) -> Record:
    """A part's record."""
    blank = {"code": None, "seconds": 0.0, "last": "", "tail": [], "results": []}
    about = {"name": part.name, "status": status, "rehearsal": rehearsal, "limit": limit}
    return about | {"command": part.rehearsal if rehearsal else part.command} | blank | more


def perform(part: Part, rehearsal: bool, limit: float) -> Record:
    """Run a part and return its record, even if the part fails."""
    if part.tool and not rehearsal and not shutil.which(part.tool, path=TOOLS):
        last = f"no {part.tool} on PATH or in /usr/local/cuda/bin"
        return _part_record(part, MISSING, rehearsal, limit, last=last)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = _filled(part.rehearsal if rehearsal else part.command, folder)
        code, late, lines = _call(command, limit)
        found = [json.loads(x.read_text()) for x in sorted(Path(folder).glob("*.json"))]
    lines = [x for x in lines if not x.startswith("wrote /tmp")]
    last = next((x for x in reversed(lines) if x.strip()), "")
    seconds = round(time.monotonic() - started, 1)
    status = TIMEOUT if late else OK if code == 0 else FAILED
    outcome = {"code": code, "seconds": seconds, "last": last, "tail": lines, "results": found}
    return _part_record(part, status, rehearsal, limit, **outcome)


def _filled(command: str, out: str) -> list[str]:
    in_venv = sys.prefix != sys.base_prefix
    arch = ""
    if "{arch}" in command:
        arch = str(10 * isolated_process.once(torch.cuda.get_device_capability)[0])
    given = {"python": sys.executable, "out": out, "arch": arch}
    given["venv"] = sys.prefix if in_venv else ""
    return [x.format(**given) for x in shlex.split(command)]


def _call(command: list[str], limit: float) -> tuple[int | None, bool, list[str]]:
    """Run a command: its status, whether it ran out of time, and its last lines of output."""
    env = os.environ | {"PATH": TOOLS, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=machine.ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return None, False, [str(error)]
        late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        log.seek(0)
        text = log.read().replace(f"{machine.ROOT}{os.sep}", "")  # no local paths on the page
    lines = [line.rstrip()[:COLUMNS] for line in text.splitlines()]
    return process.returncode, late, lines[-LINES:]


def _end(process: subprocess.Popen) -> None:
    """End a process and its children: an interrupt first, which saves results, then SIGKILL."""
    for signum, wait in ((signal.SIGINT, GRACE), (signal.SIGKILL, REAPED)):
        if process.poll() is None or signum == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)


def save(record: Record, path: Path) -> Path:
    """Write the record, and its page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for to, text in (
        (path, results.text(record)),
        (path.with_suffix(".md"), "\n".join(gpu_session_page.lines(record)) + "\n"),
    ):
        unfinished = to.with_name(f"{to.name}.tmp")
        unfinished.write_text(text)
        os.replace(unfinished, to)
    return path


def summary(record: Record, path: Path) -> Iterator[str]:
    yield from gpu_session_page.table(record)
    yield f"wrote {path} and {path.with_suffix('.md').name}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
