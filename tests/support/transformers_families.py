"""Families of transformers with tiny random weights: how to make each, and its inputs."""

from __future__ import annotations

import copy
import importlib.metadata
from typing import NamedTuple

import torch

VOCABULARY, LENGTH = 97, 24
TOKENS = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SIZES = TOKENS | dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
)
GROUPED = dict(num_key_value_heads=2, head_dim=16)
LOCAL = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
PARTIAL = dict(num_key_value_heads=2)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
LATENT = dict(
    num_key_value_heads=4,
    moe_intermediate_size=32,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
)
CHUNKED = dict(
    attention_chunk_size=8,
    layer_types=["chunked_attention", "full_attention"],
    no_rope_layers=[1, 0],
    num_local_experts=2,
    intermediate_size_mlp=96,
)
GPT2 = dict(n_embd=64, n_layer=2, n_head=4, n_inner=96, vocab_size=VOCABULARY)
SEQ2SEQ = TOKENS | dict(
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)
T5 = dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=VOCABULARY)
T5 |= dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
DISTILLED = SIZES | dict(dim=64, hidden_dim=96, n_layers=2, n_heads=4)
LOCAL_ENCODER = dict(local_attention=8, global_attn_every_n_layers=2)
LOCAL_ENCODER |= dict(cls_token_id=1, sep_token_id=2)
PIXELS = dict(image_size=32, patch_size=8, num_channels=3)
SPEECH = dict(conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2)
SPEECH |= dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)


class Family(NamedTuple):
    """name: the prefix of its class names, before Config. model: the suffix of the model's class.
    given: the model's input, "text", "encoded" text, "pair" of texts, "pixels" or "waves".
    since: the first transformers in which its attention goes through the interface."""

    name: str
    model: str
    config: dict
    given: str = "text"
    since: tuple[int, ...] = ()

    def is_here(self) -> bool:
        """Whether the installed transformers is not older than `since`."""
        version = importlib.metadata.version("transformers").split(".")[:2]
        return tuple(map(int, version)) >= self.since


CAUSAL, BARE = "ForCausalLM", "Model"
FAMILIES = [
    Family("Llama", CAUSAL, SIZES | GROUPED),
    Family("Mistral", CAUSAL, SIZES | GROUPED | dict(sliding_window=8)),
    Family("Mixtral", CAUSAL, SIZES | GROUPED | EXPERTS),
    Family("Qwen2", CAUSAL, SIZES | PARTIAL),
    Family("Qwen3", CAUSAL, SIZES | GROUPED),
    Family("Gemma", CAUSAL, SIZES | GROUPED),
    Family("Gemma2", CAUSAL, SIZES | GROUPED | LOCAL | dict(attn_logit_softcapping=0.5)),
    Family("Gemma3", CAUSAL, SIZES | GROUPED | LOCAL),
    Family("GptOss", CAUSAL, SIZES | GROUPED | LOCAL | EXPERTS),
    Family("GPT2", "LMHeadModel", GPT2),
    Family("GPTJ", CAUSAL, GPT2 | dict(rotary_dim=8), since=(5, 24)),
    Family("GPTNeoX", CAUSAL, SIZES),
    Family("OPT", CAUSAL, SIZES | dict(ffn_dim=96, word_embed_proj_dim=64)),
    Family("Phi", CAUSAL, SIZES),
    Family("Phi3", CAUSAL, SIZES | PARTIAL | dict(sliding_window=8)),
    Family("StableLm", CAUSAL, SIZES | PARTIAL),
    Family("Starcoder2", CAUSAL, SIZES | PARTIAL | dict(sliding_window=8)),
    Family("Cohere", CAUSAL, SIZES | PARTIAL),
    Family("Cohere2", CAUSAL, SIZES | GROUPED | LOCAL),
    Family("Olmo2", CAUSAL, SIZES | PARTIAL),
    Family("Granite", CAUSAL, SIZES | PARTIAL),
    Family("Glm4", CAUSAL, SIZES | GROUPED),
    Family("SmolLM3", CAUSAL, SIZES | PARTIAL),
    Family("DeepseekV3", CAUSAL, SIZES | LATENT),
    Family("Llama4", CAUSAL, SIZES | GROUPED | CHUNKED),
    Family("Persimmon", CAUSAL, SIZES),
    Family("Nemotron", CAUSAL, SIZES | GROUPED),
    Family("BioGpt", CAUSAL, SIZES),
    Family("Bert", BARE, SIZES, "encoded"),
    Family("Roberta", BARE, SIZES, "encoded"),
    Family("DistilBert", BARE, DISTILLED, "encoded"),
    Family("Electra", BARE, SIZES | dict(embedding_size=64), "encoded"),
    Family("Albert", BARE, SIZES | dict(embedding_size=64), "encoded"),
    Family("ModernBert", BARE, SIZES | LOCAL_ENCODER, "encoded"),
    Family("EuroBert", BARE, SIZES | GROUPED, "encoded"),
    Family("ViT", BARE, SIZES | PIXELS, "pixels"),
    Family("Dinov2", BARE, SIZES | PIXELS, "pixels"),
    Family("SiglipVision", BARE, SIZES | PIXELS, "pixels"),
    Family("CLIPVision", BARE, SIZES | PIXELS, "pixels"),
    Family("CLIPText", BARE, SIZES, "encoded"),
    Family("Wav2Vec2", BARE, SIZES | SPEECH, "waves"),
    Family("T5", "ForConditionalGeneration", T5, "pair"),
    Family("UMT5", "ForConditionalGeneration", T5, "pair"),
    Family("Bart", "ForConditionalGeneration", SEQ2SEQ, "pair"),
    Family("MBart", "ForConditionalGeneration", SEQ2SEQ, "pair"),
    Family("Marian", "MTModel", SEQ2SEQ, "pair"),
    Family("M2M100", "ForConditionalGeneration", SEQ2SEQ, "pair"),
    Family("Pegasus", "ForConditionalGeneration", SEQ2SEQ, "pair"),
]
FAMILY = {x.name: x for x in FAMILIES}


def made(family: Family):
    """A float32 model, the same on every run. Parameters that start as 0 or 1, which would hide
    errors, are random too."""
    import transformers

    text = "Text" if family.name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{family.name}{text}Config")
    config = config(**copy.deepcopy(family.config), dtype=torch.float32)
    torch.manual_seed(0)
    model = getattr(transformers, family.name + family.model)(config).eval()
    for x in model.parameters():
        torch.nn.init.normal_(x, 0.0 if x.ndim > 1 else 0.5, 0.2)
    return model


def text(padding: str, rows: int = 3, length: int = LENGTH):
    """Ids and a mask (rows,length), padded on the "left", the "right", on "both" sides or not."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length))
    mask = torch.ones_like(ids)
    for b, n in enumerate((0, 7, 15)[:rows]):
        if padding in ("left", "both"):
            mask[b, :n] = 0
        if padding in ("right", "both"):
            mask[b, length - n // 3 - 1 :] = 0
    return ids * mask, mask


def inputs(family: Family, padding: str) -> dict:
    torch.manual_seed(2)
    if family.given == "pixels":
        return dict(pixel_values=torch.randn(2, 3, 32, 32))
    if family.given == "waves":
        return dict(input_values=torch.randn(2, 200))
    ids, mask = text(padding)
    if family.given == "encoded":
        return dict(input_ids=ids, attention_mask=mask)
    if family.given == "pair":
        labels = torch.randint(3, VOCABULARY, (3, 9))
        return dict(input_ids=ids, attention_mask=mask, labels=labels)
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) <= 1), -100)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)
