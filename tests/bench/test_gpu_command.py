"""`python -m bench gpu`: a rehearsal from start to end, and how failing parts affect it."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from bench import gpu
from bench.__main__ import main, parser
from bench.gpu import FAILED, MISSING, OK, PARTS, TIMEOUT, UNDONE, Part
from tests.gpu_emulation.emulator import needs_emulator
from tests.support.checkout import ROOT


def kept(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


@needs_emulator
@pytest.mark.slow
def test_the_rehearsal_runs_from_end_to_end(tmp_path, capfd):
    assert main(["gpu", "--rehearse", "--output", str(tmp_path)]) == 0
    record, page = kept(tmp_path)
    assert [x["name"] for x in record["parts"]] == [x.name for x in PARTS if x.rehearsal]
    assert {x["status"] for x in record["parts"]} == {OK} and record["complete"], page
    kinds = [y.get("kind", "choices") for x in record["parts"] for y in x["results"]]
    assert kinds == ["choices", "gpu experiments", "sweep"]
    assert capfd.readouterr().out.startswith("A rehearsal: ") and gpu.REHEARSAL in page


@pytest.fixture
def of(monkeypatch, tmp_path):
    """Rehearse these parts: (exit status, the parts' records, page)."""
    monkeypatch.setattr(gpu, "GRACE", 0.3)

    def run(*parts, arguments=()):
        monkeypatch.setattr(gpu, "PARTS", parts)
        status = main(["gpu", "--rehearse", "--output", str(tmp_path), *arguments])
        record, page = kept(tmp_path)
        return status, record["parts"], page

    return run


def part(name, program, limit=30, tool=""):
    command = "{python} -c " + shlex.quote(program)
    return Part(name, limit, command, command, tool)


GOOD = part("good", "print('done')")
STUBBORN = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_failed_part_is_reported_and_the_others_run(of):
    raising = part("raising", "print('so far'); raise SystemExit('the reason')")
    absent = Part("absent", 5, "no-such-program", "no-such-program")
    status, parts, page = of(raising, absent, GOOD)
    assert status == 1 and [x["status"] for x in parts] == [FAILED, FAILED, OK]
    assert parts[0]["tail"] == ["so far", "the reason"] and "No such file" in parts[1]["last"]
    assert "3 parts of a rehearsal: 2 failed, 1 ok." in page and "    so far\n" in page


def test_a_part_that_hangs_is_killed_with_its_children(of):
    begun = time.monotonic()
    status, parts, _ = of(part("stubborn", STUBBORN, 2), GOOD)
    assert status == 1 and time.monotonic() - begun < 20
    assert [x["status"] for x in parts] == [TIMEOUT, OK]
    child, deadline = Path("/proc", parts[0]["last"], "stat"), time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_parts_that_did_not_start_and_tools_that_are_missing_are_reported(of):
    status, parts, _ = of(GOOD, arguments=["--minutes", "0"])
    assert status == 130 and [x["status"] for x in parts] == [UNDONE]
    lacking = part("lacking", "raise SystemExit(1)", tool="no-such-tool")
    found = gpu.perform(lacking, limit=5)
    assert found["status"] == MISSING and "no no-such-tool on PATH" in found["last"]


def test_the_commands_of_parts_are_understood():
    """Those of bench by its parser; the files of tests are there."""
    commands = [x for part in PARTS for x in (part.command, part.rehearsal) if x]
    for command in (x.partition(" -m bench ")[2] for x in commands if " -m bench " in x):
        parser().parse_args(shlex.split(command.format(out="out")))
    named = {x for command in commands for x in re.findall(r"tests/[\w/]+(?:\.py)?", command)}
    assert named and all((ROOT / x).exists() for x in named)
