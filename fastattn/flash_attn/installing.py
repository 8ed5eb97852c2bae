"""Make `import flash_attn` find this package, for code that cannot be changed.

A finder on sys.meta_path answers imports, `importlib.util.find_spec` and `importlib.metadata`, as
an installed flash-attn would. `transformers_checks` handles the further checks of transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType

from . import bert_padding, flash_attn_interface, passes, transformers_checks

__version__ = "2.8.3"  # the flash-attn version that this package imitates

_NAME = "flash_attn"
_MODULES = {
    _NAME: flash_attn_interface,
    f"{_NAME}.flash_attn_interface": flash_attn_interface,
    f"{_NAME}.bert_padding": bert_padding,
}
_PRIVATE = {f"{_NAME}.flash_attn_interface": passes}  # private, but imported by other libraries


def install() -> None:
    """Make `import flash_attn` find this package.

    `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` are found, too.
    importlib.metadata then lists flash-attn 2.8.3, and transformers, imported before or after,
    accepts "flash_attention_2", on CPUs too. diffusers checks for flash_attn when it is imported:
    call this function first. A second call changes nothing.

    Raises:
        RuntimeError: Another flash_attn is installed.

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
    if _NAME in sys.modules or importlib.util.find_spec(_NAME):
        raise RuntimeError(
            "flash_attn: another package of this name is installed, expected none; uninstall it "
            "(pip uninstall flash-attn), or import from fastattn.flash_attn and keep it installed"
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
    transformers_checks.retract(flash_attn_interface)


class _FlashAttnFinder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name in _MODULES:
            return ModuleSpec(name, self, origin=_MODULES[name].__file__, is_package=name == _NAME)
        if name in transformers_checks.MODULES:
            return _then(transformers_checks.answer, PathFinder.find_spec(name, path, target))
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python makes an empty module, which `exec_module` fills

    def exec_module(self, module: ModuleType) -> None:
        source = _MODULES[module.__name__]
        module.__dict__.update({name: getattr(source, name) for name in source.__all__})
        private = _PRIVATE.get(module.__name__)
        module.__dict__.update({x: getattr(private, x) for x in getattr(private, "__all__", ())})
        module.__dict__.update(__doc__=source.__doc__, __version__=__version__)
        for name in _MODULES:  # importing the package imports its submodules, too
            importlib.import_module(name)

    def find_distributions(self, context: DistributionFinder.Context | None = None):
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower().replace("_", "-") == "flash-attn":
            yield _Distribution()


class _Distribution(Distribution):
    """The distribution that importlib.metadata finds for flash-attn."""

    def read_text(self, filename: str) -> str | None:
        metadata = f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {__version__}\n"
        return {"METADATA": metadata, "top_level.txt": f"{_NAME}\n"}.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(f"{path}: this flash-attn is fastattn.flash_attn, without files")


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
