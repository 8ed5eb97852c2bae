"""The stated rates of kernels and links on machines, by which `cost_model` finds times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Link(NamedTuple):
    """rate: bytes a second that a rank sends while it receives as many. latency: seconds of an
    empty exchange. message: additional seconds for each rank that it sends to."""

    rate: float
    latency: float
    message: float


@dataclass(frozen=True, eq=False)
class Machine:
    """flops: operations a second of a rank's kernels, forward and backward, by dtype. memory: bytes
    a second that it reads and writes. call: seconds of a kernel with nothing to compute. merge:
    seconds of a ring to merge an empty result. near: the link among `node` ranks in a row. far: the
    link among others."""

    name: str
    flops: Mapping[torch.dtype, tuple[float, float]]
    memory: float
    call: float
    merge: float
    node: int
    near: Link
    far: Link

    def link(self, mesh: tuple[int, ...], dim: int) -> Link:
        """The link of the ranks along a dimension. Ranks count along the last dimension first."""
        return self.near if math.prod(mesh[dim:]) <= self.node else self.far


# FlashAttention-3 on an H100 SXM, bfloat16, D = 128, N = 16K: forward causal and backward (Shah
# 2024, arXiv:2407.08608, figures 5 and 6). That is 0.62 and 0.57 of the data sheet's 989 TFLOP/s;
# float32 and float64 have these shares of its 67 and 34 without tensor cores. fastattn's own GPU
# kernels have not been timed.
_H100 = {
    torch.bfloat16: (616e12, 561e12),
    torch.float16: (616e12, 561e12),
    torch.float32: (42e12, 38e12),
    torch.float64: (21e12, 19e12),
}
# Latencies: those that NCCL assumes for its ring in src/graph/tuning.cc, protocol Simple: 8.4 us,
# and 3.4 over NVLink or 14 over the network. A microsecond for each further peer is a guess. Rates:
# nine tenths of 400 Gb/s a GPU (ConnectX-7); of NVLink 4's 450 GB/s each way the 370 that large
# messages reach in nccl-tests.
H100 = Machine(
    "H100, eight to a node by NVLink, 400 Gb/s a GPU between nodes",
    _H100,
    memory=3.35e12,  # by the data sheet
    call=20e-6,
    merge=100e-6,  # some fifteen launches
    node=8,
    near=Link(370e9, 11.8e-6, 1e-6),
    far=Link(45e9, 22.4e-6, 1e-6),
)

# In round numbers: a core with AVX2 or half-width AVX-512 (bench/results), and gloo over loopback
# on such a machine. Machines with more cores have faster networks, too.
CPU = Machine(
    "a CPU's core a rank, gloo on one machine",
    {
        torch.bfloat16: (200e9, 150e9),
        torch.float16: (100e9, 100e9),
        torch.float32: (100e9, 100e9),
        torch.float64: (50e9, 50e9),
    },
    memory=10e9,
    call=50e-6,
    merge=200e-6,
    node=1,
    near=Link(1e9, 200e-6, 100e-6),
    far=Link(1e9, 200e-6, 100e-6),
)


def machine_of(device: str) -> Machine:
    """The machine that is assumed for a type of device, on every rank. Nothing is measured."""
    return CPU if device == "cpu" else H100
