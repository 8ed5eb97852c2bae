"""Check that the file of a shared library is complete, on Linux: other systems have other formats,
which their loaders check.

Linux's loader maps the sizes in the headers of a file, and a process that touches a mapped
page past the end of that file is killed (SIGBUS). So the headers are checked first. Their layout is
the 64-bit form in `man 5 elf`.
"""

from __future__ import annotations

import os
import platform
import struct
import sys
from pathlib import Path
from typing import BinaryIO

HEADER = struct.Struct("<4sBB10xHH12xQQ6xHHHHH")  # unpacked in _why_broken
SEGMENT = struct.Struct("<8xQ16xQ16x")  # p_offset, p_filesz
SECTION = struct.Struct("<4xI56x")  # sh_type
LIBRARY = (b"\x7fELF", 2, 1, 3)  # magic, 64 bits, little endian, ET_DYN
STRINGS = 3  # SHT_STRTAB, the type of the section that names the others
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine


def why_broken(path: Path) -> str | None:
    """Why the file at `path` is not a complete library for this machine; None if it is one, or if
    the system's loader is to say so."""
    if sys.platform != "linux":
        return None
    try:
        if not path.is_file():
            return f"{path} is no file"
        with path.open("rb") as file:
            why = _why_broken(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return why and f"{path} {why}"


def _why_broken(file: BinaryIO, size: int) -> str | None:
    def read(layout: struct.Struct, at: int) -> tuple:
        file.seek(at)
        return layout.unpack(file.read(layout.size))

    if size < HEADER.size:
        return f"is no shared library: it has {size} bytes"
    magic, bits, order, kind, machine, *table = read(HEADER, 0)
    if (magic, bits, order, kind) != LIBRARY:
        return "is no 64-bit shared library"
    if machine != MACHINES.get(platform.machine(), machine):
        return f"was built for another machine than this {platform.machine()}"
    segments, sections, segment_size, n_segments, section_size, n_sections, names = table
    if segment_size != SEGMENT.size or section_size not in (0, SECTION.size):
        return "is no shared library: its headers have other sizes than a 64-bit library's"

    described = n_sections * section_size  # 0 in a library that was stripped of this table
    end = max(segments + n_segments * segment_size, sections + described)
    if end <= size:
        entries = (read(SEGMENT, segments + i * segment_size) for i in range(n_segments))
        end = max([end, *(offset + length for offset, length in entries)])
    if end > size:
        return f"is cut short: it has {size} of at least {end} bytes"
    strings = sections + names * section_size
    if described and (names >= n_sections or read(SECTION, strings) != (STRINGS,)):
        return "is not whole: where its last table should be are other bytes"
    return None
