"""Whole serving engines, vLLM and SGLang on CPUs, with and without fastattn's attention."""
