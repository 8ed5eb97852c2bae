"""Describe where the numbers were measured: the machine, the software, the load."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastattn.backends.native import libraries

from .chips import chip

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
# Environment settings that change speed.
SETTINGS = re.compile(
    r"^(OMP|MKL|ONEDNN|DNNL|KMP|GOMP|ATEN)_|^FASTATTN_(CPU_ISA|FLOAT32)$|^CUDA_VISIBLE_DEVICES$"
)
WIDEST = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512, no AMX",
    "avx512": "AVX-512, no AMX",
    "avx2": "AVX2, no AVX-512",
}
PACKAGES = ("fastattn", "triton", "numpy", "matplotlib")

_MKL_PROBE = """
import torch
with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
    torch.ones(64, 64) @ torch.ones(64, 64)
"""

_TILES_PROBE = """
import torch
a = torch.ones(128, 128, dtype=torch.bfloat16)
a @ a
"""
WITHOUT_TILES = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def avoid_refused_tiles() -> str:
    """Some virtual machines announce AMX but refuse it: torch's bfloat16 products kill the process
    there. On such a machine, disable torch's AMX (`settings` then shows that) and return a note for
    the reader, else "". Call this before torch multiplies anything."""
    announced = "amx_tile" in _cpuinfo().get("flags", "").split()
    if not announced or WITHOUT_TILES.keys() & os.environ.keys():
        return ""
    probe = subprocess.run([sys.executable, "-c", _TILES_PROBE], capture_output=True)
    if probe.returncode >= 0:
        return ""
    os.environ.update(WITHOUT_TILES)
    name, value = next(iter(WITHOUT_TILES.items()))
    return f"torch dies of its AMX instructions on this machine: measured with {name}={value}"


def describe(device: str) -> dict[str, Any]:
    cpu = _cpu()
    machine = {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else cpu["model"],
        "platform": platform.platform(),
        "cpu": cpu,
        "mkl": _mkl(cpu),
        "threads": torch.get_num_threads(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if SETTINGS.search(k)},
    }
    if device == "cuda":
        machine["gpu"] = _gpu()
    return machine


def words(machine: dict[str, Any]) -> str:
    """The device in words. A CPU is named by its design and the width of its vector units, which
    say more than a hypervisor's "AMD EPYC"; a CPU that chips.py lacks, by its model name. Where
    that has no model, neither have the words: hypervisors that hide the name also give the
    number of another chip."""
    if machine["device"] != "cpu":
        return machine["name"]
    cpu = machine["cpu"]
    found = chip(cpu["vendor"], cpu["family"], cpu["number"])
    if found is None:
        name = _spoken(machine["name"])
        tiles = " with AMX" if cpu["amx"] else ""
        return name if re.search(r"\d", name) else f"{name}{tiles}, model hidden"
    amx = ", AMX" if cpu["amx"] else ""
    return f"{found.maker} {found.name}, {found.vector_bits}-bit units{amx}"


def kind(machine: dict[str, Any]) -> str:
    """The class of the machine that a reader may compare with: what its system calls the chip, and
    the widest instructions that serve there: "Intel Xeon with AVX-512, no AMX"."""
    if machine["device"] != "cpu":
        return machine["name"]
    best = next(iter(machine["cpu"]["isas"]), "none of our kernels")
    return f"{_spoken(machine['name'])} with {WIDEST.get(best, best)}"


def _spoken(name: str) -> str:
    """A model name without marks and clock: Intel Xeon of Intel(R) Xeon(R) Processor."""
    name = re.sub(r"\(R\)|\(TM\)|\bCPU\b|\bProcessor\b|@.*|\d+-Core", " ", name)
    return " ".join(name.split()) or "CPU"


def slug(machine: dict[str, Any]) -> str:
    """`words` as a file name: amd-zen-4-256-bit-units."""
    return in_file_names(words(machine))


def in_file_names(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> dict[str, Any] | None:
    """The checkout's commit, and whether tracked files differ from it; None without git."""
    sha = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not sha:
        return None
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return {"sha": sha, "dirty": bool(changes)}


def load() -> list[float]:
    """Runnable processes, averaged over 1, 5 and 15 minutes; it counts this process too."""
    return [round(x, 2) for x in os.getloadavg()]


def _cpu() -> dict[str, Any]:
    info = _cpuinfo()
    return {
        "model": info.get("model name") or _lscpu_model() or platform.machine(),
        "vendor": info.get("vendor_id", ""),
        "family": info.get("cpu family", ""),
        "number": info.get("model", ""),
        "amx": "amx_tile" in info.get("flags", "").split(),
        "cores": len(os.sched_getaffinity(0)),
        "mhz": float(info["cpu MHz"]) if "cpu MHz" in info else None,
        **_isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
    }


def _isa() -> dict[str, Any]:
    """Which of our kernels run, or why none does."""
    reason = libraries.cpu_unavailable()
    if reason:
        return {"isa": None, "isas": [], "unavailable": reason}
    return {"isa": libraries.cpu_isa(), "isas": libraries.cpu_isas(), "unavailable": None}


def _cpuinfo() -> dict[str, str]:
    """The first core's entry of /proc/cpuinfo. Its keys differ between architectures."""
    try:
        entry = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in entry.splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _lscpu_model() -> str:
    found = re.search(r"Model name:\s*(.+)", _output("lscpu"))
    return found[1] if found else ""


def _mkl(cpu: dict[str, Any]) -> dict[str, str]:
    """Which kernels torch's matrix products use. torch's SDPA is built on them, so a ratio means
    little without this. MKL prints its path at the first call of a process in verbose mode."""
    if not torch.backends.mkl.is_available():
        return {"path": "none", "note": "torch has no MKL here"}
    banner = _mkl_banner()
    if "AVX-512" in banner or "AVX512" in banner:
        return {"path": "AVX-512", "note": banner}
    if "AVX2" in banner:
        return {"path": "AVX2", "note": banner}
    if cpu["vendor"] == "AuthenticAMD":
        return {"path": "AVX2", "note": f"MKL takes its AVX2 path on AMD; its banner: {banner}"}
    return {"path": "unknown", "note": banner or "MKL printed no banner"}


@functools.cache
def _mkl_banner() -> str:
    first = _output(sys.executable, "-c", _MKL_PROBE).partition("\n")[0]
    return first.removeprefix("MKL_VERBOSE ")


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit,driver_version"
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "clocks": _output("nvidia-smi", query, "--format=csv"),
    }


def _output(*command: str) -> str:
    """What a command prints, or "" when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
