"""The kernels that the ledger covers, and the record of a compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastattn.backends.triton import tile_configs

FEATURES = ("plain", "band", "mask", "block mask", "alibi", "softcap", "dropout", "sinks")
FEATURES += ("score_mod",)  # a table by i - j: five operators
OF_PLAIN = ("plain", "band", "sinks")  # plain kernels have them: kernel_choice.h, is_general
OF_TRITON = ("block mask", "score_mod")  # features of Triton's kernels only
OF_SM90 = ("band",)  # of csrc/cuda/sm90 only: elsewhere plain kernels have it
# cuda: the kernels that the CUDA library prefers on an architecture, those of csrc/cuda/sm90 on
# sm_90. cuda_sm80: those of csrc/cuda/sm80 there, which run what the former decline.
COMPILERS = {"cuda": (80, 90), "cuda_sm80": (90,), "triton": (80, 90, 100, 120)}
PASSES = ("forward", "dqkv", "dq", "dkv", "dk", "dv", "decode")
# Head dims of csrc/cuda/sm90, by pass, with the features that have a kernel there.
SCORES = ("mask", "alibi", "softcap", "dropout", "sinks")
DIMS_OF_SM90 = {
    "forward": {d: ("plain", *(SCORES if d in (64, 128) else ())) for d in (64, 96, 128, 192, 256)},
    "dqkv": dict.fromkeys((64, 128), ("plain", "band", *SCORES)),
}


class LedgerCase(NamedTuple):
    """One kernel, in bfloat16."""

    compiler: str
    arch: int
    name: str  # of PASSES
    head_dim: int
    feature: str

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.compiler} {self.name} D{self.head_dim} {self.feature}"

    @property
    def by_nvcc(self) -> bool:
        return self.compiler.startswith("cuda")

    @property
    def folder(self) -> str:
        """The folder of csrc/cuda with the source of nvcc's kernel."""
        return "sm90" if (self.compiler, self.arch) == ("cuda", 90) else "sm80"


class Compiled(NamedTuple):
    case: LedgerCase
    rows: int  # of the tile of one iteration
    keys: int
    warps: int  # that run the loop
    stages: int
    registers: int  # per thread, at the launch
    shared: int  # bytes per block
    tensor: int  # columns of tensor memory
    listing: str  # the output of nvdisasm -c
    said: str = ""  # the output of ptxas -v
    launched: int = 0  # warps of a block, if more than run the loop
    declared: tuple[int, ...] = ()  # the limits of registers that the source sets, ascending
    parameters: int = 0  # where FaParams begins in constant bank 0


def cases() -> Iterator[LedgerCase]:
    """Every kernel that the ledger covers."""
    for compiler, archs in COMPILERS.items():
        for arch in archs:
            if (compiler, arch) == ("cuda", 90):
                yield from _of_sm90()
                continue
            for d in (64, 128, 256):
                for feature in FEATURES if d < 256 else ("plain",):
                    one = LedgerCase(compiler, arch, "", d, feature)
                    if feature in OF_SM90 or (one.by_nvcc and feature in OF_TRITON):
                        continue
                    split = d > 128 if one.by_nvcc else tile_configs.apart(arch, 2, d)
                    backward = ("dq", "dk", "dv") if split else ("dq", "dkv")
                    if one.by_nvcc and not split:
                        backward = ("dqkv",)
                    decode = ("decode",) * (d == 128 and feature == "plain")
                    for name in ("forward", *backward, *decode):
                        yield one._replace(name=name)


def _of_sm90() -> Iterator[LedgerCase]:
    for name, dims in DIMS_OF_SM90.items():
        for d, features in dims.items():
            for feature in features:
                yield LedgerCase("cuda", 90, name, d, feature)
