"""Advice on errors of a GPU's driver, by error code or message.

CUDA's runtime gives a code; Triton gives only the driver's message, which is the same for both.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

_CAPTURE = (
    "a CUDA graph was being captured: make one call of the same kind before, outside the capture, "
    "as torch asks for; it loads the kernels"
)
_DRIVER = (
    "the driver is older than the CUDA that these kernels were built with: update the driver, or "
    "have them built by a CUDA that it knows: CUDACXX=/path/to/its/nvcc make setup for CUDA C++, "
    "TRITON_PTXAS_PATH=/path/to/its/ptxas for Triton"
)
_MEMORY = (
    "the GPU's memory is full: free tensors, or give back what torch only keeps with "
    "torch.cuda.empty_cache(); other processes may have it, which nvidia-smi lists"
)
_CODE = (
    "the kernels have no code that this GPU runs: build them for it, say CUDAARCHS=120-real make "
    "setup for compute capability 12.0"
)


class Trouble(NamedTuple):
    codes: tuple[int, ...]  # of cudaError_t
    words: str  # a part of the driver's message, in lower case
    advice: str


TROUBLES = (
    Trouble((2,), "out of memory", _MEMORY),
    Trouble((35, 222), "driver version is insufficient", _DRIVER),
    Trouble((), "unsupported toolchain", _DRIVER),
    Trouble((200,), "device kernel image is invalid", _DRIVER),
    Trouble((209,), "no kernel image is available", _CODE),
    Trouble((900, 906), "when stream is capturing", _CAPTURE),
    Trouble((901,), "error during capture", _CAPTURE),
)


def advice(said: int | str) -> str:
    """What to do, for an error code or the driver's message; "" if there is no advice on it."""
    if isinstance(said, int):
        return next((x.advice for x in TROUBLES if said in x.codes), "")
    return next((x.advice for x in TROUBLES if x.words in said.lower()), "")


def why_unwritable(folder: Path) -> str:
    """Make the folder. Returns why it, or a file in it, cannot be made; "" if both can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""
