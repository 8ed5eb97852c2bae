"""Everything that runs the CPU kernels for 64-bit Arm on another machine, in build/arm.

    root      Debian's python3.11 for arm64, and the libraries that it needs, unpacked
    site      torch's wheel for aarch64 (a CPU build up to 2.10) and what the tests import
    library   the CPU kernels, cross-compiled

qemu-user executes Arm's instructions. The root is Debian bookworm's on any host that has apt.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from bench.instructions.x86 import run
from tests.support.checkout import ROOT

FOLDER = ROOT / "build" / "arm"
LIBRARY = FOLDER / "library" / "libfastattn_cpu.so"
TOOLCHAIN = ROOT / "csrc" / "toolchains" / "aarch64-linux-gnu.cmake"
TORCH = "2.10.0"  # newer wheels for aarch64 need CUDA's libraries
WHEELS = (f"torch=={TORCH}", "numpy<2.4", "markupsafe")
PURE = ("typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "fsspec", "filelock")
PURE += ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
PURE += ("hypothesis<6.150", "sortedcontainers", "attrs")  # newer ones of it are compiled
TAGS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
CPU = "max,sve-max-vq=2"  # everything that qemu knows, with SVE of 256 bits
PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6", "libgomp1")
NEEDED = {  # command: Debian's package
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "cmake": "cmake",
}


def unavailable() -> str | None:
    """Which commands are missing, and how to get them; or None."""
    missing = {name: package for name, package in NEEDED.items() if not shutil.which(name)}
    if not missing:
        return None
    return f"not found: {', '.join(missing)} (apt-get install {' '.join(missing.values())})"


def make() -> None:
    """Make what is missing; compile what changed."""
    make_python()
    compile_library()


def make_python() -> None:
    """Make Arm's Python and its packages where they are missing."""
    for name, maker in (("root", _root), ("site", _site)):
        if not (FOLDER / name / "complete").exists():
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            (FOLDER / name).mkdir(parents=True)
            maker(FOLDER / name)
            (FOLDER / name / "complete").touch()


def compile_library(isas: str = "") -> Path:
    """Cross-compile the CPU kernels: these instruction sets, or all."""
    folder = LIBRARY.parent
    environment = os.environ | {"FASTATTN_CUDA": "off", "FASTATTN_EXTENSION": "off"}
    environment["FASTATTN_ISAS"] = isas
    options = ("-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}")
    run("cmake", "-S", ROOT / "csrc", "-B", folder, *options, env=environment)
    run("cmake", "--build", folder, "--target", "fastattn_cpu", "--parallel", "2", env=environment)
    return LIBRARY


def _root(root: Path) -> None:
    """Unpack Debian's packages, with a state of apt that is apart from the host's."""
    state = FOLDER / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    configuration = state / "apt.conf"
    configuration.write_text(
        f'Dir::State "{state}"; Dir::State::Lists "{state}/lists";\n'
        f'Dir::State::Status "{state}/status"; Dir::Cache "{state}/cache";\n'
        'APT::Architecture "arm64"; APT::Architectures { "arm64"; };\n'
        'APT::Install-Recommends "false";\n'
    )
    environment = os.environ | {"APT_CONFIG": str(configuration)}
    run("apt-get", "update", env=environment)
    run("apt-get", "install", "--yes", "--download-only", *PACKAGES, env=environment)
    for package in sorted((state / "cache/archives").glob("*.deb")):
        run("dpkg", "-x", package, root)


def _site(site: Path) -> None:
    """Unpack wheels for aarch64; pip installs those of Python alone.

    They are named one by one: pip reads the conditions of their needs for this machine's processor.
    """
    wheels = FOLDER / "wheels"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "download", "--dest", wheels, *pip_options(*TAGS), *WHEELS)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    run(*pip, "install", "--target", site, "--no-deps", "--ignore-installed", *PURE)


def pip_options(*tags: str) -> list[str]:
    """Options by which pip gets wheels for Arm's Python, with these tags of platforms, alone."""
    platforms = [x for tag in tags for x in ("--platform", tag)]
    return [*platforms, "--python-version", "3.11", "--only-binary=:all:", "--no-deps"]


def emulated(*arguments: str | Path, plugin: Sequence[str | Path] = (), cpu: str = CPU) -> list:
    """The command that runs a program for Arm: qemu's, then `arguments`."""
    root = FOLDER / "root"
    command = ["qemu-aarch64", "-cpu", cpu, "-L", root]
    command += ["-E", "LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu:/lib/aarch64-linux-gnu"]
    return [*map(str, (*command, *plugin, *arguments))]


def python_path(*folders: str | Path) -> str:
    """PYTHONPATH of these folders."""
    return ":".join(map(str, folders))


def python(*arguments: str | Path, **more) -> list:
    """The command that runs Arm's Python: in `environment_of_python`."""
    return emulated(FOLDER / "root/usr/bin/python3.11", *arguments, **more)


def environment_of_python(library: Path = LIBRARY) -> dict[str, str]:
    """The variables by which that Python finds torch, this checkout and the kernels for Arm."""
    return os.environ | {
        "PYTHONPATH": python_path(FOLDER / "site", ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "FASTATTN_LIBRARY": str(library),
        "FASTATTN_EXTENSION": "off",
        "OMP_NUM_THREADS": "1",
    }
