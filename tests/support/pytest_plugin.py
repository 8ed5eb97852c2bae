"""A pytest plugin for other libraries' own tests: they run on fastattn, at any size.

    PYTHONPATH=<this checkout> python -m pytest -p tests.support.pytest_plugin <their tests>

`fastattn.patch()` is active before their modules are imported. With --registered, models of
transformers that would use sdpa use attn_implementation="fastattn" instead, where `register()` does
not refuse them, and "native" of diffusers is fastattn's backend. The summary ends with the number
of calls that ran on our kernels: a run with 0 shows nothing.
"""

import functools
from collections import Counter

import torch

import fastattn
from fastattn import api
from fastattn.dropin import patching

calls: Counter[str] = Counter()


def pytest_addoption(parser):
    parser.addoption("--registered", action="store_true", help="integrations' register(), too")


def pytest_configure(config):
    patching.SMALL = 0  # their tests are small, and torch's function is as fast there
    api.call = counted(api.call)
    fastattn.patch()
    if config.getoption("registered"):
        in_transformers()
        in_diffusers()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"fastattn: {calls['eager']} calls of its kernels in eager mode")


def counted(call):
    @functools.wraps(call)
    def counting(*args):
        if not torch.compiler.is_compiling():
            calls["eager"] += 1
        return call(*args)

    return counting


def in_transformers():
    """Where transformers' choice is "sdpa", it is "fastattn", but for models that refuse it."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return
    from fastattn.integrations import transformers as ours

    ours.register()
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self, *args, **kwargs):
        choice = original(self, *args, **kwargs)
        return ours.NAME if choice == "sdpa" and ours._why_not(type(self)) is None else choice

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def in_diffusers():
    """The backend of models for which none was set."""
    try:
        from diffusers.models import attention_dispatch
    except ImportError:
        return
    from fastattn.integrations import diffusers as ours

    ours.register()
    names = attention_dispatch.AttentionBackendName
    attention_dispatch._AttentionBackendRegistry.set_active_backend(names(ours.NAME))
