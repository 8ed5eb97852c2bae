"""Choices that were measured: the files of them, those of this folder, which have been committed,
and those that `python -m fastattn tune` writes on a machine."""
