"""Fifteen functions of flex_attention: traced, recognised, verified, timed and drawn.

Each is compared with a plain implementation in float64, output and gradients, before it is timed.
Its bits are compared with those of `fastattn.attention` with the same function as a mask: the words
are those of out, and of the gradients of q, k and v. Times are on one thread, divided by those of
torch's scaled_dot_product_attention with a dense mask: of a forward pass, and of a training step
with the gradients of q, k and v. --compiled divides that of a forward pass by that of torch's
compiled flex_attention, too, which has no backward on CPUs. The dense mask, the block mask and the
compiled code exist before the clock starts; a call of ours begins with its functions.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

import fastattn
from fastattn.score_mods.additive import as_sum
from fastattn.score_mods.intervals import ALL, NONE, SOME, block_classes
from fastattn.score_mods.recognition import Shape, Structure, recognise
from fastattn.score_mods.tracing import merge, trace_mask_mod, trace_score_mod

from .common import Claims, new_figure, parse, parser, progress, save
from .flex_functions import FUNCTIONS, HEADS, Function

HEAD_DIM = 64
BLOCK = 64  # rows and keys of a block
ROUNDS = 5  # of each time; the median of their ratios counts
MICROSECONDS = 1e6
OF_TABLES = 2e-5
LARGEST_TRACE = 5000  # microseconds: the bound of a first call


class Found(NamedTuple):
    """What was measured of one function.

    Args:
        traced: Microseconds of a trace, the least of some.
        operations: Values of its programs.
        recognised: The arguments of `attention` that it became.
        seen: [n, n] bool: the pairs that it shows.
        added: [n, n] float: what it adds to a score of 0 in the first head. None: no score_mod.
        classes: [blocks, blocks]: the class of each block by intervals. None: no mask_mod.
        error: Of the output, of the gradients of q, k and v, and of the learned tensor's gradient,
            if there is one, relative to float64.
        plain: The same of a plain implementation in float32.
        bits: For out and for the gradients of q, k and v, whether they are those of a mask, bit for
            bit. None: the function is no sum of the score and a mask.
        compiled: Our time divided by that of compiled flex_attention. None: not timed.
        dense: Our time of a forward pass divided by that of a dense mask.
        step: The same of a forward and a backward pass.
    """

    traced: float
    operations: int
    recognised: str
    seen: Tensor
    added: Tensor | None
    classes: Tensor | None
    error: list[float]
    plain: list[float]
    bits: list[bool] | None
    compiled: float | None
    dense: float
    step: float

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


def results(run: Callable, function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    """The output; the gradients of q, k and v for a random gradient of the output, joined; that of
    the learned tensor, if there is one."""
    leaves = [x.detach().requires_grad_() for x in given]
    trained = [] if function.learned is None else [function.learned.requires_grad_()]
    out = run(function, *leaves)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves + trained, gradient)
    for x in trained:
        x.requires_grad_(False)
    return [out.detach(), torch.cat([x.flatten() for x in gradients[:3]]), *gradients[3:]]


def errors(computed: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """The norms of the differences, relative to those of the right results."""
    return [(x.double() - y).norm().item() / y.norm().item() for x, y in zip(computed, right)]


def ours(function: Function, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fastattn.flex_attention(q, k, v, function.score_mod, mask_mod=function.mask_mod)


def stepped(run: Callable, given: Sequence[Tensor]) -> Callable:
    """A training step: a call of run, and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in given]
    gradient = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(run(*leaves), leaves, gradient)


def as_mask(function: Function, n: int) -> Callable:
    """A call of `fastattn.attention` with what a function amounts to."""
    seen, added = shown_pairs(function, n), scores_of_zero(function, n)
    mask = seen if added is None else added.masked_fill(~seen, -torch.inf)
    return lambda _, q, k, v: fastattn.attention(q, k, v, mask=mask)


def same_bits(function: Function, given: Sequence[Tensor], is_sum: bool) -> list[bool] | None:
    """Whether out, and the gradients of q, k and v, have the bits of those of a mask."""
    if not is_sum:
        return None
    n, fixed = given[0].shape[2], function._replace(learned=None)
    of_mask = results(as_mask(function, n), fixed, given)
    return [torch.equal(x, y) for x, y in zip(results(ours, fixed, given), of_mask)]


def ratio(run: Callable, other: Callable) -> float:
    """The time of a call divided by that of another: the median over rounds of both in turn."""
    run(), other()
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for call in (run, other):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        ratios.append(times[0] / times[1])
    return sorted(ratios)[ROUNDS // 2]


def names(structure: Structure) -> str:
    """What was recognised, as arguments of `attention`."""
    parts = []
    if structure.band is not None:
        left, right = structure.band
        parts.append("causal" if left is None and right == 0 else f"window ({left}, {right})")
    for name, value in (
        ("key_lengths", structure.key_lengths),
        ("softcap", structure.softcap),
        ("alibi_slopes", structure.alibi),
    ):
        if value is not None:
            parts.append(name)
    return ", ".join(parts)


def exact_classes(seen: Tensor) -> Tensor:
    """The class of each block of pairs, from all of them."""
    blocks = seen.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
    some, every = blocks.any(-1), blocks.all(-1)
    return torch.where(every, ALL, torch.where(some, SOME, NONE)).to(torch.uint8)


def trace(function: Function) -> tuple:
    score, mask = function.score_mod, function.mask_mod
    return merge(
        None if score is None else trace_score_mod(score),
        None if mask is None else trace_mask_mod(mask),
    )


def trace_time(function: Function) -> float:
    """The least time of some traces, in microseconds."""
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        trace(function)
        times.append(time.perf_counter() - begin)
    return min(times) * MICROSECONDS


def compiled_call(function: Function, q: Tensor, k: Tensor, v: Tensor) -> Callable:
    """A call of torch's flex_attention, compiled and run once, with its block mask."""
    n = q.shape[2]
    mask = function.mask_mod
    shown = mask and torch_flex.create_block_mask(mask, None, None, n, n, device="cpu")
    run: Any = torch.compile(torch_flex.flex_attention, dynamic=False)
    run(q, k, v, function.score_mod, shown)
    return lambda: run(q, k, v, function.score_mod, shown)


def shown_pairs(function: Function, n: int) -> Tensor:
    """[n, n] bool: the pairs that a function shows."""
    if function.mask_mod is None:
        return torch.ones(n, n, dtype=torch.bool)
    return function.mask_mod(*indices(n)).expand(1, 1, n, n)[0, 0]


def scores_of_zero(function: Function, n: int) -> Tensor | None:
    """(1, HEADS, n, n): what scores of 0 become. None: they stay."""
    if function.score_mod is None:
        return None
    return function.score_mod(torch.zeros(1, HEADS, n, n), *indices(n))


def measure(function: Function, n: int, with_compiled: bool) -> Found:
    draws = torch.Generator().manual_seed(0)
    given = torch.randn(3, 1, HEADS, n, HEAD_DIM, generator=draws).unbind()
    score, mask, tensors = trace(function)
    structure = recognise(score, mask, tensors, Shape(1, HEADS, n, n))
    seen, added = shown_pairs(function, n), scores_of_zero(function, n)
    classes = mask and block_classes(mask, tensors, n, n, block_rows=BLOCK, block_keys=BLOCK)

    right = results(plain, function, [x.double() for x in given])
    error = errors(results(ours, function, given), right)
    same_dtype = errors(results(plain, function, given), right)

    parts = None if score is None else as_sum(score)
    is_sum = score is None or (parts is not None and parts.softcap is None)
    dense = seen if added is None else added.masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        beside_mask = ratio(
            lambda: ours(function, *given),
            lambda: scaled_dot_product_attention(*given, attn_mask=dense),
        )
        compiled = None
        if with_compiled:
            compiled = ratio(lambda: ours(function, *given), compiled_call(function, *given))
    sdpa = lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense)  # noqa: E731
    call = lambda q, k, v: ours(function, q, k, v)  # noqa: E731
    return Found(
        traced=trace_time(function),
        operations=sum(len(x.values) for x in (score, mask) if x is not None),
        recognised=names(structure),
        seen=seen,
        added=None if added is None else added[0, 0],
        classes=classes,
        error=error,
        plain=same_dtype,
        bits=same_bits(function, given, is_sum),
        compiled=compiled,
        dense=beside_mask,
        step=ratio(stepped(call, given), stepped(sdpa, given)),
    )


def words(bits: list[bool] | None) -> str:
    return "no mask" if bits is None else " ".join("same" if x else "other" for x in bits)


def table(measured: dict[str, Found]) -> list[str]:
    lines = [
        f"{'function':<19}{'traced':>9}{'values':>8}{'hidden':>9}{'out':>9}{'q, k, v':>9}"
        f"{'table':>9}  {'bits':<10}{'/compiled':>9}{'/dense':>8}{'step':>7}  recognised"
    ]
    for name, x in measured.items():
        compiled = "-" if x.compiled is None else f"{x.compiled:.2f}"
        of_table = f"{x.error[2]:.1e}" if len(x.error) > 2 else "-"
        lines.append(
            f"{name:<19}{x.traced:>6.0f} us{x.operations:>8}{x.hidden():>9.0%}{x.error[0]:>9.1e}"
            f"{x.error[1]:>9.1e}{of_table:>9}  {words(x.bits):<10}{compiled:>9}{x.dense:>8.2f}"
            f"{x.step:>7.2f}  {x.recognised}"
        )
    return lines


def prove(measured: dict[str, Found]) -> Claims:
    claims = Claims()
    for what, at in (("output", 0), ("gradients of q, k and v", 1)):
        worst = max(x.error[at] / x.plain[at] for x in measured.values())
        claims.prove(
            f"{what}: the largest error is {worst:.2f} times that of plain float32, at most 2",
            worst <= 2,
        )
    worst = max(x.error[2] for x in measured.values() if len(x.error) > 2)
    claims.prove(
        f"gradients of tables: the largest error is {worst:.1e} of the norm, bound {OF_TABLES}; "
        "they are sums of many numbers that cancel",
        worst <= OF_TABLES,
    )
    beside = [x.bits for x in measured.values() if x.bits is not None]
    claims.prove(
        f"bits: {sum(map(all, beside))} of {len(beside)} functions that a mask can state have the "
        "bits of that mask, in the output and in the gradients of q, k and v",
        all(map(all, beside)),
    )
    pairs = [(x.classes, exact_classes(x.seen)) for x in measured.values() if x.classes is not None]
    wrong = sum(int(((c != e) & (c != SOME)).sum()) for c, e in pairs)
    missed = sum(int(((c == SOME) & (e != SOME)).sum()) for c, e in pairs)
    blocks = sum(c.numel() for c, _ in pairs)
    claims.prove(
        f"intervals: {wrong} of {blocks} blocks of {BLOCK} x {BLOCK} are classed wrongly, "
        f"{missed} without all or none of their pairs being found",
        wrong == 0,
    )
    slowest = max(x.traced for x in measured.values())
    claims.prove(
        f"trace: time of a function at most {slowest:.0f} us, bound {LARGEST_TRACE}",
        slowest <= LARGEST_TRACE,
    )
    return claims


def draw(measured: dict[str, Found], path: Path) -> None:
    """Save a picture: for each function what it shows, and what it adds to the first head."""
    figure = new_figure(15, 10.2)
    for ax, (name, x) in zip(figure.subplots(3, 5).flat, measured.items()):
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
        times = [f"{x.dense:.2f}x dense mask"]
        if x.compiled is not None:
            times.insert(0, f"{x.compiled:.2f}x compiled flex")
        ax.set_xlabel(f"{x.hidden():.0%} of blocks hidden\n{', '.join(times)}", fontsize=9)
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
    made.add_argument(
        "--compiled", action="store_true", help="time torch's compiled flex_attention, in minutes"
    )
    options = parse(made, arguments)
    if options.tokens % (2 * BLOCK) or options.tokens < 256:
        made.error(
            f"--tokens: got {options.tokens}, expected a multiple of {2 * BLOCK}, 256 or more"
        )
    if options.compiled and not shutil.which("g++"):
        made.error("--compiled: no g++ was found, which torch's compiler needs on CPUs")
    torch.set_num_threads(1)
    measured = {
        name: measure(FUNCTIONS[name](options.tokens), options.tokens, options.compiled)
        for name in progress(list(FUNCTIONS), "functions")
    }
    print("\n".join(table(measured)))
    claims = prove(measured)
    if options.plot is not None:
        draw(measured, options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
