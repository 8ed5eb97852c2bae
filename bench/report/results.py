"""A result: its initial record with empty sections, and its file."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..measure import isolated_process, machine, roofline

PAGES = sorted(machine.RESULTS.glob("*.md"))
SCHEMA = 4
DIGITS = 6  # significant ones in a file: more than any measurement reproduces
Result = dict[str, Any]


def start(
    kind: str,
    device: str,
    dtypes: tuple[str, ...],
    settings: dict[str, Any],
    process: isolated_process.Process | None = None,
) -> Result:
    """A new result: machine, versions and limits, and empty sections. Work on the device runs in
    `process`, if it is given."""
    call = process.call if process else lambda function, *args: function(*args)
    return {
        "schema": SCHEMA,
        "kind": kind,
        "settings": settings,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": False,
        "machine": call(machine.describe, device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "load": {"start": machine.load()},
        "ceilings": call(roofline.measure, device, dtypes),
        "memory": [],
        "cells": [],
        "seconds": None,
    }


def save(result: Result, folder: Path) -> Path:
    """Write the file, named after the machine and the command."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem(result)}.json"
    replace(path, text(result))
    return path


def replace(path: Path, content: str) -> None:
    """Write a file that is whole or absent."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(content)
    os.replace(unfinished, path)


def stem(result: Result) -> str:
    """The file's name: the machine, the command, and the texts of `--only`, so that a partial run
    never replaces a whole one."""
    kind = [] if result["kind"] == "sweep" else [result["kind"]]
    parts = map(machine.in_file_names, result["settings"].get("only", ()))
    return "-".join([machine.slug(result["machine"]), *kind, *parts])


def text(result: Result) -> str:
    """The file: JSON, a line for each field of the result, and one for each record of a section."""
    fields = [f"{json.dumps(key)}: {_field(_rounded(value))}" for key, value in result.items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _field(value: Any) -> str:
    if not (isinstance(value, list) and value):
        return json.dumps(value)
    return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def read(path: Path) -> Result:
    """Raises ValueError if the file is not a result or has another schema."""
    try:
        result = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: got no JSON ({error}), expected a result file") from None
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path}: got schema {found}, expected {SCHEMA}; measure it again")
    return result


def committed() -> list[Path]:
    return sorted(machine.RESULTS.glob("*.json"))


def limits(result: Result) -> roofline.Limits:
    return roofline.Limits(**result["ceilings"])
