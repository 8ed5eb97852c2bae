"""The program that tests a wheel with several versions of torch."""

import ctypes
import shutil
import subprocess
from collections import Counter

import pytest

from tests.torch_versions import __main__ as program
from tests.torch_versions import stand_ins

needs_tools = pytest.mark.skipif(stand_ins.why_not() is not None, reason=str(stand_ins.why_not()))
GPU_LIBRARY = """
int cudaGetDeviceCount(int* count) { *count = 7; return 0; }
void* of_a_version(void) { return cudaGetDeviceCount; }
void* plain(void) { return cudaGetDeviceCount; }
"""
USER = """
extern int cudaGetDeviceCount(int*);
extern void* of_a_version(void);
extern void* plain(void);
int found(void) {
  int n = 5;
  return 1000 * cudaGetDeviceCount(&n) + 10 * n + !of_a_version() + !plain();
}
"""


def compiled(path, code, *options):
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", path, "-Wl,--no-as-needed"]
    subprocess.run([*map(str, command), *options], input=code, text=True, check=True)


@needs_tools
def test_a_stand_in_has_the_symbols_and_versions_of_a_missing_library(tmp_path):
    folder, script = tmp_path / "lib", tmp_path / "map"
    folder.mkdir()
    script.write_text("GPU_7 { global: of_a_version; }; GPU_8 { global: cudaGetDeviceCount; };")
    missing = folder / "libgpu.so.1"
    named = f"-Wl,-soname,{missing.name}", f"-Wl,--version-script={script}"
    compiled(missing, GPU_LIBRARY, *named)
    user = folder / "libuser.so"
    shutil.copy(missing, folder / "libgpu.so")
    compiled(user, USER, f"-L{folder}", "-lgpu", "-Wl,-rpath,$ORIGIN")
    missing.unlink()
    (folder / "libgpu.so").unlink()
    assert stand_ins.make(folder) == ["libgpu.so.1"]
    assert ctypes.CDLL(str(user)).found() == 1000 * stand_ins.NO_DEVICE + 2
    assert stand_ins.make(folder) == []


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="fails"><failure message="x"/></testcase>
<testcase classname="a" name="stops"><error message="x"/></testcase>
<testcase classname="a" name="declines"><skipped message="torch has none"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_and_its_row_replaces_that_of_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    outcome = program.read(path, 3.0)
    assert outcome == (1, ["a::fails", "a::stops"], Counter({"torch has none": 1}), 3.0)
    assert program.summary(outcome) == "1 passed, 2 failed, 1 declined in 3 s"
    about = dict(torch="2.8.0", python="3.11.7", architecture="x86_64", extension="runs")
    about |= dict(triton="3.4.0", backends=dict(cpu="runs", triton="torch sees no CUDA GPU (x)"))
    line = program.row(about, outcome)
    assert line == "| 2.8.0 | 3.11.7 | x86_64 | runs | runs | 3.4.0: no GPU here | 1 | 2 | 1 |"
    of_models = program.row_of_transformers(about | dict(transformers="5.24.0"), outcome)
    assert of_models == "| 5.24.0 | 2.8.0 | 3.11.7 | x86_64 | 1 | 2 | 1 |"
    page = tmp_path / "results.md"
    page.write_text(line.replace("1 | 2 | 1", "0 | 9 | 0"))
    monkeypatch.setattr(program, "RESULTS", page)
    program.save([line, of_models])
    of_torch, _, of_transformers = page.read_text().partition("| transformers |")
    assert of_torch.count("2.8.0") == 1 and line in of_torch and of_models in of_transformers
