"""The wheel for Windows: its name, what its library may import, export and execute, and what Python
does where there is no fork. `make wheels ARCH=win_amd64` builds it, and runs it under wine.
"""

import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastattn.backends.native import elf, libraries
from tests.support.checkout import ROOT, configured
from tests.support.fresh_python import python
from tests.windows import environment

COMPILER, TOOLCHAIN = next(iter(environment.COMPILER)), environment.TOOLCHAIN
with_mingw = pytest.mark.skipif(
    environment.unavailable() is not None, reason=str(environment.unavailable())
)
UNALIGNED = re.search(r"set\(unaligned (\S+)\)", (ROOT / "csrc/CMakeLists.txt").read_text())[1]


@pytest.fixture(scope="module")
def scripts():
    """A function that imports a script of the folder .ci."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / ".ci"), *sys.path])
        yield importlib.import_module


@pytest.fixture(scope="module")
def dll(scripts):
    return scripts("dll")


@pytest.fixture
def wheels(scripts, tmp_path, monkeypatch):
    """The script that builds wheels, with an empty dist/."""
    script = scripts("wheels")
    monkeypatch.setattr(script, "DIST", tmp_path)
    return script


# ------------------------------------------------------------------------------------- the wheel

NAMES = {
    "aarch64": "fastattn-0.1.0-cp310-abi3-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl",
    "win_amd64": "fastattn-0.1.0-py3-none-win_amd64.whl",
    "x86_64": "fastattn-0.1.0-cp310-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
}


@pytest.mark.parametrize("arch", NAMES)
def test_each_platform_has_the_wheel_of_its_name(wheels, arch):
    for name in NAMES.values():
        (wheels.DIST / name).touch()
    assert wheels.wheel(arch).name == NAMES[arch]
    assert wheels.check_size(arch) == ("of any Python" if arch == "win_amd64" else "glibc 2.27")


def test_a_wheel_with_another_tag_is_refused(wheels):
    (wheels.DIST / "fastattn-0.1.0-cp310-abi3-win_amd64.whl").touch()
    with pytest.raises(wheels.Failed, match="expected py3-none-win_amd64"):
        wheels.check_size("win_amd64")


def test_pip_names_it_for_windows(wheels):
    variables = wheels.cross_compiling("win_amd64")
    assert variables["_PYTHON_HOST_PLATFORM"] == "win-amd64"
    assert Path(variables["CMAKE_TOOLCHAIN_FILE"]) == TOOLCHAIN
    assert wheels.kind("win_amd64").extension == "off"  # which makes the tag py3-none


def test_without_wine_the_steps_say_so_and_go_on(wheels, monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    for step in (wheels.install_under_wine, wheels.run_tests_under_wine):
        assert step("win_amd64") == "not run: not found: wine (apt-get install wine wine64)"
    with pytest.raises(wheels.Failed, match=r"apt-get install g\+\+-mingw-w64-x86-64-posix"):
        wheels.make_tools("win_amd64")


@pytest.mark.parametrize("more", ["libfastattn_cpu.so", "libfastattn_cpu.dll.a"])
def test_a_library_of_another_system_in_it_is_found(wheels, more):
    with zipfile.ZipFile(wheels.DIST / NAMES["win_amd64"], "w") as archive:
        for name in ("libfastattn_cpu.dll", more):
            archive.writestr(f"fastattn/lib/{name}", b"")
    with pytest.raises(wheels.Failed, match=r"expected .*_cpu\.dll alone"):
        wheels.check_dll("win_amd64")


# ----------------------------------------------------------------------------------- the library


def header(dll, drop="", imports="KERNEL32.dll msvcrt.dll", form="pei-x86-64"):
    """What objdump prints of a library's header."""
    names = [name for name in sorted(dll.declared() | {"fa_cpu_run"}) if name != drop]
    lines = [f"libfastattn_cpu.dll:     file format {form}", ""]
    lines += [f"\tDLL Name: {name}" for name in imports.split()]
    lines += ["", "[Ordinal/Name Pointer] Table"]
    return "\n".join([*lines, *(f"\t[{i:4}] {x}" for i, x in enumerate(names)), "", "The rest", ""])


def test_a_library_without_faults_has_none(dll):
    assert [*dll.header_faults(header(dll))] == []
    assert len(dll.declared()) > 15


@pytest.mark.parametrize(
    "planted, said",
    [
        (dict(imports="KERNEL32.dll libstdc++-6.dll"), "imports libstdc++-6.dll, expected none"),
        (dict(imports="libwinpthread-1.dll msvcrt.dll"), "imports libwinpthread-1.dll"),
        (dict(drop="fa_cpu_run"), "does not export fa_cpu_run"),
        (dict(form="pe-i386"), "got another format"),
    ],
    ids=["libstdc++", "winpthread", "export", "32 bits"],
)
def test_a_fault_of_the_header_is_found(dll, planted, said):
    (fault,) = dll.header_faults(header(dll, **planted))
    assert fault.startswith(said)


def test_an_export_of_no_declaration_is_found(dll):
    with_more = header(dll).replace("fa_cpu_run\n", "fa_cpu_run\n\t[  99] inflate\n")
    assert [*dll.header_faults(with_more)] == ["exports inflate, which abi.h does not declare"]


MOVES = {  # an instruction: may it fault on a stack of 16 bytes
    "vmovaps %zmm0,0x40(%rsp)": True,
    "vmovapd 0x20(%rbp),%ymm1": True,
    "vmovdqa %ymm7,(%rcx)": True,
    "vmovdqa64 0x80(%rsp),%zmm31{%k1}{z}": True,
    "vmovntps %ymm0,(%rax)": True,
    "vmovups %zmm0,0x40(%rsp)": False,
    "vmovdqu64 0x80(%rsp),%zmm31": False,
    "vmovaps %ymm0,%ymm1": False,
    "movaps %xmm6,0x20(%rsp)": False,
    "vaddps 0x20(%rsp),%ymm0,%ymm1": False,
}


@pytest.mark.parametrize("move", MOVES)
def test_aligned_moves_of_wide_vectors_are_found(dll, move):
    code = ["0000000000001000 <f>:\n", f"    1000:\t62 f1 7c 48 29 44 24 \t{move}\n"]
    assert bool([*dll.move_faults(code)]) == MOVES[move]


# What GCC writes for a vector that it keeps on the stack; Debian's writes vmovups of itself.
SPILL = """
void spill() { __asm__("vmovaps %ymm0, 0x20(%rsp); vmovdqa64 (%rsp), %zmm17"); }
"""
LIBRARY = """
#include <string>
extern "C" __declspec(dllexport) int fa_cpu_run(int n) { return std::to_string(n).size(); }
"""


def compiled(folder, source, *flags):
    """The file that mingw makes of this source."""
    path = folder / "planted.cpp"
    path.write_text(source)
    subprocess.run([COMPILER, "-O2", path, "-o", folder / "made.dll", *flags], check=True)
    return folder / "made.dll"


@with_mingw
@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), (UNALIGNED,)], ids=["planted", "with the flag"])
def test_the_assembler_writes_no_aligned_move(dll, tmp_path, flags):
    made = compiled(tmp_path, SPILL, "-c", *flags)
    shown = subprocess.check_output([dll.OBJDUMP, "-d", made], text=True)
    assert "ymm0" in shown and "zmm17" in shown
    found = [*dll.move_faults(shown.splitlines(keepends=True))]
    assert len(found) == (0 if flags else 2)


@with_mingw
@pytest.mark.slow
def test_a_library_of_mingw_with_faults_has_them_found(dll, tmp_path):
    shared = [*dll.faults(compiled(tmp_path, LIBRARY, "-shared"))]
    assert any(x.startswith("imports libstdc++-6.dll") for x in shared)
    static = [*dll.faults(compiled(tmp_path, LIBRARY, "-shared", "-static"))]
    assert static == [f"does not export {x}" for x in sorted(dll.declared() - {"fa_cpu_run"})]


@with_mingw
@pytest.mark.slow
def test_the_library_of_one_instruction_set_has_no_fault(dll, tmp_path):
    """It compiles for minutes."""
    more = ("-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}")
    done = configured(tmp_path, *more, FASTATTN_ISAS="generic", FASTATTN_EXTENSION="auto")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "no_extension.txt").read_text().startswith("it is built for Linux alone")
    build = ["cmake", "--build", tmp_path, "--target", "fastattn_cpu", "--parallel", "2"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(build, check=True, env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL)
    assert [*dll.faults(tmp_path / "libfastattn_cpu.dll")] == []


# ------------------------------------------------------------------------------------ the Python


def test_the_loader_of_windows_checks_its_files(monkeypatch, tmp_path):
    path = tmp_path / "libfastattn_cpu.dll"
    path.write_bytes(b"MZ" * 99)
    assert "no 64-bit shared library" in elf.why_broken(path)
    monkeypatch.setattr(elf.sys, "platform", "win32")
    assert elf.why_broken(path) is None


def test_without_the_extension_of_linux_the_reason_is_that_of_the_build(monkeypatch, tmp_path):
    (tmp_path / "no_extension.txt").write_text("it is built for Linux alone")
    path = tmp_path / "fastattn_marshalling.abi3.so"
    monkeypatch.setattr(libraries, "_candidates", lambda name, variable="": [path])
    monkeypatch.setattr(libraries.machinery, "EXTENSION_SUFFIXES", [".cp313-win_amd64.pyd", ".pyd"])
    monkeypatch.delenv("FASTATTN_EXTENSION", raising=False)
    assert (
        libraries._load_extension.__wrapped__() == "it was not built: it is built for Linux alone"
    )


@pytest.mark.slow  # imports torch anew
def test_it_imports_without_fork():
    assert python(
        "-c", "import torch, os; del os.register_at_fork; import fastattn; print(1)"
    ).stdout


def test_paths_are_those_of_windows():
    assert environment.windows_path("/tmp/a b/c.dll") == r"Z:\tmp\a b\c.dll"
    assert environment.python_path("/a", "/b/c") == r"Z:\a;Z:\b\c"
