"""The kernels that the ledger covers, and the record of a compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastattn.backends.triton_support import tile_configs

FEATURES = ("plain", "mask", "block mask", "alibi", "softcap", "dropout", "sinks")
OF_TRITON = ("block mask",)  # features of Triton's kernels only
COMPILERS = {"cuda": (80, 90), "triton": (80, 90, 100, 120)}
PASSES = ("forward", "dqkv", "dq", "dkv", "dk", "dv", "decode")


class LedgerCase(NamedTuple):
    """One kernel, in bfloat16."""

    compiler: str
    arch: int
    name: str  # of PASSES
    head_dim: int
    feature: str

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.compiler} {self.name} D{self.head_dim} {self.feature}"


class Compiled(NamedTuple):
    case: LedgerCase
    rows: int  # of the tile of one iteration
    keys: int
    warps: int
    stages: int
    registers: int  # per thread
    shared: int  # bytes per block
    tensor: int  # columns of tensor memory
    listing: str  # the output of nvdisasm -c


def cases() -> Iterator[LedgerCase]:
    """Every kernel that the ledger covers."""
    for compiler, archs in COMPILERS.items():
        for arch in archs:
            for d in (64, 128, 256):
                for feature in FEATURES if d < 256 else ("plain",):
                    if compiler == "cuda" and feature in OF_TRITON:
                        continue
                    split = d > 128 if compiler == "cuda" else tile_configs.apart(arch, 2, d)
                    backward = ("dq", "dk", "dv") if split else ("dq", "dkv")
                    if compiler == "cuda" and not split:
                        backward = ("dqkv",)
                    decode = ("decode",) * (d == 128 and feature == "plain")
                    for name in ("forward", *backward, *decode):
                        yield LedgerCase(compiler, arch, name, d, feature)
