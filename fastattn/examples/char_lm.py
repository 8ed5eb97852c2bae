"""A GPT-style model of characters learns Python from the standard library's sources.

Two models with one initial state train on the same batches, one with torch's attention and one with
`fastattn.nn.from_torch`'s. Their losses differ only by rounding. A third model measures how much
that is: torch's attention on the same batches with the rows in another order. At the end the model
writes text with a key-value cache.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import nn
from .common import Claims, new_figure, parse, parser, progress, save

CHARACTERS = 128  # ASCII; a character is its own number
WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, CONTEXT = 8, 128
STEPS, RATE = 600, 4e-3
TORCH, FUSED, REORDERED = "torch", "fused", "torch, rows reordered"
PROMPT = "def read(self, "


class LanguageModel(torch.nn.Module):
    """Embeddings, causal pre-norm layers and a linear map to the logits of the next character."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CHARACTERS, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.embedding, self.positions):
            torch.nn.init.normal_(embedding.weight, std=0.1)
        layer = torch.nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, 4 * WIDTH),
            dropout=0.0,
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


def batches(text: Tensor) -> list[Tensor]:
    """Batches (BATCH, CONTEXT + 1) of characters at random places."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - CONTEXT, (STEPS, BATCH), generator=generator)
    return list(text[starts[..., None] + torch.arange(CONTEXT + 1)])


class Trainer:
    """A model and its training steps. The initial state is the same for every kind of attention."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name, self.model = name, LanguageModel(name == FUSED)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, RATE, STEPS, pct_start=0.1
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


def side_by_side(trainers: Sequence[Trainer], data: list[Tensor]) -> list[list[float]]:
    """Each trainer's losses, on the same batches."""
    losses: list[list[float]] = [[] for _ in trainers]
    for batch in progress(data, "training"):
        for trainer, curve in zip(trainers, losses):
            curve.append(trainer.step(batch))
    return losses


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


def picture(losses: dict[str, list[float]]) -> Any:
    """Loss curves, and distances from torch's losses."""
    figure = new_figure(9, 3.8)
    curve, apart = figure.subplots(1, 2)
    colors = {TORCH: "#d1495b", FUSED: "#0b6e4f", REORDERED: "#edae49"}
    for name, width in ((TORCH, 4), (FUSED, 1)):
        curve.plot(losses[name], color=colors[name], linewidth=width, label=name)
    curve.set(xlabel="step", ylabel="nats a character", title="loss")
    for name in (REORDERED, FUSED):
        gaps = [abs(a - b) for a, b in zip(losses[name], losses[TORCH])]
        apart.plot(gaps, color=colors[name], linewidth=0.8, label=name)
    apart.set(xlabel="step", yscale="log", title="distance from torch's loss", ylim=(1e-11, None))
    for axis in (curve, apart):
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
    curves = side_by_side(trainers, batches(text))
    losses = {trainer.name: curve for trainer, curve in zip(trainers, curves)}

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
    with torch.no_grad():
        apart = (model(written[:, :-1]) - cached).abs().max().item()
    claims.prove(f"logits from the cache are those of a full pass, to {apart:.1e}", apart < 1e-4)
    if options.plot is not None:
        save(picture(losses), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
