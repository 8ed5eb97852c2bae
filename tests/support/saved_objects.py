"""Objects that refer to public names, as user programs save them.

    python -m tests.support.saved_objects FILE.pt    modules, functions and a cache, pickled
    python -m tests.support.saved_objects FILE.pt2   a program of torch.export

The files in `tests/saved/` were made by this script before modules of the package moved. They must
not be made again: `test_saved_objects.py` loads them.
"""

import io
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
        "Transformer": (
            layers.Transformer(
                5,
                embed_dim=E,
                num_heads=H,
                num_encoder_layers=1,
                num_decoder_layers=1,
                ff_dim=8,
                max_len=4,
            ),
            (tokens, tokens),
        ),
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


class Program(nn.Module):
    """A call of each public function, with every kind of argument."""

    def forward(self, q, k, v, mask, lengths, slopes, sinks, seed, table):
        o, lse = fastattn.attention(
            *(q, k, v),
            mask=mask,
            key_lengths=lengths,
            alibi_slopes=slopes,
            sinks=sinks,
            causal=True,
            window=(4, 2),
            softcap=3.0,
            dropout_p=0.25,
            seed=seed,
            return_lse=True,
        )
        weights = fastattn.attention_weights(q, k, mask=mask, key_lengths=lengths)
        pages = (x.transpose(1, 2).contiguous() for x in (k, v))
        rows, cu_q = q.transpose(1, 2).flatten(0, 1), 5 * torch.arange(3)
        packed = fastattn.attention_packed(
            rows, *pages, cu_q, block_table=table, key_lengths=lengths, max_q=5
        )
        return o, lse, weights, packed


def program():
    """A `Program` and its inputs."""
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    lengths, table = torch.tensor([16, 9]), torch.tensor([[0], [1]])
    extras = torch.randn(2, 4, 5, 16), lengths, torch.rand(4), torch.randn(4), torch.tensor(7)
    return Program(), (q, k, v, *extras, table)


def save_program(file):
    module, given = program()
    exported = torch.export.export(module, given)
    expected = io.BytesIO()
    torch.save((given, module(*given)), expected)
    torch.export.save(exported, file, extra_files={"expected.pt": expected.getvalue().hex()})


if __name__ == "__main__":
    (save_program if sys.argv[1].endswith(".pt2") else save)(sys.argv[1])
