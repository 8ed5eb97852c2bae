"""A worker: an adapter in a process of its engine's environment, asked over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .environments import ROOT
from .peers import Peer

ADAPTERS = Path(__file__).parent / "workers"
LOOP = ADAPTERS / "worker.py"
# Of OpenMP, MKL and OpenBLAS. Adapters set the threads of engines with pools of their own.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Threads that wait sleep: a spinning one would add its wait to the CPU time of the work.
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


class Failed(Exception):
    """A worker replied with an error, or died."""


class Declined(Failed):
    """An engine has no such call."""


class Worker:
    """Start the process; `version` is the engine's. Raises Failed if it does not start."""

    def __init__(self, peer: Peer, threads: int):
        environment = os.environ | dict.fromkeys(THREADS, str(threads)) | SLEEPING
        if peer.environment is None:
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
        else:  # nothing of this process's packages is seen
            environment.pop("PYTHONPATH", None)
        python = peer.environment.python if peer.environment else sys.executable
        command = [str(python), str(LOOP), str(ADAPTERS), peer.adapter, peer.variant, str(threads)]
        self.peer, self.errors = peer, tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, env=environment, cwd=ADAPTERS
        )
        self.version: str = self._reply()["version"]

    def prepare(self, sizes: dict[str, Any], tensors: dict[str, Any], out: Path) -> str:
        """Compute the row once, and write its output in float32 to `out`; the precision that the
        engine has there. Raises Declined or Failed."""
        return self._ask(do="prepare", sizes=sizes, tensors=tensors, out=str(out))["precision"]

    def sample(self, loops: int) -> float:
        """CPU seconds of the process a call. Raises Failed."""
        return self._ask(do="sample", loops=loops)["seconds"]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            if file:
                file.close()

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it died; the reply is the reason
            pass
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"its process ended with {self.process.wait()}: {self._last_error()}")
        reply = json.loads(line)
        if "declined" in reply:
            raise Declined(reply["declined"])
        if "failed" in reply:
            raise Failed(reply["failed"])
        return reply

    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"
