"""python -m bench gpu: all work that needs a GPU, part by part; `make gpu` sets up first.

Each part is a process with a time limit. One that fails, hangs or lacks a tool is recorded, and the
next begins. After each, results/gpu/<device>.json and .md are rewritten, so that an interrupted run
leaves a record and a page. Without a GPU, or with --rehearse, parts run in their smallest form, on
the tests' emulator of CUDA and a stub of a driver; the files are marked and in results/local.
"""

from __future__ import annotations

import argparse
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
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .measure import isolated_process, machine, nvidia
from .measure.records import markdown
from .report import results

Record = dict[str, Any]
MINUTES = 60.0
GRACE, REAPED = 15.0, 60.0  # seconds to exit after an interrupt, which saves results; after SIGKILL
LINES, COLUMNS = 150, 300  # of a part's output that are kept: the last lines
TOOLS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
OK, FAILED, TIMEOUT, MISSING, UNDONE = "ok", "failed", "out of time", "tool is missing", "not begun"
REHEARSAL = "**Rehearsal: no GPU was used, and no figure on this page is a measurement of one.**"


class Part(NamedTuple):
    """Commands run in the repository's root. {python} is this Python, {out} a folder for result
    files, {venv} this Python's environment for make."""

    name: str
    limit: float  # seconds
    command: str
    rehearsal: str = ""  # small, with no GPU; "": another part rehearses this kind
    tool: str = ""  # that the command needs


TESTS = "{python} -m pytest -q -rfE -m ''"
ON_GPU = "{python} -m pytest -q -rfE -m gpu"
PROBES = "tests/gpu_emulation/tests/test_probe.py tests/gpu_emulation/tests/test_probe90.py"
BENCH = "{python} -m bench"
TINY = "--device cpu --threads 1 --seconds 0.002 --output {out}"
SMALL = "--lengths 40 --dims 16 --dtypes bfloat16 --masks full --passes forward --sweep-only"
PEERS = "fastattn-cuda torch torch-flash torch-cudnn torch-efficient flash-attn"
EMULATED = f"{TESTS} tests/cuda/test_cuda_emulated.py -k every_site_is_reached"
FEW = "tests/gpu/test_gpu_rows.py -k cuda-00"
CHECK, TUNE = "{python} -m fastattn check", "env FASTATTN_CACHE_DIR={out} {python} -m fastattn tune"
EXPERIMENTS = "{python} -m bench.gpu_experiments --output {out}"
TINY_SHAPE = "--device cpu --shape 'float32 H1 M40 N40 D16'"


def _sanitized(tool: str) -> Part:
    """A few calls, without torch's allocator, which would hide accesses beyond a tensor."""
    command = f"compute-sanitizer --tool {tool} --error-exitcode 1 {ON_GPU} {FEW}"
    alone = f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 {command}"
    return Part(f"sanitizer: {tool}", 300, alone, tool="compute-sanitizer")


def _swept(name: str, what: str, rehearsal: str = "") -> Part:
    command = f"sweep --sweep-only --dtypes bfloat16 {what} --peers {PEERS} --output {{out}}"
    return Part(f"sweep: {name}", 600, f"{BENCH} {command}", rehearsal)


# First what would make the rest fail or hang, then the most informative: a run may be cut short.
PARTS = (
    Part("build", 1200, "make setup VENV={venv}", tool="make"),
    Part("check", 420, CHECK, f"{CHECK} --device cpu --isa generic --call 0"),
    Part("tune", 420, TUNE, f"{TUNE} {TINY_SHAPE}"),
    Part("experiments", 720, EXPERIMENTS, f"{EXPERIMENTS} --rehearse"),
    _swept(
        "lengths",
        "--masks full causal --dims 64 128 --lengths 512 2048 8192",
        f"{BENCH} sweep {SMALL} {TINY}",
    ),
    _swept("features", "--masks window padding ALiBi dropout --dims 64 --lengths 4096"),
    *map(_sanitized, ("memcheck", "racecheck", "synccheck", "initcheck")),
    Part(
        "tests: gpu",
        3600,
        f"{ON_GPU} tests/gpu tests/package/test_first_call.py {PROBES}",
        EMULATED,
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rehearse", action="store_true", help="the default without a GPU")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts with TEXT in their names")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: bench/results/gpu")


def command(options: argparse.Namespace) -> int:
    """Status 1 if a part failed or ran out of time, else 130 if a part was not begun. Raises
    ValueError if torch cannot use the GPU, unless it is a rehearsal."""
    if not options.rehearse and (why := nvidia.unusable()):
        raise ValueError(f"{why}. --rehearse needs no GPU")
    rehearsal = options.rehearse or not torch.cuda.is_available()
    parts = [x for x in PARTS if not options.only or any(y in x.name for y in options.only)]
    if rehearsal:
        parts = [x._replace(command=x.rehearsal, tool="") for x in parts if x.rehearsal]
    if not parts:
        raise ValueError(f"--only: got {options.only}, expected some of {[x.name for x in PARTS]}")
    # A process that has used a GPU holds it, so this process leaves the GPU to the parts.
    where = (
        machine.describe("cpu") if rehearsal else isolated_process.once(machine.describe, "cuda")
    )
    folder = options.output or machine.RESULTS / ("local" if rehearsal else "gpu")
    path = folder / ("rehearsal.json" if rehearsal else f"{machine.slug(where)}.json")
    record = _begun(rehearsal, where, parts)
    if rehearsal:
        print("A rehearsal: no GPU is used, and nothing here is a measurement of one.", flush=True)
    _perform_all(record, path, parts, 60 * options.minutes)
    print(*table(record), f"wrote {path} and {path.with_suffix('.md').name}", sep="\n")
    failed = {x["status"] for x in record["parts"]} & {FAILED, TIMEOUT}
    return 1 if failed else 0 if record["complete"] else 130


def _perform_all(record: Record, path: Path, parts: list[Part], seconds: float) -> None:
    """Ctrl-C ends the run and keeps finished parts."""
    end = time.monotonic() + seconds
    try:
        for number, part in enumerate(parts):
            save(record, path)
            if (left := end - time.monotonic()) <= 0:
                break
            print(f"[{number + 1}/{len(parts)}] {part.name}", flush=True)
            done = record["parts"][number] = perform(part, min(part.limit, left))
            print(f"    {done['status']} in {done['seconds']:.0f} s: {done['last']}", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted: finished parts are kept", file=sys.stderr)
    record["complete"] = all(x["status"] != UNDONE for x in record["parts"])
    save(record, path)


def _begun(rehearsal: bool, where: Record, parts: list[Part]) -> Record:
    return {
        "kind": "gpu, a rehearsal" if rehearsal else "gpu",
        "rehearsal": rehearsal,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": False,
        "machine": where,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "parts": [_part_record(x, UNDONE) for x in parts],
    }


def _part_record(part: Part, status: str, **more: Any) -> Record:
    blank = {"code": None, "seconds": 0.0, "last": "", "tail": [], "results": []}
    about = {"name": part.name, "status": status, "limit": part.limit, "command": part.command}
    return about | blank | more


def perform(part: Part, limit: float) -> Record:
    """Run a part and return its record, even if the part fails."""
    if part.tool and not shutil.which(part.tool, path=TOOLS):
        last = f"no {part.tool} on PATH or in /usr/local/cuda/bin"
        return _part_record(part, MISSING, last=last)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = {"python": sys.executable, "out": folder}
        given["venv"] = sys.prefix if sys.prefix != sys.base_prefix else ""
        code, late, lines = _call([x.format(**given) for x in shlex.split(part.command)], limit)
        found = [json.loads(x.read_text()) for x in sorted(Path(folder).glob("*.json"))]
    status = TIMEOUT if late else OK if code == 0 else FAILED
    last = next((x for x in reversed(lines) if x.strip() and not x.startswith("wrote /")), "")
    outcome = {"code": code, "seconds": round(time.monotonic() - started, 1), "last": last}
    return _part_record(part, status, **outcome, tail=lines, results=found)


def _call(command: list[str], limit: float) -> tuple[int | None, bool, list[str]]:
    """Run a command: its status, whether it ran out of time, and its last lines of output."""
    env = os.environ | {"PATH": TOOLS, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            process = subprocess.Popen(
                command, cwd=machine.ROOT, env=env, start_new_session=True, **streams
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


def save(record: Record, path: Path) -> None:
    """Write the record, and its page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results.replace(path, results.text(record))
    results.replace(path.with_suffix(".md"), "\n".join(page(record)) + "\n")


def page(record: Record) -> Iterator[str]:
    about, commit = record["machine"], record["commit"]
    yield f"# {'A rehearsal' if record['rehearsal'] else 'On a GPU'}: {about['name']}"
    yield ""
    if record["rehearsal"]:
        yield from (REHEARSAL, "")
    versions = ", ".join(f"{name} {x}" for name, x in record["versions"].items())
    at = f"{commit['sha'][:12]}{', with changes' * commit['dirty']}" if commit else "no checkout"
    yield f"{record['created']}; commit {at}; {versions}."
    if gpu := about.get("gpu"):
        yield f"Compute capability {gpu['capability']}, CUDA {gpu['cuda']}; {gpu['clocks']}"
    yield ""
    yield from table(record)
    for part in record["parts"]:
        if part["tail"]:
            yield from ("", f"## {part['name']}", "", f"`{part['command']}`", "")
            yield from (f"    {line}".rstrip() for line in part["tail"])


def table(record: Record) -> Iterator[str]:
    parts = record["parts"]
    head = "part", "what became of it", "seconds", "of at most", "its last words"
    yield from markdown(head, map(_row, parts))
    counts = Counter(x["status"] for x in parts)
    yield ""
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    yield f"{len(parts)} parts{' of a rehearsal' * record['rehearsal']}: {summary}."


def _row(part: Record) -> list[str]:
    last = part["last"].strip("= ").replace("|", "\\|")[:100]
    return [part["name"], part["status"], f"{part['seconds']:.0f}", f"{part['limit']:.0f}", last]
