"""Convert torch.nn.Transformer, its stacks and its layers to ours and back, with equal outputs.

Our modules are always batch first. Calls differ from torch's in three ways: bool masks and padding
masks are inverted (torch hides where True, we hide where False); our decoders are causal unless
causal=False is passed; and our src_padding_mask is also torch's memory_key_padding_mask.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Decoder, DecoderLayer, Encoder, EncoderLayer
from .transformer import EncoderDecoder, Transformer

State = dict[str, Tensor]

# torch's class to ours. torch.nn.Transformer has no token embeddings: it is our EncoderDecoder.
OURS: dict[type[nn.Module], Any] = {
    nn.TransformerEncoderLayer: EncoderLayer,
    nn.TransformerDecoderLayer: DecoderLayer,
    nn.TransformerEncoder: Encoder,
    nn.TransformerDecoder: Decoder,
    nn.Transformer: EncoderDecoder,
}
TORCHS: dict[type[nn.Module], Any] = {ours: torchs for torchs, ours in OURS.items()}
TORCHS[Transformer] = nn.Transformer

# Parameter names of a layer: rules from our names to torch's, and back.
OURS_TO_TORCHS = (
    (r"\bcross_attn\.", "multihead_attn."),
    (r"\bfeed_forward\.", ""),
    (r"\bresidual(\d)\.norm\.", r"norm\1."),
)
TORCHS_TO_OURS = (
    (r"\bmultihead_attn\.", "cross_attn."),
    (r"\b(linear\d|activation)\.", r"feed_forward.\1."),
    (r"\bnorm(\d)\.", r"residual\1.norm."),
)


def state_from_torch(state: State) -> State:
    """Rename the entries of torch's state dict to the names of fastattn.

    Args:
        state: The state dict of torch.nn.Transformer, or of one of its stacks or layers.

    Shape:
        state: Tensors of any shape. They are not copied.

    Returns:
        A state dict for the class that `from_torch` makes.

    Example:
        >>> import torch
        >>> from fastattn.nn import EncoderLayer, state_from_torch
        >>> torchs = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> EncoderLayer(32, 4).load_state_dict(state_from_torch(torchs.state_dict()))
        <All keys matched successfully>
    """
    return _renamed(state, TORCHS_TO_OURS)


def state_to_torch(state: State) -> State:
    """Rename the entries of fastattn's state dict to the names of torch.

    Args:
        state: The state dict of a module of fastattn. Of a `Transformer` only encoder and decoder
            remain, because torch's has no embeddings.

    Shape:
        state: Tensors of any shape. They are not copied.

    Returns:
        A state dict for the class that `to_torch` makes.

    Example:
        >>> import torch
        >>> from fastattn.nn import EncoderLayer, state_to_torch
        >>> torchs = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> torchs.load_state_dict(state_to_torch(EncoderLayer(32, 4).state_dict()))
        <All keys matched successfully>
    """
    if "src_embedding.weight" in state:
        state = {name: x for name, x in state.items() if name.startswith(("encoder.", "decoder."))}
    return _renamed(state, OURS_TO_TORCHS)


def from_torch(module: nn.Module) -> nn.Module:
    """Convert torch.nn.Transformer, a stack or a layer of it to the module of fastattn.

    The result computes the same, with copied parameters and the same modes. Calls differ: masks
    hide where they are 0 or False, decoders are causal unless causal=False is passed, and padding
    of src is hidden from the decoder, too.

    Args:
        module: A torch.nn.TransformerEncoderLayer, TransformerDecoderLayer, TransformerEncoder,
            TransformerDecoder or Transformer.

    Returns:
        An `EncoderLayer`, `DecoderLayer`, `Encoder`, `Decoder` or `EncoderDecoder`.

    Raises:
        ValueError: module is of another class, or a layer was altered.

    Example:
        >>> import torch
        >>> from fastattn.nn import from_torch
        >>> torchs = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
        >>> x = torch.randn(2, 5, 32)
        >>> torch.testing.assert_close(from_torch(torchs)(x), torchs(x))
    """
    with torch.device("meta"):  # parameters are loaded later: do not draw them
        ours = _ours(module)
    return _filled(ours, module, state_from_torch)


def to_torch(module: nn.Module) -> nn.Module:
    """Convert a module of fastattn to the one of torch.nn, the reverse of `from_torch`.

    Args:
        module: An `EncoderLayer`, `DecoderLayer`, `Encoder`, `Decoder`, `EncoderDecoder` or
            `Transformer`.

    Returns:
        The module of torch.nn, with batch_first. A `Transformer` gives a torch.nn.Transformer of
        its encoder and decoder, without embeddings and out_proj.

    Raises:
        ValueError: module is of another class, or a layer was altered.

    Example:
        >>> import torch
        >>> from fastattn.nn import EncoderLayer, to_torch
        >>> layer = EncoderLayer(32, num_heads=4, dropout=0.0)
        >>> x = torch.randn(2, 5, 32)
        >>> torch.testing.assert_close(to_torch(layer)(x), layer(x))
    """
    with torch.device("meta"):
        torchs = _torchs(module)
    return _filled(torchs, module, state_to_torch)


def _filled(made: nn.Module, source: nn.Module, renamed: Callable[[State], State]) -> nn.Module:
    """`made` with copies of the source's parameters and their requires_grad."""
    state = renamed(dict(source.state_dict(keep_vars=True)))
    made.load_state_dict({name: x.detach().clone() for name, x in state.items()}, assign=True)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)
    return made


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
        ours: Any = EncoderDecoder(_ours(torchs.encoder), _ours(torchs.decoder))
    elif kind in (Encoder, Decoder):
        layers = [_ours(layer) for layer in torchs.layers]
        ours = kind(layers[0], 1, copy.deepcopy(torchs.norm))
        ours.layers = nn.ModuleList(layers)  # torch's layers may differ
    else:
        return _checked(torchs, _our_layer, _torchs_layer)
    ours.training = torchs.training
    return ours


def _torchs(ours: Any) -> nn.Module:
    kind = _twin(ours, TORCHS)
    if kind is nn.Transformer:
        first = ours.encoder.layers[0].self_attn
        torchs: Any = nn.Transformer(
            *(first.embed_dim, first.num_heads),
            custom_encoder=_torchs(ours.encoder),
            custom_decoder=_torchs(ours.decoder),
            batch_first=True,
        )
    elif kind in (nn.TransformerEncoder, nn.TransformerDecoder):
        layers = [_torchs(layer) for layer in ours.layers]
        # Nested tensors would change the values at padded positions, and warn if not supported.
        options = {"enable_nested_tensor": False} if kind is nn.TransformerEncoder else {}
        torchs = kind(layers[0], len(layers), copy.deepcopy(ours.norm), **options)
        torchs.layers = nn.ModuleList(layers)
    else:
        return _checked(ours, _torchs_layer, _our_layer)
    torchs.training = ours.training
    return torchs


def _our_layer(torchs: Any) -> nn.Module:
    return OURS[type(torchs)](
        torchs.self_attn.embed_dim,
        torchs.self_attn.num_heads,
        torchs.linear1.out_features,
        dropout=torchs.dropout.p,
        activation=copy.deepcopy(torchs.activation),
        norm_first=torchs.norm_first,
        eps=torchs.norm1.eps,
        bias=torchs.linear1.bias is not None,
    ).train(torchs.training)


def _torchs_layer(ours: Any) -> nn.Module:
    return TORCHS[type(ours)](
        ours.self_attn.embed_dim,
        ours.self_attn.num_heads,
        ours.feed_forward.linear1.out_features,
        dropout=ours.feed_forward.dropout.p,
        activation=copy.deepcopy(ours.feed_forward.activation),
        layer_norm_eps=ours.residual1.norm.eps,
        batch_first=True,
        norm_first=ours.residual1.norm_first,
        bias=ours.feed_forward.linear1.bias is not None,
    ).train(ours.training)


def _twin(module: nn.Module, twins: dict[type[nn.Module], Any]) -> Any:
    if type(module) not in twins:
        names = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in twins)
        raise ValueError(f"module: got {type(module).__name__}, expected one of {names}")
    return twins[type(module)]


def _checked(
    layer: nn.Module, there: Callable[[Any], nn.Module], back: Callable[[Any], nn.Module]
) -> nn.Module:
    """Convert by `there`; raise if back(there(layer)) differs from the layer."""
    try:
        twin = there(layer)
        parts, made = _parts(layer), _parts(back(twin))
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"module: got a {type(layer).__name__} that was altered ({error}), expected one as its "
            "constructor makes it"
        ) from error
    differing = [name for name in {**parts, **made} if parts.get(name) != made.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"module: got a {type(layer).__name__} that was altered: {name or 'the layer'} is "
            f"{parts.get(name, 'none')}, expected {made.get(name, 'none')}, as its constructor "
            "makes it from its other parts"
        )
    return twin


def _parts(layer: nn.Module) -> dict[str, str]:
    """The type, options and parameter shapes of each submodule, by name."""
    parts = {}
    for name, module in layer.named_modules():
        options = module.extra_repr()
        if isinstance(module, nn.MultiheadAttention):
            same = ["embed_dim", "num_heads", "dropout", "kdim", "vdim", "add_zero_attn"]
            options = ", ".join(f"{x}={getattr(module, x)}" for x in same)
            options += f", bias_kv={module.bias_k is not None}"
        if hasattr(module, "norm_first"):
            options += f", norm_first={module.norm_first}"
        shapes = [f"{x} {tuple(p.shape)}" for x, p in module.named_parameters(recurse=False)]
        parts[name] = f"{type(module).__name__}({', '.join([options, *shapes])})"
    return parts
