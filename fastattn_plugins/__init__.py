"""The entry points of serving engines, which load them in each process.

They are outside of fastattn so that an engine imports it only where a variable asks for it.
"""

import os


def vllm() -> None:
    """Run vLLM's attention on fastattn if FASTATTN_VLLM is 1."""
    if _asked("FASTATTN_VLLM"):
        from fastattn.integrations import vllm

        vllm.register()


def sglang() -> None:
    """Add fastattn to the attention backends that SGLang's option names, and import it when it is
    chosen."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    def make(runner: object) -> object:
        from fastattn.integrations import sglang

        return sglang.make(runner)

    if "fastattn" not in choices.ATTENTION_BACKEND_CHOICES:
        choices.ATTENTION_BACKEND_CHOICES.append("fastattn")
    attention_registry.register_attention_backend("fastattn")(make)


def _asked(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: got {value!r}, expected 1, 0 or no value")
    return value == "1"
