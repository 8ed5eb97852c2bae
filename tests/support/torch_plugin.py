"""A pytest plugin for torch's own tests of varlen_attn and flex_attention: they run on fastattn, on
a CPU.

    PYTHONPATH=<this checkout> python -m pytest -p tests.support.torch_plugin --sample=100 \
        <torch>/test/test_varlen_attention.py <torch>/test/inductor/test_flex_attention.py

varlen_attn runs on fastattn wherever they call it. Of flex_attention, what they compile runs on
fastattn, without a compiler, and raises what fastattn raises; what they call uncompiled is torch's,
which is their reference. Cases that they skip on CPUs run, with gradients. --sample draws so many
of all cases. The tests need torch's `expecttest`.
"""

import functools
import random

import torch
from torch.nn.attention import flex_attention as module
from torch.testing._internal import common_cuda, common_device_type

import fastattn
from fastattn.dropin import varlen_patching

torchs, torchs_compile = module.flex_attention, torch.compile
active = [0]  # calls of compiled functions
calls = [0]  # of fastattn's flex_attention


@functools.wraps(torchs)
def flex_attention(*args, **kwargs):
    if not active[0]:
        return torchs(*args, **kwargs)
    calls[0] += 1
    return fastattn.flex_attention(*args, **kwargs)


def compile(function=None, **options):
    """In place of torch.compile: a function in which flex_attention is fastattn's."""
    if function is None:
        return functools.partial(compile, **options)

    @functools.wraps(function, updated=())
    def run(*args, **kwargs):
        active[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            active[0] -= 1

    return run


def always(*_, **__):
    """In place of a condition under which a test is skipped."""
    return lambda test: test


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, help="how many of all cases")


def pytest_configure(config):
    varlen_patching.take()
    module.flex_attention = flex_attention
    module._validate_device = lambda *_: None  # torch's own has gradients on CPUs, uncompiled
    common_cuda.PLATFORM_SUPPORTS_FLASH_ATTENTION = common_cuda.PLATFORM_SUPPORTS_BF16 = True
    common_device_type.flex_attention_supported_platform = lambda test: test
    common_device_type.skipCPUIf = always
    instantiate = common_device_type.instantiate_device_type_tests

    def on_cpus(tests, scope, **_):
        instantiate(tests, scope, only_for=("cpu",))

    common_device_type.instantiate_device_type_tests = on_cpus


def pytest_runtest_setup(item):
    of_flex = hasattr(item.module, "flex_attention")
    torch.compile = compile if of_flex else torchs_compile


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{calls[0]} calls of fastattn.flex_attention")


def pytest_collection_modifyitems(config, items):
    for tests in {item.module for item in items}:
        with_gradients = getattr(tests, "DEVICE_SUPPORTS_BACKWARDS", None)
        if with_gradients is not None:
            with_gradients.items.add("cpu")
    most = config.getoption("sample")
    if most is not None and most < len(items):
        items[:] = random.Random(0).sample(items, most)
