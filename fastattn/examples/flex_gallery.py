"""Fifteen functions of flex_attention: traced, recognised, verified and drawn.

Each is compared with a plain implementation in float64. What is recognised becomes an argument of
`fastattn.attention`, the rest a program. `python -m bench race flex compiled-flex` times such
functions; tests compare their gradients, and their bits with those of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn
from fastattn.score_mods.intervals import ALL, NONE, SOME, block_classes
from fastattn.score_mods.recognition import Shape, Structure, recognise
from fastattn.score_mods.tracing import merge, trace_mask_mod, trace_score_mod

from .common import Claims, new_figure, parse, parser, progress, save
from .flex_functions import FUNCTIONS, HEADS, Function

HEAD_DIM = 64
BLOCK = 64  # rows and keys of a block


class Found(NamedTuple):
    """What was found of one function.

    Args:
        operations: Values of its programs.
        recognised: The arguments of `attention` that it became.
        seen: [n, n] bool: the pairs that it shows.
        added: [n, n] float: what it adds to a score of 0 in the first head. None: no score_mod.
        classes: [blocks, blocks]: the class of each block by intervals. None: no mask_mod.
        error: Of the output, relative to float64.
        plain: The same of a plain implementation in float32.
    """

    operations: int
    recognised: str
    seen: Tensor
    added: Tensor | None
    classes: Tensor | None
    error: float
    plain: float

    def hidden(self) -> float:
        """The share of blocks that interval arithmetic finds hidden."""
        return 0.0 if self.classes is None else (self.classes == NONE).float().mean().item()


def indices(n: int) -> tuple[Tensor, ...]:
    """b, h, i, j, which broadcast to (1, HEADS, n, n)."""
    at = torch.arange(n)
    return torch.zeros(1, 1, 1, 1).long(), torch.arange(HEADS).view(-1, 1, 1), at[:, None], at


def plain(function: Function, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(score_mod(q k^T / sqrt(d))) v by torch's own operations, in the dtype of q."""
    where = indices(q.shape[2])
    scores = q @ k.mT * HEAD_DIM**-0.5
    if function.score_mod is not None:
        scores = function.score_mod(scores, *where).to(q.dtype)
    if function.mask_mod is not None:
        scores = scores.masked_fill(~function.mask_mod(*where), -torch.inf)
    return scores.softmax(-1) @ v


def names(found: Structure) -> str:
    """What was recognised, as arguments of `attention`."""
    parts = []
    if found.band is not None:
        left, right = found.band
        parts.append("causal" if left is None and right == 0 else f"window ({left}, {right})")
    for name, value in (
        ("key_lengths", found.key_lengths),
        ("softcap", found.softcap),
        ("alibi_slopes", found.alibi),
    ):
        if value is not None:
            parts.append(name)
    return ", ".join(parts)


def exact_classes(seen: Tensor) -> Tensor:
    """The class of each block of pairs, from all of them."""
    blocks = seen.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
    some, every = blocks.any(-1), blocks.all(-1)
    return torch.where(every, ALL, torch.where(some, SOME, NONE)).to(torch.uint8)


def shown_pairs(function: Function, n: int) -> Tensor:
    """[n, n] bool: the pairs that a function shows."""
    if function.mask_mod is None:
        return torch.ones(n, n, dtype=torch.bool)
    return function.mask_mod(*indices(n)).expand(1, 1, n, n)[0, 0]


def measure(function: Function, n: int) -> Found:
    draws = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, n, HEAD_DIM, generator=draws)
    traced = (
        None if function.score_mod is None else trace_score_mod(function.score_mod),
        None if function.mask_mod is None else trace_mask_mod(function.mask_mod),
    )
    score, mask, tensors = merge(*traced)
    structure = recognise(score, mask, tensors, Shape(1, HEADS, n, n), documents=False)
    added = None
    if function.score_mod is not None:
        added = function.score_mod(torch.zeros(1, HEADS, n, n), *indices(n))[0, 0]
    right = plain(function, q.double(), k.double(), v.double())
    ours = fastattn.flex_attention(q, k, v, function.score_mod, mask_mod=function.mask_mod)
    errors = [(x - right).norm().item() for x in (ours, plain(function, q, k, v))]
    classes = None
    if mask is not None:
        classes = block_classes(mask, tensors, n, n, block_rows=BLOCK, block_keys=BLOCK)
    return Found(
        operations=sum(len(x.values) for x in (score, mask) if x is not None),
        recognised=names(structure),
        seen=shown_pairs(function, n),
        added=added,
        classes=classes,
        error=errors[0] / right.norm().item(),
        plain=errors[1] / right.norm().item(),
    )


def table(found: dict[str, Found]) -> list[str]:
    lines = [f"{'function':<19}{'values':>8}{'hidden':>9}{'error':>9}  recognised"]
    for name, x in found.items():
        numbers = f"{x.operations:>8}{x.hidden():>9.0%}{x.error:>9.1e}"
        lines.append(f"{name:<19}{numbers}  {x.recognised}".rstrip())
    return lines


def prove(found: dict[str, Found]) -> Claims:
    claims = Claims()
    worst = max(x.error / x.plain for x in found.values())
    claims.prove(
        f"output: the largest error is {worst:.2f} times that of plain float32, at most 2",
        worst <= 2,
    )
    pairs = [(x.classes, exact_classes(x.seen)) for x in found.values() if x.classes is not None]
    wrong = sum(int(((c != e) & (c != SOME)).sum()) for c, e in pairs)
    missed = sum(int(((c == SOME) & (e != SOME)).sum()) for c, e in pairs)
    blocks = sum(c.numel() for c, _ in pairs)
    claims.prove(
        f"intervals: {wrong} of {blocks} blocks of {BLOCK} x {BLOCK} are classed wrongly, "
        f"{missed} without all or none of their pairs being found",
        wrong == 0,
    )
    return claims


def draw(found: dict[str, Found], path: Path) -> None:
    """Save a picture: for each function what it shows, and what it adds to the first head."""
    figure = new_figure(15, 10.2)
    for ax, (name, x) in zip(figure.subplots(3, 5).flat, found.items()):
        n = len(x.seen)
        shown = torch.where(x.seen, torch.zeros(()) if x.added is None else x.added, torch.nan)
        limit = 1.0 if x.added is None else max(1e-3, shown.nan_to_num().abs().max().item())
        ax.imshow(
            shown.numpy(), cmap="Blues" if x.added is None else "RdBu", interpolation="nearest",
            vmin=-limit, vmax=limit,
        )  # fmt: skip
        for row, key in [] if x.classes is None else (x.classes == NONE).nonzero().tolist():
            ax.add_patch(_grey(key * BLOCK - 0.5, row * BLOCK - 0.5))
        ax.set_title(name, weight="bold")
        ax.set(xticks=[], yticks=[], xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5))
        ax.set_xlabel(f"{x.hidden():.0%} of blocks hidden", fontsize=9)
    figure.suptitle(
        "flex_attention's functions: rows are queries, columns keys; interval arithmetic finds the "
        "grey blocks hidden;\ncolours: what a score of 0 becomes in the first head",
        fontsize=15,
    )
    save(figure, path)


def _grey(x: float, y: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), BLOCK, BLOCK, facecolor="#e8e8e8", edgecolor="#d5d5d5", linewidth=0.4)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("flex_gallery", __doc__)
    made.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {2 * BLOCK}")
    options = parse(made, arguments)
    if options.tokens % (2 * BLOCK) or options.tokens < 256:
        made.error(
            f"--tokens: got {options.tokens}, expected a multiple of {2 * BLOCK}, 256 or more"
        )
    torch.set_num_threads(1)
    found = {
        name: measure(FUNCTIONS[name](options.tokens), options.tokens)
        for name in progress(list(FUNCTIONS), "functions")
    }
    print("\n".join(table(found)))
    claims = prove(found)
    if options.plot is not None:
        draw(found, options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
