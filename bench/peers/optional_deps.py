"""Import torchvision and its dependents, which the Makefile installs outside the environment."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

# Not in the environment: transformers would import this torchvision and break.
FOLDER = max(Path(__file__).resolve().parents[2].glob("build/vision-*[0-9]"), default=None)
NAMES = ("timm", "torchvision", "open_clip")

_operators: list[torch.library.Library] = []


def library(name: str) -> ModuleType:
    """Import a module. Raises ModuleNotFoundError if `make test` has not installed it."""
    if name in NAMES:
        if FOLDER and str(FOLDER) not in sys.path:
            sys.path.append(str(FOLDER))
        _mend_torchvision()
    return importlib.import_module(name)


def found(name: str) -> bool:
    """Whether `library` would find it; nothing is imported."""
    if importlib.util.find_spec(name) is not None:
        return True
    return bool(FOLDER and name in NAMES and (FOLDER / name).is_dir())


def _mend_torchvision() -> None:
    """Declare two operators that the import of a CUDA build of torchvision needs. Such a build
    cannot load its operators with a CPU build of torch; attention does not use them."""
    spec = importlib.util.find_spec("torchvision")
    if _operators or spec is None or spec.origin is None or torch.version.cuda:
        return
    if "+cu" in Path(spec.origin).with_name("version.py").read_text():
        _operators.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in ("nms", "qnms"):
            boxes = "Tensor dets, Tensor scores, float threshold"
            _operators[0].define(f"{operator}({boxes}) -> Tensor")
