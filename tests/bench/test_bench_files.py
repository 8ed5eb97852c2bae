"""The harness's files: compared, plotted, and written into pages."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re

import pytest

from bench.__main__ import main
from bench.measure import peak_memory, timing
from bench.peers.registry import BASELINE, SUBJECT
from bench.report import comparison, console, results
from tests.support.bench_helpers import case, cells, know_ceilings

pytestmark = pytest.mark.usefixtures("one_thread", "known_ceilings")


# --- files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> dict:
    """A sweep of three lengths with two lengths of memory."""
    with pytest.MonkeyPatch.context() as patch:
        know_ceilings(patch)
        result = results.start("sweep", "cpu", ("float32",), {})
    cases = [case(mask, N=n, D=64) for mask in ("full", "causal", "window") for n in (16, 32, 64)]
    result["cells"] = cells(*cases)
    size = {"full": 100, "dropout": 1000}
    result["memory"] = [
        {"mask": mask, "N": n, "dtype": "float32", "pass": "forward+backward", "peer": peer}
        | {"extra_bytes": n * size[mask], "error": ""}
        | peak_memory.SHAPE
        for mask in size
        for n in (1024, 2048)
        for peer in (SUBJECT, BASELINE)
    ]
    torchs = {"ms": 2.0, "ratio": {"q1": 1.9, "median": 2.0, "q3": 2.1}, "precision": "float32"}
    result["engines"] = [{"row": "a row", "width": "float32", "peers": {BASELINE: torchs}}]
    return json.loads(json.dumps(result))


@pytest.fixture
def files(sweep, tmp_path):
    """A result, and another in which one cell is half as fast."""
    slower = copy.deepcopy(sweep)
    peers = slower["cells"][4]["timings"][0]["peers"]
    peers[SUBJECT]["median_ms"] *= 2
    paths = []
    for name, result in (("a", sweep), ("b", slower)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(result))
    return paths


def test_compare_finds_a_planted_regression(files, sweep, capsys):
    assert main(["report", "--compare", *map(str, files)]) == 0
    first = capsys.readouterr().out.splitlines()[1]
    planted = sweep["cells"][4]
    assert first.split()[:2] == ["0.50", "1.00"]
    assert f"{planted['mask']} " in first and f"N{planted['N']} " in first
    assert first.endswith(f"{planted['pass']}, 1 thread")
    assert main(["report", "--compare", *map(str, files), "--fail-under", "0.9"]) == 1
    assert "1 under 0.9: FAILED" in capsys.readouterr().out
    assert main(["report", "--compare", *map(str, files), "--fail-under", "0.4"]) == 0
    assert main(["report", "--compare", str(files[0]), str(files[0]), "--fail-under", "0.99"]) == 0


@pytest.mark.parametrize("text, reason", [("{}", "got schema None"), ("x", "got no JSON")])
def test_a_file_of_another_kind_is_refused(text, reason, tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(text)
    assert main(["report", str(path)]) == 2
    assert reason in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent.json")]) == 2


def test_wall_times_of_a_busy_machine_are_left_out(sweep):
    """Eight times torch on two threads that other processes kept from running is no result."""
    result = copy.deepcopy(sweep)
    for cell in result["cells"]:
        (one,) = cell["timings"]
        ratio = {"speedup": {"q1": 7.77, "median": 7.77, "q3": 7.77}}
        peers = {SUBJECT: one["peers"][SUBJECT], BASELINE: one["peers"][BASELINE] | ratio}
        cell["timings"] += [one | {"threads": 2, "peers": peers}]
    race = {"what": "a", "dtype": "float32", "pass": "forward", "threads": 2, "status": "ok"}
    race |= {"ratio": ratio["speedup"], "ms": {"ours": 1.0, "other": 1.0}}
    race |= {"rule": "at least", "aim": 1.0, "met": True}
    for others, shown in ((None, True), (0.02, True), (0.5, False)):
        for timed in (*(cell["timings"][1] for cell in result["cells"]), race):
            timed["others"] = others
        tables = console.table(result["cells"]), console.small_table(result["cells"])
        lines = [*map("\n".join, tables), console.race_line(race)]
        assert [("7.77" in x, "busy" in x) for x in lines] == [(shown, not shown)] * len(lines)


def test_other_processes_are_counted(monkeypatch):
    """One and a half cores of two, less ours."""
    cores, begun = os.cpu_count() or 1, (100.0, 10.0, 5.0)
    ended = 100.0 + cores * 2.0 * 0.75, 10.0 + cores * 2.0 * 0.5, 7.0
    assert timing._share_of_others(begun, ended) == pytest.approx(0.25)
    assert timing._share_of_others(None, ended) is None
    seen = iter([begun, ended])
    monkeypatch.setattr(timing, "_seconds_used", lambda: next(seen))
    clock = timing.HostClock("steps", itertools.count().__next__)
    timing.interleaved({"a": (lambda _: None,)}, clock, 1.0)
    assert clock.others == pytest.approx(0.25)


@pytest.mark.slow
def test_a_report_is_written_between_markers(files, tmp_path, sweep):
    text = "before\n<!-- speed:begin -->\nold\n<!-- speed:end -->\nafter\n"
    page = tmp_path / "README.md"
    page.write_text(text)
    assert main(["report", str(files[0]), "--pages", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n<!-- speed:begin -->\n- `a.json`: ")
    assert written.endswith("<!-- speed:end -->\nafter\n") and "old" not in written
    assert "| D=64 | machine | full, N=64 | causal, N=64 | window, N=64 |" in written
    assert re.search(r"\| float32 forward \| [^|]+ \| \d+\.\d\dx, \d+% \|", written)
    assert main(["report", str(files[0]), "--pages", str(page)]) == 0
    assert page.read_text() == written  # a second report changes nothing


def test_a_slowdown_that_torch_shares_is_no_regression():
    """A slowdown that torch shares is the machine's; a faster machine does not hide one of ours."""
    ratios = {"slower alone": (0.5, 1.0), "slower with torch": (0.5, 0.5), "failed": (0.0, None)}
    ratios |= {"slower, torch faster": (0.8, 1.5), "no torch": (0.8, None), "faster": (1.2, 0.5)}
    found = [comparison.Change(ratio, name, torch) for name, (ratio, torch) in ratios.items()]
    worse = {change.cell for change in comparison.regressions(found, 0.9)}
    assert worse == {"slower alone", "failed", "slower, torch faster", "no torch"}
