"""fastattn in other libraries, by a line each. README.md has the tables.

    fastattn.integrations.transformers.register() then attn_implementation="fastattn"
    fastattn.integrations.diffusers.register()    then model.set_attention_backend("fastattn")

Each `register` has its `unregister`: both may be called twice, and the second undoes the first
exactly. No library is imported before it is asked for.
"""

from . import diffusers, transformers

__all__ = ["diffusers", "transformers"]


def __dir__() -> list[str]:
    return sorted(__all__)
