"""Libraries that the Makefile puts beside the environment: torchvision, and what imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

# Away from what breaks beside them: transformers takes up a torchvision that it finds.
FOLDER = max(Path(__file__).resolve().parent.parent.glob("build/vision-*[0-9]"), default=None)
NAMES = ("timm", "torchvision", "open_clip")

_operators: list[torch.library.Library] = []


def library(name: str) -> ModuleType:
    """The module. Raises ModuleNotFoundError where `make test-all` has not installed it."""
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
    """One that is made for CUDA does not load its operators beside the CPU's torch, and stumbles
    over two of them, which attention does without."""
    spec = importlib.util.find_spec("torchvision")
    if _operators or spec is None or spec.origin is None or torch.version.cuda:
        return
    if "+cu" in Path(spec.origin).with_name("version.py").read_text():
        _operators.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in ("nms", "qnms"):
            boxes = "Tensor dets, Tensor scores, float threshold"
            _operators[0].define(f"{operator}({boxes}) -> Tensor")
