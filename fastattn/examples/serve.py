"""A small language model serves requests with continuous batching and a paged cache.

It learns characters of the standard library's sources on packed batches of sequences of different
lengths. Then it serves requests with prompts and answers of different lengths in three ways: with
continuous batching, where a request takes a slot as soon as one is free and each step packs the
rows of all requests, prompts and single characters; in padded batches, which run until their
longest answer is complete; and one after the other. All three give the same characters. Characters
per second of one thread and the memory of the caches are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import KVCache, attention, attention_packed
from .char_lm import CHARACTERS, sources
from .common import Claims, least_seconds, new_figure, parse, parser, progress, save

WIDTH, HEADS, LAYERS = 256, 8, 2  # half as wide, a step would take mostly Python's time
DIM = WIDTH // HEADS
CONTEXT, PAGE, SLOTS = 256, 16, 12
STEPS, ROWS, RATE = 400, 1024, 2e-3
REQUESTS, PROMPTS, ANSWERS = 48, (4, 128), (8, 128)  # lengths, from and to
SHADES = torch.tensor([[255, 255, 255], [116, 196, 118], [11, 110, 79], [240, 190, 195]])
CONTINUOUS, PADDED, ALONE = "continuous batching", "padded batches", "one after the other"

# The attention of a layer: (layer index, q, k, v), each of q, k, v (T,H,D), to (T,H,D).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.in_proj = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.in_proj(self.before(x)).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        x = x + self.out_proj(attend(q, k, v).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class LanguageModel(torch.nn.Module):
    """Characters (T,) at their places (T,) to logits (T, CHARACTERS) of the next ones. Only
    `attend` knows which request each row belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CHARACTERS, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.embedding, self.positions):
            torch.nn.init.normal_(embedding.weight, std=0.1)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.out_proj = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor, places: Tensor, attend: Attend) -> Tensor:
        y = self.embedding(x) + self.positions(places)
        for at, layer in enumerate(self.layers):
            y = layer(y, lambda q, k, v, at=at: attend(at, q, k, v))
        return self.out_proj(self.norm(y))


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def train(text: Tensor) -> tuple[LanguageModel, list[float]]:
    """Train on packed batches of about ROWS characters, in sequences of 8 to CONTEXT characters."""
    torch.manual_seed(0)
    model, losses = LanguageModel(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in progress(range(STEPS), "training"):
        lengths = torch.randint(8, CONTEXT + 1, (2 * ROWS // CONTEXT,), generator=generator)
        starts = torch.randint(len(text) - CONTEXT, lengths.shape, generator=generator)
        cu = offsets(lengths.tolist())
        places = torch.cat([torch.arange(n) for n in lengths.tolist()])
        at = starts.repeat_interleave(lengths) + places

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, cu: Tensor = cu) -> Any:
            return attention_packed(q, k, v, cu, cu, max_q=CONTEXT, max_k=CONTEXT, causal=True)

        loss = F.cross_entropy(model(text[at], places, attend), text[at + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), losses


# ----------------------------------------------------------------------------------------- serving


class Request(NamedTuple):
    prompt: list[int]
    answer: int  # how many characters it wants


class Served(NamedTuple):
    answers: list[list[int]]  # of each request
    nbytes: int  # of the caches, all layers together
    busy: list[list[int]]  # for each step, the rows of each slot; 0 if idle
    wasted: list[list[bool]]  # for each step, the slots that compute only because others go on


def requests(text: Tensor) -> list[Request]:
    generator = torch.Generator().manual_seed(2)

    def some(low: int, high: int) -> list[int]:
        return torch.randint(low, high + 1, (REQUESTS,), generator=generator).tolist()

    starts = some(0, len(text) - PROMPTS[1] - 1)
    prompts = [text[at : at + n].tolist() for at, n in zip(starts, some(*PROMPTS))]
    return [Request(*x) for x in zip(prompts, some(*ANSWERS))]


def likeliest(logits: Tensor) -> list[int]:
    """The most likely next characters. Logits are rounded, so that the last bits of torch's
    products, which depend on the number of rows, do not decide."""
    return logits.mul(1000).round().argmax(-1).tolist()


@torch.no_grad()
def continuous(model: LanguageModel, asked: Sequence[Request], slots: int) -> Served:
    """A request keeps its slot until its answer is complete; then its pages are freed."""
    size: Any = dict(capacity=CONTEXT // slots, page_size=PAGE, grow=True)
    caches = [KVCache(slots, HEADS, DIM, **size) for _ in range(LAYERS)]
    waiting, answers, busy = list(range(len(asked)))[::-1], [[] for _ in asked], []
    taken: list[int | None] = [None] * slots
    rows: list[list[int]] = [[] for _ in taken]  # of the next step
    while waiting or any(x is not None for x in taken):
        for slot, request in enumerate(taken):
            if request is None and waiting:
                taken[slot] = request = waiting.pop()
                rows[slot] = asked[request].prompt
        counts = [len(x) for x in rows]
        cu, lengths = offsets(counts), caches[0].lengths.tolist()
        places = torch.cat([n + torch.arange(more) for n, more in zip(lengths, counts)])

        def attend(
            at: int, q: Tensor, k: Tensor, v: Tensor, cu: Tensor = cu, most: int = max(counts)
        ) -> Any:
            caches[at].append(k, v, cu)
            return caches[at].attention(q, cu_q=cu, max_q=most, row_invariant=True)

        logits = model(torch.tensor([x for row in rows for x in row]), places, attend)
        busy.append(counts)
        following = likeliest(logits[(cu[1:] - 1).clamp(min=0)])
        for slot, request in enumerate(taken):
            if request is None:
                continue
            answers[request].append(following[slot])
            rows[slot] = [following[slot]]
            if len(answers[request]) == asked[request].answer:
                taken[slot], rows[slot] = None, []
        if done := [slot for slot, n in enumerate(counts) if n and not rows[slot]]:
            for cache in caches:
                cache.free(done)
    assert all(cache.pages_free == len(cache.k_pages) for cache in caches)
    nbytes = sum(cache.nbytes for cache in caches)
    return Served(answers, nbytes, busy, [[False] * slots] * len(busy))


@torch.no_grad()
def padded(model: LanguageModel, asked: Sequence[Request], slots: int) -> Served:
    """Prompts of a batch are padded on the left; all stay until the longest answer is complete."""
    answers, busy, wasted = [], [], []
    kept = torch.zeros(LAYERS, 2, slots, HEADS, CONTEXT, DIM)
    for first in range(0, len(asked), slots):
        batch = asked[first : first + slots]
        longest = max(len(x.prompt) for x in batch)
        pads = torch.tensor([longest - len(x.prompt) for x in batch])
        rows = torch.tensor([[0] * (longest - len(x.prompt)) + x.prompt for x in batch])
        written: list[list[int]] = [[] for _ in batch]
        begin = 0
        for _ in range(max(x.answer for x in batch)):
            end = begin + rows.shape[1]
            places = (torch.arange(begin, end) - pads[:, None]).clamp(min=0)
            real = torch.arange(end) >= pads[:, None]

            def attend(
                at: int,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                keys: slice = slice(begin, end),
                mask: Tensor = real[:, None, None],
            ) -> Any:
                sized = (x.unflatten(0, (len(mask), -1)).transpose(1, 2) for x in (q, k, v))
                rows, *new = sized
                for x, room in zip(new, kept[at, :, : len(mask)]):
                    room[:, :, keys] = x
                k, v = kept[at, :, : len(mask), :, : keys.stop]
                given: Any = dict(mask=mask, causal="bottom_right", row_invariant=True)
                out: Any = attention(rows, k, v, **given)
                return out.transpose(1, 2).flatten(0, 1)

            logits = model(rows.flatten(), places.flatten(), attend)
            wanted = [x.answer - len(y) for x, y in zip(batch, written)]
            busy.append([rows.shape[1]] * len(batch) + [0] * (slots - len(batch)))
            wasted.append([more <= 0 for more in wanted] + [False] * (slots - len(batch)))
            following = likeliest(logits.unflatten(0, rows.shape)[:, -1])
            for answer, x, more in zip(written, following, wanted):
                answer += [x] * (more > 0)
            rows, begin = torch.tensor(following)[:, None], end
        answers += written
    return Served(answers, kept.nbytes, busy, wasted)


def in_order(seconds: dict[str, float]) -> bool:
    """Whether continuous batching is the fastest way, and one request at a time the slowest."""
    return seconds[CONTINUOUS] <= seconds[PADDED] <= seconds[ALONE]


def measured(
    model: LanguageModel, asked: Sequence[Request], rounds: int
) -> tuple[dict[str, Served], dict[str, float]]:
    """What each way serves, and its characters per second."""
    ways = {
        CONTINUOUS: lambda: continuous(model, asked, SLOTS),
        PADDED: lambda: padded(model, asked, SLOTS),
        ALONE: lambda: continuous(model, asked, 1),
    }
    served = {name: way() for name, way in ways.items()}
    seconds = least_seconds(ways, rounds, in_order, "serving")
    total = sum(x.answer for x in asked)
    return served, {name: total / x for name, x in seconds.items()}


def picture(served: dict[str, Served], rates: dict[str, float]) -> Any:
    """What each slot did at each step (dark: a prompt; red: it waits), speed, and memory."""
    figure = new_figure(13, 3.8)
    busy, pad, speed, memory = figure.subplots(1, 4, width_ratios=(2, 2, 1, 1))
    for axis, name in ((busy, CONTINUOUS), (pad, PADDED)):
        rows, wasted = (torch.tensor(x).T for x in (served[name].busy, served[name].wasted))
        kinds = rows.clamp(max=2).masked_fill(wasted, 3)  # nothing, a character, a prompt, waste
        axis.imshow(SHADES[kinds], aspect="auto", interpolation="nearest")
        axis.set(xlabel="step", ylabel="slot", title=f"{name}: {rows.shape[1]} steps")
    colors = ("#0b6e4f", "#d1495b", "#edae49")
    names = [name.replace(" ", "\n", 1) for name in served]
    speed.bar(names, list(rates.values()), color=colors)
    speed.set(title="characters a second")
    memory.bar(names, [x.nbytes / 1e6 for x in served.values()], color=colors)
    memory.set(title="MB of caches")
    for axis in (speed, memory):
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser("serve", __doc__ or ""), arguments)
    text = sources()
    model, losses = train(text)
    asked = requests(text)
    served, rates = measured(model, asked, 3)
    total = sum(x.answer for x in asked)
    print(f"{len(asked)} requests, {total} characters to write, {SLOTS} slots\n")
    print(f"{'':22}{'steps':>8}{'rows':>8}{'chars/s':>10}{'MB of caches':>14}")
    for name, x in served.items():
        rows = sum(map(sum, x.busy))
        print(f"{name:22}{len(x.busy):8,}{rows:8,}{rates[name]:10,.0f}{x.nbytes / 1e6:14.2f}")
    first = asked[0]
    shown = bytes(first.prompt + served[CONTINUOUS].answers[0]).decode("ascii", "replace")
    print("\nThe first, its prompt and answer:\n\n    " + shown.replace("\n", "\n    ") + "\n")

    claims = Claims()
    late = statistics.fmean(losses[-20:])
    claims.prove(f"it learned: {late:.2f} nats a character (< 2.4)", late < 2.4)
    same = all(x.answers == served[ALONE].answers for x in served.values())
    claims.prove(f"the same {total} characters all three ways", same)
    steps, longer = (len(served[x].busy) for x in (CONTINUOUS, PADDED))
    claims.prove(
        f"continuous batching takes {steps} steps, padded batches {longer}", steps < longer
    )
    order = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    claims.prove(
        f"the three ways: time grows in their order; characters a second: {order}",
        in_order({name: 1 / rate for name, rate in rates.items()}),
    )
    small, large = (served[x].nbytes / 1e6 for x in (CONTINUOUS, PADDED))
    claims.prove(f"pages take {small:.2f} MB, padded caches {large:.2f} MB", small < large)
    if options.plot is not None:
        save(picture(served, rates), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
