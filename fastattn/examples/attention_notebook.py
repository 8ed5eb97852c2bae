"""A notebook on attention, cell by cell: fastattn's results beside those that it printed.

The notebook builds attention from a single dot product up to a causal module with dropout, on the
six tokens "Your journey starts with one step". Here the fused modules of `fastattn.nn` compute its
weights and contexts, and plain torch the steps before them; all agree to the last printed digit.
Two cells print random draws: each of their values is checked to be one that dropout can produce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from .common import Claims, new_figure, parse, parser, save
from .notebook_cells import KEPT, MASK, STEPS, TOKENS, TOLERANCE, Step

INTRODUCTION = """\
Attention on six tokens: "Your journey starts with one step".
Each step shows: computed by fastattn | printed by the notebook, then the largest difference."""
PANELS = {
    "cell 13: weights": "Simple attention: dot products alone",
    "cell 27: weights": "Self-attention: of projections, untrained",
    "cell 33: causal weights": "Causal: no token sees the future",
    "cell 35: weights, dropped out": "Causal, with dropout: 0 or doubled",
}


def like(x: float, digits: str) -> str:
    """x with as many decimals as `digits`; the notebook prints whole numbers as `1.`."""
    _, point, decimals = digits.partition(".")
    return format(x, f"#.{len(decimals)}f" if point else ".0f")


def show(step: Step, computed: Tensor, difference: float) -> None:
    """Print the step's name and note, and its two blocks of numbers side by side."""
    printed = [row.split() for row in step.printed.split("\n")]
    width = max(len(digits) for row in printed for digits in row)
    lines = []
    for values, row in zip(computed.reshape(len(printed), -1).tolist(), printed):
        both = ([like(x, digits) for x, digits in zip(values, row)], row)
        lines.append("  " + " | ".join(" ".join(f"{x:>{width}}" for x in side) for side in both))
    lines[-1] += f"   {difference:.1e}" if difference else "   exact"
    print(f"\n{step.name:<36}{step.note}", *lines, sep="\n")


def picture(tensors: dict[str, Tensor]) -> Any:
    """Heat maps of the weights of four kinds of attention, with one colour scale."""
    figure = new_figure(10, 10.4)
    for axis, (name, title) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        weights = tensors[name]
        hidden = (weights == 0) & (MASK == 0)
        # Square roots, because all weights would be pale beside the 1 in causal attention's row 0.
        shades = weights.sqrt().masked_fill(hidden, math.nan)
        axis.imshow(shades.tolist(), cmap="Blues", vmin=0, vmax=1.2)
        axis.set_facecolor("0.9")
        for i, j in (~hidden).nonzero().tolist():
            x = weights[i, j].item()
            color = "white" if x > 0.45 else "black"
            axis.text(j, i, f"{x:.2f}" if x else "0", ha="center", va="center", color=color)
        axis.set_title(title, fontsize=11)
        axis.set_xticks(range(len(TOKENS)), TOKENS)
        axis.set_yticks(range(len(TOKENS)), TOKENS)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.suptitle("How much each token (row) attends to each token (column); grey is hidden")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute and print every step, check its digits, and return the exit status."""
    options = parse(parser("attention_notebook", __doc__ or ""), arguments)
    print(INTRODUCTION)
    tensors, differences = {}, {}
    for section, steps in groupby(STEPS, key=lambda step: step.section):
        print(f"\n\n{section}\n{'-' * len(section)}")
        for step in steps:
            tensors[step.name] = step.compute()
            differences[step.name] = step.difference(tensors[step.name])
            show(step, tensors[step.name], differences[step.name])
    print()
    claims = Claims()
    digits = sum(x.isdigit() for step in STEPS if step.name not in KEPT for x in step.printed)
    draws = [differences.pop(name) for name in KEPT]
    exact = differences.values()
    claims.prove(
        f"{len(exact)} tensors, {digits} digits, are reproduced to the printed digit, "
        f"off by {max(exact):.1e} at most",
        all(x <= TOLERANCE for x in exact),
    )
    claims.prove(
        f"{len(draws)} draws of dropout, ours and the notebook's: all 0 or w / (1 - p), "
        f"off by {max(draws):.1e} at most",
        all(x <= TOLERANCE for x in draws),
    )
    if options.plot is not None:
        save(picture(tensors), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
