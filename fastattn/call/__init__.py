"""One call as data: tensors, scalars, the rules for them, and the spec of a valid call."""
