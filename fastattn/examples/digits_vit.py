"""A small vision Transformer reads handwritten digits, before and after `fastattn.convert`.

    python -m fastattn.examples.digits_vit [--plot [PNG]]

The model is torch's nn.TransformerEncoder on the 8x8 digits that come with scikit-learn. It is
trained twice from one initial state, with torch's attention and with fused attention. Then torch's
trained model is converted, and reverted. About half a minute on one core. There is no dropout,
because torch and fastattn draw different masks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn

from .common import Claims, new_figure, parse, parser, progress, save

WIDTH, HEADS, LAYERS, SIDE = 48, 4, 2, 4  # SIDE * SIDE patches
EPOCHS, BATCH, RATE = 30, 64, 1.5e-3
TEST = 360  # of the 1797 images
ROUNDING = 5e-5  # of logits up to 10 in float32, after two layers


class ViT(nn.Module):
    """Images (B, 8, 8) to logits (B, 10), from a class token that attends to the patches."""

    def __init__(self) -> None:
        super().__init__()
        # Patches of 4x4 pixels with stride 2: they overlap, so that edges do not cut every stroke.
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=4, stride=2, padding=1)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + SIDE**2, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 8, 8) to (B, 1 + 16, WIDTH), the class token first."""
        patches = self.patches(images[:, None]).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        return torch.cat([class_token, patches], dim=1) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(images))[:, 0])

    def attention(self, images: Tensor) -> Tensor:
        """Weights of the class token in each layer, mean over heads: (LAYERS, B, 4, 4)."""
        x, maps = self.tokens(images), []
        for layer in self.encoder.layers:
            normed = layer.norm1(x)
            _, weights = layer.self_attn(normed, normed, normed, need_weights=True)
            maps.append(weights[:, 0, 1:].unflatten(1, (SIDE, SIDE)))
            x = layer(x)
        return torch.stack(maps)


class Digits(NamedTuple):
    images: Tensor  # (N, 8, 8), from 0 to 1
    labels: Tensor  # (N,)


class Run(NamedTuple):
    model: ViT
    losses: Tensor  # (steps,)
    logits: Tensor  # (TEST, 10)


def load() -> tuple[Digits, Digits]:
    """The training digits and the test digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        why = "the digits come with scikit-learn, which is missing"
        raise SystemExit(f"{why}: pip install scikit-learn") from None
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:-TEST], order[-TEST:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images (B, 8, 8), each slightly shifted, rotated, scaled and sheared."""
    off = 0.1 * (2 * torch.rand(len(images), 2, 3, generator=generator) - 1)
    grid = F.affine_grid(torch.eye(2, 3) + off, [len(images), 1, 8, 8], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def train(model: ViT, digits: Digits, name: str) -> Tensor:
    """Train; return the loss of every step, (steps,). Every call uses the same images in the same
    order."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    steps = EPOCHS * -(-len(digits.images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    losses = []
    model.train()
    for _ in progress(range(EPOCHS), name):
        for batch in torch.randperm(len(digits.images), generator=generator).split(BATCH):
            logits = model(distorted(digits.images[batch], generator))
            loss = F.cross_entropy(logits, digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    return torch.stack(losses)


@torch.no_grad()
def predict(model: ViT, images: Tensor) -> Tensor:
    """Logits (B, 10). Without gradients, torch's encoder takes its inference fast path."""
    return model.eval()(images)


@torch.no_grad()
def nudged(model: ViT) -> ViT:
    """A copy with every parameter moved to the next larger float: it shows the effect of
    rounding."""
    model = copy.deepcopy(model)
    for x in model.parameters():
        x.copy_(x.nextafter(torch.tensor(torch.inf)))
    return model


def new_model(seed: int) -> ViT:
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the default generator
        torch.manual_seed(seed)
        return ViT()


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def changed(a: Tensor, b: Tensor) -> int:
    """How many predictions differ between two logits (B, 10)."""
    return int((a.argmax(1) != b.argmax(1)).sum())


def prove_training(claims: Claims, digits: Digits, test: Digits) -> tuple[Run, Run, Run]:
    """Train torch's model, the fused one and the nudged one from one initial state."""
    initial = new_model(seed=0)
    models = {"torch": initial, "fastattn": copy.deepcopy(initial), "nudged": nudged(initial)}
    print(f"fastattn.convert(model): {fastattn.convert(models['fastattn'])}\n")
    print(f"{'':8}{'seconds':>10}{'last loss':>12}{'test accuracy':>16}")
    runs = []
    for name, model in models.items():
        start = time.perf_counter()
        losses = train(model, digits, name)
        seconds = time.perf_counter() - start
        runs.append(run := Run(model, losses, predict(model, test.images)))
        last, right = losses.view(EPOCHS, -1)[-1].mean(), accuracy(run.logits, test.labels)
        print(f"{name:8}{seconds:10.1f}{last:12.4f}{right:16.1%}", flush=True)
    print("nudged: torch again, every initial weight moved to the next larger number\n")

    plain, fused, yardstick = runs
    gap, usual = apart(fused.losses, plain.losses), apart(yardstick.losses, plain.losses)
    claims.prove(
        f"trained alike: the losses of {len(fused.losses)} steps differ by {gap:.0e} at most "
        f"(nudged: {usual:.0e})",
        gap <= 10 * usual,
    )
    differ, usual = changed(fused.logits, plain.logits), changed(yardstick.logits, plain.logits)
    claims.prove(
        f"equally good: {differ} of {TEST} predictions differ (nudged: {usual}), over 97% right",
        differ == 0 and accuracy(fused.logits, test.labels) > 0.97,
    )
    return plain, fused, yardstick


def prove_conversion(claims: Claims, plain: Run, fused: Run, images: Tensor) -> None:
    """Convert and revert the model trained with torch; load each kind's state into the other."""
    model, before = copy.deepcopy(plain.model), plain.model.state_dict()
    fastattn.convert(model)
    logits = predict(model, images)
    gap, differ = apart(logits, plain.logits), changed(logits, plain.logits)
    claims.prove(
        f"converted after training: {differ} predictions differ, logits by {gap:.0e} at most",
        differ == 0 and gap < ROUNDING,
    )
    fastattn.revert(model)
    after = model.state_dict()
    claims.prove(
        f"reverted: the {len(before)} tensors of its state and all logits, bit for bit as before",
        before.keys() == after.keys()
        and all(torch.equal(before[name], after[name]) for name in before)
        and torch.equal(predict(model, images), plain.logits),
    )
    other, converted = new_model(seed=1), new_model(seed=1)
    fastattn.convert(converted)
    other.load_state_dict(fused.model.state_dict(), strict=True)
    converted.load_state_dict(before, strict=True)
    there = apart(predict(converted, images), plain.logits)
    back = apart(predict(other, images), fused.logits)
    claims.prove(
        f"checkpoints load both ways, strictly: logits differ by {there:.0e} and {back:.0e}",
        max(there, back) < ROUNDING,
    )


def picture(plain: Run, fused: Run, yardstick: Run, test: Digits) -> Any:
    """The losses, their differences, and test digits with the class token's weights."""
    figure = new_figure(12, 7.2)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    blue, orange, grey, red = "#1f3b73", "#f2b880", "#b8b8b8", "#c0392b"
    left, right = top.subplots(1, 2)
    left.plot(plain.losses, color=orange, linewidth=4, label="torch")
    left.plot(fused.losses, color=blue, linewidth=0.8, label="fastattn")
    left.set_title("loss of each training step")
    gaps = [(run.losses - plain.losses).abs() for run in (yardstick, fused)]
    right.plot(gaps[0], ".", ms=3, color=grey, label="torch, weights nudged by one rounding")
    right.plot(gaps[1], ".", ms=3, color=blue, label="fastattn")
    right.set_title("how far that is from torch's")
    for axis in (left, right):
        axis.set(xlabel="step", yscale="log")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)

    guess = fused.logits.argmax(1)
    hit = guess == test.labels
    shown = [int((hit & (test.labels == digit)).nonzero()[0]) for digit in range(10)]
    shown += (~hit).nonzero()[:2, 0].tolist()
    with torch.no_grad():
        attention = fused.model.attention(test.images[shown]).numpy()
    axes = bottom.subplots(1 + LAYERS, len(shown), subplot_kw={"xticks": [], "yticks": []})
    for j, i in enumerate(shown):
        image, misread = test.images[i].numpy(), "" if hit[i] else f", is {test.labels[i]}"
        axes[0, j].imshow(image, cmap="gray_r")
        axes[0, j].set_title(f"{guess[i]}{misread}", color=red if misread else "black")
        for axis, weights in zip(axes[1:, j], attention[:, j]):
            extent = (-0.5, 7.5, 7.5, -0.5)  # in pixels of the image
            axis.imshow(weights, cmap="magma", interpolation="bicubic", extent=extent)
            axis.contour(image, levels=[0.5], colors="white", linewidths=0.8)
    for row, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"layer {row}" if row else "read as")
    bottom.suptitle("test digits, and what the class token attends to (mean of heads, each scaled)")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser("digits_vit", __doc__ or ""), arguments)
    claims = Claims()
    digits, test = load()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slower for work this small
    try:
        runs = prove_training(claims, digits, test)
        prove_conversion(claims, *runs[:2], test.images)
    finally:
        torch.set_num_threads(threads)
    if options.plot is not None:
        save(picture(*runs, test), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
