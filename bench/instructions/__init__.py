"""python -m bench instructions: what kernels execute, held against a record, without a clock.

x86.py      the CPU kernels under valgrind: `make instructions`
arm.py      the CPU kernels on 64-bit Arm under qemu (--arm): `make instructions-arm`
gpu.py      the main loops of the GPU kernels, with no GPU (--gpu): `make ledger`
"""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--arm", action="store_true", help="on 64-bit Arm, under qemu")
    where.add_argument("--gpu", action="store_true", help="the loops of GPU kernels, with no GPU")
    parser.add_argument("--accept", action="store_true", help="make these counts the record")


def command(options: argparse.Namespace) -> int:
    if options.arm:
        from . import arm

        return arm.check(options.accept)
    if options.gpu:
        from . import gpu

        return gpu.check(options.accept)
    from . import x86

    return x86.check(options.accept)
