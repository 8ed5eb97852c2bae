"""Models of transformers and diffusers at the widths of their checkpoints, with few layers.

A function makes a model and what it is called with; `scale` shrinks lengths, for tests. Dropout is
off in training too, so that both sides compute the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

import fastattn

from .peers import optional_deps
from .races import generation
from .races.generation import Pair, of_transformers

LAYERS, AIM = 2, 0.99
Given = dict[str, Tensor]
Made = tuple[Callable[[], Any], Given]  # what makes the model, and what its forward takes


def bert(n: int, batch: int, padded: bool, dtype: torch.dtype, scale: float) -> Made:
    import transformers

    n = max(8, int(n * scale))
    config = transformers.BertConfig(num_hidden_layers=LAYERS, vocab_size=1024)
    ids = torch.randint(1, 1024, (batch, n))
    lengths = torch.arange(1, batch + 1) * n // batch if padded else torch.full((batch,), n)
    mask = (torch.arange(n) < lengths[:, None]).long()
    given = dict(input_ids=ids * mask, attention_mask=mask)
    return lambda: transformers.BertModel(config, add_pooling_layer=False), given


def gpt2(dtype: torch.dtype, scale: float) -> Made:
    import transformers

    config = transformers.GPT2Config(n_layer=LAYERS, vocab_size=1024)
    ids = torch.randint(1024, (1, max(8, int(512 * scale))))
    return lambda: transformers.GPT2Model(config), dict(input_ids=ids)


def swin(dtype: torch.dtype, scale: float) -> Made:
    """Swin-T: windows of 49 tokens, with a bias of relative positions, and a mask where windows are
    shifted."""
    import transformers

    sizes: dict[str, Any] = dict(depths=[LAYERS] * 4, drop_path_rate=0.0)
    config = transformers.SwinConfig(**sizes)
    pixels = torch.randn(1, 3, 224, 224, dtype=dtype)
    given = dict(pixel_values=pixels)
    return lambda: transformers.SwinModel(config, add_pooling_layer=False), given


def t5(dtype: torch.dtype, scale: float) -> Made:
    """T5-small: a bias of relative positions in the encoder and in the decoder."""
    import transformers

    config = transformers.T5Config(num_layers=LAYERS, num_decoder_layers=LAYERS, vocab_size=1024)
    source, target = (torch.randint(1, 1024, (1, max(8, int(n * scale)))) for n in (512, 128))
    return lambda: transformers.T5Model(config), dict(input_ids=source, decoder_input_ids=target)


def whisper(dtype: torch.dtype, scale: float) -> Made:
    """Whisper-base on 30 seconds: 1500 rows in the encoder, and 128 tokens in the decoder."""
    import transformers

    frames = max(8, int(1500 * scale))
    sizes: dict[str, Any] = dict(d_model=512, max_source_positions=frames, vocab_size=1024)
    for part in ("encoder", "decoder"):
        own = dict(layers=LAYERS, attention_heads=8, ffn_dim=2048)
        sizes |= {f"{part}_{name}": size for name, size in own.items()}
    for token in ("pad", "bos", "eos", "decoder_start"):
        sizes[f"{token}_token_id"] = 0
    config = transformers.WhisperConfig(**sizes)
    sound = torch.randn(1, config.num_mel_bins, 2 * frames, dtype=dtype)
    tokens = torch.randint(1, 1024, (1, max(8, int(128 * scale))))
    given = dict(input_features=sound, decoder_input_ids=tokens)
    return lambda: transformers.WhisperModel(config), given


def vit(dtype: torch.dtype, scale: float) -> Made:
    import transformers

    config = transformers.ViTConfig(num_hidden_layers=LAYERS)
    given = dict(pixel_values=torch.randn(2, 3, 224, 224, dtype=dtype))
    return lambda: transformers.ViTModel(config, add_pooling_layer=False), given


def dit(dtype: torch.dtype, scale: float) -> Made:
    """DiT-XL/2: 256 patches, heads of 72."""
    diffusers: Any = optional_deps.library("diffusers")
    pixels = torch.randn(2, 4, 32, 32, dtype=dtype)
    given = dict(hidden_states=pixels, timestep=torch.tensor([3, 5]), class_labels=torch.arange(2))
    return lambda: diffusers.DiTTransformer2DModel(num_layers=LAYERS), given


def wan(dtype: torch.dtype, scale: float) -> Made:
    """Wan 2.1 of 1.3B: 256 patches of a video, and 128 tokens of text."""
    diffusers: Any = optional_deps.library("diffusers")
    sizes: dict[str, Any] = dict(num_attention_heads=12, ffn_dim=8960, num_layers=1)
    side = 32 if scale == 1 else 8
    pixels = torch.randn(1, 16, 1, side, side, dtype=dtype)
    text = torch.randn(1, 128, 4096, dtype=dtype)
    given = dict(hidden_states=pixels, timestep=torch.tensor([3]), encoder_hidden_states=text)
    return lambda: diffusers.WanTransformer3DModel(**sizes), given


# ------------------------------------------------------------------- how a model comes to fastattn


@contextlib.contextmanager
def registered() -> Generator[None, None, None]:
    """Inside the block transformers and, if it is installed, diffusers accept "fastattn"."""
    import fastattn.integrations.diffusers as integration

    with generation.registered():
        if not optional_deps.found("diffusers"):
            yield
            return
        integration.register()
        try:
            yield
        finally:
            integration.unregister()


class Inside(nn.Module):
    """A model that calls torch's function, inside `fastattn.sdpa()`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> Any:
        with fastattn.sdpa():
            return self.model(**given)


def _patched(make: Callable[[], Any]) -> Pair:
    torch.manual_seed(0)
    other = _spread_out(make())
    return Inside(copy.deepcopy(other)), other


def _of_diffusers(make: Callable[[], Any]) -> Pair:
    torch.manual_seed(0)
    other = _spread_out(make())
    ours = copy.deepcopy(other)
    ours.set_attention_backend("fastattn")
    other.set_attention_backend("native")
    return ours, other


def _spread_out(model: Any) -> Any:
    """Zeros, with which models of diffusers begin, would hide attention."""
    with torch.no_grad():
        for x in model.parameters():
            if not x.any():
                x.normal_(0, 0.02)
    return model


MODELS: dict[str, tuple[Callable[..., Pair], Callable[..., Made]]] = {
    "BERT-base, N = 128": (of_transformers, functools.partial(bert, 128, 2, False)),
    "BERT-base, N = 512": (of_transformers, functools.partial(bert, 512, 1, False)),
    "BERT-base, N = 512, padded": (of_transformers, functools.partial(bert, 512, 2, True)),
    "GPT-2, N = 512": (of_transformers, gpt2),
    "Swin-T": (of_transformers, swin),
    "T5-small": (of_transformers, t5),
    "ViT-B/16": (of_transformers, vit),
    "Whisper-base": (of_transformers, whisper),
    "DiT-XL/2 in sdpa()": (_patched, dit),
    "Wan 1.3B": (_of_diffusers, wan),
}


def pair(name: str, dtype: torch.dtype, scale: float) -> tuple[Pair, Callable[[Any], Tensor]]:
    """A model that uses fastattn and one that does not, and the output of either, where nothing is
    padding."""
    both, model = MODELS[name]
    make, given = model(dtype, scale)
    hidden = given.get("attention_mask")

    def out(model: Any) -> Tensor:
        found = model(**given, return_dict=False)[0]
        return found if hidden is None else found[hidden.bool()]

    return both(lambda: make().to(dtype).eval()), out


def available(name: str) -> bool:
    of_diffusers = MODELS[name][0] is not of_transformers
    return not of_diffusers or optional_deps.found("diffusers")
