"""A pytest plugin for FlashAttention-3's and -4's own tests: they run on `fastattn.flash_attn`, on
a CPU.

    PYTHONPATH=<this checkout> python -m pytest -p tests.support.flash_attn_plugin \
        --flash-attn=<checkout of flash-attention> --most=40 <their tests>

`install()` is active before their modules are imported. Their tests ask for "cuda", and get CPU
tensors. --most draws so many cases of each test, of sizes up to 300 if it has these; --gpu=10 is
the compute capability that they find, by which theirs skip cases. Modules of their tests that lie
in their package (`flash_attn.cute.testing`), and their references of norms, are read from the
checkout.
"""

import ast
import importlib
import importlib.util
import random
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import torch
from torch.overrides import TorchFunctionMode

from fastattn import flash_attn


class OnCPU(TorchFunctionMode):
    """Tensors of "cuda" are the CPU's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*("cpu" if is_cuda(x) else x for x in args), **kwargs)


def is_cuda(device):
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def pytest_addoption(parser):
    parser.addoption("--flash-attn", type=Path, help="a checkout of flash-attention")
    parser.addoption("--most", type=int, help="cases of each test")
    parser.addoption("--gpu", type=int, default=9, help="the compute capability that tests find")


def pytest_configure(config):
    flash_attn.install()
    torch.cuda.get_device_capability = lambda *_: (config.getoption("gpu"), 0)
    for name in ("synchronize", "empty_cache", "manual_seed"):
        setattr(torch.cuda, name, lambda *_: None)
    OnCPU().__enter__()
    root = config.getoption("flash_attn")
    if root is None:
        return
    sys.path.insert(0, str(root / "hopper"))
    module("flash_attn.cute.testing", root / "flash_attn/cute/testing.py")
    cache = module("flash_attn.cute.cache_utils")
    cache.JITCache, cache.get_jit_cache = dict, lambda name: {}
    interface = importlib.import_module("flash_attn.cute.interface")
    interface.__getattr__ = private
    norms = importlib.import_module("flash_attn.ops.triton.layer_norm")
    norms.__dict__.update(references(root / "flash_attn/ops/triton/layer_norm.py"))
    norms.layer_norm_linear_fn = None  # which is not served


def references(file):
    """The functions of this file with names that end in _ref; the file imports a compiler."""
    tree, found = ast.parse(file.read_text()), {"torch": torch, "F": torch.nn.functional}
    tree.body = [x for x in tree.body if getattr(x, "name", "").endswith("_ref")]
    exec(compile(tree, str(file), "exec"), found)
    return {name: x for name, x in found.items() if name.endswith("_ref")}


def private(name):
    if not name.startswith("_flash_attn"):
        raise AttributeError(name)

    def call(*_, **__):
        raise NotImplementedError(f"{name}: a private function of FlashAttention-4")

    return call


def module(name, file=None):
    """A module of their package: empty, or of this file."""
    if file is not None and file.exists():
        spec = importlib.util.spec_from_file_location(name, file)
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        spec.loader.exec_module(made)
        return made
    return sys.modules.setdefault(name, ModuleType(name))


def pytest_collection_modifyitems(config, items):
    most = config.getoption("most")
    if most is None:
        return
    of = defaultdict(list)
    for item in items:
        of[item.nodeid.split("[")[0]].append(item)
    draw = random.Random(0)
    for some in of.values():
        draw.shuffle(some)
        some.sort(key=lambda item: largest(item) > 300)
    items[:] = [item for some in of.values() for item in some[:most]]


def largest(item):
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return max((x for x in values if isinstance(x, int)), default=0)
