"""Make a virtual environment with one version of torch, its Triton, and fastattn's wheel; or one
with a version of transformers before the packages of this Python.

A CUDA build of torch gets stand-ins for NVIDIA's libraries (`stand_ins`), so an environment takes
two gigabytes, not six. It is kept in build/ and made again only if it is not complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.torch_versions import stand_ins

ROOT = Path(__file__).resolve().parents[2]  # tests.support imports torch
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
# What the tests import, and what they skip without. torch's own needs are added.
PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "numpy", "matplotlib")
PACKAGES += ("scikit-learn", "tqdm", "onnx", "onnxscript", "tensor-layouts")
PACKAGES += ("transformers; python_version >= '3.11'", "diffusers; python_version >= '3.11'")
PACKAGES += ("x-transformers; python_version >= '3.11'", "setuptools")
OF_GPUS = r"torch$|triton|nvidia|cuda"  # installed by their own rules, or not at all
ABOUT = """
import importlib.metadata, importlib.util, json, platform, sys, torch, fastattn
from fastattn.backends.native import libraries
from fastattn.backends.triton.tile_configs import triton_version
has = importlib.util.find_spec("transformers") is not None
print(json.dumps(dict(
    transformers=importlib.metadata.version("transformers") if has else None,
    python="%d.%d.%d" % sys.version_info[:3], torch=torch.__version__,
    backends={name: why or "runs" for name, why in fastattn.available_backends().items()},
    architecture=platform.machine(), triton=triton_version(),
    extension=libraries.extension_unavailable() or "runs", file=fastattn.__file__)))
"""


class NotServed(Exception):
    """pip has no such version for this Python."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment for a version of torch, by one Python interpreter.

    version: of torch, as "2.8" or "2.8.0"; the newest release of "2.8" is taken.
    interpreter: a command, as "python3.11".
    """

    version: str
    interpreter: str

    @property
    def folder(self) -> Path:
        return ROOT / "build" / f"torch-{self.version}-{Path(self.interpreter).name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self, wheel: Path) -> None:
        """Make it, unless it is there, and install the wheel into it.

        Raises:
            NotServed: pip has no such version, or the interpreter is not here.
        """
        self._complete()
        self._pip("--force-reinstall", "--no-deps", str(wheel))

    def _complete(self) -> None:
        complete = self.folder / "complete"
        if not complete.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self._make()
            complete.touch()

    def about(self) -> dict:
        """The versions, and what runs."""
        done = self._run("-c", ABOUT, cwd=self.folder)
        if done.returncode:
            raise RuntimeError(f"fastattn does not run in {self.folder}: {done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def _make(self) -> None:
        self._make_empty()
        series = self.version.count(".") == 1
        self._pip("--no-deps", f"torch=={self.version}" + ".*" * series)
        own = self._needs_of_torch()
        triton = [x for x in own if x.startswith("triton")]
        self._pip(*self._constraints("torch"), *(x for x in own if not re.match(OF_GPUS, x)))
        self._pip("--no-deps", *self._packages())
        if triton:
            self._pip("--no-deps", *triton)
        if not (why := stand_ins.why_not()):
            stand_ins.make(self._torch_libraries())
        elif self._run("-c", "import torch").returncode:
            raise NotServed(f"torch {self.version} does not load without stand-ins: {why}")

    def _make_empty(self) -> None:
        command = [self.interpreter, "-m", "venv", str(self.folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise NotServed(f"{self.interpreter} is not here") from None
        if done.returncode:
            raise NotServed(f"{self.interpreter}: {(done.stderr or done.stdout).strip()}")

    def _packages(self) -> list[str]:
        """The packages of the tests and what these need, without torch."""
        report = self.folder / "report.json"
        command = ("install", "-q", "--dry-run", "--report", str(report))
        done = self._run("-m", "pip", *command, *self._constraints("torch"), *PACKAGES)
        if done.returncode:
            raise RuntimeError(f"pip resolves no tests' packages: {done.stderr}")
        found = [x["metadata"] for x in json.loads(report.read_text())["install"]]
        wanted = [x for x in found if not re.match(OF_GPUS, x["name"])]
        return [f"{x['name']}=={x['version']}" for x in wanted]

    def _constraints(self, name: str) -> list[str]:
        """The constraints without that on one package: its version is another here."""
        text = re.sub(rf"^{name}==.*$", "", CONSTRAINTS.read_text(), flags=re.M)
        path = self.folder / "constraints.txt"
        path.write_text(text)
        return ["-c", str(path)]

    def _needs_of_torch(self) -> list[str]:
        code = (
            "from importlib.metadata import requires\n"
            "from pip._vendor.packaging.requirements import Requirement\n"
            "every = map(Requirement, requires('torch'))\n"
            "print(*(f'{x.name}{x.specifier}' for x in every"
            " if x.marker is None or x.marker.evaluate({'extra': ''})), sep='\\n')"
        )
        return self._run("-c", code, check=True).stdout.split()

    def _torch_libraries(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages/torch/lib")
        return found

    def _pip(self, *arguments: str) -> None:
        done = self._run("-m", "pip", "install", "-q", *arguments)
        if done.returncode:
            said = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
            raise NotServed("; ".join(said) or done.stderr)

    def _run(self, *arguments: str, check: bool = False, cwd: Path = ROOT):
        command = [str(self.python), *arguments]
        clean = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            command, capture_output=True, text=True, check=check, cwd=cwd, env=clean
        )


class OfTransformers(Environment):
    """The packages of this Python, fastattn as it is there, and another version of transformers.

    version: of transformers, as "5.23" or "5.23.0"; the newest release of "5.23" is taken.
    interpreter: that of this Python.
    """

    @property
    def folder(self) -> Path:
        return ROOT / "build" / f"transformers-{self.version}-{Path(self.interpreter).name}"

    def make(self, wheel: Path | None = None) -> None:
        """Make it, unless it is there.

        Raises:
            NotServed: pip has no such version.
            RuntimeError: Python finds another version there.
        """
        self._complete()
        if not (found := self.about()["transformers"]).startswith(self.version):
            raise RuntimeError(f"{self.folder}: got transformers {found}, expected {self.version}")

    def _make(self) -> None:
        self._make_empty()
        (own,) = self.folder.glob("lib/python*/site-packages")
        shared = sysconfig.get_path("purelib")  # after `own`, so that what is in both is from there
        (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        series = self.version.count(".") == 1
        self._pip(
            *self._constraints("transformers"), f"transformers=={self.version}" + ".*" * series
        )


def wheel() -> Path:
    """Build fastattn's wheel, in the build folder of this Python, and return its path."""
    folder = ROOT / "build" / "wheel-for-tests"
    shutil.rmtree(folder, ignore_errors=True)
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True)
    (found,) = folder.glob("*.whl")
    return found
