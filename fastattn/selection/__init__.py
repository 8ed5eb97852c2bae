"""Sparse attention by index: attention to keys that each row names, and the choice of keys."""
