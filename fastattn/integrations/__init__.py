"""Enable fastattn in other libraries, with one line for each. README.md has the tables.

    fastattn.integrations.transformers.register() then attn_implementation="fastattn"
    fastattn.integrations.diffusers.register()    then model.set_attention_backend("fastattn")

Each `register` has an `unregister`, which undoes it exactly; both may be called twice. No library
is imported before its `register` is called.
"""

from . import diffusers, transformers

__all__ = ["diffusers", "transformers"]


def __dir__() -> list[str]:
    return sorted(__all__)
