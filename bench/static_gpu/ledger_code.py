"""The machine code that the ledger reads: compiled once per version, cached in build/ledger."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import ledger_compilers, ptxas
from .ledger_cases import Compiled, LedgerCase

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "ledger"
FORMAT = 2  # version of the cache files


def unavailable(compiler: str) -> str | None:
    """Why the compiler or the tools that read its code cannot be used here, or None."""
    if not importlib.util.find_spec("triton"):
        return "Triton is not installed; its wheel has nvdisasm and cuobjdump"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set: there is nothing to compile"
    if compiler != "triton" and not ptxas.find_nvcc():
        return "nvcc is not installed (of the CUDA toolkit 12.8 or newer)"
    return None


@functools.cache
def version(compiler: str) -> str:
    if compiler != "triton":
        return ptxas.version()
    import triton

    return f"triton {triton.__version__}"


def compiled(every: Iterable[LedgerCase], workers: int = 2) -> Iterator[Compiled]:
    """Kernels in the given order; those not in the cache are compiled by `workers` processes."""
    every = list(every)
    missing = [x for x in every if not _path(x).exists()]
    calls: dict[
        LedgerCase, list[LedgerCase]
    ] = {}  # one call of Triton's launcher compiles several passes
    for case in missing:
        one = case if case.by_nvcc else case._replace(name="")
        calls.setdefault(one, []).append(case)
    with ThreadPoolExecutor(workers) as threads, contextlib.ExitStack() as stack:
        processes: Any = None  # each process sets its own driver
        if any(x.compiler == "triton" for x in calls):
            spawn = multiprocessing.get_context("spawn")
            processes = stack.enter_context(spawn.Pool(workers, maxtasksperchild=4))
        waiting: dict[LedgerCase, Callable[[], Any]] = {}
        for one, cases in calls.items():
            if one.by_nvcc:
                wait = threads.submit(_make, ledger_compilers.by_nvcc, cases).result
            else:
                wait = processes.apply_async(_make, (ledger_compilers.by_triton, cases)).get
            waiting.update(dict.fromkeys(cases, wait))
        for case in every:
            if case in waiting:
                waiting[case]()
            yield _cached(case)


def _make(compiler: Callable[[list[LedgerCase]], list[Compiled]], cases: list[LedgerCase]) -> None:
    for found in compiler(cases):
        _keep(found)


# --------------------------------------------------------------------------------------- the cache


@functools.cache
def _sources(folder: str) -> str:
    """A hash of all that the code depends on; `folder` is LedgerCase's, or triton."""
    files = [f"csrc/{x}" for x in ("*.h", "common/*.h", "cuda/*.h", "cuda/*.cuh")]
    folders = {
        "sm80": (*files, "csrc/cuda/sm80/*.cuh"),
        "sm90": (*files, *(f"csrc/cuda/{x}" for x in ("sm80/*.cuh", "sm90/*.h", "sm90/*.cuh"))),
        "triton": (
            "kernels/*.py",
            "fastattn/backends/triton/arguments.py",
            "fastattn/backends/triton/job.py",
            "fastattn/backends/triton/runtime.py",
            "fastattn/backends/triton/tile_configs.py",
            "fastattn/backends/triton/backend.py",
        ),
    }
    found = hashlib.sha256(f"{FORMAT} {version(folder)}".encode())
    compilers_file = Path(ledger_compilers.__file__)
    for path in (compilers_file, *sorted(x for y in folders[folder] for x in ROOT.glob(y))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _path(case: LedgerCase) -> Path:
    sources = _sources(case.folder if case.by_nvcc else case.compiler)
    return CACHE / f"{'-'.join(map(str, case))}-{sources}.json.gz"


def _keep(found: Compiled) -> None:
    """Write the file atomically, since others may read it; delete older files of the case."""
    path = _path(found.case)
    CACHE.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(gzip.compress(json.dumps(found).encode(), 5))
    for old in CACHE.glob(path.name[: -len("0123456789abcdef.json.gz")] + "*.json.gz"):
        old.unlink(missing_ok=True)
    part.replace(path)


def _cached(case: LedgerCase) -> Compiled:
    case_fields, *rest = json.loads(gzip.decompress(_path(case).read_bytes()))
    return Compiled(LedgerCase(*case_fields), *rest)
