"""Run a model many times, and leave the model and its inputs unchanged."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def need_initialised(owner: nn.Module | None) -> None:
    named = () if owner is None else chain(owner.named_parameters(), owner.named_buffers())
    for name, x in named:
        if nn.parameter.is_lazy(x):
            raise ValueError(
                f"got an uninitialised lazy module ({name}), expected one that has run once: call "
                "the model on its inputs first"
            )


@contextmanager
def unchanged(owner: nn.Module | None) -> Generator[None]:
    """Restore a module's buffers and the random generators after the block. A buffer without a
    write is left alone, because a graph that has yet to run backward may need it."""
    modules = [] if owner is None else list(owner.modules())
    before = [(m, dict(m._buffers)) for m in modules]
    kept = [_Kept(x) for _, held in before for x in held.values() if x is not None]
    devices = {x.device for m in modules for x in m.parameters(recurse=False) if x.is_cuda}
    with torch.random.fork_rng([x.index for x in devices]):
        try:
            yield
        finally:
            for module, held in before:
                if not isinstance(module, torch.jit.ScriptModule):  # its buffers are views
                    module._buffers.clear()
                    module._buffers.update(held)
            for x in kept:
                x.restore()


class _Kept:
    """A tensor, and a copy of its value."""

    def __init__(self, x: Tensor):
        self.tensor, self.value, self.version = x, x.detach().clone(), _version(x)

    def changed(self) -> bool:
        return _version(self.tensor) != self.version or self._differs()

    def _differs(self) -> bool:
        """Compare the values, because not every write raises the version: batch norms' do not."""
        x, value = self.tensor.detach(), self.value
        if x.layout != torch.strided or x.is_meta or x.is_nested:
            return False
        return not bool(((x == value) | ((x != x) & (value != value))).all())

    def restore(self) -> None:
        if self.changed():
            mode = torch.inference_mode(self.tensor.is_inference())
            with mode, torch.no_grad(), suppress(RuntimeError):  # an expanded tensor refuses
                self.tensor.copy_(self.value)

    def copy(self) -> Tensor:
        if self.tensor.requires_grad and not self.tensor.is_leaf:
            return self.tensor.clone()
        return self.value.clone().requires_grad_(self.tensor.requires_grad)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


class Inputs:
    """The inputs of a model. Caches among them grow, so each run gets copies of all that is not a
    tensor, and of tensors that the first run wrote to."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    kept: dict[int, _Kept]
    looked: bool

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.given = args, kwargs
        tensors = {id(x): x for x in tree_leaves(self.given) if isinstance(x, Tensor)}
        self.kept = {at: _Kept(x) for at, x in tensors.items()}
        self.looked = False

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.looked:
            self.look()

    def look(self) -> None:
        """After the first run: find and restore the tensors that it wrote to."""
        self.looked = True
        self.kept = {at: x for at, x in self.kept.items() if x.changed()}
        for x in self.kept.values():
            x.restore()

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = {at: x.copy() for at, x in self.kept.items()} if self.looked else {}
        return tree_map(
            lambda x: copies.get(id(x), x) if isinstance(x, Tensor) else _copy(x), self.given
        )


def _copy(x: Any) -> Any:
    try:
        return copy.deepcopy(x)
    except Exception:  # whatever a copy may raise
        return x


def tensors_in(x: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in a model's output, also inside dataclasses and mappings of any kind."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
        return
    if isinstance(x, Mapping):
        inside = list(x.values())
    elif dataclasses.is_dataclass(x):
        inside = [getattr(x, name, None) for name in _attributes(x)]
    else:
        inside = [y for y in tree_leaves(x, is_leaf=lambda y: y is not x) if y is not x]
    for y in inside:
        yield from tensors_in(y, seen)


def _attributes(x: Any) -> set[str]:
    return {*getattr(x, "__dict__", ()), *(field.name for field in dataclasses.fields(x))}
