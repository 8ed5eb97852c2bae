"""Import modules by the paths that they had in 0.1.0: pickles and scripts may name those.

A name in this table is imported as the module that took its place. No file has an old name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# New folder: modules that moved into it, old name=new name if it changed. Paths below the package.
_MOVED = {
    "": "forwards=module_types prerequisites=require_torch",
    "backends": "backend=base gpu launcher=native_launcher packing=per_sequence "
    "trouble=cuda_errors",
    "backends.native": "crossing=marshalling elf extents native=libraries",
    "backends.triton_support": "autotune compiled=launch_cache toolchain tuning=tile_configs",
    "call": "advice=argument_hints check=validation place quantisation scalars spec",
    "dispatch": "batching=vmap_fold context_parallel decomposition=onnx_decomposition "
    "derivatives=formulas events=profiler_events flops gradient_batches=legacy_vmap operation "
    "operators=library_ops overrides=torch_function passes=run_pass roads=dispatcher "
    "transforms=functorch",
    "distributed": "distributed.agreement=consistency distributed.calls=attention_call "
    "distributed.cost=cost_model distributed.hops=p2p distributed.whole=global_call",
    "dropin": "conversion multihead nested nested_heads patching torch_form=sdpa",
    "inspection": "calls=call_record explaining=explain_call observing=recorder profiling report "
    "sights=capture structure=mask_structure untouched=restore_state",
    "kv_cache": "cache pages=block_pool",
    "nn": "nn.interchange=state_dict_conversion nn.single=single_head",
}


def _table() -> dict[str, str]:
    """Old path -> new path."""
    package, table = __name__.partition(".")[0], {}
    for folder, names in _MOVED.items():
        for old, _, new in (name.partition("=") for name in names.split()):
            table[f"{package}.{old}"] = ".".join(filter(None, [package, folder, new or old]))
    return table


MOVED = _table()


class _OldPathFinder(MetaPathFinder, Loader):
    """Finds an old path where no file has it, and loads the module of the new path."""

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # the import system replaces it with the old path's
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Resolve old paths from now on. A finder that comes last: files go before. A reloaded package
    calls this again, and a copy of the package under another name has its own finder."""
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.append(_OldPathFinder())


def attributes(package: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package: imports `package.<name>` if that is an old path."""

    def __getattr__(name: str) -> ModuleType:
        if (old := f"{package}.{name}") in MOVED:
            return importlib.import_module(old)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
