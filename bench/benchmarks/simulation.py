"""Simulate attention over ranks on a cluster: the cost model of fastattn.distributed at sizes that
no test has, with published rates of kernels and links. Nothing here was run.

A layer of Llama 3 405B (128 query heads, 8 key heads, D = 128), bfloat16, forward and backward.
It is compared with published runs. `page` is results/distributed-simulation.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastattn.distributed import cost_model, layout
from fastattn.distributed.cost_model import UNLIMITED, CallSizes, Cost, Step
from fastattn.distributed.machines import H100, Machine

from ..plots.plot_speed import title
from ..reporting import simulated_page

PAGE, PICTURE = "distributed-simulation.txt", "distributed-simulation.png"
HEADS, KEY_HEADS, DIM, NODE = 128, 8, 128, 8
LENGTHS, RANKS = tuple(1 << n for n in range(20, 24)), (8, 64, 512, 4096)
# The picture has more lengths and ranks.
MANY_LENGTHS, MANY_RANKS = tuple(1 << n for n in range(16, 24)), tuple(1 << n for n in range(3, 13))
COLORS = {"gather": "#d9a441", "ring": "#4f7cac", "ulysses": "#6fbf9b", "usp": "#0b6e4f"}
SHADES = {name: at for at, name in enumerate(COLORS)}


class Band(NamedTuple):
    """Which keys a row attends to, and the layout that suits this."""

    name: str
    layout: str
    left: int


BANDS = (
    Band("causal", layout.ZIGZAG, UNLIMITED),
    Band("causal, a window of 4096", layout.CONTIGUOUS, 4095),
)


def call(
    N: int, mesh: tuple[int, ...], band: Band, heads: int, key_heads: int, backward: bool
) -> CallSizes:
    spans = layout.spans(band.layout, N, math.prod(mesh))
    sizes = 1, heads, key_heads, DIM, DIM, torch.bfloat16
    return CallSizes(mesh, spans, spans, *sizes, backward, -band.left, 0)


def costs(N: int, ranks: int, band: Band, machine: Machine = H100) -> dict[str, Cost]:
    """Costs of the strategies that are possible; usp runs Ulysses inside a node."""
    meshes = {"gather": (ranks,), "ring": (ranks,)}
    if HEADS % ranks == 0:
        meshes["ulysses"] = (ranks,)
    if ranks > NODE:
        meshes["usp"] = (ranks // NODE, NODE)
    shape = HEADS, KEY_HEADS, True
    return {
        x: cost_model.cost(x, call(N, mesh, band, *shape), machine) for x, mesh in meshes.items()
    }


def least(found: dict[str, Cost]) -> str:
    return min(found, key=lambda name: found[name].seconds)


def efficiency(found: Cost, N: int, ranks: int, band: Band) -> float:
    """The share of the kernels' speed without transfers and with all ranks equally busy."""
    single = call(N, (1,), band, HEADS, KEY_HEADS, True)
    scores = cost_model.alone(single, (layout.Span(0, N),)).scores
    free = dataclasses.replace(H100, call=0.0)
    steps = Step(scores), Step(scores, backward=True)
    return sum(cost_model.seconds(x, single, free) for x in steps) / ranks / found.seconds


# -- beside what was published ---------------------------------------------------------------------


class Run(NamedTuple):
    """A prefill of Llama 3 405B: N tokens on nodes of eight H100, published seconds."""

    N: int
    nodes: int
    seconds: float


# Yang 2024, arXiv:2411.01783: the abstract, and for one node the "about" figures of section 1.
# Nodes form a ring (pass-KV), the GPUs of a node divide heads and matrices.
PUBLISHED = (
    Run(1_000_000, 16, 77.0),
    Run(131_072, 16, 3.8),
    Run(1_000_000, 1, 1200.0),
    Run(131_072, 1, 60.0),
)
LAYERS, WIDTH, PARAMETERS = 126, 16_384, 405e9
FACTOR = 1.5  # tolerance of the model, which has only attention, products and sums


def prefill(run: Run) -> dict[str, float]:
    """Seconds of attention, of products (at attention's rate), and of sums over a node (two a
    layer, each rank sends 7/8 of a row twice)."""
    between_nodes = dataclasses.replace(H100, node=1)
    shape = HEADS // NODE, KEY_HEADS // NODE, False
    attention = cost_model.cost("ring", call(run.N, (run.nodes,), BANDS[0], *shape), between_nodes)
    rows = run.N / run.nodes
    products = 2 * PARAMETERS * rows / NODE / H100.flops[torch.bfloat16][0]
    sums = LAYERS * 2 * rows * WIDTH * 2 * 2 * 7 / 8 / H100.near.rate
    return {"attention": LAYERS * attention.seconds, "products": products, "sums": sums}


def show(options: argparse.Namespace) -> None:
    simulated_page.show(options, page(), draw, PAGE, PICTURE)


# -- the page --------------------------------------------------------------------------------------


def page() -> str:
    near, far = H100.near, H100.far
    forward, backward = H100.flops[torch.bfloat16]
    lines = [
        "# python -m bench distributed --simulate: nothing here was run, on GPUs or over NCCL.",
        f"# {HEADS} heads on {KEY_HEADS} key heads, D = {DIM}, bfloat16, a layer's forward and "
        "backward. What a ring computes it computes in bfloat16.",
        f"# {H100.name}: kernels {forward / 1e12:.0f} TFLOP/s forward, {backward / 1e12:.0f} "
        "backward (FlashAttention-3, published);",
        f"# links {near.rate / 1e9:.0f} GB/s and {1e6 * near.latency:g} us in a node, "
        f"{far.rate / 1e9:.0f} GB/s and {1e6 * far.latency:g} us between; "
        "fastattn/distributed/cost_model.py has the sources.",
        "",
        "Llama 3 405B, prefill, nodes of eight H100: seconds, and published (arXiv:2411.01783)",
        *map(_published, PUBLISHED),
    ]
    for band in BANDS:
        lines += ["", *_table(band)]
    return "\n".join(x.rstrip() for x in lines) + "\n"


def _published(run: Run) -> str:
    parts = prefill(run)
    total = sum(parts.values())
    times = ", ".join(f"{name} {x:.1f}" for name, x in parts.items())
    off = f"{total / run.seconds - 1:+.0%}"
    return f"{run.N:>9} tokens, nodes {run.nodes:>2}: {times}: {total:.1f}, {run.seconds:g} ({off})"


def _table(band: Band) -> Iterator[str]:
    yield f"{band.name}, {band.layout}: ms, % of what the kernels could do; GB a rank of the least"
    yield f"{'N':>6}{'ranks':>7}" + "".join(f"{x:>19}" for x in COLORS) + f"  {'least':10}{'GB':>7}"
    for N in LENGTHS:
        for ranks in RANKS:
            found = costs(N, ranks, band)
            name = least(found)
            text = "".join(_entry(found.get(x), N, ranks, band) for x in COLORS)
            memory = f"{found[name].memory / 1e9:7.2f}"
            yield f"{N >> 20:>5}M{ranks:>7}{text}  {name:10}{memory}"


def _entry(found: Cost | None, N: int, ranks: int, band: Band) -> str:
    if found is None:
        return f"{'-':>19}"
    return f"{1e3 * found.seconds:>14.2f}{efficiency(found, N, ranks, band):>5.0%}"


# -- the picture -----------------------------------------------------------------------------------


def draw(
    new: Callable[..., Any],
    lengths: Sequence[int] = MANY_LENGTHS,
    ranks: Sequence[int] = MANY_RANKS,
) -> Any:
    """Where each strategy takes the least time, and its share of the kernels' rate."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure = new(5.1 * len(BANDS) + 0.6, 0.4 * len(lengths) + 1.9)
    for axis, band in zip(figure.subplots(1, len(BANDS), squeeze=False)[0], BANDS, strict=True):
        grid = [[costs(N, P, band) for P in ranks] for N in lengths]
        names = [[least(x) for x in row] for row in grid]
        shades = [[SHADES[x] for x in row] for row in names]
        axis.imshow(shades, ListedColormap([*COLORS.values()]), vmin=0, vmax=3, aspect="auto")
        for i, j in ((i, j) for i in range(len(lengths)) for j in range(len(ranks))):
            share = efficiency(grid[i][j][names[i][j]], lengths[i], ranks[j], band)
            look = dict(ha="center", va="center", fontsize=7.5, color="white")
            axis.text(j, i, f"{share:.0%}", **look)
        axis.set_xticks(range(len(ranks)), map(str, ranks), fontsize=8)
        axis.set_yticks(range(len(lengths)), map(_tokens, lengths), fontsize=8)
        axis.set_xlabel("ranks", fontsize=9)
        axis.set_title(f"{band.name}, {band.layout}", fontsize=9.5)
        axis.invert_yaxis()
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    title(
        figure,
        "The strategy that takes the least time, and % of the kernels' rate: simulated, H100,\n"
        f"{HEADS} heads on {KEY_HEADS}, D = {DIM}, bfloat16, forward and backward",
    )
    return figure


def _tokens(N: int) -> str:
    return f"{N >> 20}M" if N >= 1 << 20 else f"{N >> 10}K"
