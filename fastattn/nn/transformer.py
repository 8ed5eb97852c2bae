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
    """An encoder, and a decoder that attends to its output.

    This is the structure of torch.nn.Transformer.

    Args:
        encoder: An `Encoder`.
        decoder: A `Decoder`.

    Shape:
        src: (B, N, E).
        tgt: (B, M, E).
        src_mask: (N, N), (B, N, N) or (B, H, N, N); bool or any other dtype.
        tgt_mask: (M, M), (B, M, M) or (B, H, M, M).
        memory_mask: (M, N), (B, M, N) or (B, H, M, N).
        src_padding_mask: (B, N).
        tgt_padding_mask: (B, M).
        out: (B, M, E).

    Example:
        >>> import torch
        >>> from fastattn.nn import Decoder, DecoderLayer, Encoder, EncoderDecoder, EncoderLayer
        >>> encoder = Encoder(EncoderLayer(32, num_heads=4, ff_dim=64), num_layers=2)
        >>> decoder = Decoder(DecoderLayer(32, num_heads=4, ff_dim=64), num_layers=2)
        >>> model = EncoderDecoder(encoder, decoder)
        >>> model(torch.randn(2, 7, 32), torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
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
        """Encode src, then decode tgt.

        Args:
            src: Tokens of the encoder.
            tgt: Tokens of the decoder.
            src_mask: 0 or False hides a key from a row of the encoder.
            tgt_mask: 0 or False hides a key from a row of the decoder's self-attention.
            memory_mask: 0 or False hides a key of the encoder's output from a row of the decoder.
            src_padding_mask: 0 or False hides a key of src from the encoder, and from the decoder,
                too.
            tgt_padding_mask: 0 or False hides a key of tgt.
            causal: If True, tgt token i attends to tgt tokens 0 to i.

        Returns:
            out.

        Raises:
            ValueError: A tensor does not have the shape stated above, or a float mask on a CPU
                contains -inf.
        """
        memory = self.encoder(src, src_mask, src_padding_mask)
        return self.decoder(
            *(tgt, memory, tgt_mask, memory_mask, tgt_padding_mask, src_padding_mask),
            causal=causal,
        )


class Transformer(Leaf):
    """A Transformer from source tokens and the target tokens so far to logits of the next tokens.

    It adds sinusoids to the embeddings times sqrt(embed_dim), then applies the encoder, the decoder
    and a linear map (Vaswani et al. 2017).

    Args:
        vocab_size: The number of source tokens.
        tgt_vocab_size: The number of target tokens. None: source and target share vocabulary and
            embedding.
        embed_dim: The number of columns E of the embeddings.
        num_heads: The number of heads. It must divide embed_dim.
        num_encoder_layers: The number of encoder layers.
        num_decoder_layers: The number of decoder layers.
        ff_dim: The number of columns inside the feed-forward networks.
        dropout: As in `EncoderLayer`, and on the sum of embeddings and sinusoids.
        activation: "relu", "gelu" or any function of a tensor.
        norm_first: If True, layers are pre-norm, otherwise post-norm.
        final_norm: If True, a LayerNorm follows each stack, as in torch.nn.Transformer. Pre-norm
            needs it; the paper's post-norm has none.
        eps: The eps of LayerNorm.
        bias: If True, the linear maps of the layers and the LayerNorms have a bias.
        max_len: The largest length of a sequence. Longer ones raise.
        pad_id: Tokens equal to it are hidden: those of src from encoder and decoder, those of tgt
            from the decoder's self-attention. None hides no tokens.
        tied: If True, the last linear map has the weights of the target's embedding and no bias
            (section 3.4). Otherwise it is `out_proj`.

    Shape:
        src: (B, N), int32 or int64.
        tgt: (B, M), int32 or int64.
        logits: (B, M, V), V target tokens.

    Raises:
        ValueError: num_heads does not divide embed_dim, a number of layers is below 1, or
            activation is another string.

    Example:
        >>> import torch
        >>> from fastattn.nn import Transformer
        >>> sizes = dict(embed_dim=32, num_heads=4, num_encoder_layers=1, num_decoder_layers=1)
        >>> model = Transformer(vocab_size=100, ff_dim=64, **sizes)
        >>> src, tgt = torch.randint(100, (2, 7)), torch.randint(100, (2, 5))
        >>> model(src, tgt).shape
        torch.Size([2, 5, 100])
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
        """Compute the logits of the token after each target token.

        Args:
            src: Source tokens.
            tgt: Target tokens.

        Returns:
            logits. Those at i are for the token after tgt[:, i] and depend only on tgt[:, : i + 1]
            and src.

        Raises:
            ValueError: src or tgt has another shape or dtype, or is longer than max_len.
        """
        memory = self.encode(src)
        return self.decode(
            tgt, memory, padding_mask=self._shown(tgt), memory_padding_mask=self._shown(src)
        )

    def encode(self, src: Tensor) -> Tensor:
        """Compute the encoder's output.

        Args:
            src: Source tokens.

        Shape:
            src: (B, N), int32 or int64.
            memory: (B, N, E).

        Returns:
            memory.

        Raises:
            ValueError: src has another shape or dtype, or is longer than max_len.

        Example:
            >>> import torch
            >>> from fastattn.nn import Transformer
            >>> sizes = dict(embed_dim=32, num_heads=4, num_encoder_layers=1, num_decoder_layers=1)
            >>> model = Transformer(vocab_size=100, ff_dim=64, **sizes)
            >>> model.encode(torch.randint(100, (2, 7))).shape
            torch.Size([2, 7, 32])
        """
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
        """Compute logits from target tokens and the encoder's output.

        Args:
            tgt: Target tokens. With a cache they continue the cached tokens.
            memory: The output of `encode`.
            padding_mask: 0 or False hides a target token from the decoder's self-attention. With a
                cache it covers the cached tokens, too.
            memory_padding_mask: 0 or False hides a source token.
            cache: The keys of earlier calls, from `decoder.new_cache`.

        Shape:
            tgt: (B, M), int32 or int64.
            memory: (B, N, E).
            padding_mask: (B, M), or (B, cached and new tokens).
            memory_padding_mask: (B, N).
            logits: (B, M, V), V target tokens.

        Returns:
            logits.

        Raises:
            ValueError: A tensor has another shape or dtype, tgt is longer than max_len, or the
                cache has no room.

        Example:
            >>> import torch
            >>> from fastattn.nn import Transformer
            >>> sizes = dict(embed_dim=32, num_heads=4, num_encoder_layers=1, num_decoder_layers=1)
            >>> model = Transformer(vocab_size=100, ff_dim=64, **sizes).eval()
            >>> src, tgt = torch.randint(100, (2, 7)), torch.randint(100, (2, 5))
            >>> logits = model.decode(tgt, model.encode(src))
            >>> torch.testing.assert_close(logits, model(src, tgt))
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
        """Decode greedily: each token is the most likely one after bos_id and the tokens before it.

        Keys and values are cached, so a token costs one row in each layer. Call eval() first:
        dropout acts in training mode.

        Args:
            src: Source tokens.
            max_len: The largest number of tokens T to generate.
            bos_id: The token before the first one.
            eos_id: The token that ends a row. The rest of the row is filled with it, and decoding
                stops when every row has one. None: every row has max_len tokens.

        Shape:
            src: (B, N), int32 or int64.
            tokens: (B, T), int64.

        Returns:
            tokens.

        Raises:
            ValueError: src has another shape or dtype, or max_len or the length of src is above the
                max_len of the model.

        Example:
            >>> import torch
            >>> from fastattn.nn import Transformer
            >>> sizes = dict(embed_dim=32, num_heads=4, num_encoder_layers=1, num_decoder_layers=1)
            >>> model = Transformer(vocab_size=100, ff_dim=64, **sizes).eval()
            >>> model.generate(torch.randint(100, (2, 7)), max_len=4, bos_id=1).shape
            torch.Size([2, 4])
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
    """Make an embedding of variance 1 / embed_dim, so that logits of tied weights start near 1."""
    embedding = nn.Embedding(vocab_size, embed_dim)
    nn.init.normal_(embedding.weight, std=embed_dim**-0.5)
    return embedding
