"""What aot.py and ptxas.py share: records with a line for each group, and NVIDIA's tools, which
Triton's wheel has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Groups = dict[str, dict[str, Any]]


def read(path: Path) -> Groups:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, groups: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [
        f" {json.dumps(group)}: {json.dumps(dict(sorted(of.items())))}"
        for group, of in sorted(groups.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def nvidia_tool(name: str, *args: str, cwd: str | None = None) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *args], capture_output=True, text=True, check=True, cwd=cwd).stdout
