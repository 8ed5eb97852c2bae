"""Thin modules over `fastattn.attention`, batch first, for models written in plain PyTorch.

They are the systems of the tutorials that this package grew from, checked against what those print
(tests/test_documents.py) and against the same systems written out naively (tests/test_nn.py):

    tutorial                system                                  class
    chapter-3 notebook      attention without parameters            ScaledDotProductAttention
                            self-attention, one head                SelfAttention
                            causal, with dropout; split heads       CausalSelfAttention
                            a stack of single heads                 ConcatenatedHeads
    attention overview      self-attention of three tokens          SelfAttention
                            projections that heads share            SharedHeadAttention
                            dot-product seq2seq attention           LuongAttention
                            additive seq2seq attention              BahdanauAttention
    Transformer practice    n_Q != n_K, d_V != d_K                  ScaledDotProductAttention
                            every intermediate tensor               TracedAttention
    attention from scratch  masked self-attention                   SelfAttention
                            packed projection                       PackedSelfAttention
                            positions, batch first                  SinusoidalPositionalEncoding
    paper review            positions, sequence first               SinusoidalPositionalEncoding

RotaryEmbedding and alibi_slopes are what people use today instead.
"""

from .cached import CachedAttention, KeyValueCache, record_weights
from .causal import CausalSelfAttention, ConcatenatedHeads
from .heads import PackedSelfAttention, SharedHeadAttention, TracedAttention
from .interchange import from_torch, state_from_torch, state_to_torch, to_torch
from .layers import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, Residual
from .positions import RotaryEmbedding, SinusoidalPositionalEncoding, alibi_slopes
from .seq2seq import BahdanauAttention, LuongAttention
from .single import ScaledDotProductAttention, SelfAttention
from .transformer import EncoderDecoder, Transformer

__all__ = [
    "BahdanauAttention",
    "CachedAttention",
    "CausalSelfAttention",
    "ConcatenatedHeads",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderDecoder",
    "EncoderLayer",
    "FeedForward",
    "KeyValueCache",
    "LuongAttention",
    "PackedSelfAttention",
    "Residual",
    "RotaryEmbedding",
    "ScaledDotProductAttention",
    "SelfAttention",
    "SharedHeadAttention",
    "SinusoidalPositionalEncoding",
    "TracedAttention",
    "Transformer",
    "alibi_slopes",
    "from_torch",
    "record_weights",
    "state_from_torch",
    "state_to_torch",
    "to_torch",
]
