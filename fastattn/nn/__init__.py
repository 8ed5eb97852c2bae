"""Thin modules over `fastattn.attention`, batch first, for models written in plain PyTorch.

They implement the systems of five tutorials. Tests in tests/nn compare them with what the tutorials
print (D: test_tutorial_outputs.py) and with naive implementations, including gradients (N:
test_nn.py, T: test_nn_transformer.py, C: test_nn_conversion.py). The last column is a word for
pytest -k:

document              system                         class                         test
--------------------  -----------------------------  ----------------------------  -----------------
chapter-3 notebook    attention without parameters   ScaledDotProductAttention     D notebook
                      self-attention, one head       SelfAttention                 D notebook
                      causal, dropout, split heads   CausalSelfAttention           N causal_self
                      a stack of single heads        ConcatenatedHeads             N concatenated
attention overview    self-attention, three tokens   SelfAttention                 D overview
                      scaled dot product with mask   ScaledDotProductAttention     N leading
                      projections that heads share   SharedHeadAttention           N shared_head
                      multi-head                     CachedAttention               T encoder_layer
                      dot-product seq2seq            LuongAttention                N luong
                      additive seq2seq               BahdanauAttention             N bahdanau
Transformer practice  n_Q != n_K, d_V != d_K         ScaledDotProductAttention     D shapes
                      every intermediate tensor      TracedAttention               N traced
attention, scratch    masked self-attention          SelfAttention                 D causal_weights
                      packed projection              PackedSelfAttention           N packed
                      positions, batch first         SinusoidalPositionalEncoding  N sinusoids
paper review          positions, sequence first      SinusoidalPositionalEncoding  N sinusoids
                      position-wise network          FeedForward                   T feed_forward
                      residual and norm              Residual                      T encoder_layer
                      encoder block, stack           EncoderLayer, Encoder         T encoder_layer
                      decoder block, stack           DecoderLayer, Decoder         T decoder_layer
                      encode, decode                 EncoderDecoder                C and_back
                      tokens, tied embeddings        Transformer                   T transformer

A mask hides a key where it is 0, in any dtype. For a tutorial's mask that has 1 where a key is
hidden, pass mask == 0. A row with every key hidden has output 0; in tutorials that add -1e9 to
hidden scores, its output is the mean of v.

Also here: RotaryEmbedding and alibi_slopes, which replace sinusoids today; KeyValueCache for
decoding; from_torch and to_torch, which convert from and to torch.nn.Transformer; record_weights,
which records attention weights. The programs of `fastattn.examples` use all of them.
"""

from ..public_names import set_module
from .cached import CachedAttention, KeyValueCache, record_weights
from .causal import CausalSelfAttention, ConcatenatedHeads
from .heads import PackedSelfAttention, SharedHeadAttention, TracedAttention
from .layers import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, Residual
from .positions import RotaryEmbedding, SinusoidalPositionalEncoding, alibi_slopes
from .seq2seq import BahdanauAttention, LuongAttention
from .single_head import ScaledDotProductAttention, SelfAttention
from .state_dict_conversion import from_torch, state_from_torch, state_to_torch, to_torch
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
set_module(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
