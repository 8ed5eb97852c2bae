"""Classify GPU instructions into a few kinds, by opcode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .sass import NEVER, PRODUCTS, Instruction

# Every known opcode, by its first word. A kernel with any other opcode is rejected.
KINDS = {
    "tensor": " ".join(PRODUCTS),
    "mufu": "MUFU",
    "fp32": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 UFADD UFMUL UFFMA",
    "float": "FMNMX FMNMX3 FSEL FSETP FSET FCHK FSWZADD UFMNMX UFSEL UFSETP UFSET "
    "HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 DADD DMUL DFMA DSETP",
    "convert": "F2F F2FP F2I I2F I2FP FRND UF2F UF2FP UF2I UI2F UI2FP UFRND",
    "int": "IADD IADD3 IMAD IABS IMNMX ISETP LEA LOP LOP3 SHF SHL SHR BREV FLO POPC VIADD "
    "VIADDMNMX VIMNMX VIMNMX3 SGXT BMSK IDP PLOP3 UIADD3 UIMAD UISETP ULEA ULOP3 USHF USGXT UBMSK "
    "UFLO UPOPC UPLOP3 UIABS UVIADD UVIMNMX UBREV",
    "move": "MOV UMOV CS2R CS2UR S2R S2UR R2UR R2P P2R UR2UP UP2UR SEL USEL PRMT UPRMT MOVM LDC "
    "LDCU ULDC I2IP",
    "shared": "LDS LDSM STS STSM SHFL ATOMS REDUX CREDUX",
    "global": "LDG STG LD ST LDGSTS ATOM ATOMG RED REDG UTMALDG UTMASTG UTMAPF UTMACCTL "
    "UTMACMDFLUSH UBLKCP CCTL CCTLL",
    "spill": "LDL STL",
    "tmem": "LDTM STTM UTCBAR UTCATOMSWS UTCCP",
    "barrier": "BAR MEMBAR FENCE ELECT ERRBAR CGAERRBAR LDGDEPBAR ARRIVES UCGABAR_ARV UCGABAR_WAIT "
    "ACQBULK",
    "wait": "DEPBAR",
    "branch": "BRA BRX JMP BSSY BSYNC BREAK EXIT CALL RET WARPSYNC ENDCOLLECTIVE YIELD NANOSLEEP "
    "KILL BPT RPCMOV BMOV",
    "other": "NOP VOTE VOTEU MATCH UVIRTCOUNT PMTRIG SETMAXREG USETMAXREG LEPC PREEXIT",
}
KIND_OF = {opcode: kind for kind, text in KINDS.items() for opcode in text.split()}
UNKNOWN = "unknown"
# Prefixes of opcodes with a first word of two meanings.
SPECIAL = (
    ("IMAD.MOV", "move"),
    ("SYNCS.PHASECHK", "wait"),
    ("SYNCS", "barrier"),
    ("WARPGROUP.DEPBAR", "wait"),
    ("WARPGROUP", "barrier"),
)


def kind(x: Instruction) -> str:
    """One of KINDS, or UNKNOWN."""
    if x.guard in NEVER:
        return "other"
    special = next((name for start, name in SPECIAL if x.opcode.startswith(start)), None)
    return special or KIND_OF.get(x.base, UNKNOWN)


def count(instructions: Iterable[Instruction]) -> Counter[str]:
    """How many of each kind; raises ValueError for unknown opcodes."""
    instructions = list(instructions)
    strange = sorted({x.opcode for x in instructions if kind(x) == UNKNOWN})
    if strange:
        raise ValueError(
            f"got opcodes that bench/static_gpu/sass_kinds.py does not know: {', '.join(strange)}; "
            "add them to a kind of KINDS"
        )
    return Counter(map(kind, instructions))
