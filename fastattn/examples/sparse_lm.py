"""A small model learns to look up, with all keys, with blocks of keys and with keys of an indexer.

    python -m fastattn.examples.sparse_lm [--plot [PNG]]

The first half of a sequence says pairs of a name and a value, the second half asks for the values
of names in another order. The model has one layer of causal attention, which is trained three times
from one initial state:

    dense     `fastattn.attention`: a row attends to all keys before it
    blocks    `fastattn.top_blocks` by mean keys, as in MoBA, then `fastattn.attention_selected`
    indexer   `fastattn.lightning_index`, trained to agree with attention, as in DeepSeek-V3.2

Half a minute on one core. Then one forward and backward pass of each is measured on a long
sequence: its time and its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn

from .common import Claims, new_figure, parse, parser, progress, save
from .memory import extra_bytes

NAMES, VALUES, LENGTH = 64, 16, 128  # a sequence: 64 pairs, then 64 questions
WIDTH, HEADS, INDEX_HEADS, INDEX_DIM = 64, 2, 4, 16
BLOCK, BLOCKS, KEYS = 4, 12, 32  # a row attends to 12 blocks of 4 of 128 keys, or to 32 keys
STEPS, BATCH, RATE = 300, 8, 3e-3
KINDS = ("dense", "blocks", "indexer")
LONG, LONG_BLOCK, LONG_KEYS = 8192, 64, 256  # of the measurement


class Layer(nn.Module):
    """Tokens (B, N) of pairs and questions to logits (B, N, VALUES)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.names = nn.Embedding(NAMES, WIDTH)
        self.values = nn.Embedding(VALUES + 1, WIDTH)  # the last one is unknown
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, VALUES)
        )
        self.index_q = nn.Linear(WIDTH, INDEX_HEADS * INDEX_DIM)
        self.index_k = nn.Linear(WIDTH, INDEX_DIM)
        self.index_weights = nn.Linear(WIDTH, INDEX_HEADS)

    def forward(self, names: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits; the indexer's loss, 0 without one; and the blocks or keys that rows chose."""
        x = self.names(names) + self.values(values)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        loss, chosen = x.new_zeros(()), None
        if self.kind == "dense":
            mixed = fastattn.attention(q, k, v, causal=True)
        elif self.kind == "blocks":
            chosen = fastattn.top_blocks(q, k, BLOCK, BLOCKS, causal=True)
            mixed = fastattn.attention_selected(q, k, v, chosen, block=BLOCK, causal=True)
        else:
            chosen, loss = self.choose(x.detach(), q.detach(), k.detach())
            mixed = fastattn.attention_selected(q, k, v, chosen, causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)), loss, chosen

    def choose(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of each row, and how far the indexer is from attention over these keys: the
        Kullback-Leibler divergence of DeepSeek-V3.2's sparse training. Its gradient reaches the
        indexer alone."""
        index_q = self.index_q(x).unflatten(-1, (INDEX_HEADS, -1)).transpose(1, 2)
        weights = self.index_weights(x).transpose(1, 2)
        chosen, scores = fastattn.lightning_index(
            index_q, self.index_k(x), weights, KEYS, causal=True, return_scores=True
        )
        near = k.gather(
            2, chosen.clamp(min=0).long().flatten(2)[..., None].expand(*k.shape[:2], -1, k.shape[3])
        )
        near = near.unflatten(2, chosen.shape[2:])
        logits = (q[..., None, :] * near).sum(-1) * q.shape[-1] ** -0.5
        hidden = chosen < 0
        attends = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1).mean(1, keepdim=True)
        indexes = torch.log_softmax(scores, -1).masked_fill(hidden, 0)
        return chosen, F.kl_div(indexes, attends, reduction="none").sum(-1).mean()


class Run(NamedTuple):
    losses: Tensor  # (STEPS,)
    right: float  # the share of questions that are answered, at the end
    seconds: float
    chosen: Tensor | None  # of one sequence


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Names (B, N), values (B, N), in which questions have none, and the answers (B, N / 2)."""
    half = LENGTH // 2
    orders = torch.stack(
        [torch.stack([torch.randperm(NAMES)[:half] for _ in range(2)]) for _ in range(BATCH)]
    )
    of_names = torch.randint(VALUES, (BATCH, NAMES))
    said, asked = orders.unbind(1)
    values = torch.cat([of_names.gather(1, said), torch.full_like(asked, VALUES)], 1)
    return torch.cat([said, asked], 1), values, of_names.gather(1, asked)


def train(kind: str) -> Run:
    torch.manual_seed(0)
    model = Layer(kind)
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    losses, right, chosen = [], 0.0, None
    start = time.perf_counter()
    for _ in progress(range(STEPS), kind):
        names, values, answers = batch()
        logits, index_loss, chosen = model(names, values)
        logits = logits[:, LENGTH // 2 :]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        (loss + index_loss).backward()
        optimiser.step()
        losses.append(loss.detach())
        right = float((logits.argmax(-1) == answers).float().mean())
    seconds = time.perf_counter() - start
    return Run(torch.stack(losses), right, seconds, None if chosen is None else chosen[0, 0])


# ------------------------------------------------------------------------- one long sequence


def long_call(kind: str, length: int = LONG) -> Callable[[], Any]:
    """One forward and backward pass of attention on a sequence of this length: eight heads that
    read one key head."""
    q, k, v = (torch.randn(1, heads, length, 64, requires_grad=True) for heads in (8, 1, 1))

    def call() -> Any:
        if kind == "dense":
            out = fastattn.attention(q, k, v, causal=True)
        elif kind == "blocks":
            count = LONG_KEYS // LONG_BLOCK
            chosen = fastattn.top_blocks(q, k, LONG_BLOCK, count, causal=True, shared=True)
            out = fastattn.attention_selected(q, k, v, chosen, block=LONG_BLOCK, causal=True)
        else:
            index_q, index_k, weights = q.detach()[..., :32], k.detach()[:, 0, :, :32], q[..., 0]
            chosen = fastattn.lightning_index(index_q, index_k, weights, LONG_KEYS, causal=True)
            out = fastattn.attention_selected(q, k, v, chosen, causal=True)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    return call


def measure(kind: str) -> tuple[float, float]:
    """Seconds, and MiB in addition to the inputs."""
    call = long_call(kind)
    call()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, extra_bytes(long_call, (kind, LONG), (kind, 64)) / 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser("sparse_lm", __doc__), arguments)
    claims = Claims()
    runs = {kind: train(kind) for kind in KINDS}
    print(f"{'':10}loss   answered   keys a row   {STEPS} steps")
    keys = {"dense": LENGTH, "blocks": BLOCK * BLOCKS, "indexer": KEYS}
    for kind, run in runs.items():
        loss = float(run.losses[-20:].mean())
        print(f"{kind:8}{loss:6.2f}{run.right:11.0%}{keys[kind]:13}{run.seconds:9.1f} s")
    print(f"\nforward and backward of {LONG} rows, at most {LONG_KEYS} keys each:")
    long = {kind: measure(kind) for kind in KINDS}
    for kind, (seconds, mib) in long.items():
        print(f"{kind:8}{seconds:6.2f} s{mib:8.0f} MiB")
    for kind in KINDS:
        claims.prove(f"{kind}: the model learns to answer", runs[kind].right > 0.9)
    scores = 4 * LONG**2 / 2**20
    for kind in KINDS[1:]:
        claims.prove(
            f"{kind}: {long[kind][1]:.0f} MiB, below one head's scores of all pairs, {scores:.0f}",
            long[kind][1] < scores,
        )
    if options.plot is not None:
        save(picture(runs), options.plot)
    return claims.status()


def picture(runs: dict[str, Run]) -> Any:
    figure = new_figure(11, 3.6)
    losses, *others = figure.subplots(1, 3)
    for kind, run in runs.items():
        losses.plot(run.losses.unfold(0, 10, 10).mean(1), label=kind)
    losses.set(title="loss of the answers", xlabel="ten steps")
    losses.legend()
    for axes, kind in zip(others, KINDS[1:]):
        size = BLOCK if kind == "blocks" else 1
        chosen = runs[kind].chosen
        assert chosen is not None
        shown = torch.zeros(LENGTH, LENGTH // size + 1)
        shown.scatter_(1, torch.where(chosen < 0, LENGTH // size, chosen).long(), 1.0)
        shown = shown[:, :-1].repeat_interleave(size, 1).tril()
        axes.imshow(shown, cmap="Blues", interpolation="nearest")
        axes.set(title=f"{kind}: keys that each row chose", xlabel="key", ylabel="row")
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
