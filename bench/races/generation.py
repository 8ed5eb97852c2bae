"""Token generation of transformers with fastattn beside sdpa, behind prompts that its dynamic and
static caches hold; and a step of our own cache beside what a model does without it: two writes into
slices, then torch's function.

Models are small and have few tokens to choose from, so that attention, and what surrounds its
calls, is a large part of a token. Weights are random. Tokens are compared in float32 only, because
rounding may choose other tokens in bfloat16.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cases import DTYPES, FORWARD
from .race import Race
from .small import steps

PROMPT, TOKENS, WINDOW = 256, 32, 128
BATCHES, PADDED_BATCH = (1, 8), 4
CACHES = ("DynamicCache", "StaticCache")  # of transformers
SIZES = dict(intermediate_size=1408, num_hidden_layers=4, vocab_size=1024, pad_token_id=0)
HEADS = dict(num_attention_heads=8, num_key_value_heads=2)
# name: the model, and its sizes. All prompts of one that ends with "padded" are, on the left.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, D = 64": ("Llama", dict(hidden_size=512, head_dim=64) | HEADS),
    "Llama, D = 80": ("Llama", dict(hidden_size=640, head_dim=80) | HEADS),
    "GPT-2, D = 64": ("GPT2", dict(hidden_size=768, num_attention_heads=12)),
    "Llama, D = 64, padded": ("Llama", dict(hidden_size=512, head_dim=64) | HEADS),
    "Mistral, D = 64, padded": (
        "Mistral",
        dict(hidden_size=512, head_dim=64, sliding_window=WINDOW) | HEADS,
    ),
}
STEPS, LENGTHS, GROUPS, DIM = 8, (512, 2048), (32, 8), 128  # of our own cache
AIM, STEP_AIM = 1.0, 1.5

Pair = tuple[Any, Any]  # a model that uses fastattn, and a copy that does not


@contextlib.contextmanager
def registered() -> Generator[None, None, None]:
    """Inside the block transformers accepts attn_implementation="fastattn"."""
    import fastattn.integrations.transformers as integration

    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers: got none, expected it for models; pip install transformers")
    integration.register()
    try:
        yield
    finally:
        integration.unregister()


def of_transformers(make: Callable[[], Any]) -> Pair:
    """Both have the same weights. To be used inside `registered`."""
    torch.manual_seed(0)
    other = make()
    ours = copy.deepcopy(other)
    ours.set_attn_implementation("fastattn")
    other.set_attn_implementation("sdpa")
    return ours, other


def races(dtypes: Sequence[str], scale: float) -> Iterator[Race]:
    """`scale` multiplies all lengths, for tests."""
    for dtype, batch, length in itertools.product(dtypes, BATCHES, LENGTHS):
        n = max(2, int(length * scale))
        name = f"{STEPS} steps of KVCache, B = {batch}, N = {length}"
        ours, other = steps(dtype, batch, GROUPS, DIM, n, STEPS)
        yield Race(name, dtype, FORWARD, ours, other, aim=STEP_AIM)
    with registered():
        for dtype, name in itertools.product(dtypes, MODELS):
            yield from _generated(dtype, name, max(8, int(PROMPT * scale)))


def _generated(dtype: str, name: str, n: int) -> Iterator[Race]:
    import transformers

    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    pair = of_transformers(lambda: model(config).to(DTYPES[dtype]).eval())
    padded = name.endswith("padded")
    for batch, cache in itertools.product([PADDED_BATCH] if padded else BATCHES, CACHES):
        ids = torch.randint(1, SIZES["vocab_size"], (batch, n + 1))
        mask = torch.ones_like(ids)
        for b in range(batch * padded):
            mask[b, : b * n // batch] = 0
        given = dict(input_ids=ids * mask, attention_mask=mask)
        ours, other = (_tokens(x, given, cache) for x in pair)
        made = batch * TOKENS
        at, same = f"{name}, B = {batch}, {cache}", dtype == "float32"
        yield Race(at, dtype, FORWARD, ours, other, aim=AIM, same=same, tokens=made)


def _tokens(model: Any, given: dict[str, Tensor], cache: str) -> Callable[[], list[Tensor]]:
    """A call that generates tokens behind all of the prompt but its last token, which is in the
    cache: each call has a copy of it."""
    import transformers

    n = given["input_ids"].shape[1]
    room = dict(max_cache_len=n + TOKENS) if cache == "StaticCache" else {}
    kept = getattr(transformers, cache)(config=model.config, **room)
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # in transformers 5.23
    length = dict(min_new_tokens=TOKENS, max_new_tokens=TOKENS)
    how = dict(do_sample=False, eos_token_id=None, pad_token_id=0) | length
    with torch.no_grad():
        model(**{at: x[:, :-1] for at, x in given.items()}, **{name: kept}, use_cache=True)

    def tokens() -> list[Tensor]:
        with torch.no_grad():
            return [model.generate(**given, **{name: copy.deepcopy(kept)}, **how)]

    return tokens
