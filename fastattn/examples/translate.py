"""An encoder-decoder Transformer learns to write number words as digits.

"three hundred forty two thousand seven" becomes 342007. Words name tens, hundreds and thousands,
while a digit's value depends on its place, and a zero may have no word. Sources have 1 to 10 words;
sources and targets of a batch are padded to one length. The model is `fastattn.nn.Transformer`. It
is trained for a minute on numbers up to 999,999, then tested on numbers that it never saw.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .. import nn
from .common import Claims, new_figure, parse, parser, progress, save

# fmt: off
SMALL = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
         "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
         "nineteen"]
# fmt: on
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
PAD, BOS, EOS = range(3)
WORDS = ["<pad>", "<bos>", "<eos>", *SMALL, *TENS, "hundred", "thousand"]
DIGITS = ["<pad>", "<bos>", "<eos>", *"0123456789"]
LARGEST = 999_999
LONGEST = 7  # six digits and EOS

STEPS, BATCH, RATE = 800, 128, 3e-3
UNSEEN = 2000
SHOWN = 342_007  # the number for which attention is printed


def in_words(n: int) -> list[str]:
    """342007 to three hundred forty two thousand seven."""
    return _parts(n) or ["zero"]


def _parts(n: int) -> list[str]:
    if n < 20:
        return SMALL[n : n + 1] if n else []
    if n < 100:
        return [TENS[n // 10 - 2], *_parts(n % 10)]
    size, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    return [*_parts(n // size), name, *_parts(n % size)]


def sources(numbers: Sequence[int]) -> Tensor:
    """(B, N) tokens of WORDS, padded."""
    return _padded([[WORDS.index(word) for word in in_words(n)] for n in numbers])


def targets(numbers: Sequence[int]) -> Tensor:
    """(B, M) tokens of DIGITS from BOS to EOS, padded."""
    return _padded([[BOS, *(DIGITS.index(digit) for digit in str(n)), EOS] for n in numbers])


def _padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def read(tokens: Tensor) -> list[str]:
    """The digits before EOS in each row of (B, T)."""
    return ["".join(DIGITS[i] for i in row).partition("<eos>")[0] for row in tokens.tolist()]


def draw(chance: random.Random, count: int) -> list[int]:
    """Random numbers below 10, 100, ... 1,000,000, each limit equally often."""
    return [chance.randrange(10 ** chance.randint(1, 6)) for _ in range(count)]


def build() -> nn.Transformer:
    return nn.Transformer(
        len(WORDS),
        len(DIGITS),
        embed_dim=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        ff_dim=128,
        dropout=0.0,  # every batch is new: there is nothing to overfit
        norm_first=True,
        pad_id=PAD,
    )


def train(model: nn.Transformer, chance: random.Random, unseen: set[int]) -> list[float]:
    """Train; return the loss of every step, in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    losses = []
    for _ in progress(range(STEPS), "training"):
        numbers = [n for n in draw(chance, BATCH) if n not in unseen]
        src, tgt = sources(numbers), targets(numbers)
        logits = model(src, tgt[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def translate(model: nn.Transformer, numbers: Sequence[int]) -> list[str]:
    """The digits that the model writes for the words of each number, all in one batch."""
    return read(model.generate(sources(numbers), LONGEST, bos_id=BOS, eos_id=EOS))


@torch.no_grad()
def translate_anew(model: nn.Transformer, numbers: Sequence[int]) -> list[str]:
    """`translate` without a cache: every token takes a full pass over all tokens before it."""
    src = sources(numbers)
    tgt = src.new_full((len(src), 1), BOS)
    for _ in range(LONGEST):
        tgt = torch.cat([tgt, model(src, tgt)[:, -1:].argmax(-1)], dim=1)
    return read(tgt[:, 1:])


@torch.no_grad()
def attention_of(model: nn.Transformer, number: int) -> Tensor:
    """(digits and EOS, words): the weight of each word for each written token, averaged over the
    heads of the last layer."""
    with nn.record_weights(model) as weights:
        model(sources([number]), targets([number])[:, :-1])
    last = len(model.decoder.layers) - 1
    return weights[f"decoder.layers.{last}.cross_attn"].mean(1)[0]


def prove(model: nn.Transformer, unseen: list[int], claims: Claims) -> None:
    written = translate(model, unseen)
    right = sum(text == str(n) for text, n in zip(written, unseen)) / len(unseen)
    claims.prove(
        f"exact match on {len(unseen)} numbers never seen: {right:.2%} (> 99%)",
        right > 0.99,
    )

    start = time.perf_counter()
    cached = translate(model, unseen[:500])
    middle = time.perf_counter()
    anew = translate_anew(model, unseen[:500])
    ratio = (time.perf_counter() - middle) / (middle - start)
    claims.prove(
        f"with keys and values cached, 500 outputs are the same, {ratio:.1f} times as fast",
        cached == anew,
    )
    alone = [translate(model, [n])[0] for n in unseen[:100]]
    claims.prove("100 of them, each alone, come out as in a padded batch", alone == written[:100])

    theirs: Any = nn.to_torch(model)
    src = sources(unseen[:100])
    x = model.positions(model.src_embedding(src) * model.embed_dim**0.5)
    with torch.no_grad():
        memory, torchs = model.encode(src), theirs.encoder(x, src_key_padding_mask=src == PAD)
    apart = (memory - torchs)[src != PAD].abs().max().item()
    claims.prove(f"moved to torch.nn.Transformer, its memory differs by {apart:.1e}", apart < 1e-4)


def print_attention(weights: Tensor, number: int) -> None:
    """Print a heat map made of characters; darker is more."""
    words = in_words(number)
    print(f"\nwhere it looks to write {number}:\n")
    for word, column in zip(words, weights.T.tolist()):
        shades = "   ".join(" ░▒▓█"[min(4, int(5 * x))] for x in column)
        print(f"  {word:>9}  {shades}")
    print(f"  {'':>9}  {'   '.join(str(number))}   .\n")


def picture(model: nn.Transformer, losses: list[float]) -> Any:
    """The loss, and the attention to the words of two numbers."""
    figure = new_figure(12, 4.2)
    curve, *maps = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    curve.plot(range(1, len(losses) + 1), losses, color="#0b6e4f", linewidth=1)
    curve.set(xlabel="step", ylabel="loss (nats a token)", yscale="log", title="training")
    curve.grid(alpha=0.25)
    curve.spines[["top", "right"]].set_visible(False)
    for axis, number in zip(maps, (SHOWN, 918_273)):
        weights = attention_of(model, number)
        axis.imshow(weights.T.tolist(), cmap="Greens", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(weights)), [*str(number), "end"])
        axis.set_yticks(range(weights.shape[1]), in_words(number))
        axis.set_title(f"words seen to write {number}", fontsize=11)
        axis.tick_params(length=0)
    figure.suptitle("Attention of the decoder's last layer to the words, mean over its heads")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(parser("translate", __doc__ or ""), arguments)
    torch.manual_seed(0)
    chance = random.Random(0)
    unseen = chance.sample(range(1000, LARGEST + 1), UNSEEN)
    model = build()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {STEPS} steps of {BATCH} numbers from 0 to {LARGEST:,}")
    losses = train(model, chance, set(unseen))
    model.eval()
    print(f"loss {losses[0]:.2f} at first, {sum(losses[-20:]) / 20:.4f} at last")
    print_attention(attention_of(model, SHOWN), SHOWN)
    claims = Claims()
    prove(model, unseen, claims)
    if options.plot is not None:
        save(picture(model, losses), options.plot)
    return claims.status()


if __name__ == "__main__":
    raise SystemExit(main())
