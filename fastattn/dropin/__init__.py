"""Replacements of torch's own attention: the function, the module, and models that have them."""
