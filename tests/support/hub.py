"""The repository for Hugging Face's hub, made of the installed package, and a stand-in for the part
of `kernels` that finds and imports the folder of a variant."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

import fastattn
from fastattn.backends.native import libraries
from tests.support.checkout import ROOT

# torch and the oldest stable ABI, or the only version; the C++ ABI; the processor.
COMPILED = re.compile(r"torch(-stable-abi)?(\d)(\d+)(?:-cxx11)?-cpu-(\w+)-linux")
ANYWHERE = ("torch-cpu", "torch-universal")


def script() -> ModuleType:
    """.ci/hub.py, which lays out the repository."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        return importlib.import_module("hub")
    finally:
        sys.path.remove(str(ROOT / ".ci"))


def lay_out(to: Path) -> None:
    """Lay out the repository in the folder `to`."""
    folders = map(Path, importlib.import_module("fastattn.kernels").__path__)
    kernels = next(x for x in folders if (x / "tile.py").exists())
    script().lay_out(Path(fastattn.__file__).parent, kernels, libraries.cpu().path.parent, to)


def choose(names: list[str], version: str, processor: str) -> str | None:
    """The name of the variant that `kernels` loads on a CPU, with this version of torch: the newest
    stable ABI that is not newer than torch, then this very version, then what runs anywhere."""
    here = tuple(map(int, version.split(".")[:2]))
    stable, same = [], []
    for name in names:
        if not (found := COMPILED.fullmatch(name)) or found[4] != processor:
            continue
        built = int(found[2]), int(found[3])
        if found[1] and built <= here:
            stable.append((built, name))
        if not found[1] and built == here:
            same.append(name)
    anywhere = [name for name in ANYWHERE if name in names]
    return ([x for _, x in sorted(stable, reverse=True)] + sorted(same) + anywhere + [None])[0]


def load(folder: Path) -> ModuleType:
    """Import the variant in this folder under the name that its metadata gives it."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def get_kernel(repository: str, **options) -> ModuleType:
    """The kernel for a CPU from the folder that LOCAL_KERNELS="owner/name=folder:…" names."""
    entries = os.environ["LOCAL_KERNELS"].split(":")
    build = Path(dict(x.split("=", 1) for x in entries)[repository]) / "build"
    names = sorted(x.name for x in build.iterdir())
    chosen = choose(names, torch.__version__, platform.machine())
    if chosen is None:
        raise FileNotFoundError(f"{build}: got {names}, expected a variant for this system")
    return load(build / chosen)
