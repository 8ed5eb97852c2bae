"""Seconds of requests with an engine's own attention over those with ours, in turns."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .engine import environment, make_model, pair

# Of a model small enough that attention matters, and large enough to be no toy.
SIZES = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, vocab_size=2048)
SIZES |= dict(num_attention_heads=16, num_key_value_heads=4, head_dim=64)
MODEL = SIZES | dict(max_position_embeddings=8192, initializer_range=0.05)
# Prompts, tokens of a prompt, new tokens of each.
REQUESTS = (8, 512, 1), (1, 4096, 1), (8, 1024, 64), (4, 4000, 32)
HEADER = (
    "| engine | requests | own / ours, median | quartiles | ours, tokens a second |",
    "|---|---|---|---|---|",
)


def measure(names: Sequence[str], dtype: str, rounds: int) -> Iterator[str]:
    """Lines of a table. Both engines of a pair are alive; each round asks one, then the other."""
    yield from HEADER
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        for name in names:
            if absent := environment(name).absent:
                yield f"{name}: {absent}"
                continue
            if not model.exists():
                make_model(model, "LlamaForCausalLM", MODEL, dtype)
            yield from _rows(name, model, dtype, rounds)


def _rows(name: str, model: Path, dtype: str, rounds: int) -> Iterator[str]:
    own = {"vllm": dict(enable_prefix_caching=False), "sglang": dict(disable_radix_cache=True)}
    with pair(name, model, model.parent, dtype=dtype, **own[name]) as both:
        for count, length, tokens in REQUESTS:
            draw = random.Random(0)
            prompts = [[draw.randrange(3, 2048) for _ in range(length)] for _ in range(count)]
            seconds: tuple[list[float], list[float]] = ([], [])
            for turn in range(rounds + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    taken = both[which].ask(prompts, tokens)["seconds"]
                    if turn:  # the first one warms up
                        seconds[which].append(taken)
            ratios = [x / y for x, y in zip(*seconds)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rate = count * (length + tokens if tokens == 1 else tokens) / min(seconds[1])
            what = f"{count} x {length} tokens" + f", then {tokens} each" * (tokens > 1)
            yield f"| {name} | {what} | {middle:.2f} | {low:.2f} to {high:.2f} | {rate:.0f} |"
