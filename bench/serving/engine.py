"""An engine in processes of its own environment, asked over pipes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..cpu_engines.environments import ROOT, WHOLE, Environment

PROGRAMS = Path(__file__).with_name("programs")
MARK = "ANSWER "  # of the programs' answers, among what else an engine prints
NAMES = "vllm", "sglang"


def environment(name: str) -> Environment:
    return WHOLE[f"{name}-engine"]


class Failed(Exception):
    """A process of an engine ended."""


def variables(name: str, ours: bool, folder: Path) -> dict[str, str]:
    """The environment's variables of a process that finds the plugins of this checkout. `folder` is
    for what a wheel would tell: their entry points."""
    tomllib = importlib.import_module("tomllib")  # of Python 3.11, which the engines need, too
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{x} = {y}" for x, y in points.items())]
    told = folder / "fastattn-0.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: fastattn\nVersion: 0\n")
    (told / "entry_points.txt").write_text("\n".join(lines))
    own = {"vllm": {"FASTATTN_VLLM": str(int(ours)), "VLLM_CPU_KVCACHE_SPACE": "1"}}
    own["sglang"] = {"OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), str(folder)])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | own[name]


def make_model(folder: Path, kind: str, settings: dict[str, Any], dtype: str = "float32") -> None:
    """Save a model of this class of transformers with random weights. Raises Failed."""
    command = [environment("vllm").python, PROGRAMS / "make_model.py", folder, kind]
    done = subprocess.run(
        [*map(str, command), json.dumps(settings), dtype],
        env={x: y for x, y in os.environ.items() if x != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(done.stderr[-2000:])


class Engine:
    """vLLM or SGLang with a model; with fastattn's attention if `ours`, else with its own.

    `log` is a file for all that it prints. Raises Failed if it does not start.
    """

    def __init__(self, name: str, model: Path, log: Path, ours: bool, **arguments: Any):
        given: dict[str, Any]
        if name == "vllm":
            given = dict(model=str(model), max_model_len=8192, enforce_eager=True)
        else:
            backend = "fastattn" if ours else "torch_native"
            given = dict(model_path=str(model), device="cpu", attention_backend=backend)
            given |= dict(skip_tokenizer_init=True, disable_cuda_graph=True, log_level="info")
            given |= dict(disable_overlap_schedule=True, grammar_backend="none")
            given |= dict(max_total_tokens=32768, mem_fraction_static=0.1, page_size=64)
        self.log, pipe = log, subprocess.PIPE
        self._output = log.open("w")
        program = PROGRAMS / f"{name}_engine.py"
        self.process = subprocess.Popen(
            [str(environment(name).python), str(program), json.dumps(given | arguments)],
            stdin=pipe,
            stdout=pipe,
            stderr=self._output,
            text=True,
            env=variables(name, ours, log.parent / "plugins"),
        )
        self._answer()

    def ask(self, prompts: list[list[int]], tokens: int | None = None) -> dict[str, Any]:
        """Greedy tokens and the seconds that they took; without `tokens`, embeddings. Raises
        Failed."""
        assert self.process.stdin
        asked = dict(prompts=prompts) | ({} if tokens is None else dict(tokens=tokens))
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let it end by itself, with the processes that it started."""
        for file in (self.process.stdin, self.process.stdout):
            if file:
                file.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            self._output.write(line)
            self._output.flush()
        self.close()
        raise Failed(self.log.read_text()[-6000:])


@contextmanager
def pair(
    name: str, model: Path, folder: Path, **arguments: Any
) -> Generator[tuple[Engine, Engine]]:
    """Of the engine's own attention and of ours; both start at once. Their logs are in `folder`.
    Raises Failed."""
    with ThreadPoolExecutor() as threads:
        starts = [
            threads.submit(Engine, name, model, folder / f"{name}{ours:d}.log", ours, **arguments)
            for ours in (False, True)
        ]
    try:
        own, ours = (x.result() for x in starts)
        yield own, ours
    finally:
        for x in starts:
            if not x.exception():
                x.result().close()
