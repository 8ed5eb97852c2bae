"""A native library with a file that is broken in any way gives a reason and never a crash.

Each broken file is loaded in a separate process, forked from one that has imported torch already.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fastattn.backends.native import elf, libraries
from tests.support.fresh_python import python
from tests.support.marks import parametrize

UNPRIVILEGED = 65534
TORCH = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"

LOADER = f"""
import json, os, sys
import fastattn
from fastattn.backends.native import libraries

def reason(cuda, unreadable):
    if unreadable and os.geteuid() == 0:
        os.seteuid({UNPRIVILEGED})  # nothing is unreadable to root
    return libraries.cuda_unavailable() if cuda else libraries.cpu_unavailable()

for name, path, cuda, unreadable in json.load(sys.stdin):
    os.environ["FASTATTN_CUDA_LIBRARY" if cuda else "FASTATTN_LIBRARY"] = path
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, str(reason(cuda, unreadable)).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    output = os.read(read, 1 << 16).decode()  # nothing from one that was killed
    print(json.dumps([name, os.waitpid(child, 0)[1], output]))
"""


def patched(intact, at, *values):
    found = bytearray(intact)
    found[at : at + len(values)] = bytes(values)
    return bytes(found)


# What is wrong -> (a function from the intact file's bytes to the broken ones, the reason given).
# Offsets are those of the ELF header: 4 class, 18 machine, 54 size of a segment's entry, 56 number
# of segments, 60 number of sections, 62 index of the section with the names.
CONTENTS = {
    "empty": (lambda x: b"", "is no shared library: it has 0 bytes"),
    "text": (lambda x: b"no library " * 99, "is no 64-bit shared library"),
    "short text": (lambda x: b"no library", "is no shared library: it has 10 bytes"),
    "cut in its header": (lambda x: x[:63], "is no shared library: it has 63 bytes"),
    "cut after its header": (lambda x: x[:64], "is cut short: it has 64 of at least"),
    "cut in its table of segments": (lambda x: x[:200], "is cut short: it has 200 of"),
    "cut in its first segment": (lambda x: x[:5000], "is cut short: it has 5000 of"),
    "cut to a quarter": (lambda x: x[: len(x) // 4], "is cut short"),
    "cut to a half": (lambda x: x[: len(x) // 2], "is cut short"),
    "cut to whole pages": (lambda x: x[: len(x) // 8192 * 4096], "is cut short"),
    "cut in its table of sections": (lambda x: x[:-100], "is cut short"),
    "cut by one byte": (lambda x: x[:-1], "is cut short"),
    "half of it zeros": (lambda x: x[: len(x) // 2].ljust(len(x), b"\0"), "is not whole"),
    "of 32 bits": (lambda x: patched(x, 4, 1), "is no 64-bit shared library"),
    "another machine's": (lambda x: patched(x, 18, 8, 0), "was built for another machine"),
    "entries of no size": (lambda x: patched(x, 54, 0, 0), "its headers have other sizes"),
    "too many segments": (lambda x: patched(x, 56, 255, 255), "is cut short"),
    "too many sections": (lambda x: patched(x, 60, 255, 255), "is cut short"),
    "names nowhere": (lambda x: patched(x, 62, 255, 255), "is not whole"),
}
OTHERS = {
    "a directory": "is no file",
    "a pipe": "is no file",
    "nothing": "built: no ",
    "a link to nothing": "built: no ",
    "unreadable": "cannot be read: Permission denied",
    "in an unreadable folder": "built: no ",
    "without the symbols": "undefined symbol: fa_",
}


@pytest.fixture(scope="module")
def intact():
    if why := libraries.cpu_unavailable():
        pytest.skip(why)
    return libraries.cpu().path


def make(folder, name, intact):
    """Create the broken library of that name."""
    path = folder / name.replace(" ", "_")
    if name in CONTENTS:
        path.write_bytes(CONTENTS[name][0](intact.read_bytes()))
    elif name == "a directory":
        path.mkdir()
    elif name == "a pipe":
        os.mkfifo(path)
    elif name == "a link to nothing":
        path.symlink_to(folder / "nowhere")
    elif name == "unreadable":
        shutil.copy(intact, path)
        path.chmod(0)
    elif name == "in an unreadable folder":
        path.mkdir()
        shutil.copy(intact, path / "library.so")
        path.chmod(0)
        return path / "library.so"
    elif name == "without the symbols":
        shutil.copy(TORCH, path)
    return path


@pytest.fixture(scope="module")
def reasons(intact):
    """{(name, is it the CUDA library): (how its process ended, the reason it printed)}."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are private to their owner
        os.chmod(folder, 0o755)
        return load_all(Path(folder), intact)


def load_all(folder, intact):
    made = {name: make(folder, name, intact) for name in (*CONTENTS, *OTHERS)}
    wanted = [
        ((name, cuda), str(path), cuda, "unreadable" in name)
        for name, path in made.items()
        for cuda in (False, True)
    ]
    run = python("-c", LOADER, stdin=json.dumps(wanted))
    return {tuple(name): rest for name, *rest in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
@parametrize("name", [*CONTENTS, *OTHERS], fast=3)
def test_a_broken_library_is_a_reason(name, cuda, reasons):
    status, reason = reasons[name, cuda]
    assert status == 0, f"the process ended with status {status}"
    expected = CONTENTS[name][1] if name in CONTENTS else OTHERS[name]
    prefix = "the CUDA kernels" if cuda else "the native library"
    assert reason.startswith(prefix) and expected in reason, reason


def test_a_library_of_another_abi_is_a_reason(intact, monkeypatch):
    monkeypatch.setattr(libraries, "FIELDS", "q k")
    with pytest.raises(OSError, match=r"another version of .*: the fields of FaParams are"):
        libraries.CpuLibrary(intact)


def test_an_intact_library_passes(intact):
    assert elf.why_broken(intact) is None and elf.why_broken(TORCH) is None


@pytest.mark.slow
def test_a_missing_build_stops_pytest_with_one_message(tmp_path):
    environment = {"FASTATTN_LIBRARY": str(tmp_path / "nothing.so"), "PATH": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    output = (done.stdout + done.stderr).strip()
    assert done.returncode == 4 and output.count("\n") == 0, output
    assert output.startswith("ERROR: there is nothing to test: the native library was not built")
