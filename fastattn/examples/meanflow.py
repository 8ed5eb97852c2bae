"""A mean-flow model learns to draw closed curves in one step; training needs attention's jvp.

    python -m fastattn.examples.meanflow [--plot [PNG]]

A flow carries noise (t = 1) to data (t = 0). A mean-flow model (Geng et al., Mean Flows for
One-step Generative Modeling, 2025) learns the mean velocity u over any interval from r to t, so
that a sample is one evaluation, x = z - u(z, 0, 1). The training target of u contains the
derivative of u along the flow,

    u = v - (t - r) (v . du/dz + du/dt),

which torch.func.jvp computes through the whole model, including attention. fastattn has a fused
pass for it; torch computes it with M x N matrices. The curves have 32 points each, the tokens of a
small Transformer. It is trained twice from one state on the same draws, with fastattn and with
torch. Then a gradient penalty differentiates attention twice. About a minute on one core.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn

from .common import Claims, new_figure, parse, parser, progress, save
from .memory import extra_bytes

POINTS, WIDTH, HEADS, LAYERS = 32, 48, 4, 2
STEPS, BATCH, RATE = 500, 48, 3e-3
SAME = 40  # steps for which two trainings agree; later, rounding separates them
LENGTHS = (512, 1024, 2048)  # points, where memory is measured
PENALTY = 0.1

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's math path, the only one of its paths that supports forward-mode AD."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(q, k, v)


WAYS: dict[str, Attention] = {"fastattn": ours, "torch": torchs}


class Block(nn.Module):
    """Attention, then two layers on each point. t and r set a scale and a shift of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Linear(WIDTH, 2 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, times: Tensor, attention: Attention) -> Tensor:
        scale, shift = self.times(times)[:, None].chunk(2, -1)
        y = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class MeanFlow(nn.Module):
    """u(z, r, t): the mean velocity (B, N, 2) of points z (B, N, 2) from t to r, both (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(2, WIDTH)
        self.times = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, attention: Attention) -> Tensor:
        angles = torch.stack([t, t - r], -1)[..., None] * 2.0 ** torch.arange(4)
        times = self.times(torch.cat([angles.sin(), angles.cos()], -1).flatten(1))
        places = torch.arange(z.shape[1]) / z.shape[1] * 2 * torch.pi
        waves = [f(places * n) for n in range(1, 1 + WIDTH // 2) for f in (torch.sin, torch.cos)]
        x = self.into(z) + 0.3 * torch.stack(waves, -1)
        for block in self.blocks:
            x = block(x, times, attention)
        return self.out(F.layer_norm(x, (WIDTH,)))


def curves(count: int, points: int = POINTS) -> Tensor:
    """(count, points, 2) closed curves: circles with three or five waves, rotated randomly."""
    angle = torch.arange(points) / points * 2 * torch.pi
    turn, waves = 2 * torch.pi * torch.rand(count, 1), 3 + 2 * torch.randint(2, (count, 1))
    radius = 1 + 0.35 * torch.cos(waves * (angle + turn))
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


class Draw(NamedTuple):
    """A batch: data, noise, and time intervals r <= t."""

    x: Tensor
    noise: Tensor
    r: Tensor
    t: Tensor


def draw(count: int = BATCH, points: int = POINTS) -> Draw:
    """Draw a batch. For about half of it r = t, where u is the instantaneous velocity."""
    times = torch.rand(2, count).sort(0).values
    r = torch.where(torch.rand(count) < 0.5, times[1], times[0])
    x = curves(count, points)
    return Draw(x, torch.randn_like(x), r, times[1])


def errors_of(model: MeanFlow, batch: Draw, attention: Attention) -> Tensor:
    """(B,): mean squared error of u against its target, which contains u's own derivative."""
    x, noise, r, t = batch
    at = t[:, None, None]
    z, v = (1 - at) * x + at * noise, noise - x

    def u(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return model(z, r, t, attention)

    along = v, torch.zeros_like(r), torch.ones_like(t)
    found, found_t, *_ = torch.func.jvp(u, (z, r, t), along)
    wanted = (v - (t - r)[:, None, None] * found_t).detach()
    return (found - wanted).square().mean((1, 2))


class Training(NamedTuple):
    losses: list[float]
    seconds: float
    model: MeanFlow


def train(start: MeanFlow, attention: Attention, name: str) -> Training:
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    losses = []
    torch.manual_seed(1)
    begun = time.perf_counter()
    for _ in progress(range(STEPS), name):
        errors = errors_of(model, draw(), attention)
        optimizer.zero_grad()
        (errors / (errors.detach() + 0.01)).mean().backward()  # no item outweighs the others
        optimizer.step()
        schedule.step()
        losses.append(errors.mean().item())
    return Training(losses, time.perf_counter() - begun, model)


@torch.no_grad()
def sample(model: MeanFlow, count: int) -> Tensor:
    """One step from noise to data."""
    noise = torch.randn(count, POINTS, 2)
    zeros = torch.zeros(count)
    return noise - model(noise, zeros, zeros + 1, ours)


def off_curve(samples: Tensor) -> Tensor:
    """(count,): distance of each sample from the nearest possible curve, averaged over points; it
    is about 1 for noise."""
    angle = torch.arange(POINTS) / POINTS * 2 * torch.pi
    turns = torch.arange(60) / 60 * 2 * torch.pi
    radii = [1 + 0.35 * torch.cos(n * (angle + turns[:, None])) for n in (3, 5)]
    radius = torch.cat(radii)
    every = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    apart = (samples[:, None] - every).norm(dim=-1).mean(-1)
    return apart.min(1).values


def penalty_gradients(model: MeanFlow, batch: Draw, attention: Attention) -> list[Tensor]:
    """Gradients of a loss with a penalty on the gradient of u by z: a double backward."""
    z = batch.noise.clone().requires_grad_()
    u = model(z, batch.r, batch.t, attention)
    (slope,) = torch.autograd.grad(u.square().sum(), z, create_graph=True)
    loss = (u - batch.x).square().mean() + PENALTY * slope.square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def prepare(way: str, points: int) -> Callable[[], Any]:
    """A training step on long curves, without the optimizer."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = MeanFlow(), draw(1, points)

    def step() -> None:
        errors_of(model, batch, WAYS[way]).mean().backward()

    return step


def seconds_of(way: str, points: int) -> float:
    step = prepare(way, points)
    step()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def prove(trained: dict[str, Training], start: MeanFlow, claims: Claims) -> dict[str, list[float]]:
    fused, plain = (trained[way] for way in WAYS)
    apart = max(abs(a - b) / b for a, b in zip(fused.losses[:SAME], plain.losses[:SAME]))
    claims.prove(f"the same losses over {SAME} steps, to {apart:.0e} of each", apart < 1e-3)
    ends = [sum(x.losses[-50:]) / 50 for x in (fused, plain)]
    print(f"        in the end {ends[0]:.3f} and {ends[1]:.3f}, in {fused.seconds:.0f} s and "
          f"{plain.seconds:.0f} s")  # fmt: skip
    torch.manual_seed(2)
    drawn, before = off_curve(sample(fused.model, 200)).mean(), off_curve(sample(start, 200)).mean()
    claims.prove(
        f"one step of the model draws curves: {drawn:.2f} off, {before:.2f} before training",
        bool(drawn < 0.35 * before),
    )
    batch = draw()
    pairs = zip(*(penalty_gradients(fused.model, batch, way) for way in WAYS.values()))
    apart = max(float((a - b).norm() / b.norm()) for a, b in pairs if a is not None)
    claims.prove(f"a gradient penalty has torch's gradients, to {apart:.0e} of each", apart < 1e-3)

    memory = {
        way: [extra_bytes(prepare, (way, n), (way, 64)) / 1e6 for n in LENGTHS] for way in WAYS
    }
    longest, mine, theirs = LENGTHS[-1], memory["fastattn"], memory["torch"]
    claims.prove(
        f"a step on curves of {longest} points takes {mine[-1]:.0f} MB instead of "
        f"{theirs[-1]:.0f},\n        {mine[-1] / mine[-2]:.1f} times as much as on half as many",
        mine[-1] < 2.4 * mine[-2] and mine[-1] < theirs[-1],
    )
    took = {way: seconds_of(way, LENGTHS[-1]) for way in WAYS}
    print(f"        and {took['fastattn']:.2f} s instead of {took['torch']:.2f}")
    return memory


def picture(trained: dict[str, Training], memory: dict[str, list[float]]) -> Any:
    figure = new_figure(12, 3.8)
    losses, grows, drawn = figure.subplots(1, 3)
    for (way, training), color in zip(trained.items(), ("#0b6e4f", "#d1495b")):
        means = torch.tensor(training.losses).unfold(0, 10, 10).mean(1)
        losses.plot(range(10, STEPS + 1, 10), means.tolist(), color=color, label=way)
        grows.plot(LENGTHS, memory[way], color=color, marker="o", label=way)
    losses.set(xlabel="step", ylabel="loss", title="training, mean of ten steps")
    grows.set(xscale="log", yscale="log", xlabel="points", ylabel="MB", title="memory of a step")
    grows.set_xticks(LENGTHS, map(str, LENGTHS))
    grows.minorticks_off()
    torch.manual_seed(3)
    for at, curve in enumerate(sample(trained["fastattn"].model, 12)):
        shifted = curve + torch.tensor([3.0 * (at % 4), 3.0 * (at // 4)])
        drawn.plot(*torch.cat([shifted, shifted[:1]]).T.tolist(), color="#0b6e4f", linewidth=1)
    drawn.set(title="samples, one evaluation each", aspect="equal", xticks=[], yticks=[])
    for axis in (losses, grows):
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser("meanflow", __doc__ or ""), arguments)
    torch.manual_seed(0)
    start = MeanFlow()
    trained = {way: train(start, attention, way) for way, attention in WAYS.items()}
    claims = Claims()
    memory = prove(trained, start, claims)
    if options.plot:
        save(picture(trained, memory), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
