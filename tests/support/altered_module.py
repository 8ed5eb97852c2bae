"""Run tests with one module of the package altered:

    python -m tests.support.altered_module fastattn.score_mods.linear old new tests...

`old` occurs once in the module's source, and `new` replaces it. The exit status is pytest's: 1 if a
test fails.
"""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader

import pytest


class AlteredLoader(SourceFileLoader):
    """Load a module from its source with a replacement, without a cache."""

    def __init__(self, name: str, path: str, old: str, new: str):
        super().__init__(name, path)
        self.old, self.new = old, new

    def get_code(self, fullname: str):
        source = self.get_source(fullname)
        assert source.count(self.old) == 1, (
            f"{fullname} has {source.count(self.old)} of: {self.old}"
        )
        return compile(source.replace(self.old, self.new), self.path, "exec")


class AlteredFinder(importlib.abc.MetaPathFinder):
    """Find one module, for `AlteredLoader`."""

    def __init__(self, name: str, old: str, new: str):
        self.name, self.old, self.new = name, old, new

    def find_spec(self, fullname, path, target=None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # for the next line, which finds the module itself
        found = importlib.util.find_spec(fullname)
        assert found and found.origin
        loader = AlteredLoader(fullname, found.origin, self.old, self.new)
        return importlib.util.spec_from_loader(fullname, loader, origin=found.origin)


def main(name: str, old: str, new: str, *tests: str) -> int:
    sys.meta_path.insert(0, AlteredFinder(name, old, new))
    status = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests])
    assert name in sys.modules, f"no test imported {name}"
    return status


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
