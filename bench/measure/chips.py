"""Identify a CPU by its CPUID fields: maker, design, and the width of its vector units.

The width is that of the units, not of the registers: Zen 4 runs each AVX-512 instruction on 256-bit
units in two steps, so its peak is that of AVX2. Intel's model numbers are from its optimization
manuals and from Linux (arch/x86/include/asm/intel-family.h), AMD's from its revision guides.
"""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    maker: str
    name: str
    vector_bits: int


# vendor_id, cpu family: (first model, last model, chip)
_CHIPS: dict[tuple[str, int], list[tuple[int, int, Chip]]] = {
    ("AuthenticAMD", 23): [
        (0x00, 0x2F, Chip("AMD", "Zen", 128)),
        (0x30, 0xFF, Chip("AMD", "Zen 2", 256)),
    ],
    ("AuthenticAMD", 25): [
        (0x00, 0x0F, Chip("AMD", "Zen 3", 256)),
        (0x10, 0x1F, Chip("AMD", "Zen 4", 256)),
        (0x20, 0x5F, Chip("AMD", "Zen 3", 256)),
        (0x60, 0xAF, Chip("AMD", "Zen 4", 256)),
    ],
    ("AuthenticAMD", 26): [
        (0x00, 0x1F, Chip("AMD", "Zen 5", 512)),
    ],
    ("GenuineIntel", 6): [
        (0x3F, 0x3F, Chip("Intel", "Haswell", 256)),
        (0x4F, 0x4F, Chip("Intel", "Broadwell", 256)),
        (0x55, 0x55, Chip("Intel", "Skylake", 512)),
        (0x6A, 0x6C, Chip("Intel", "Ice Lake", 512)),
        (0x8F, 0x8F, Chip("Intel", "Sapphire Rapids", 512)),
        (0xCF, 0xCF, Chip("Intel", "Emerald Rapids", 512)),
        (0xAD, 0xAE, Chip("Intel", "Granite Rapids", 512)),
    ],
}


def chip(vendor: str, family: str, model: str) -> Chip | None:
    """The chip with these decimal fields of /proc/cpuinfo; None if the table lacks it."""
    if not (family.isdigit() and model.isdigit()):
        return None
    rows = _CHIPS.get((vendor, int(family)), [])
    return next((found for first, last, found in rows if first <= int(model) <= last), None)
