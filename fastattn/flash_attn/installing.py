"""Make `import flash_attn` and `import flash_attn_interface` find this package, for code that
cannot be changed.

A finder on sys.meta_path answers imports, `importlib.util.find_spec` and `importlib.metadata`, as
an installed flash-attn 2, 3 and 4 would. `transformers_checks` handles the further checks of
transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import NamedTuple

from . import (
    activations,
    bert_padding,
    cute,
    flash_attn_3,
    flash_attn_interface,
    losses,
    mha,
    norms,
    passes,
    rotary,
    transformers_checks,
)

__version__ = "2.8.3"  # the flash-attn version that this package imitates


class _Module(NamedTuple):
    """A module has the public names of `source`, and those of `private`."""

    version: str
    source: ModuleType
    private: ModuleType | None = None


class _Package(NamedTuple):
    """A distribution, and the packages in it."""

    name: str
    version: str
    packages: tuple[str, ...]


_PACKAGES = (
    _Package("flash-attn", __version__, ("flash_attn",)),
    _Package("flash-attn-3", "3.0.0", ("flash_attn_3", "flash_attn_interface")),
    _Package("flash-attn-4", "4.0.0", ("flash_attn",)),
)
_2, _3, _4 = (x.version for x in _PACKAGES)
_FOLDER = ModuleType("flash_attn", "A folder of modules.")  # without names of its own
_FOLDER.__dict__.update(__all__=[], __file__=__file__)
_MODULES = {
    "flash_attn": _Module(_2, flash_attn_interface),
    # passes are private, but other libraries import them
    "flash_attn.flash_attn_interface": _Module(_2, flash_attn_interface, passes),
    "flash_attn.bert_padding": _Module(_2, bert_padding),
    "flash_attn.layers": _Module(_2, _FOLDER),
    "flash_attn.layers.rotary": _Module(_2, rotary),
    "flash_attn.losses": _Module(_2, _FOLDER),
    "flash_attn.losses.cross_entropy": _Module(_2, losses),
    "flash_attn.modules": _Module(_2, _FOLDER),
    "flash_attn.modules.mha": _Module(_2, mha),
    "flash_attn.ops": _Module(_2, _FOLDER),
    "flash_attn.ops.activations": _Module(_2, activations),
    "flash_attn.ops.rms_norm": _Module(_2, norms),
    "flash_attn.ops.triton": _Module(_2, _FOLDER),
    "flash_attn.ops.triton.cross_entropy": _Module(_2, losses),
    "flash_attn.ops.triton.layer_norm": _Module(_2, norms),
    "flash_attn.ops.triton.rotary": _Module(_2, rotary),
    "flash_attn.cute": _Module(_4, cute),
    "flash_attn.cute.interface": _Module(_4, cute),
    "flash_attn.cute.block_sparsity": _Module(_4, cute),
    "flash_attn_interface": _Module(_3, flash_attn_3),
    "flash_attn_3": _Module(_3, flash_attn_3),
    "flash_attn_3.flash_attn_interface": _Module(_3, flash_attn_3),
}
_NAMES = tuple(x for x in _MODULES if "." not in x)


def install() -> None:
    """Make `import flash_attn` and `import flash_attn_interface` find this package.

    They are FlashAttention-2 (`flash_attn`), -3 (`flash_attn_interface`, `flash_attn_3`) and -4
    (`flash_attn.cute`). importlib.metadata then lists flash-attn 2.8.3, flash-attn-3 and
    flash-attn-4. transformers, imported before or after, accepts "flash_attention_2",
    "flash_attention_3" and "flash_attention_4", on CPUs too. diffusers checks for flash_attn when
    it is imported: call this function first. A second call changes nothing.

    Raises:
        RuntimeError: Another package of one of these names is installed.

    Example:
        >>> import importlib.metadata
        >>> import fastattn.flash_attn
        >>> fastattn.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func is fastattn.flash_attn.flash_attn_func
        True
        >>> importlib.metadata.version("flash-attn")
        '2.8.3'
        >>> fastattn.flash_attn.uninstall()
    """
    if _FINDER in sys.meta_path:
        return
    for name in _NAMES:
        if name in sys.modules or importlib.util.find_spec(name):
            raise RuntimeError(
                f"{name}: another package of this name is installed, expected none; uninstall it, "
                "or import from fastattn.flash_attn and keep it installed"
            )
    sys.meta_path.insert(0, _FINDER)
    importlib.invalidate_caches()
    transformers_checks.answer()


def uninstall() -> None:
    """Undo `install` for later imports and checks.

    Modules that have imported functions by name keep them. Nothing happens if `install` was not
    called.

    Example:
        >>> import importlib.util
        >>> import fastattn.flash_attn
        >>> fastattn.flash_attn.install()
        >>> fastattn.flash_attn.uninstall()
        >>> print(importlib.util.find_spec("flash_attn"))
        None
    """
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name in _MODULES:
        sys.modules.pop(name, None)
    transformers_checks.retract((flash_attn_interface, flash_attn_3, cute))


class _FlashAttnFinder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name in _MODULES:
            origin = _MODULES[name].source.__file__
            is_package = any(x.startswith(f"{name}.") for x in _MODULES)
            return ModuleSpec(name, self, origin=origin, is_package=is_package)
        if name in transformers_checks.MODULES:
            return _then(transformers_checks.answer, PathFinder.find_spec(name, path, target))
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python makes an empty module, which `exec_module` fills

    def exec_module(self, module: ModuleType) -> None:
        given = _MODULES[module.__name__]
        for source in filter(None, (given.source, given.private)):
            module.__dict__.update({name: getattr(source, name) for name in source.__all__})
        module.__dict__.update(__doc__=given.source.__doc__, __version__=given.version)
        for name in _MODULES:  # importing a package imports its submodules, too
            if name.startswith(f"{module.__name__}."):
                importlib.import_module(name)

    def find_distributions(self, context: DistributionFinder.Context | None = None):
        wanted = getattr(context, "name", None)
        for package in _PACKAGES:
            if wanted is None or wanted.lower().replace("_", "-") == package.name:
                yield _Distribution(package)


class _Distribution(Distribution):
    """The distribution that importlib.metadata finds for a package."""

    def __init__(self, package: _Package) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        name, version, packages = self._package
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        found = {"METADATA": metadata, "top_level.txt": "".join(f"{x}\n" for x in packages)}
        return found.get(filename)

    def locate_file(self, path):
        name = self._package.name
        raise FileNotFoundError(f"{path}: this {name} is fastattn.flash_attn, without files")


def _then(act, spec: ModuleSpec | None) -> ModuleSpec | None:
    """Change a module's spec so that `act` is called after the module has executed."""
    if spec is None or spec.loader is None:
        return spec
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        act()

    spec.loader.exec_module = exec_module  # each spec has its own loader
    return spec


_FINDER = _FlashAttnFinder()
