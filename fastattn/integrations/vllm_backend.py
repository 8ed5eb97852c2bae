"""The attention backend of vLLM on CPUs: its batches and paged cache as arguments of ours.

A block of vLLM's cache has, for each key head, `page` times D + Dv numbers. Here the first page * D
of them are the keys of the block, and the others its values, so that a head's rows are adjacent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheLayout

from ..api import attention_packed
from ..call.spec import Place

logger = init_logger("vllm.plugins.fastattn")  # vLLM shows what is below its own name

_INSTEAD = "unset FASTATTN_VLLM for vLLM's own attention"
_STORED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_ENCODERS = AttentionType.ENCODER, AttentionType.ENCODER_ONLY
_LAST_AT_LAST = Place(bottom_right=True)  # the last row is at the last key


def _refusal(what: str, got: object, expected: str) -> NotImplementedError:
    return NotImplementedError(f"{what}: got {got}, expected {expected}; {_INSTEAD}")


class Backend(AttentionBackend):
    """What vLLM asks about the backend. It has the name of the one that it replaces, as vLLM knows
    no other on CPUs."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16", *_STORED]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return Layer

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in list(AttentionType)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class Latent(AttentionBackend):
    """In place of vLLM's latent attention, which has another cache: it raises."""

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> Any:
        raise _refusal("model", "latent attention (MLA)", "keys and values of heads")

    get_builder_cls = get_impl_cls

    @classmethod
    def is_mla(cls) -> bool:
        return True


@dataclass
class Batch:
    """The requests of a step, for all layers of a kind. vLLM reads and sets slot_mapping."""

    rows: int
    starts: Tensor  # (B + 1,) the rows of each request
    lengths: Tensor  # (B,) its keys
    most_rows: int
    blocks: Tensor  # (B, blocks)
    slot_mapping: Tensor
    causal: bool


# Arguments of a batch that change what rows see, by what they are.
_UNKNOWN = {
    "mm_req_doc_ranges": "parts of a prompt that see ahead",
    "rswa_prefix_lens": "windows that always see a prefix",
    "dcp_local_seq_lens": "keys that lie on several ranks",
}


class Builder(AttentionMetadataBuilder[Batch]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.kv_transfer_config is not None:
            raise _refusal("kv_transfer_config", "one", "none, as the layout of blocks is our own")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        common = common_attn_metadata
        for name, what in _UNKNOWN.items():
            if (value := getattr(common, name)) is not None and len(value):
                raise _refusal(name, what, "None")
        if isinstance(common.causal, Tensor):
            raise _refusal("causal", "one for each request", "one for all")
        return Batch(
            rows=common.num_actual_tokens,
            starts=common.query_start_loc,
            lengths=common.seq_lens,
            most_rows=common.max_query_len,
            blocks=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal and not isinstance(self.kv_cache_spec, CrossAttentionSpec),
        )


class Layer(AttentionImpl[Batch]):
    """The attention of a layer. vLLM gives the arguments by position, and further ones by name."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise _refusal("attention layer", sorted(unknown), "none of these arguments")
        if attn_type not in list(AttentionType):
            raise _refusal("attn_type", attn_type, f"one of {[x.value for x in AttentionType]}")
        if self.pcp_world_size * self.dcp_world_size != 1:
            raise _refusal("context parallelism", "several ranks", "1")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.sinks = sliding_window, sinks
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes).float()
        self.softcap = logits_soft_cap or None
        self.row_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        logger.info_once("Attention runs on fastattn.")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend query (T,H,D) to the keys of its requests; write output (T,H,Dv).

        Without a batch, as in vLLM's warm-up, nothing is done."""
        if output_scale is not None or output_block_scale is not None:
            raise _refusal("output_scale", "a quantised output", "None")
        if attn_metadata is None:
            return output
        batch, rows = attn_metadata, slice(attn_metadata.rows)
        given = self._given(batch)
        if self.attn_type in _ENCODERS:
            out = attention_packed(
                *(query[rows], key[rows], value[rows], batch.starts, batch.starts),
                max_q=batch.most_rows,
                max_k=batch.most_rows,
                **given,
            )
        else:
            k, v = self._pages(kv_cache, output.shape[-1], query.dtype)
            out = attention_packed(
                *(query[rows], k, v, batch.starts),
                block_table=batch.blocks,
                key_lengths=batch.lengths,
                max_q=batch.most_rows,
                **given,
                **self._scales(layer),
            )
        output[rows] = out
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store key (T,Hk,D) and value (T,Hk,Dv). A slot below 0 is none."""
        if self.attn_type in _ENCODERS or not slot_mapping.numel():
            return
        key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
        if slot_mapping.min() < 0:
            kept = slot_mapping >= 0
            key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
        k, v = self._pages(kv_cache, value.shape[-1], key.dtype)
        if self.kv_cache_dtype in _STORED:
            key = _rounded(key, layer._k_scale_float, k.dtype)
            value = _rounded(value, layer._v_scale_float, v.dtype)
        at = slot_mapping // k.shape[1], slot_mapping % k.shape[1]
        k[at], v[at] = key, value

    def _given(self, batch: Batch) -> dict[str, Any]:
        """The arguments of `attention_packed` that all kinds of attention have."""
        given: dict[str, Any] = dict(scale=self.scale, row_invariant=self.row_invariant)
        left = None if self.sliding_window is None else self.sliding_window - 1
        if batch.causal:
            given |= dict(causal="bottom_right", window=(left, None))
        elif left is not None:  # as far ahead as back
            given |= dict(window=(left, left), place=_LAST_AT_LAST)
        if self.slopes is not None:
            if not batch.causal:
                raise _refusal("alibi_slopes", "some where rows see ahead", "causal attention")
            given["alibi_slopes"] = self.slopes
        if self.softcap is not None:
            given["softcap"] = self.softcap
        if self.sinks is not None:
            given["sinks"] = self.sinks
        return given

    def _pages(self, cache: Tensor, Dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys (P,page,Hk,D) and values (P,page,Hk,Dv) in a cache (P,Hk,page,D+Dv)."""
        stored = _STORED.get(self.kv_cache_dtype, dtype)
        P, Hk, page, D = cache.shape[0], self.num_kv_heads, cache.shape[2], self.head_size
        if cache.shape[1:] != (Hk, page, D + Dv) or cache.element_size() != stored.itemsize:
            raise _refusal(
                f"cache of {self.kv_cache_dtype!r}",
                f"{tuple(cache.shape)} of {cache.dtype}",
                f"(blocks, {Hk}, page, {D + Dv}) of {stored}",
            )
        heads = cache.view(stored).view(P, Hk, page * (D + Dv))
        k, v = heads.split([page * D, page * Dv], dim=-1)
        k, v = k.unflatten(-1, (page, D)), v.unflatten(-1, (page, Dv))
        return k.transpose(1, 2), v.transpose(1, 2)

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        """Those of numbers in eight bits: one for all keys, and one for all values."""
        if self.kv_cache_dtype not in _STORED:
            return {}
        scales = layer._k_scale, layer._v_scale
        if any(x.numel() != 1 for x in scales):
            raise _refusal("k_scale", "one for each head", "one for a layer")
        k_scale, v_scale = (x.float().reshape(()) for x in scales)
        return dict(k_scale=k_scale, v_scale=v_scale)


def _rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale in eight bits. Numbers beyond the largest become the largest."""
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-most, most).to(dtype)
