"""To and from torch.nn.Transformer, its stacks and its layers: equal structure, equal outputs.

Ours are batch first, whatever theirs was. Where torch's key_padding_mask and bool masks are True,
ours are False; our decoders are causal unless told otherwise.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Decoder, DecoderLayer, Encoder, EncoderLayer
from .transformer import EncoderDecoder, Transformer

State = dict[str, Tensor]

# Which class is which. What torch calls Transformer has no tokens: it is our EncoderDecoder.
OURS: dict[type[nn.Module], Any] = {
    nn.TransformerEncoderLayer: EncoderLayer,
    nn.TransformerDecoderLayer: DecoderLayer,
    nn.TransformerEncoder: Encoder,
    nn.TransformerDecoder: Decoder,
    nn.Transformer: EncoderDecoder,
}
TORCHS: dict[type[nn.Module], Any] = {ours: torchs for torchs, ours in OURS.items()}
TORCHS[Transformer] = nn.Transformer

# How a layer's parameters are called here, and in torch.
OURS_TO_TORCHS = (
    (r"\bcross_attn\.", "multihead_attn."),
    (r"\bfeed_forward\.", ""),
    (r"\bresidual(\d)\.norm\.", r"norm\1."),
)
TORCHS_TO_OURS = (
    (r"\bmultihead_attn\.", "cross_attn."),
    (r"\b(linear\d)\.", r"feed_forward.\1."),
    (r"\bnorm(\d)\.", r"residual\1.norm."),
)


def state_from_torch(state: State) -> State:
    """The state_dict of a module here with the tensors of torch's; nothing is copied."""
    return _renamed(state, TORCHS_TO_OURS)


def state_to_torch(state: State) -> State:
    """The state_dict of torch's module with the tensors of ours; nothing is copied. Of a
    `Transformer` only the encoder and decoder are there: torch's has no embeddings."""
    if "src_embedding.weight" in state:
        state = {name: x for name, x in state.items() if name.startswith(("encoder.", "decoder."))}
    return _renamed(state, OURS_TO_TORCHS)


def from_torch(module: nn.Module) -> nn.Module:
    """A module here that computes what torch's does, with copies of its parameters, in its mode.

    Takes torch.nn.TransformerEncoderLayer, TransformerDecoderLayer, TransformerEncoder,
    TransformerDecoder, and Transformer, which becomes an `EncoderDecoder`. Raises ValueError for
    anything else, a layer that was altered among it.
    """
    with torch.device("meta"):  # no parameters are drawn for nothing
        ours = _ours(module)
    return _filled(ours, state_from_torch(module.state_dict()), module)


def to_torch(module: nn.Module) -> nn.Module:
    """The reverse of `from_torch`, with batch_first. A `Transformer` gives the torch.nn.Transformer
    of its encoder and decoder: embeddings and out_proj have no place in that."""
    with torch.device("meta"):
        theirs = _torchs(module)
    return _filled(theirs, state_to_torch(module.state_dict()), module)


def _filled(made: nn.Module, state: State, source: nn.Module) -> nn.Module:
    copies = {name: x.detach().clone() for name, x in state.items()}
    made.load_state_dict(copies, assign=True)
    return made.train(source.training)


def _renamed(state: State, rules: tuple[tuple[str, str], ...]) -> State:
    renamed = {}
    for name, x in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = x
    return renamed


def _ours(torchs: Any) -> nn.Module:
    kind = _twin(torchs, OURS)
    if kind is EncoderDecoder:
        return EncoderDecoder(_ours(torchs.encoder), _ours(torchs.decoder))
    if kind in (Encoder, Decoder):
        layers = [_ours(layer) for layer in torchs.layers]
        stack = kind(layers[0], 1, copy.deepcopy(torchs.norm))
        stack.layers = nn.ModuleList(layers)  # which may differ, in torch's
        return stack
    _check_layer(torchs)
    return kind(
        torchs.self_attn.embed_dim,
        torchs.self_attn.num_heads,
        torchs.linear1.out_features,
        dropout=torchs.dropout.p,
        activation=torchs.activation,
        norm_first=torchs.norm_first,
        eps=torchs.norm1.eps,
        bias=torchs.linear1.bias is not None,
    )


def _torchs(ours: Any) -> nn.Module:
    kind = _twin(ours, TORCHS)
    if kind is nn.Transformer:
        first = ours.encoder.layers[0].self_attn
        return nn.Transformer(
            *(first.embed_dim, first.num_heads),
            custom_encoder=_torchs(ours.encoder),
            custom_decoder=_torchs(ours.decoder),
            batch_first=True,
        )
    if kind in (nn.TransformerEncoder, nn.TransformerDecoder):
        layers = [_torchs(layer) for layer in ours.layers]
        # Nested tensors would give padded positions other values, and warn where they cannot be.
        options = {"enable_nested_tensor": False} if kind is nn.TransformerEncoder else {}
        stack = kind(layers[0], len(layers), copy.deepcopy(ours.norm), **options)
        stack.layers = nn.ModuleList(layers)
        return stack
    return kind(
        ours.self_attn.embed_dim,
        ours.self_attn.num_heads,
        ours.feed_forward.linear1.out_features,
        dropout=ours.feed_forward.dropout.p,
        activation=ours.feed_forward.activation,
        layer_norm_eps=ours.residual1.norm.eps,
        batch_first=True,
        norm_first=ours.residual1.norm_first,
        bias=ours.feed_forward.linear1.bias is not None,
    )


def _twin(module: nn.Module, twins: dict[type[nn.Module], Any]) -> Any:
    if type(module) not in twins:
        names = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in twins)
        raise ValueError(f"module: got {type(module).__name__}, expected one of {names}")
    return twins[type(module)]


def _check_layer(layer: nn.Module) -> None:
    """torch's layer has a dropout rate in five places, norms and attentions that may be replaced:
    ours has them all alike."""
    children = list(layer.modules())
    rates = {m.p for m in children if isinstance(m, nn.Dropout)}
    rates |= {m.dropout for m in children if isinstance(m, nn.MultiheadAttention)}
    norms = {type(m) for name, m in layer.named_children() if name.startswith("norm")}
    eps = {m.eps for m in children if isinstance(m, nn.LayerNorm)}
    if len(rates) != 1 or norms != {nn.LayerNorm} or len(eps) != 1:
        raise ValueError(
            f"module: got a {type(layer).__name__} with dropout rates {sorted(rates)}, norms "
            f"{sorted(kind.__name__ for kind in norms)} of eps {sorted(eps)}, expected one rate, "
            "LayerNorms and one eps"
        )
