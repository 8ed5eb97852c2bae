"""Benchmark peers that end the process that measures them, or leave it unusable.

Importing this module adds them to the benchmark's table.
"""

import os

import torch

from bench.peers.registry import BASELINE, PEERS, Peer

TIMED = 3  # calls: the first is judged, those after it are timed


def _aborts():
    os.abort()


def _fills():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")


def _poisons():
    """Like an illegal access: from now on every use of the GPU raises."""

    def unusable():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = unusable
    unusable()


def _crashing(crash, when):
    def prepare(case):
        call, calls = PEERS[BASELINE].prepare(case), []

        def crashing(x):
            calls.append(1)
            return crash() if len(calls) >= when else call(x)

        return crashing

    return prepare


CRASHES = {"aborts": _aborts, "fills": _fills, "poisons": _poisons}
for name, crash in CRASHES.items():
    PEERS[name] = Peer(name, _crashing(crash, 1))
    PEERS[f"{name} while timed"] = Peer(name, _crashing(crash, TIMED))
