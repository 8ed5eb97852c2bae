"""Enable fastattn in other libraries, with one line for each. README.md has the tables.

    fastattn.integrations.transformers.register() then attn_implementation="fastattn"
    fastattn.integrations.diffusers.register()    then model.set_attention_backend("fastattn")
    fastattn.integrations.vllm.register()         or FASTATTN_VLLM=1 vllm serve ...

SGLang's option --attention-backend fastattn needs no call.

Each `register` has an `unregister`, which undoes it exactly; both may be called twice. No library
is imported before its `register` is called.
"""

from . import diffusers, transformers, vllm

__all__ = ["diffusers", "transformers", "vllm"]


def __dir__() -> list[str]:
    return sorted(__all__)
