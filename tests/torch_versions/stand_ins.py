"""Make libraries in the place of the GPU libraries that a CUDA build of torch loads.

PyPI has only CUDA builds of most versions of torch. They run on a CPU, but they load gigabytes of
NVIDIA's libraries first. A stand-in has the name, the symbols and the symbol versions of such a
library. Each of its functions returns 0, and cudaGetDeviceCount reports that there is no GPU. So
torch sees a machine without one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
OF_THE_SYSTEM = re.compile(r"lib(c|m|pthread|dl|rt|util|gcc_s|stdc\+\+|gomp)\.so|ld-linux")
FUNCTION = "void* {name}(void) {{ return 0; }}\n"
DEVICE_COUNT = f"int cudaGetDeviceCount(int* count) {{ *count = 0; return {NO_DEVICE}; }}\n"
TOOLS = ("gcc", "nm", "objdump")


def why_not() -> str | None:
    """Why no stand-ins can be made here, or None."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    return f"{', '.join(missing)} not found on PATH" if missing else None


def make(folder: Path) -> list[str]:
    """Write a stand-in into `folder`, torch's lib folder, for each library that is missing there.

    Returns the names of the stand-ins.
    """
    libraries = sorted(x for x in folder.iterdir() if ".so" in x.name)
    present = {x.name for x in libraries}
    needed: set[str] = set()
    file_of: dict[str, str] = {}  # symbol version -> library
    undefined: dict[str, str] = {}  # symbol -> its version, or ""
    defined: set[str] = set()
    for path in libraries:
        needs, versions = _dependencies(path)
        needed |= needs
        file_of |= versions
        for kind, name, version in _symbols(path):
            if kind == "U":
                undefined.setdefault(name, version)
            else:
                defined.add(name)
    absent = sorted(x for x in needed - present if not OF_THE_SYSTEM.match(x))
    if not absent:
        return []
    # A symbol without a version may come from any library: the first stand-in has it. Symbols of
    # Python and of the system that land there, too, are found elsewhere first.
    by_file: dict[str, dict[str, list[str]]] = {x: defaultdict(list) for x in absent}
    for version, file in file_of.items():
        if file in by_file:
            by_file[file][version]
    for name, version in sorted(undefined.items()):
        if name in defined or name.startswith(("Py", "_Py")):
            continue
        if not version:
            by_file[absent[0]][""].append(name)
        elif file_of.get(version) in by_file:
            by_file[file_of[version]][version].append(name)
    for file, versions in by_file.items():
        _compile(folder / file, versions)
    return absent


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _dependencies(path: Path) -> tuple[set[str], dict[str, str]]:
    """The libraries that a library needs, and which of them has which symbol version."""
    needed, versions, file = set(), {}, ""
    for line in _output("objdump", "-p", path).splitlines():
        if found := re.match(r"\s+NEEDED\s+(\S+)", line):
            needed.add(found[1])
        elif found := re.match(r"\s+required from (\S+):", line):
            file = found[1]
        elif file and (found := re.match(r"\s+0x\w+ 0x\w+ \d+ (\S+)", line)):
            versions[found[1]] = file
    return needed, versions


def _symbols(path: Path) -> list[tuple[str, str, str]]:
    """(U or another letter of nm, name, version or "") of each dynamic symbol that is not weak."""
    found = []
    for line in _output("nm", "-D", "--with-symbol-versions", path).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind not in "wv":
            found.append((kind, name, version.lstrip("@")))
    return found


def _compile(path: Path, versions: dict[str, list[str]]) -> None:
    """Make a library of functions that do nothing, with these names under each symbol version."""
    names = [name for each in versions.values() for name in each]
    code = "".join(
        DEVICE_COUNT if name == "cudaGetDeviceCount" else FUNCTION.format(name=name)
        for name in names
    )
    script = ""
    for version, each in versions.items():
        if version:
            exported = "global: " + " ".join(f"{name};" for name in each) if each else ""
            script += f"{version} {{ {exported} }};\n"
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    if script:
        script_path = path.with_suffix(".map")
        script_path.write_text(script)
        options.append(f"-Wl,--version-script={script_path}")
    command = ["gcc", *options, "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)
    if script:
        script_path.unlink()
