"""Whole models with and without fastattn: how much of a kernel's speed-up a user gets.

Llama-like and Mistral-like models of four layers and the models of `families`, of transformers and
diffusers, "fastattn" against "sdpa"; and one and six of torch's encoder layers,
torchvision's ViT-B/16 and OpenCLIP's ViT-B/32 (these two if `make test` has installed them),
converted and not. Weights are random. Both results are compared before either is timed: outputs of
unpadded positions, and in training the loss and a gradient. Tokens are a table of `race`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fastattn

from . import families
from .cases import BOTH, DTYPES, FORWARD, TRAINING
from .peers import optional_deps
from .races.generation import Pair, of_transformers
from .races.race import Race

LENGTHS = (1024, 2048)
BATCH, WINDOW = 4, 256
LAYER_BATCHES, LAYER_LENGTHS = (1, 8), (32, 64, 128, 197)  # of an encoder layer as in ViT-B
SECONDS = 2.0
SIZES = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8)
SIZES |= dict(num_key_value_heads=2, head_dim=64, vocab_size=1024, pad_token_id=0)
PLAIN_AIM, AIM = 1.0, 1.3  # AIM is for windows or padding
LAYER_AIM = 1.05

Results = Callable[[], Sequence[Tensor]]


def races(
    dtypes: Sequence[str] = BOTH,
    lengths: Sequence[int] = LENGTHS,
    scale: float = 1.0,
    only: Sequence[str] = (),
) -> Iterator[Race]:
    """Races with one of the texts of `only` in their names, or all; to be used inside
    `families.registered`. `scale` shrinks all models, for tests."""
    for dtype in dtypes:
        every = [*_languages(dtype, lengths, scale), *_others(dtype, scale)]
        for name, what, aim, make in every:
            if only and not any(text in f"{name}, {what}" for text in only):
                continue
            ours, other = make()
            yield Race(name, dtype, what, ours, other, aim=aim)


Entry = tuple[str, str, float, Callable[[], tuple[Results, Results]]]


def _languages(dtype: str, lengths: Sequence[int], scale: float) -> Iterator[Entry]:
    for name, n, padded in itertools.product(("Llama", "Mistral"), lengths, (False, True)):
        aim = AIM if name == "Mistral" or padded else PLAIN_AIM
        at = f"{name}, N = {n}{', padded' * padded}"
        make = functools.partial(_language, name, dtype, n, padded, scale)
        for what in (FORWARD, TRAINING):
            yield at, what, aim, functools.partial(make, what)


def _others(dtype: str, scale: float) -> Iterator[Entry]:
    for what in (FORWARD, TRAINING):
        for name in filter(families.available, families.MODELS):
            make = functools.partial(_family, name, dtype, what, scale)
            yield name, what, families.AIM, make
        for padded in (False, True):
            at, aim = ("encoder, padded", AIM) if padded else ("encoder", PLAIN_AIM)
            yield at, what, aim, functools.partial(_encoder, dtype, what, padded, scale)
    for batch, n in itertools.product(LAYER_BATCHES, LAYER_LENGTHS):
        make = functools.partial(_layer, dtype, batch, n, scale)
        yield f"encoder layer, B = {batch}, N = {n}", FORWARD, LAYER_AIM, make
    if dtype == "float32":
        return
    # Under autocast: models with nn.MultiheadAttention inside, which has an inference fast path.
    for padded in (False, True):
        make = functools.partial(_encoder, dtype, FORWARD, padded, scale, autocast=True)
        yield f"encoder under autocast{', padded' * padded}", FORWARD, PLAIN_AIM, make
    for library, name, model in (
        ("torchvision", "torchvision ViT-B/16", _torchvision),
        ("open_clip", "OpenCLIP ViT-B/32", _open_clip),
    ):
        if optional_deps.found(library):
            make = functools.partial(_autocast, dtype, model, scale)
            yield f"{name} under autocast", FORWARD, PLAIN_AIM, make


# ----------------------------------------------------------------------------- both sides of a race


def _converted(other: nn.Module) -> Pair:
    ours = copy.deepcopy(other)
    fastattn.convert(ours)
    return ours, other


def _run(
    pair: Pair,
    what: str,
    out: Callable[[Any], Tensor],
    loss: Callable[[Any], Tensor] | None = None,
) -> tuple[Results, Results]:
    """Both models' outputs; or a training step without its optimizer: the loss, and the first
    parameter's gradient. The loss, if none is given, is one that a final layer norm does not make
    constant and rounding does not cancel."""

    def distance(model: Any) -> Tensor:
        found = out(model)
        target = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
        return (found.float() - target).square().mean()

    def forward(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [out(model)]

    def step(model: Any) -> list[Tensor]:
        found = (loss or distance)(model)
        trained = [x for x in model.parameters() if x.requires_grad]
        return [found.detach(), torch.autograd.grad(found, trained)[0]]

    ours, other = (functools.partial(step if what == TRAINING else forward, x) for x in pair)
    return ours, other


# --------------------------------------------------------------------------------------- the models


def _language(
    name: str, dtype: str, n: int, padded: bool, scale: float, what: str
) -> tuple[Results, Results]:
    import transformers

    n = max(16, int(n * scale))
    config = getattr(transformers, f"{name}Config")
    window = dict(sliding_window=max(4, int(WINDOW * scale))) if name == "Mistral" else {}
    kind = getattr(transformers, f"{name}ForCausalLM")
    pair = of_transformers(lambda: kind(config(**SIZES | window)).to(DTYPES[dtype]).eval())
    batch = BATCH if padded else 1
    ids = torch.randint(1, SIZES["vocab_size"], (batch, n))
    mask = torch.ones_like(ids)
    for b in range(batch):
        mask[b, : b * n // BATCH] = 0  # left padding, as in generation
    given = dict(input_ids=ids * mask, attention_mask=mask)
    labels = ids.masked_fill(mask == 0, -100)
    return _run(
        pair,
        what,
        lambda model: model(**given, use_cache=False)[0][mask.bool()],
        lambda model: model(**given, labels=labels, use_cache=False).loss,
    )


def _family(name: str, dtype: str, what: str, scale: float) -> tuple[Results, Results]:
    pair, out = families.pair(name, DTYPES[dtype], scale)
    return _run(pair, what, out)


def _layers(scale: float) -> int:
    """Of a transformer for images or texts."""
    return 12 if scale == 1 else 1


def _encoder(
    dtype: str, what: str, padded: bool, scale: float, autocast: bool = False
) -> tuple[Results, Results]:
    """The encoder of torch.nn. With `autocast` it computes in `dtype`, of float32 weights."""
    weights_dtype = torch.float32 if autocast else DTYPES[dtype]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 1408, 0.0, "gelu", batch_first=True)
    other = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(weights_dtype)
    n = max(16, int(1024 * scale))
    x = torch.randn(BATCH, n, 512, dtype=weights_dtype)
    lengths = torch.arange(1, BATCH + 1) * n // BATCH
    hidden = torch.arange(n) >= lengths[:, None] if padded else None
    real = torch.ones(BATCH, n, dtype=torch.bool) if hidden is None else ~hidden

    def out(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", DTYPES[dtype], enabled=autocast):
            return model(x, src_key_padding_mask=hidden)[real]

    return _run(_converted(other.train(what == TRAINING)), what, out)


def _layer(dtype: str, batch: int, n: int, scale: float) -> tuple[Results, Results]:
    torch.manual_seed(0)
    other = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
    x = torch.randn(batch, max(4, int(n * scale)), 768, dtype=DTYPES[dtype])
    return _run(_converted(other.to(DTYPES[dtype]).eval()), FORWARD, lambda model: model(x))


Inputs = tuple[Tensor, ...]


def _autocast(
    dtype: str, make: Callable[[float], tuple[nn.Module, Inputs]], scale: float
) -> tuple[Results, Results]:
    torch.manual_seed(0)
    other, inputs = make(scale)

    def out(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", DTYPES[dtype]):
            found = model(*inputs)
        return found if isinstance(found, Tensor) else torch.stack(found[:2])  # no logit scale

    return _run(_converted(other.eval()), FORWARD, out)


def _torchvision(scale: float) -> tuple[nn.Module, Inputs]:
    models = optional_deps.library("torchvision").models
    model = models.VisionTransformer(224, 16, _layers(scale), 12, 768, 3072)
    model.heads = nn.Identity()  # the last layer is initialized to zeros
    return model, (torch.randn(2, 3, 224, 224),)


def _open_clip(scale: float) -> tuple[nn.Module, Inputs]:
    clip = optional_deps.library("open_clip").model
    images = clip.CLIPVisionCfg(layers=_layers(scale), patch_size=32)
    texts = clip.CLIPTextCfg(layers=_layers(scale))
    tokens = torch.randint(texts.vocab_size, (2, texts.context_length))
    return clip.CLIP(512, images, texts), (torch.randn(2, 3, 224, 224), tokens)
