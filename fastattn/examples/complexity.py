"""Table 1 of "Attention Is All You Need" (Vaswani et al., 2017), measured.

    python -m fastattn.examples.complexity --plot

Why self-attention: how the cost of a layer grows with the number of tokens n and their width d, how
many of its operations must run one after the other, and how many layers connect the first token to
the last. A convolution has k taps, restricted attention a window of r keys. Exponents are log-log
slopes over the three largest sizes, where constant costs are negligible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from .common import Claims, parse, parser
from .complexity_plot import Panel, draw
from .layers import (
    ATTENTION,
    CONVOLUTION,
    DILATED,
    MAX_COLUMNS,
    PLAIN,
    RECURRENT,
    RESTRICTED,
    Case,
    Curve,
    forward_seconds,
    longest_chain,
    path_length,
    training_bytes,
)


class Paper(NamedTuple):
    """A row of the paper's table; `length` is its path length for our k and r."""

    time: dict[str, int]
    sequential: str
    path: str
    length: Callable[[int], int]


K, R = 3, 9  # k and r for path lengths
TABLE = {
    ATTENTION: Paper({"n": 2, "d": 1}, "O(1)", "O(1)", lambda n: 1),
    PLAIN: Paper({}, "O(1)", "O(1)", lambda n: 1),
    RECURRENT: Paper({"n": 1, "d": 2}, "O(n)", "O(n)", lambda n: n),
    # The paper's table has the path of dilated convolutions; its text says O(n/k) for contiguous.
    CONVOLUTION: Paper({"k": 1, "n": 1, "d": 2}, "O(1)", "O(n/k)", lambda n: hops(n, K)),
    DILATED: Paper({}, "", "O(log_k n)", lambda n: round(math.log(n, K))),
    RESTRICTED: Paper({"r": 1, "n": 1, "d": 1}, "O(1)", "O(n/r)", lambda n: hops(n, R)),
}
TIMED = (ATTENTION, RECURRENT, CONVOLUTION, RESTRICTED)
LAYERS = (ATTENTION, PLAIN, RECURRENT, CONVOLUTION, RESTRICTED)
TOLERANCE = {"n": 0.3, "d": 0.35, "k": 0.3, "r": 0.3}
ATTEMPTS = 8

# (layer, letter that varies) -> cases. Attention's batches fit in a core's L2 cache, 2 MB: above it
# the slope of time would be that of memory traffic. Weights of d x d do not fit: use more rows.
D, N, SIZES = 128, 128, (64, 128, 256, 512, 1024)


def widths(layer: str) -> list[int]:
    """The widths of a layer; attention is limited to those of one head, because two heads have two
    softmaxes, which the paper does not count."""
    return [d for d in SIZES if d <= MAX_COLUMNS or layer not in (ATTENTION, RESTRICTED)]


def batch(layer: str) -> int:
    return 4 if layer in (ATTENTION, RESTRICTED) else 8


TIME = {
    **{(layer, "n"): [Case(layer, n, D, batch=batch(layer)) for n in SIZES] for layer in TIMED},
    **{
        (layer, "d"): [Case(layer, N, d, batch=2 * batch(layer)) for d in widths(layer)]
        for layer in TIMED
    },
    (CONVOLUTION, "k"): [Case(CONVOLUTION, 256, 256, k=k, batch=4) for k in (4, 8, 16)],
    # Kernels round a window up to tiles of keys: only for wide windows is that negligible.
    (RESTRICTED, "r"): [Case(RESTRICTED, 16384, 64, r=r) for r in (512, 1024, 2048)],
}
MEMORY_SIZES = (512, 1024, 2048, 4096, 8192)
MEMORY = {(layer, "n"): [Case(layer, n, D) for n in MEMORY_SIZES] for layer in LAYERS}
CHAINS = {layer: [Case(layer, n, 8) for n in (16, 64, 256)] for layer in LAYERS}
PATHS = {layer: [Case(layer, n, 8, k=K, r=R) for n in (9, 27, 81)] for layer in TABLE}


class Measured(NamedTuple):
    """Seconds and bytes as curves by (layer, letter); chains and paths by layer, for each case."""

    time: dict[tuple[str, str], Curve]
    memory: dict[tuple[str, str], Curve]
    chains: dict[str, list[int]]
    paths: dict[str, list[int]]

    def powers(self, layer: str) -> dict[str, float]:
        """letter -> the exponent of time, in the paper's order."""
        return {letter: self.time[layer, letter].slope() for letter in TABLE[layer].time}

    def rises(self, layer: str) -> list[float]:
        """Operations that each further token adds to the chain, between successive cases."""
        points = [(case.n, length) for case, length in zip(CHAINS[layer], self.chains[layer])]
        return [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(points)]

    def ratios(self, letter: str) -> dict[int, float]:
        """size -> the time of attention divided by that of recurrence."""
        attention, recurrence = (self.time[layer, letter] for layer in (ATTENTION, RECURRENT))
        pairs = zip(attention.values, recurrence.values)
        return {size: a / r for size, (a, r) in zip(attention.sizes, pairs)}

    def meeting(self) -> float:
        """The n at which attention and recurrence take the same time, by log-log interpolation."""
        for (m, before), (n, after) in itertools.pairwise(self.ratios("n").items()):
            if before <= 1 < after:
                return m * (n / m) ** (math.log(before) / math.log(before / after))
        return math.nan


def measure() -> Measured:
    """Measure everything: half a minute on an idle machine."""
    return Measured(
        times(forward_seconds),
        curves(MEMORY, training_bytes),
        {layer: [longest_chain(case) for case in cases] for layer, cases in CHAINS.items()},
        {layer: [path_length(case) for case in cases] for layer, cases in PATHS.items()},
    )


def times(measured_at: Callable[[Sequence[Case]], Mapping[Case, float]]) -> dict:
    """The curves of time. If an exponent is not the paper's, its cases are measured again and the
    least time is taken: on a busy machine, cache misses slow some attempts, but hardly all."""
    time_curves = curves(TIME, measured_at)
    for _ in range(ATTEMPTS - 1):
        again = {x: cases for x, cases in TIME.items() if not is_near(*x, time_curves[x].slope())}
        if not again:
            break
        for key, curve in curves(again, measured_at).items():
            least = [min(pair) for pair in zip(time_curves[key].values, curve.values)]
            time_curves[key] = Curve(curve.sizes, least)
    return time_curves


def is_near(layer: str, letter: str, power: float) -> bool:
    """Whether the exponent of a letter is the paper's, within TOLERANCE."""
    return abs(power - TABLE[layer].time[letter]) < TOLERANCE[letter]


def curves(
    sweeps: Mapping[tuple[str, str], Sequence[Case]],
    measured_at: Callable[[Sequence[Case]], Mapping[Case, float]],
) -> dict[tuple[str, str], Curve]:
    """A curve for each sweep over the values of its letter. All cases are measured together, and
    each value is divided by the batch size."""
    values = measured_at([case for cases in sweeps.values() for case in cases])
    each = {case: value / case.batch for case, value in values.items()}
    return {
        (layer, letter): Curve([getattr(x, letter) for x in cases], [each[x] for x in cases])
        for (layer, letter), cases in sweeps.items()
    }


def hops(n: int, seen: int) -> int:
    """Layers from the first of n tokens to the last if a token attends to `seen` tokens, itself
    included."""
    return math.ceil((n - 1) / (seen - 1))


def product(exponents: Mapping[str, float]) -> str:
    """Format exponents: "k n d^2" for the paper's, "k^0.92 n^1.00 d^1.97" for measured ones."""
    texts = {
        letter: f"^{p}" if isinstance(p, int) else f"^{p:.2f}" for letter, p in exponents.items()
    }
    return " ".join(letter + text.removesuffix("^1") for letter, text in texts.items())


def prove(costs: Measured) -> Claims:
    """Check the claims of the table against the measurements."""
    claims = Claims()
    for layer in TIMED:
        paper, powers = TABLE[layer].time, costs.powers(layer)
        near = all(is_near(layer, x, powers[x]) for x in paper)
        claims.prove(f"{layer}: time {product(powers)}, in the paper {product(paper)}", near)

    slopes = {layer: costs.memory[layer, "n"].slope() for layer in LAYERS}
    stored, fused = (costs.memory[layer, "n"].values[-1] / 1e6 for layer in (PLAIN, ATTENTION))
    claims.prove(
        f"self-attention: memory n^{slopes[ATTENTION]:.2f} fused, linear as the others', n^"
        f"{slopes[PLAIN]:.2f} in plain torch;\n        at n = {MEMORY_SIZES[-1]} that is "
        f"{fused:.0f} MB instead of {stored:.0f}",
        all(abs(slopes[x] - (2 if x == PLAIN else 1)) < TOLERANCE["n"] for x in LAYERS),
    )

    rises = {layer: costs.rises(layer) for layer in LAYERS}
    recurrent = rises.pop(RECURRENT)
    claims.prove(
        f"each token adds {recurrent[0]:g} operations in sequence to a recurrent layer, none to "
        "the others",
        min(recurrent) == max(recurrent) >= 1 and not any(map(any, rises.values())),
    )
    claims.prove(
        "longest path: attention 1, recurrence n, restricted attention (n-1)/(r-1),\n"
        "        convolutions (n-1)/(k-1), and the paper's log_k n only if they are dilated",
        all(costs.paths[x] == [TABLE[x].length(case.n) for case in PATHS[x]] for x in TABLE),
    )

    by_n, by_d = (costs.ratios(letter) for letter in "nd")
    short = [by_n[n] for n in SIZES if n <= D] + [by_d[d] for d in by_d if N <= d]
    long, equal = by_n[SIZES[-1]], costs.meeting()
    claims.prove(
        f"attention: time of recurrence is at least {1 / max(short):.1f} times as long if n <= d;\n"
        f"        at d = {D} they meet at n = {equal:.0f} = {equal / D:.1f} d, and at n = "
        f"{SIZES[-1] / D:.0f} d it costs {long:.1f} times as much",
        max(short) < 1 < long,
    )
    return claims


def table(costs: Measured) -> list[tuple[str, ...]]:
    """Two heading rows, then a row for each layer."""
    sizes = ", ".join(str(case.n) for case in PATHS[ATTENTION])
    rows = [
        ("", "time", "", "memory", "in sequence", "", "longest path", ""),
        ("layer", "paper", "measured", "measured", "paper", "measured", "paper", f"n={sizes}"),
    ]
    for layer, paper in TABLE.items():
        time, memory, chain = ("", ""), "", ""
        if layer in TIMED:
            time = f"O({product(paper.time)})", product(costs.powers(layer))
        if layer in LAYERS:
            memory = product({"n": costs.memory[layer, "n"].slope()})
            rise, first = costs.rises(layer)[0], costs.chains[layer][0]
            chain = f"{rise:g}n + {first - rise * CHAINS[layer][0].n:g}" if rise else f"{first}"
        path = ", ".join(map(str, costs.paths[layer]))
        rows.append((layer, *time, memory, paper.sequential, chain, paper.path, path))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and its claims, draw the plot; return 1 if a claim fails."""
    options = parse(parser("complexity", __doc__ or ""), arguments)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs = measure()
    finally:
        torch.set_num_threads(threads)
    rows = table(costs)
    widths = [max(map(len, column)) + 2 for column in zip(*rows[1:])]
    for row in rows:
        line = ""
        for start, cell in zip(itertools.accumulate(widths, initial=0), row):
            line = line.ljust(start) + cell
        print(line.rstrip())
    print()
    claims = prove(costs)
    if options.plot:
        panels = [
            Panel(
                f"Time against length, d = {D}", "n", "ms each", 1e3, costs.time, costs.meeting()
            ),
            Panel(f"Time against width, n = {N}", "d", "ms each", 1e3, costs.time),
            Panel(f"Memory of training, d = {D}", "n", "MB", 1e-6, costs.memory),
        ]
        draw(panels, rows, options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
