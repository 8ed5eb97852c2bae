"""The Transformer (Vaswani et al. 2017): encoder and decoder, without and with token embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .core import Leaf, Module
from .layers import (
    Activation,
    ActivationName,
    Decoder,
    DecoderCache,
    DecoderLayer,
    Encoder,
    EncoderLayer,
)
from .positions import SinusoidalPositionalEncoding


class EncoderDecoder(Module):
    """An encoder, and a decoder that attends to its output: the structure of torch.nn.Transformer.

    >>> EncoderDecoder(Encoder(EncoderLayer(512, 8), 6), Decoder(DecoderLayer(512, 8), 6))
    """

    encoder: Encoder
    decoder: Decoder

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_padding_mask: Tensor | None = None,
        tgt_padding_mask: Tensor | None = None,
        *,
        causal: bool = True,
    ) -> Tensor:
        """src (B, N, E) and tgt (B, M, E) to (B, M, E).

        src_mask is (N, N), tgt_mask (M, M), memory_mask (M, N), each also (B, ..) or (B, H, ..);
        src_padding_mask is (B, N), tgt_padding_mask (B, M). 0 or False hides a key; padding of src
        is hidden from the decoder, too. With `causal`, tgt token i attends to tgt tokens 0 to i.
        """
        memory = self.encoder(src, src_mask, src_padding_mask)
        return self.decoder(
            *(tgt, memory, tgt_mask, memory_mask, tgt_padding_mask, src_padding_mask),
            causal=causal,
        )


class Transformer(Leaf):
    """Maps source tokens and the target tokens so far to logits of the target's next tokens.

    Embeddings times sqrt(embed_dim) plus sinusoids, then `encoder`, `decoder` and a linear map. If
    `tied`, the map has the weights of the target's embedding and no bias (section 3.4); otherwise
    it is `out_proj`. If tgt_vocab_size is None, source and target share vocabulary and embedding.

    Tokens equal to pad_id are hidden: those of src from encoder and decoder, those of tgt from the
    decoder's self-attention. `norm_first` is pre-norm; `final_norm` puts a LayerNorm after each
    stack, as torch.nn.Transformer does and pre-norm needs; the paper's post-norm has none.
    Sequences longer than max_len raise.
    """

    embed_dim: int
    pad_id: int | None
    encoder: Encoder
    decoder: Decoder
    src_embedding: nn.Embedding
    tgt_embedding: nn.Embedding
    positions: SinusoidalPositionalEncoding
    out_proj: nn.Linear | None

    def __init__(
        self,
        vocab_size: int,
        tgt_vocab_size: int | None = None,
        *,
        embed_dim: int = 512,
        num_heads: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        ff_dim: int = 2048,
        dropout: float = 0.1,
        activation: ActivationName | Activation = "relu",
        norm_first: bool = False,
        final_norm: bool = True,
        eps: float = 1e-5,
        bias: bool = True,
        max_len: int = 5000,
        pad_id: int | None = None,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dim, self.pad_id = embed_dim, pad_id
        sizes = (embed_dim, num_heads, ff_dim)
        options: dict[str, Any] = dict(
            dropout=dropout, activation=activation, norm_first=norm_first, eps=eps, bias=bias
        )

        def norm() -> nn.LayerNorm | None:
            return nn.LayerNorm(embed_dim, eps=eps, bias=bias) if final_norm else None

        self.encoder = Encoder(EncoderLayer(*sizes, **options), num_encoder_layers, norm())
        self.decoder = Decoder(DecoderLayer(*sizes, **options), num_decoder_layers, norm())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

        self.src_embedding = _embedding(vocab_size, embed_dim)
        self.tgt_embedding = self.src_embedding
        if tgt_vocab_size is not None:
            self.tgt_embedding = _embedding(tgt_vocab_size, embed_dim)
        self.positions = SinusoidalPositionalEncoding(embed_dim, max_len, dropout)
        # Tied weights have no second name, because copying the model could separate the two.
        self.out_proj = None
        if not tied:
            self.out_proj = nn.Linear(embed_dim, self.tgt_embedding.num_embeddings)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """src (B, N) and tgt (B, M), int32 or int64, to logits (B, M, V). Logits at i are for the
        token after tgt[:, i] and depend only on tgt[:, : i + 1] and src."""
        memory = self.encode(src)
        return self.decode(
            tgt, memory, padding_mask=self._shown(tgt), memory_padding_mask=self._shown(src)
        )

    def encode(self, src: Tensor) -> Tensor:
        """src (B, N) to the memory (B, N, E)."""
        return self.encoder(self._embed(src, self.src_embedding), padding_mask=self._shown(src))

    def decode(
        self,
        tgt: Tensor,
        memory: Tensor,
        *,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        cache: list[DecoderCache] | None = None,
    ) -> Tensor:
        """Logits (B, M, V) for tgt (B, M) and memory (B, N, E); padding masks (B, M) and (B, N),
        where 0 or False hides.

        cache, from `decoder.new_cache`, holds the keys of earlier calls. tgt then continues their
        tokens, and padding_mask covers these, too.
        """
        offset = 0 if cache is None else cache[0].self_attn.length
        x = self.decoder(
            *(self._embed(tgt, self.tgt_embedding, offset), memory),
            padding_mask=padding_mask,
            memory_padding_mask=memory_padding_mask,
            cache=cache,
        )
        if self.out_proj is None:
            return F.linear(x, self.tgt_embedding.weight)
        return self.out_proj(x)

    @torch.no_grad()
    def generate(
        self, src: Tensor, max_len: int, *, bos_id: int, eos_id: int | None = None
    ) -> Tensor:
        """Greedy decoding: at most max_len tokens (B, T) for src (B, N), each the most likely after
        bos_id and the tokens before it. After its eos_id a row is filled with eos_id; decoding
        stops when every row has one.

        Keys and values are cached, so a token costs one row in each layer. Call eval() first:
        dropout acts in training mode.
        """
        if max_len > self.positions.max_len:
            raise ValueError(
                f"max_len: got {max_len}, expected at most {self.positions.max_len}, the max_len "
                "that this model was made with"
            )
        memory, shown = self.encode(src), self._shown(src)
        cache = self.decoder.new_cache(max_len)
        tokens = torch.full((src.shape[0], 1), bos_id, dtype=torch.int64, device=src.device)
        for _ in range(max_len):
            logits = self.decode(
                *(tokens[:, -1:], memory),
                padding_mask=self._shown(tokens),
                memory_padding_mask=shown,
                cache=cache,
            )
            token = logits.argmax(-1)
            if eos_id is not None and tokens.shape[1] > 1:
                token = token.masked_fill(tokens[:, -1:] == eos_id, eos_id)
            tokens = torch.cat([tokens, token], dim=1)
            if eos_id is not None and (token == eos_id).all():
                break
        return tokens[:, 1:]

    def _embed(self, tokens: Tensor, embedding: nn.Embedding, offset: int = 0) -> Tensor:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"tokens: got {tokens.dtype} of shape {tuple(tokens.shape)}, expected int32 "
                "or int64 (B, N)"
            )
        return self.positions(embedding(tokens) * math.sqrt(self.embed_dim), offset)

    def _shown(self, tokens: Tensor) -> Tensor | None:
        return None if self.pad_id is None else tokens != self.pad_id


def _embedding(vocab_size: int, embed_dim: int) -> nn.Embedding:
    """An embedding with variance 1 / embed_dim, so that logits of tied weights start near 1."""
    embedding = nn.Embedding(vocab_size, embed_dim)
    nn.init.normal_(embedding.weight, std=embed_dim**-0.5)
    return embedding
