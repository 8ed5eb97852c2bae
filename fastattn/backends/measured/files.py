"""Files of choices that were measured on a chip: how they are found, checked, read and written.

A file is JSON with the identity of what was measured, and choices by name:

    rules   which backend comes first for which calls (preference.py)
    tiles   tiles and splits of Triton's kernels (triton/autotune.py)
    cpu     the instruction sets and the most threads (native/libraries.py)

Those in this folder are named by the architecture. A user's is named by the chip, and lies in
FASTATTN_CACHE_DIR, else in the cache folder of the system. It counts if every line of its identity
is as here. A folder that is not there costs one look at the file system. Without a home there is no
folder, and no file.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ...namespace import PACKAGE
from ...version import FALLBACK

FORMAT = 1
COMMITTED = Path(__file__).parent
AGAIN = "`python -m fastattn tune` measures again, `python -m fastattn tune --forget` deletes it"
VECTORS = re.compile("avx|amx|fma|f16c|asimd|sve|sme|bf16|i8mm")
Identity = dict[str, Any]
Parsed = TypeVar("Parsed")


class Measured(NamedTuple):
    """A file that counts here."""

    path: Path
    identity: Identity
    choices: dict[str, Any]


def folder() -> str:
    """The folder of a user's files; "" if it would be in a home, and the user has none."""
    home = os.path.expanduser("~")
    system = {
        "win32": os.environ.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local"),
        "darwin": os.path.join(home, "Library", "Caches"),
    }.get(sys.platform, os.path.join(home, ".cache"))
    found = os.environ.get("FASTATTN_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or system, "fastattn"
    )
    found = os.path.expanduser(found)
    return "" if found.startswith("~") else found


def library_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        return FALLBACK


@functools.cache
def cpu_name() -> str:
    """The processor's name, as its maker writes it where the system says."""
    found = re.search(r"^model name\s*: (.+)$", _text("/proc/cpuinfo"), re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


@functools.cache
def cpu_flags() -> str:
    """The processor's extensions for vectors and matrices, which may differ behind one name: a
    virtual machine hides some."""
    found = re.search(r"^(?:flags|Features)\s*: (.+)$", _text("/proc/cpuinfo"), re.M)
    return " ".join(sorted(x for x in found[1].split() if VECTORS.match(x))) if found else ""


def driver_version() -> str:
    """The version of the GPU's driver; where the system does not say, of the CUDA that it has."""
    found = re.search(r"Module.*?(\d+\.[\d.]+)", _text("/proc/driver/nvidia/version"))
    built: Any = torch._C
    return found[1] if found else f"CUDA {built._cuda_getDriverVersion()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def identity(device: torch.device) -> Identity:
    """What a measurement on a device depends on, beside the call."""
    if device.type == "cpu":
        return dict(
            fastattn=library_version(), chip=cpu_name(), cores=os.cpu_count(), flags=cpu_flags()
        )
    major, minor = torch.cuda.get_device_capability(device)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return dict(
        fastattn=library_version(),
        chip=torch.cuda.get_device_name(device),
        architecture=10 * major + minor,
        torch=torch.__version__,
        triton=triton,
        driver=driver_version(),
    )


def path_of(device: torch.device) -> Path:
    """The user's file for a device."""
    chip = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    words = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    return Path(folder()) / f"{device.type}-{words}.json"


def all_of_user() -> list[Path]:
    """The user's files, of every chip: those that can be read, and what has the name of a chip that
    is here. Raises OSError if the folder cannot be listed."""
    where = folder()
    names = os.listdir(where) if os.path.isdir(where) else []
    paths = [Path(where) / x for x in sorted(names) if re.fullmatch(r"(cpu|cuda)-.*\.json", x)]
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    own = {path_of(x) for x in devices}
    return [x for x in paths if x in own or _readable(x)]


def _readable(path: Path) -> bool:
    try:
        read(path)
    except (OSError, ValueError):
        return False
    return True


@functools.cache
def here(device: torch.device) -> Measured | None:
    """The user's file for a device, if it is there and counts. Warns once if it does not."""
    where = folder()
    if not (where and os.path.isdir(where)):
        return None
    path = path_of(device)
    try:
        found = read(path)
        stale = differs(found.identity, identity(device))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return ignored(path, f"it is damaged ({error})")
    return ignored(path, f"it was measured with {stale}") if stale else found


def read(path: Path) -> Measured:
    """Raises OSError, or ValueError for a file of another form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict) or repr(found.get("format")) != repr(FORMAT):  # true is no 1
        raise ValueError(f"got no object of format {FORMAT}")
    if not isinstance(found.get("identity"), dict) or not isinstance(found.get("choices"), dict):
        raise ValueError("got no identity and choices")
    return Measured(path, found["identity"], found["choices"])


def differs(measured: Identity, now: Identity) -> str:
    """The first difference, as in "torch 2.11, and here is 2.13"; "" without one."""
    for name in now | measured:
        if measured.get(name) != now.get(name):
            return f"{name} {measured.get(name)}, and here is {now.get(name)}"
    return ""


def ignored(path: Path, why: str) -> None:
    """Warn that a file is ignored."""
    warnings.warn(f"{path} is ignored: {why}. {AGAIN}", stacklevel=2)


def choices(
    device: torch.device, name: str, parse: Callable[[Any], Parsed], default: Parsed
) -> Parsed:
    """The choices of a name in the user's file, as `parse` makes them; a file in which they have
    another form is ignored with a warning. Readers cache what this returns."""
    found = here(device)
    if found is None or name not in found.choices:
        return default
    try:
        return parse(found.choices[name])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        ignored(found.path, f"its {name} are damaged ({error!r})")
        return default


def text(identity: Identity, choices: dict[str, Any]) -> str:
    return json.dumps(dict(format=FORMAT, identity=identity, choices=choices), indent=1) + "\n"


def write(path: Path, content: str) -> None:
    """Replace a file: other processes read the old one or the new one, whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.write_text(content, encoding="utf-8")
        os.replace(made, path)
