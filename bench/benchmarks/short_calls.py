"""Short self-attention on one thread: a causal call's time over the full call's, beside torch's.

A causal call needs (N + 1) / 2N of the full call's scores. What it takes beyond that is scores that
are computed and hidden, and work that does not depend on the band: the layout of Q, the output, the
normaliser, the call. Each ratio is of calls in the same round.
"""

from __future__ import annotations

import argparse

from ..cases import FORWARD, Case
from ..measure import run, timing
from ..measure.verify import Judge
from ..peers.registry import BASELINE, PEERS, SUBJECT

LENGTHS = (16, 32, 64, 128, 256, 512)
SECONDS = 1.0
PAIR = (SUBJECT, BASELINE)
HEAD = f"{'dtype':10}{'D':>5}{'N':>5}{'us':>9}{'causal/full':>13}{'least':>8}{'torch':>9}"
HEAD += f"{'/full':>9}{'/causal':>9}"


def command(options: argparse.Namespace) -> int:
    """Print a line for each cell. Status 1 if a result is wrong."""
    print(f"{HEAD}   torch: its causal over full, and its time over ours")
    failed = False
    for dtype in options.dtypes or ("float32",):
        for d in options.dims or (64,):
            for n in options.lengths or LENGTHS:
                text = line(dtype, d, n, options.seconds or SECONDS)
                failed |= text.startswith("failed")
                print(text, flush=True)
    return 1 if failed else 0


def line(dtype: str, d: int, n: int, seconds: float) -> str:
    cases = {mask: Case("cpu", dtype, mask, B=8, H=8, N=n, D=d) for mask in ("full", "causal")}
    names = {
        (name, mask): name if mask == "full" else f"{name} {mask}"
        for name in PAIR
        for mask in cases
    }
    contenders = {
        called: run.Contender(PEERS[name], cases[mask]) for (name, mask), called in names.items()
    }
    judges = {case: Judge(case, gradients=False) for case in cases.values()}
    heat = run.race(contenders, FORWARD, [(1, timing.THREAD_TIME)], seconds, judges)
    if wrong := [f"{name}: {x.reason}" for name, x in heat.verdicts.items() if x.reason]:
        return f"failed: {dtype} D{d} N{n}: {'; '.join(wrong)}"
    laps = run.totals(heat.laps[0].samples, FORWARD)

    def ratio(first: tuple[str, str], second: tuple[str, str]) -> float:
        return run.ratio(laps[names[first]], laps[names[second]])["median"]

    us = 1e6 * timing.quartiles(laps[SUBJECT])["median"]
    ours, theirs = (ratio((name, "causal"), (name, "full")) for name in PAIR)
    faster = (ratio((BASELINE, mask), (SUBJECT, mask)) for mask in cases)
    return (
        f"{dtype:10}{d:5}{n:5}{us:9.1f}{ours:13.2f}{(n + 1) / (2 * n):8.2f}{theirs:9.2f}"
        + "".join(f"{x:9.2f}" for x in faster)
    )
