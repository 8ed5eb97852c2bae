"""What is wrong with the CPU library for Windows, as objdump shows it: a line for each fault.

dll.py libfastattn_cpu.dll     the status is 1 if there is one
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ABI = Path(__file__).resolve().parents[1] / "csrc" / "abi.h"
OBJDUMP = "x86_64-w64-mingw32-objdump"
# Every Windows has these. The compiler's own runtime, as libstdc++-6.dll, is a part of the library.
OF_WINDOWS = {"kernel32.dll", "msvcrt.dll"}
# A move between memory and a vector of 32 or 64 bytes that faults where the address is no multiple
# of its width. Stacks have a multiple of 16.
ALIGNED = re.compile(r"\sv?mov(?:ap[sd]|dqa(?:32|64)?|nt\w+)\s(?=.*\()(?=.*%[yz]mm)")


def declared() -> set[str]:
    """The functions of the CPU library."""
    return set(re.findall(r"\b(fa_(?:cpu_|abi_)\w+)\(", ABI.read_text()))


def header_faults(header: str) -> Iterator[str]:
    """Faults in what `objdump -p` prints."""
    if "file format pei-x86-64" not in header:
        yield "got another format, expected pei-x86-64, a library of 64-bit Windows"
    for name in re.findall(r"DLL Name: (\S+)", header):
        if name.lower() not in OF_WINDOWS:
            yield f"imports {name}, expected none but {', '.join(sorted(OF_WINDOWS))}"
    names = header.partition("[Ordinal/Name Pointer] Table")[2].partition("\n\n")[0]
    exported = set(re.findall(r"\[ *\d+\](?: \+base\[ *\d+\])? +(?:\w+ )?(\w+)$", names, re.M))
    yield from (f"does not export {name}" for name in sorted(declared() - exported))
    yield from (f"exports {name}, which abi.h does not declare" for name in exported - declared())


def move_faults(code: Iterable[str]) -> Iterator[str]:
    """Faults in what `objdump -d` prints."""
    function = "?"
    for line in code:
        if line.endswith(">:\n"):
            function = line.split("<", 1)[1][:-3]
        elif ALIGNED.search(line):
            yield f"{function}: {line.split(chr(9))[-1].strip()}: an aligned move"


def faults(path: Path) -> Iterator[str]:
    """All faults of a library."""
    shown = subprocess.run([OBJDUMP, "-p", path], check=True, capture_output=True, text=True)
    yield from header_faults(shown.stdout)
    with subprocess.Popen([OBJDUMP, "-d", path], stdout=subprocess.PIPE, text=True) as code:
        assert code.stdout
        yield from move_faults(code.stdout)
    if code.returncode:
        yield f"{OBJDUMP} -d ended with {code.returncode}"


if __name__ == "__main__":
    found = [*faults(Path(sys.argv[1]))]
    print(*found, sep="\n")
    sys.exit(bool(found))
