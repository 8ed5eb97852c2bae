"""Objects that refer to public names, as user programs save them.

    python -m tests.support.saved_objects FILE.pt    modules, functions and a cache, pickled

The file in `tests/saved/` was made by this script before modules of the package moved, and beside
it is a program of torch.export with a call of each public function. They must not be made again:
`test_saved_objects.py` loads them.
"""

import sys

import torch
from torch import nn

import fastattn
from fastattn import distributed, flash_attn, reference
from fastattn import nn as layers

E, H = 8, 2
PUBLIC = {  # a pickle stores functions by name
    fastattn: [x for x in fastattn.__all__ if callable(getattr(fastattn, x))],
    distributed: distributed.__all__,
    flash_attn: [x for x in flash_attn.__all__ if callable(getattr(flash_attn, x))],
    layers: layers.__all__,
    reference: ["attention", "weights", "scores", "keep_mask"],
}


def modules():
    """{name: (module, its inputs)}"""
    torch.manual_seed(0)
    x, heads = torch.randn(2, 3, E), torch.randn(2, H, 3, 4)
    encoder = layers.Encoder(layers.EncoderLayer(E, H, 8), 1)
    decoder = layers.Decoder(layers.DecoderLayer(E, H, 8), 1)
    tokens = torch.tensor([[1, 2, 3]])
    sizes = dict(embed_dim=E, num_heads=H, ff_dim=8, max_len=4)
    sizes |= dict(num_encoder_layers=1, num_decoder_layers=1)
    converted = nn.TransformerEncoderLayer(E, H, 8)
    fastattn.convert(converted)
    ways = {
        "MultiheadAttention": (fastattn.MultiheadAttention(E, H, batch_first=True), (x, x, x)),
        "convert": (converted, (x,)),
        "BahdanauAttention": (layers.BahdanauAttention(E, E, 4), (x, x)),
        "CachedAttention": (layers.CachedAttention(E, H), (x,)),
        "CausalSelfAttention": (layers.CausalSelfAttention(E, E, num_heads=H), (x,)),
        "ConcatenatedHeads": (layers.ConcatenatedHeads(E, 4), (x,)),
        "Encoder": (encoder, (x,)),
        "EncoderDecoder": (layers.EncoderDecoder(encoder, decoder), (x, x)),
        "FeedForward": (layers.FeedForward(E, 8), (x,)),
        "LuongAttention": (layers.LuongAttention(E), (x, x)),
        "PackedSelfAttention": (layers.PackedSelfAttention(E, H), (x,)),
        "RotaryEmbedding": (layers.RotaryEmbedding(4), (heads,)),
        "ScaledDotProductAttention": (layers.ScaledDotProductAttention(), (x, x, x)),
        "SelfAttention": (layers.SelfAttention(E), (x,)),
        "SharedHeadAttention": (layers.SharedHeadAttention(E, H), (x, x, x)),
        "SinusoidalPositionalEncoding": (layers.SinusoidalPositionalEncoding(E, 9), (x,)),
        "TracedAttention": (layers.TracedAttention(E, H), (x, x, x)),
        "Transformer": (layers.Transformer(5, **sizes), (tokens, tokens)),
    }
    return {name: (module.eval(), given) for name, (module, given) in ways.items()}


def first(out):
    return out[0] if isinstance(out, tuple) else out


def cache():
    """A KVCache with something in it."""
    found = fastattn.KVCache(1, H, 4, capacity=16)
    torch.manual_seed(1)
    found.append(*torch.randn(2, 1, H, 3, 4))
    return found


def save(file):
    with torch.no_grad():
        expected = {name: (m, given, first(m(*given))) for name, (m, given) in modules().items()}
    q = torch.randn(1, H, 3, 4)
    held = cache()
    torch.save(
        dict(
            modules=expected,
            names={p.__name__: {x: getattr(p, x) for x in names} for p, names in PUBLIC.items()},
            place=fastattn.Place(row=3, rows=9),
            cache=(held, q, held.attention(q)),
        ),
        file,
    )


if __name__ == "__main__":
    save(sys.argv[1])
