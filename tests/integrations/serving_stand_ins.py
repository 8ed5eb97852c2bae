"""What fastattn's plugins import of vLLM and SGLang, where these are not installed: the names, and
the few things that the plugins' base classes do. Slow tests run the plugins in the engines."""

import enum
import sys
import types
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest
import torch

from fastattn import integrations

T = TypeVar("T")


def modules(monkeypatch, contents):
    """Put modules of these names, and their packages, where `import` looks first."""
    for name, members in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            if package not in sys.modules or not hasattr(sys.modules[package], "stands_in"):
                made = types.ModuleType(package)
                made.__dict__.update(__path__=[], stands_in=True)
                monkeypatch.setitem(sys.modules, package, made)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made)
        sys.modules[name].__dict__.update(members)


def forget(backend):
    """Make a later import load this module of `fastattn.integrations` anew."""
    if sys.modules.pop(f"{integrations.__name__}.{backend}", None) is not None:
        delattr(integrations, backend)


# --------------------------------------------------------------------------------------------- vLLM


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class Builder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec


class Impl(Generic[T]):
    pcp_world_size = dcp_world_size = 1


@dataclass
class MultipleOf:
    base: int


@dataclass
class Common:
    """vLLM's CommonAttentionMetadata."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    mm_req_doc_ranges: dict | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    dcp_local_seq_lens: torch.Tensor | None = None


class Logger:
    def info_once(self, text):
        pass


class Names(enum.Enum):
    """vLLM's AttentionBackendEnum."""

    CPU_ATTN = "vllm.CPUAttentionBackend"
    CPU_MLA = "vllm.CPUMLABackend"
    AMX_MLA = "vllm.AMXMLABackend"

    def get_path(self):
        return overrides.get(self, self.value)

    def is_overridden(self):
        return self in overrides

    def clear_override(self):
        overrides.pop(self, None)


overrides = {}
platform = types.SimpleNamespace(device_type="cpu", is_cpu=lambda: platform.device_type == "cpu")


@pytest.fixture
def vllm(monkeypatch):
    """The module: vLLM 0.32 on a CPU."""
    attention = "vllm.v1.attention"
    backend = dict(AttentionType=AttentionType, MultipleOf=MultipleOf)
    backend |= dict(AttentionBackend=object, CommonAttentionMetadata=Common)
    backend |= dict(AttentionImpl=Impl, AttentionMetadataBuilder=Builder)
    layout = types.SimpleNamespace(LBHNC="LBHNC")
    spec = type("CrossAttentionSpec", (), {})
    cached = types.SimpleNamespace(cache_clear=lambda: None)
    modules(
        monkeypatch,
        {
            "vllm": dict(__version__="0.32.0"),
            "vllm.envs": dict(VLLM_PLUGINS=None, VLLM_BATCH_INVARIANT=False),
            "vllm.logger": dict(init_logger=lambda name: Logger()),
            "vllm.platforms": dict(current_platform=platform),
            f"{attention}.backend": backend,
            f"{attention}.backends.registry": dict(
                AttentionBackendEnum=Names, register_backend=overrides.__setitem__
            ),
            f"{attention}.selector": dict(_cached_get_attn_backend=cached),
            "vllm.v1.kv_cache_interface": dict(KVCacheLayout=layout, CrossAttentionSpec=spec),
        },
    )
    forget("vllm_backend")
    yield sys.modules["vllm"]
    forget("vllm_backend")
    overrides.clear()
    platform.device_type = "cpu"


# ------------------------------------------------------------------------------------------- SGLang


class SGLangType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


ForwardMode = enum.Enum("ForwardMode", "EXTEND DECODE MIXED IDLE TARGET_VERIFY")


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None


class Pool:
    """SGLang's MHATokenToKVPool: a row for each token; row 0 and its page are for padding."""

    def __init__(self, size, page, heads, D, Dv, dtype=torch.float32):
        self.k, self.v = (torch.zeros(size + page, heads, x, dtype=dtype) for x in (D, Dv))

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v

    def set_kv_buffer(self, layer, at, k, v):
        self.k[at.loc], self.v[at.loc] = k, v


class WindowPool(Pool):
    """SGLang's SWAKVPool: layers with a window have a smaller pool, and a number in it for each
    token; -1 for one that no window reaches."""

    swa_layer_nums = 1

    def __init__(self, *sizes, numbers):
        super().__init__(*sizes)
        self.inside, self.numbers = Pool(*sizes), numbers
        self.layers_mapping = {0: (0, False), 1: (0, True)}

    def translate_loc_from_full_to_swa(self, tokens):
        return self.numbers[tokens]

    def get_key_buffer(self, layer_id):
        return self.inside.k if self.layers_mapping[layer_id][1] else self.k

    def get_value_buffer(self, layer_id):
        return self.inside.v if self.layers_mapping[layer_id][1] else self.v

    def set_kv_buffer(self, layer, at, k, v):
        if self.layers_mapping[layer.layer_id][1]:
            at = KVWriteLoc(at.swa_loc, None)
            self.inside.set_kv_buffer(layer, at, k, v)
        else:
            super().set_kv_buffer(layer, at, k, v)


@pytest.fixture
def sglang(monkeypatch):
    """The module: SGLang 0.5.23."""
    layers = "sglang.srt.layers"
    factories = {}

    def register_attention_backend(name):
        return lambda function: factories.setdefault(name, function)

    modules(
        monkeypatch,
        {
            "sglang": dict(__version__="0.5.23"),
            "sglang.srt.arg_groups.choices": dict(ATTENTION_BACKEND_CHOICES=["torch_native"]),
            f"{layers}.attention.attention_registry": dict(
                ATTENTION_BACKENDS=factories, register_attention_backend=register_attention_backend
            ),
            f"{layers}.attention.base_attn_backend": dict(AttentionBackend=object),
            f"{layers}.radix_attention": dict(AttentionType=SGLangType),
            "sglang.srt.mem_cache.memory_pool": dict(KVWriteLoc=KVWriteLoc),
            "sglang.srt.mem_cache.swa_memory_pool": dict(SWAKVPool=WindowPool),
            "sglang.srt.model_executor.forward_batch_info": dict(ForwardMode=ForwardMode),
        },
    )
    forget("sglang_backend")
    yield sys.modules["sglang"]
    forget("sglang_backend")
