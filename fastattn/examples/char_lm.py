"""A GPT-style model of characters learns Python from the standard library's sources.

Two models with one initial state train on the same batches, one with torch's attention and one with
`fastattn.nn.from_torch`'s. Their losses differ only by rounding. A third model measures how much
that is: torch's attention on the same batches with the rows in another order. Characters per second
of one thread and peak memory are compared without and with dropout of attention weights, for which
torch has no fused kernel on a CPU. At the end the model writes text with a key-value cache.
"""

from __future__ import annotations

import itertools
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import nn
from .common import Claims, least_seconds, new_figure, parse, parser, progress, save
from .memory import extra_bytes

CHARACTERS = 128  # ASCII; a character is its own number
WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, CONTEXT = 8, 128
STEPS, RATE = 600, 4e-3
TORCH, FUSED, REORDERED = "torch", "fused", "torch, rows reordered"
COMPARED = ((TORCH, 0.0), (FUSED, 0.0), (TORCH, 0.1), (FUSED, 0.1))  # and the rate of dropout
SIZES = ((BATCH, CONTEXT), (1, 1024))  # both are 1,024 characters a step
TIMED_STEPS = 8
PROMPT = "def read(self, "

Rows = dict[tuple[str, float, int], tuple[float, float]]  # (name, dropout, context): see compare


class LanguageModel(torch.nn.Module):
    """Embeddings, causal pre-norm layers and a linear map to the logits of the next character."""

    def __init__(self, fused: bool, dropout: float = 0.0, context: int = CONTEXT) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CHARACTERS, WIDTH)
        self.positions = torch.nn.Embedding(context, WIDTH)
        for embedding in (self.embedding, self.positions):
            torch.nn.init.normal_(embedding.weight, std=0.1)
        layer = torch.nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, 4 * WIDTH),
            dropout=dropout,
            activation="gelu",
            norm_first=True,
            batch_first=True,
        )
        norm = torch.nn.LayerNorm(WIDTH)
        torchs = torch.nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
        self.encoder = nn.from_torch(torchs) if fused else torchs
        self.out_proj = torch.nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor, cache: list[nn.KeyValueCache] | None = None) -> Tensor:
        """x (B, N) to logits (B, N, CHARACTERS); only the fused model takes a cache."""
        start = 0 if cache is None else cache[0].length
        places = torch.arange(start, start + x.shape[1], device=x.device)
        y = self.embedding(x) + self.positions(places)
        if isinstance(self.encoder, nn.Encoder):
            y = self.encoder(y, causal=True, cache=cache)
        else:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            y = self.encoder(y, mask=mask, is_causal=True)
        return self.out_proj(y)


def sources() -> Tensor:
    """The standard library's modules, concatenated, as character codes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text("utf-8", errors="replace") for file in files)
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def batches(text: Tensor, count: int, batch: int = BATCH, context: int = CONTEXT) -> list[Tensor]:
    """count batches (batch, context + 1) of characters at random places, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - context, (count, batch), generator=generator)
    return list(text[starts[..., None] + torch.arange(context + 1)])


class Trainer:
    """A model and its training steps. The initial state is the same for every kind of attention."""

    def __init__(
        self, name: str, dropout: float = 0.0, context: int = CONTEXT, steps: int = STEPS
    ) -> None:
        torch.manual_seed(0)
        self.name, self.model = name, LanguageModel(name == FUSED, dropout, context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, RATE, steps, pct_start=0.1
        )

    def step(self, batch: Tensor) -> float:
        """Train on batch (B, N + 1); return the loss in nats a character."""
        if self.name == REORDERED:
            batch = batch.flip(0)
        logits, following = self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        loss = F.cross_entropy(logits, following)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        # In float64, so that rounding of the loss does not hide the difference between two models.
        return F.cross_entropy(logits.detach().double(), following).item()


def side_by_side(trainers: Sequence[Trainer], data: list[Tensor], what: str) -> list[list[float]]:
    """Each trainer's losses, on the same batches."""
    losses: list[list[float]] = [[] for _ in trainers]
    for batch in progress(data, what):
        for trainer, curve in zip(trainers, losses):
            curve.append(trainer.step(batch))
    return losses


def one_step(name: str, dropout: float, batch: int, context: int) -> Callable[[], Any]:
    """A training step as a call, for `extra_bytes` to measure its memory."""
    trainer = Trainer(name, dropout, context)
    data = torch.zeros(batch, context + 1, dtype=torch.long)
    return lambda: trainer.step(data)


def in_order(seconds: dict[tuple[str, float], float]) -> bool:
    """Whether dropout makes no step faster, and a step with it is faster fused than torch's."""
    cost = all(seconds[name, 0.0] <= seconds[name, 0.1] for name in (TORCH, FUSED))
    return cost and seconds[FUSED, 0.1] <= seconds[TORCH, 0.1]


def compare(text: Tensor) -> Rows:
    """Characters per second, and a step's peak memory in MB, without the model and torch itself."""
    rows = {}
    for size in SIZES:
        steps = {}
        for name, dropout in COMPARED:
            trainer, data = Trainer(name, dropout, size[1]), batches(text, TIMED_STEPS, *size)
            steps[name, dropout] = map(trainer.step, itertools.cycle(data)).__next__
        what = f"comparing at {size[1]} characters"
        seconds = least_seconds(steps, TIMED_STEPS, in_order, what)
        for (name, dropout), least in seconds.items():
            taken = extra_bytes(one_step, (name, dropout, *size), (name, dropout, 1, 16))
            rows[name, dropout, size[1]] = (size[0] * size[1] / least, taken / 1e6)
    return rows


def print_rows(rows: Rows) -> None:
    lengths = [context for _, context in SIZES]
    print(f"\n{'':24}" + "".join(f"{f'{n:,} characters':>28}" for n in lengths))
    print(f"{'':24}" + f"{'chars/s':>16}{'peak MB':>12}" * len(lengths))
    for name, dropout in COMPARED:
        cells = [rows[name, dropout, n] for n in lengths]
        label = f"{name}, dropout {dropout:g}"
        print(f"{label:24}" + "".join(f"{rate:16,.0f}{peak:12.0f}" for rate, peak in cells))


def distance(x: list[float], y: list[float]) -> float:
    """Root mean square, in nats."""
    return statistics.fmean((a - b) ** 2 for a, b in zip(x, y)) ** 0.5


@torch.no_grad()
def write(model: LanguageModel, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The prompt (1, N) with count more characters, (1, N + count), each drawn from the three most
    likely; and the logits (1, N + count - 1, CHARACTERS)."""
    generator = torch.Generator().manual_seed(0)
    cache = model.encoder.new_cache(CONTEXT)  # ty: ignore
    text, new, logits = [prompt], prompt, []
    for _ in range(count):
        logits.append(model(new, cache))
        best, which = logits[-1][:, -1].topk(3)
        new = which.gather(1, best.softmax(-1).multinomial(1, generator=generator))
        text.append(new)
    return torch.cat(text, dim=1), torch.cat(logits, dim=1)


def picture(losses: dict[str, list[float]], rows: Rows) -> Any:
    """Loss curves, distances from torch's losses, characters per second, and peak memory."""
    figure = new_figure(13, 3.8)
    curve, apart, speed, memory = figure.subplots(1, 4, width_ratios=(1.2, 1.2, 1, 1))
    colors = {TORCH: "#d1495b", FUSED: "#0b6e4f", REORDERED: "#edae49"}
    for name, width in ((TORCH, 4), (FUSED, 1)):
        curve.plot(losses[name], color=colors[name], linewidth=width, label=name)
    curve.set(xlabel="step", ylabel="nats a character", title="loss")
    for name in (REORDERED, FUSED):
        gaps = [abs(a - b) for a, b in zip(losses[name], losses[TORCH])]
        apart.plot(gaps, color=colors[name], linewidth=0.8, label=name)
    apart.set(xlabel="step", yscale="log", title="distance from torch's loss", ylim=(1e-11, None))
    labels = [f"{context:,}\n{dropout:g}" for _, context in SIZES for dropout in (0, 0.1)]
    for axis, at, title in ((speed, 0, "characters a second"), (memory, 1, "peak MB of a step")):
        for shift, name in ((-0.2, TORCH), (0.2, FUSED)):
            heights = [rows[name, p, context][at] for _, context in SIZES for p in (0.0, 0.1)]
            places = [i + shift for i in range(len(heights))]
            axis.bar(places, heights, 0.38, color=colors[name], label=name)
        axis.set_xticks(range(len(labels)), labels, fontsize=8)
        axis.set(xlabel="characters of context, dropout", title=title)
    for axis in (curve, apart, speed, memory):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser("char_lm", __doc__ or ""), arguments)
    text = sources()
    trainers = [Trainer(name) for name in (TORCH, FUSED, REORDERED)]
    model = trainers[1].model
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text):,} characters, {size:,} parameters, {STEPS} steps of {BATCH} x {CONTEXT}")
    curves = side_by_side(trainers, batches(text, STEPS), "training")
    losses = {trainer.name: curve for trainer, curve in zip(trainers, curves)}
    rows = compare(text)
    print_rows(rows)

    late = statistics.fmean(losses[FUSED][-20:])
    print(
        f"\nloss {losses[FUSED][0]:.2f} at first, {late:.2f} nats a character at last; it writes:"
    )
    prompt = torch.tensor([list(PROMPT.encode())])
    written, cached = write(model.eval(), prompt, CONTEXT - len(PROMPT))
    print("\n    " + bytes(written[0].tolist()).decode().replace("\n", "\n    ") + "\n")

    claims = Claims()
    claims.prove(f"it learned: {late:.2f} nats a character (< 2.2)", late < 2.2)
    ours, own = (distance(losses[x], losses[TORCH]) for x in (FUSED, REORDERED))
    claims.prove(
        f"one loss curve: {ours:.1e} nats from torch's, which parts from itself by {own:.1e}",
        ours <= 3 * max(own, torch.finfo(torch.float32).eps),
    )
    for _, context in SIZES:
        rates = {(name, p): rows[name, p, context][0] for name, p in COMPARED}
        shown = ", ".join(
            f"{name}, dropout {p:g}: {rate:,.0f}" for (name, p), rate in rates.items()
        )
        claims.prove(
            f"dropout on {context:,} characters: time grows, and less when fused; characters a\n"
            f"        second: {shown}",
            in_order({kind: 1 / rate for kind, rate in rates.items()}),
        )
    with torch.no_grad():
        apart = (model(written[:, :-1]) - cached).abs().max().item()
    claims.prove(f"logits from the cache are those of a full pass, to {apart:.1e}", apart < 1e-4)
    torchs, fused = (rows[name, 0.1, 1024][1] for name in (TORCH, FUSED))
    claims.prove(
        f"with dropout on 1,024 characters, {fused:.0f} MB a step and torch's {torchs:.0f} MB",
        fused < torchs / 2,
    )
    if options.plot is not None:
        save(picture(losses, rows), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
