"""fastattn in other libraries, by a line each. README.md has the table.

    fastattn.integrations.diffusers.register()    then model.set_attention_backend("fastattn")

No library is imported before it is asked for.
"""

from . import diffusers

__all__ = ["diffusers"]
