"""The first hour with a GPU: a rehearsal from start to end, and how failing parts affect it."""

import json
import os
import re
import shlex
import time
from pathlib import Path

import pytest
import torch

from bench.__main__ import _parser, main
from bench.benchmarks import gpu_session, gpu_session_page
from bench.benchmarks.gpu_session import FAILED, MISSING, OK, PARTS, TIMEOUT, UNDONE, Part
from bench.reporting import results
from tests.gpu_emulation.emulator import needs_emulator

TESTS = Path(__file__).parents[1]
PYTHON = "{python} -c "


def kept(folder):
    (path,) = folder.glob("*.json")
    assert {x.name for x in folder.iterdir()} == {path.name, path.with_suffix(".md").name}
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


@pytest.mark.slow
@needs_emulator
def test_the_rehearsal_runs_from_end_to_end(tmp_path, capfd):
    assert main(["gpu", "--rehearse", "--output", str(tmp_path)]) == 0
    record, page = kept(tmp_path)
    found = {x["name"]: x for x in record["parts"]}
    assert {x.name for x in PARTS if x.rehearsal} == found.keys() and record["complete"]
    assert {x["status"] for x in found.values()} == {OK}, page
    assert all(x["tail"] and x["seconds"] < x["limit"] for x in found.values())
    kinds = [y["kind"] for x in found.values() for y in x["results"]]
    assert kinds == ["overhead", "sweep"]
    assert "forward" in "".join(found["launch"]["tail"])
    stdout = capfd.readouterr().out
    assert stdout.startswith("A rehearsal: ") and stdout.count(": ok in ") == len(found)


@pytest.fixture
def of(monkeypatch, tmp_path):
    """Run an hour of these parts: (exit status, record, page)."""
    monkeypatch.setattr(gpu_session, "GRACE", 0.3)

    def run(*parts, arguments=()):
        monkeypatch.setattr(gpu_session, "PARTS", parts)
        status = main(["gpu", "--rehearse", "--output", str(tmp_path), *arguments])
        return status, *kept(tmp_path)

    return run


def part(name, program, limit=30, tool=""):
    command = PYTHON + shlex.quote(program)
    return Part(name, limit, command, command, tool)


GOOD = part("good", "print('done')")


def test_a_failed_part_is_reported_and_the_others_run(of):
    raising = part("raising", "print('so far'); raise SystemExit('the reason')")
    absent = Part("absent", 5, "no-such-program", "no-such-program")
    killed = part("killed", "import os; os.kill(os.getpid(), 9)")
    status, record, page = of(raising, absent, killed, GOOD)
    assert status == 1 and record["complete"]
    assert [x["status"] for x in record["parts"]] == [FAILED, FAILED, FAILED, OK]
    assert [x["code"] for x in record["parts"]] == [1, None, -9, 0]
    assert record["parts"][0]["tail"] == ["so far", "the reason"]
    assert "No such file or directory: 'no-such-program'" in record["parts"][1]["last"]
    assert "4 parts of a rehearsal: 3 failed, 1 ok." in page
    assert "    so far\n    the reason\n" in page


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""
OBLIGING = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("kept what was done")
"""


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_with_its_children(of):
    begun = time.monotonic()
    status, record, page = of(part("stubborn", STUBBORN, 2), part("obliging", OBLIGING, 2), GOOD)
    assert status == 1 and time.monotonic() - begun < 20
    assert [x["status"] for x in record["parts"]] == [TIMEOUT, TIMEOUT, OK]
    child = int(record["parts"][0]["last"])
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
    assert record["parts"][1]["last"] == "kept what was done"
    assert "| stubborn | out of time |" in page


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_missing_tool_is_reported(monkeypatch):
    """It does not count as a failure: nothing in this checkout can be fixed."""
    lacking = part("lacking", "raise SystemExit(1)", tool="no-such-tool")
    found = gpu_session.perform(lacking, rehearsal=False, limit=5)
    assert found["status"] == MISSING and "no no-such-tool on PATH" in found["last"]
    assert found["code"] is None and not found["rehearsal"]


def test_parts_that_did_not_start_are_reported(of):
    status, record, page = of(GOOD, part("other", ""), arguments=["--minutes", "0"])
    assert status == 130 and not record["complete"]
    assert [x["status"] for x in record["parts"]] == [UNDONE] * 2
    assert "2 parts of a rehearsal: 2 not begun." in page


def test_an_interrupt_keeps_what_is_done(of, monkeypatch):
    real = gpu_session.perform

    def interrupted(part, *rest):
        if part.name == "second":
            raise KeyboardInterrupt
        return real(part, *rest)

    monkeypatch.setattr(gpu_session, "perform", interrupted)
    status, record, _ = of(GOOD, part("second", ""))
    assert status == 130 and not record["complete"]
    assert [x["status"] for x in record["parts"]] == [OK, UNDONE]


def test_results_of_a_part_are_in_the_file(of):
    writing = Part(
        "w", 30, "", 'sh -c \'echo "{{\\"n\\": 1}}" > {out}/a.json; echo a > {out}/a.png\''
    )
    _, record, _ = of(writing)
    assert record["parts"][0]["results"] == [{"n": 1}] and record["parts"][0]["code"] == 0


def test_only_some(of, capsys):
    status, record, _ = of(GOOD, part("other", ""), arguments=["--only", "oth"])
    assert status == 0 and [x["name"] for x in record["parts"]] == ["other"]
    assert main(["gpu", "--rehearse", "--only", "nothing"]) == 2
    assert "--only: got ['nothing'], expected some of ['good', 'other']" in capsys.readouterr().err


@pytest.mark.parametrize("rehearsal", [True, False])
def test_rehearsals_are_marked_as_rehearsals(rehearsal, monkeypatch, tmp_path):
    """The file, the page and each part are marked as a rehearsal, and git ignores them."""
    machine = {"device": "cuda", "name": "NVIDIA H200", "gpu": None}
    monkeypatch.setattr(gpu_session.machine, "describe", lambda device: machine)
    monkeypatch.setattr(
        gpu_session.isolated_process, "once", lambda function, *args: function(*args)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not rehearsal)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_session, "PARTS", (GOOD,))
    record, path = gpu_session.run(None, False, 1, None)
    page = path.with_suffix(".md").read_text()
    assert record["rehearsal"] == rehearsal == record["parts"][0]["rehearsal"]
    assert ("rehearsal" in record["kind"]) == rehearsal == (gpu_session_page.REHEARSAL in page)
    assert rehearsal == ("## good (rehearsal)" in page) == ("of a rehearsal: " in page)
    where = "local/rehearsal" if rehearsal else "gpu/nvidia-h200"
    assert path == tmp_path / f"{where}-first-hour.json"


# --------------------------------------------------------------------------- the table of parts


def commands():
    return [x for part in PARTS for x in (part.command, part.rehearsal) if x]


def test_parts_have_names_of_their_own():
    assert len({x.name for x in PARTS}) == len(PARTS)
    kinds = {x.name.partition(":")[0] for x in PARTS}  # "sweep: lengths" is of the kind "sweep"
    assert {x.name.partition(":")[0] for x in PARTS if x.rehearsal} == kinds - {"decode", "memory"}


def test_commands_of_bench_are_understood():
    parser, _ = _parser()
    found = [x.partition(" -m bench ")[2] for x in commands() if " -m bench " in x]
    for command in found:
        parser.parse_args(shlex.split(command.format(out="out", arch="90")))
    assert len(found) > 6


def test_every_file_of_tests_that_needs_a_gpu_has_a_part():
    marked = r"pytest\.mark\.gpu|on_gpu"
    every = {str(x.relative_to(TESTS)): x for x in TESTS.rglob("test_*.py")}
    files = {name for name, x in every.items() if re.search(marked, x.read_text())}
    named = {x for command in commands() for x in re.findall(r"tests/(\S+/test_\w+\.py)", command)}
    assert named <= set(every)
    run = {x for part in PARTS for x in re.findall(r"tests/(\S+/test_\w+\.py)", part.command)}
    assert files - {str(Path(__file__).relative_to(TESTS))} <= run


def test_the_environment_finds_the_tools_of_cuda():
    assert gpu_session.TOOLS.split(os.pathsep)[-1] == "/usr/local/cuda/bin"
