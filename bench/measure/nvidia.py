"""Find the NVIDIA GPU of this machine without torch, and why torch cannot use it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

NODE = Path("/dev/nvidia0")
# The indices of torch's builds, the newest CUDA first, and the oldest driver that each works with.
INDICES = (("cu130", 580), ("cu128", 570), ("cu126", 525))
URL = "https://download.pytorch.org/whl/"


class Gpu(NamedTuple):
    name: str
    driver: str  # its version, "" if unknown


def unusable() -> str:
    """Why torch cannot use this machine's GPU, and what to do; "" if it can, if there is no GPU, or
    if the user has hidden it."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return ""
    if not (gpu := _seen()):
        return ""
    driver = f"driver {gpu.driver}" if gpu.driver else "a driver of unknown version"
    why, what = _reason(gpu.driver)
    return (
        f"got torch {torch.__version__}, expected one that can use the GPU of this machine "
        f"({gpu.name}, {driver}): {why}; {what}"
    )


def _reason(driver: str) -> tuple[str, str]:
    cuda = torch.version.cuda
    why = f"it is built for CUDA {cuda}" if cuda else "it is built for CPUs alone"
    if not driver:
        return why, f"nvidia-smi shows the driver's CUDA: install torch from its index at {URL}"
    index = next((x for x, oldest in INDICES if int(driver.split(".")[0]) >= oldest), None)
    if index is None:
        return why, f"update the driver to {INDICES[-1][1]} or newer, as torch's CUDA builds need"
    if cuda and _number(cuda) <= _number(index):  # the driver is new enough: another cause
        return f"{why}, and fails with: {_init_error()}", "nvidia-smi may show more"
    pip = f"{sys.executable} -m pip install --force-reinstall torch --index-url {URL}{index}"
    return why, f"install a build for that driver: {pip}"


def _number(cuda: str) -> int:
    """130 for "cu130" and for "13.0"."""
    return int("".join(re.findall(r"\d", cuda)))


def _init_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "nothing"


def _seen() -> Gpu | None:
    """The GPU as nvidia-smi reports it, else as /dev does."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=60)
        name, comma, version = done.stdout.partition("\n")[0].rpartition(", ")
        if done.returncode == 0 and comma:
            return Gpu(name, version if re.fullmatch(r"\d+(\.\d+)*", version) else "")
    return Gpu("an NVIDIA GPU", "") if NODE.exists() else None
