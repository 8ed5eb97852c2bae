"""A model trains on a sequence that is split over ranks, with the losses of one rank.

    python -m fastattn.examples.long_context [--ranks 4] [--strategy ring] [--layout zigzag]
    torchrun --nproc-per-node 4 -m fastattn.examples.long_context

The model is built like gpt-oss: grouped heads with learned sinks, layers that alternate full
attention and a sliding window, plus dropout of attention weights. `fastattn.distributed.shard`
gives each rank a part of the tokens, positions and next tokens; only attention uses other parts.
Rank 0 first trains the same model on the whole sequence. The losses agree, in float32 to 1e-6
relative, and so does attention in the first step, bit by bit if no sum is split. Ranks are
processes on this machine that communicate by gloo over its loopback.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fastattn

from .. import distributed
from ..nn import RotaryEmbedding
from .common import Claims, new_figure, parse, parser, progress, save
from .memory import peak_bytes, release, reset_peak

TOKENS = 64
WIDTH, HEADS, KEY_HEADS, DIM, LAYERS = 64, 8, 2, 32, 4
WINDOW, DROPOUT = 128, 0.1
STEPS, LENGTH, RATE = 20, 1024, 3e-3
STRATEGIES = ("gather", "ring", "ulysses", "usp")
EXACT, OF_ROWS = ("gather", "ulysses"), ("out", "LSE", "dQ")  # exact: sums over keys are not split
RESULTS = (*OF_ROWS, "dK", "dV")


class Way(NamedTuple):
    """How a sequence is processed: as a whole, or by ranks with a part each."""

    attention: Callable[..., Any]
    shard: Callable[..., Tensor]
    unshard: Callable[..., Tensor]
    add: Callable[[Tensor], Any]  # sum over ranks, in place


def whole(x: Tensor, dim: int = 2) -> Tensor:
    return x


ALONE = Way(fastattn.attention, whole, whole, whole)


def together(strategy: str, layout: str) -> Way:
    ranks = dist.get_world_size()
    group = init_device_mesh("cpu", (ranks // 2, 2)) if strategy == "usp" else None
    about: dict[str, Any] = dict(layout=layout, group=group)
    return Way(
        partial(distributed.attention, strategy=strategy, **about),
        partial(distributed.shard, **about),
        partial(distributed.unshard, **about),
        dist.all_reduce,
    )


def possible(ranks: int) -> list[str]:
    """The strategies that work with this number of ranks."""
    can = {"ulysses": HEADS % ranks == 0, "usp": ranks % 2 == 0}
    return [x for x in STRATEGIES if can.get(x, True)]


# -- the model and its data ------------------------------------------------------------------------


class Block(nn.Module):
    """Attention, then two layers on each token."""

    def __init__(self, window: tuple[int, int] | None) -> None:
        super().__init__()
        self.window = window
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.rotary = RotaryEmbedding(DIM)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor, attention: Callable, seed: int) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        about = dict(causal=True, window=self.window, sinks=self.sinks)
        q, k = self.rotary(q, places), self.rotary(k, places)
        out = attention(q, k, v, **about, dropout_p=DROPOUT, seed=seed)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        windows = (None if layer % 2 else (WINDOW - 1, 0) for layer in range(LAYERS))
        self.blocks = nn.ModuleList(map(Block, windows))
        self.out = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS))

    def forward(self, x: Tensor, places: Tensor, attention: Callable, step: int) -> Tensor:
        """Tokens (B,N) at places (N,) to logits (B,N,TOKENS) of the next tokens."""
        x = self.embedding(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, places, attention, seed=step * LAYERS + layer)
        return self.out(x)


def sequences(steps: int, length: int) -> Iterator[Tensor]:
    """(1, length + 1) tokens for each step. Three in four tokens are a function of the one before.
    The second half repeats the first, so attention can find its random tokens length / 2 before."""
    chance = random.Random(1)
    for _ in range(steps):
        half = [chance.randrange(TOKENS)]
        while len(half) < length // 2:
            drawn = chance.randrange(4) == 0
            half.append(chance.randrange(TOKENS) if drawn else (5 * half[-1] + 3) % TOKENS)
        yield torch.tensor([(half * 3)[: length + 1]])


def loss_of(model: Model, tokens: Tensor, way: Way, step: int) -> Tensor:
    """This rank's share of the mean loss over all tokens. It is in float64, so that rounding of the
    loss does not hide the difference between two models."""
    length = tokens.shape[1] - 1
    own, following = (way.shard(x, dim=1) for x in (tokens[:, :-1], tokens[:, 1:]))
    places = way.shard(torch.arange(length), dim=0)
    logits = model(own, places, way.attention, step).flatten(0, 1).double()
    return F.cross_entropy(logits, following.flatten(), reduction="sum") / length


def add_gradients(model: Model, way: Way) -> None:
    """Sum gradients over ranks in one message. Sinks are left out: every rank has all of them, and
    attention's backward has already summed their gradient."""
    own = [x.grad for name, x in model.named_parameters() if not name.endswith("sinks")]
    flat = nn.utils.parameters_to_vector(own)  # ty: ignore
    way.add(flat)
    nn.utils.vector_to_parameters(flat, own)  # ty: ignore


class Training(NamedTuple):
    """losses: of the whole sequence, in nats. peak: peak bytes of the last step, without model and
    optimizer."""

    losses: list[float]
    seconds: float
    peak: int


def train(way: Way, steps: int, length: int, what: str) -> Training:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, before, begun = [], 0, time.perf_counter()
    turns = progress(range(steps), what) if dist.get_rank() == 0 else range(steps)
    for step, tokens in zip(turns, sequences(steps, length)):
        if step == steps - 1:
            before = reset_peak()
        loss = loss_of(model, tokens, way, step)
        loss.backward()
        add_gradients(model, way)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        way.add(total)
        losses.append(total.item())
    return Training(losses, (time.perf_counter() - begun) / steps, peak_bytes() - before)


# -- attention of the first step -------------------------------------------------------------------


class Call(NamedTuple):
    """The arguments of an attention call, and the gradient of its output."""

    qkv: Sequence[Tensor]
    about: dict[str, Any]
    dout: Tensor

    def run(self, way: Way) -> list[Tensor]:
        """`RESULTS` for the whole sequence."""
        q, k, v = (way.shard(x).clone().requires_grad_() for x in self.qkv)
        out, lse = way.attention(q, k, v, **self.about, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), way.shard(self.dout))
        return [way.unshard(x) for x in (out.detach(), lse.detach(), *grads)]


def first_calls(length: int) -> list[Call]:
    """The attention call of each layer in the first training step on one rank."""
    torch.manual_seed(0)
    model, calls = Model(), []

    def attention(*qkv: Tensor, **about: Any) -> Tensor:
        about["sinks"] = about["sinks"].detach()
        out = fastattn.attention(*qkv, **about)
        assert isinstance(out, Tensor)
        given = [x.detach() for x in qkv]
        out.register_hook(lambda dout: calls.append(Call(given, about, dout)))
        return out

    loss_of(model, next(sequences(1, length)), ALONE._replace(attention=attention), 0).backward()
    return calls


def errors_by_strategy(length: int, layout: str) -> dict[str, Tensor]:
    """Maximum error of each of `RESULTS` over the layers, relative to the largest value of the
    one-rank result. Only rank 0 computes it; other ranks return zeros."""
    calls = first_calls(length) if dist.get_rank() == 0 else [None] * LAYERS
    ways = {name: together(name, layout) for name in possible(dist.get_world_size())}
    errors = {name: torch.zeros(len(RESULTS)) for name in ways}
    for call in calls:
        shared: list[Any] = [call]
        dist.broadcast_object_list(shared)
        results = {name: shared[0].run(way) for name, way in ways.items()}
        if call is not None:
            right = call.run(ALONE)
            for name, each in results.items():
                pairs = zip(each, right)
                apart = torch.stack([(x - y).abs().max() / y.abs().max() for x, y in pairs])
                errors[name] = errors[name].maximum(apart)
    return errors


# -- results ---------------------------------------------------------------------------------------


def print_rows(alone: Training, ranks: Sequence[Training], errors: dict[str, Tensor]) -> None:
    names = ("loss at first", "at last", "s a step", "peak MB")
    print(f"\n{'':12}" + "".join(f"{x:>15}" for x in names))
    rows = [("one rank", alone), *((f"rank {r} of {len(ranks)}", x) for r, x in enumerate(ranks))]
    for name, x in rows:
        losses = f"{x.losses[0]:15.9f}{x.losses[-1]:15.9f}"
        print(f"{name:12}{losses}{x.seconds:15.2f}{x.peak / 1e6:15.1f}")
    print("\nattention of the first step, against one rank's:\n")
    print(f"{'':12}" + "".join(f"{name:>10}" for name in RESULTS))
    for name, each in errors.items():
        cells = [f"{x:.1e}" if x else "the bits" for x in each.tolist()]
        print(f"{name:12}" + "".join(f"{x:>10}" for x in cells))
    print()


def prove(
    alone: Training, ranks: Sequence[Training], errors: dict[str, Tensor], claims: Claims
) -> None:
    right, of_ranks = (torch.tensor(x.losses, dtype=torch.float64) for x in (alone, ranks[0]))
    apart = ((of_ranks - right) / right).abs().max().item()
    claims.prove(
        f"the losses of {len(right)} steps are those of one rank, to {apart:.0e} of each (< 1e-6)",
        apart < 1e-6,
    )
    exact = [name for name in EXACT if name in errors]
    of_rows = torch.stack([errors[name][: len(OF_ROWS)] for name in exact])
    claims.prove(
        f"out, LSE and dQ have one rank's bits under {' and '.join(exact)}", not of_rows.any()
    )
    worst = torch.stack(list(errors.values())).max().item()
    claims.prove(f"everything else is one rank's to {worst:.0e} (< 1e-5)", worst < 1e-5)
    part = max(x.peak for x in ranks) / alone.peak
    most = 1 / len(ranks) + 0.2
    claims.prove(
        f"a step takes {part:.2f} of one rank's memory at most (< {most:.2f})", part < most
    )


def picture(alone: Training, ranks: Sequence[Training], strategy: str) -> Any:
    figure = new_figure(12, 3.8)
    losses, apart, memory = figure.subplots(1, 3)
    name = f"{len(ranks)} ranks, {strategy}"
    losses.plot(alone.losses, color="#d1495b", linewidth=4, label="one rank")
    losses.plot(ranks[0].losses, color="#0b6e4f", linewidth=1.2, label=name)
    losses.set(xlabel="step", ylabel="nats a token", title="loss")
    losses.legend(frameon=False)
    differences = [abs(x - y) / y for x, y in zip(ranks[0].losses, alone.losses)]
    apart.plot([max(x, 1e-12) for x in differences], "o-", color="#0b6e4f")
    apart.axhline(1e-6, color="#666666", linestyle=":")
    apart.set(xlabel="step", yscale="log", ylim=(1e-12, 1e-5), title="apart, in parts of the loss")
    names = ["one rank", *(f"rank {r}" for r in range(len(ranks)))]
    colors = ["#d1495b", *["#0b6e4f"] * len(ranks)]
    memory.bar(names, [x.peak / 1e6 for x in (alone, *ranks)], color=colors)
    memory.set(ylabel="MB", title="memory that a step takes")
    for axis in (losses, apart, memory):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


# -- ranks -----------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
    """Run the example on this rank. Rank 0 prints the results and returns the exit status."""
    torch.set_num_threads(1)
    release()
    steps, length = options.steps, options.length
    alone = train(ALONE, steps, length, "one rank") if dist.get_rank() == 0 else None
    dist.barrier()
    way = together(options.strategy, options.layout)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, train(way, steps, length, f"{len(ranks)} ranks"))
    errors = errors_by_strategy(length, options.layout)
    dist.destroy_process_group()
    if alone is None:
        return 0
    print(f"{length} tokens on {len(ranks)} ranks by {options.strategy}, {options.layout}")
    print_rows(alone, ranks, errors)
    claims = Claims()
    prove(alone, ranks, errors, claims)
    if options.plot is not None:
        save(picture(alone, ranks, options.strategy), options.plot)
    return claims.status()


def rank_of(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Main function of a process that `main` started."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks)
    sys.exit(work(options))


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("long_context", __doc__ or "")
    made.add_argument("--ranks", type=int, default=4, help="processes; torchrun says it itself")
    made.add_argument("--strategy", choices=STRATEGIES, default="ulysses")
    made.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous")
    made.add_argument("--steps", type=int, default=STEPS)
    made.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    options = parse(made, arguments)
    options.ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    if options.strategy not in possible(options.ranks):
        made.error(
            f"--strategy: {options.ranks} ranks can take {', '.join(possible(options.ranks))}"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group("gloo")
        return work(options)
    with tempfile.TemporaryDirectory() as folder:
        given = rank_of, (options, folder), options.ranks
        try:
            multiprocessing.start_processes(*given, start_method="forkserver")
        except multiprocessing.ProcessExitedException as ended:
            return ended.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
