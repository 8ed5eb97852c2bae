"""The attention backend of SGLang on CPUs: its batches and token pool as arguments of ours.

The pool has a row for each token, (size, Hk, D), in pages of adjacent rows: these are our pages,
and the page of a token is its row divided by the page size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from ..api import attention_packed

logger = logging.getLogger("sglang.fastattn")  # SGLang sets the level of all loggers
_PREFILL = ForwardMode.EXTEND, ForwardMode.MIXED
_KNOWN = *_PREFILL, ForwardMode.DECODE, ForwardMode.IDLE


def _refusal(what: str, got: object, expected: object) -> NotImplementedError:
    return NotImplementedError(
        f"{what}: got {got}, expected {expected}; choose another --attention-backend"
    )


@dataclass
class Batch:
    """The requests of a step, for all layers."""

    starts: Tensor  # (B + 1,) the rows of each request
    lengths: Tensor  # (B,) its keys
    most_rows: int
    blocks: Tensor  # (B, blocks) its pages
    window_blocks: Tensor | None  # those of layers with a window, if these have a pool of their own
    window_slots: Tensor | None  # where the new rows of such layers go


class Backend(AttentionBackend):
    """SGLang makes one for a model, and calls it for each step and layer."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.slots = model_runner.req_to_token_pool
        self.pool = model_runner.token_to_kv_pool
        self.page = model_runner.page_size
        self.forward_metadata: Batch | None = None
        if str(model_runner.device) != "cpu":
            raise _refusal("--device", model_runner.device, "cpu")
        if model_runner.use_mla_backend:
            raise _refusal("model", "latent attention (MLA)", "keys and values of heads")
        if model_runner.spec_algorithm.is_speculative():
            raise _refusal("--speculative-algorithm", "one", "none")
        self.has_windows = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        logger.info("Attention runs on fastattn.")

    def support_triton(self) -> bool:
        """SGLang asks whether its own kernels of bookkeeping may be Triton's: not on a CPU."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode not in _KNOWN:
            raise _refusal("forward_mode", mode.name, [x.name for x in _KNOWN])
        if batch.encoder_lens is not None:
            raise _refusal("model", "an encoder beside the decoder", "a decoder or an encoder")
        if batch.spec_info is not None:
            raise _refusal("spec_info", type(batch.spec_info).__name__, "None")
        self.forward_metadata = None
        if mode == ForwardMode.IDLE:
            return
        lengths = batch.seq_lens
        if mode == ForwardMode.DECODE:
            starts, most = torch.arange(len(lengths) + 1, dtype=torch.int32), 1
        else:
            rows = batch.extend_seq_lens
            starts = torch.nn.functional.pad(rows.cumsum(0, dtype=torch.int32), (1, 0))
            most = int(rows.max())
        # The first token of each page says which page it is.
        tokens = self.slots.req_to_token[batch.req_pool_indices, : int(lengths.max()) : self.page]
        window_blocks = window_slots = None
        if self.has_windows:
            # Pages left of all windows are free, and have no number.
            inside = self.pool.translate_loc_from_full_to_swa(tokens.long())
            window_blocks = inside.clamp(min=0) // self.page
            window_slots = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        self.forward_metadata = Batch(
            starts=starts,
            lengths=lengths,
            most_rows=most,
            blocks=tokens // self.page,
            window_blocks=window_blocks,
            window_slots=window_slots,
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Attend q (T, H D) to the keys of its requests: (T, H Dv). k and v are stored first, if
        there are any."""
        if given := sorted(name for name, value in unknown.items() if value is not None):
            raise _refusal("attention layer", given, "none of these arguments")
        batch, heads = self.forward_metadata, layer.tp_q_head_num
        assert batch is not None
        given = _given(layer)
        if save_kv_cache and k is not None:
            at = KVWriteLoc(forward_batch.out_cache_loc, batch.window_slots)
            self.pool.set_kv_buffer(layer, at, k, v)
        windowed = self.has_windows and self.pool.layers_mapping[layer.layer_id][1]
        out = attention_packed(
            q.reshape(-1, heads, layer.qk_head_dim),
            self._pages("keys", self.pool.get_key_buffer(layer.layer_id), q),
            self._pages("values", self.pool.get_value_buffer(layer.layer_id), q),
            batch.starts,
            block_table=batch.window_blocks if windowed else batch.blocks,
            key_lengths=batch.lengths,
            max_q=batch.most_rows,
            sinks=sinks,
            **given,
        )
        return out.reshape(-1, heads * layer.v_head_dim)

    forward_decode = forward_extend

    def _pages(self, name: str, rows: Tensor, q: Tensor) -> Tensor:
        """(P,page,Hk,D)"""
        if rows.ndim != 3 or rows.dtype != q.dtype or len(rows) % self.page:
            raise _refusal(
                f"cache of {name}",
                f"{tuple(rows.shape)} of {rows.dtype}",
                f"rows of tokens (size, heads, head size) of {q.dtype}, in pages of {self.page}",
            )
        return rows.view(-1, self.page, *rows.shape[1:])


# Attributes of a layer that change its scores, and their values where they change nothing.
_PLAIN = {
    "is_cross_attention": (False,),
    "use_irope": (False,),  # Llama 4's chunks
    "pos_encoding_mode": ("NONE",),
    "logit_capping_method": ("tanh",),
    "xai_temperature_len": (-1, None),
}


def _given(layer: Any) -> dict[str, Any]:
    """The arguments of `attention_packed` that a layer has."""
    for name, values in _PLAIN.items():
        if getattr(layer, name) not in values:
            raise _refusal(name, repr(getattr(layer, name)), f"{values[0]!r}")
    given: dict[str, Any] = dict(scale=layer.scaling)
    if layer.logit_cap:
        given["softcap"] = layer.logit_cap
    window = layer.sliding_window_size  # keys before a row's own; -1 for all
    has_window = window is not None and window >= 0
    if layer.attn_type == AttentionType.DECODER:
        return given | dict(causal="bottom_right", window=(window if has_window else None, None))
    if layer.attn_type != AttentionType.ENCODER_ONLY or has_window:
        kinds = [AttentionType.DECODER, AttentionType.ENCODER_ONLY]
        raise _refusal("attn_type", layer.attn_type, f"{kinds}, the latter without a window")
    return given
