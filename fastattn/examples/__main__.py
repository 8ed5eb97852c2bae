"""python -m fastattn.examples: the examples, and what each shows."""

from . import __doc__ as examples

print(examples)
