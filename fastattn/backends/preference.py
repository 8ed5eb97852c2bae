"""The order in which backends are tried, and the calls on some GPUs that have another order: the
rules of files that were measured."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..call.spec import AttentionSpec, Feature, Tensors
from .measured import files

# Triton's kernels come before those in CUDA C++, because they support newer GPUs.
PREFERENCE = ["cpu", "triton", "cuda", "reference"]


class KernelClasses(Protocol):
    """A backend that has several classes of kernels. Rules are about such backends."""

    def kernels(
        self, spec: AttentionSpec, device: torch.device, t: Tensors | None = None
    ) -> dict[str, str]:
        """By pass of `passes_of(spec)`, the class of the kernels that would run it on a device:
        "sm_90", "sm_80", or "sm_80: " and why not those of sm_90. This may depend on addresses and
        strides, which are t's; without t they are those of gapless, aligned tensors."""
        ...


class Rule(NamedTuple):
    """Calls for which `backend` comes before `instead_of` on GPUs of one architecture: they have
    all of these properties, and the kernels of class `kernels` run each of their passes."""

    architecture: int  # 90 for compute capability 9.0
    passes: tuple[str, ...]  # as `passes_of` returns them
    head_dims: tuple[int, int]  # the least and the most that the larger of D and Dv may be
    features: Feature  # the call has no other features
    dtypes: frozenset[torch.dtype]
    backend: str
    kernels: str  # "": of any class
    instead_of: str
    evidence: tuple[str, ...] = ()  # files of bench/results that timed both backends on such calls
    all_features: bool = False  # the call has every one of the features, too
    sizes: tuple[tuple[str, int, int], ...] = ()  # the least and the most of M, N and heads
    source: str = ""  # the file that has the rule

    def admits(self, spec: AttentionSpec, architecture: int) -> bool:
        least, most = self.head_dims
        given = spec.features & ~Feature.GRAD
        return (
            architecture == self.architecture
            and passes_of(spec) == self.passes
            and least <= max(spec.D, spec.Dv) <= most
            and not given & ~self.features
            and not (self.all_features and self.features & ~given)
            and spec.dtype in self.dtypes
            and all(low <= size(spec, name) <= high for name, low, high in self.sizes)
        )

    def calls(self) -> str:
        least, most = self.head_dims
        unless = "" if self.features & Feature.BAND else " if nothing is causal or windowed"
        return f"{' and '.join(self.passes)} with D {least} to {most}{unless}"

    def __str__(self) -> str:
        features = ", ".join(str(x.name).lower() for x in Feature if x & self.features)
        dtypes = " and ".join(sorted(str(x)[6:] for x in self.dtypes))
        where = f"{self.backend} before {self.instead_of} on sm_{self.architecture}"
        calls = self.calls() + "".join(f", {x} {low} to {high}" for x, low, high in self.sizes)
        kernels = f", if kernels of {self.kernels} run them" if self.kernels else ""
        having = "with" if self.all_features else "plain or with"
        return f"{where} for {calls}, in {dtypes}, {having} {features or 'nothing more'}{kernels}"

    def written(self) -> dict[str, Any]:
        """The rule as a file has it; `parsed` makes it again."""
        return dict(
            backend=self.backend,
            kernels=self.kernels,
            instead_of=self.instead_of,
            passes=[*self.passes],
            head_dims=[*self.head_dims],
            features=[x.name for x in Feature if x & self.features],
            dtypes=sorted(str(x)[6:] for x in self.dtypes),
            evidence=[*self.evidence],
            all_features=self.all_features,
            sizes=[[*x] for x in self.sizes],
        )


def parsed(written: dict[str, Any], architecture: int, source: str) -> Rule:
    """Raises KeyError, TypeError, ValueError or AttributeError for what is no rule."""
    least, most = written["head_dims"]
    passes, sizes = tuple(written["passes"]), tuple(map(tuple, written.get("sizes", ())))
    evidence = tuple(written.get("evidence", ()))
    dtypes = frozenset(getattr(torch, x) for x in written["dtypes"])
    backend, instead_of, kernels = (written[x] for x in ("backend", "instead_of", "kernels"))
    whole = [least, most, architecture, *(x for _, *bounds in sizes for x in bounds)]
    for name, right in dict(
        sizes=all(name in SIZES and low <= high for name, low, high in sizes),
        head_dims=all(type(x) is int for x in whole) and least <= most,
        passes=passes and set(passes) <= PASSES,
        dtypes=all(isinstance(x, torch.dtype) for x in dtypes),
        backend=backend in PREFERENCE and backend != instead_of,
        instead_of=instead_of in PREFERENCE,
        # The backend in CUDA C++ alone has several classes of kernels.
        kernels=isinstance(kernels, str) and (not kernels or backend == "cuda"),
        evidence=all(isinstance(x, str) for x in evidence),
    ).items():
        if not right:
            raise ValueError(f"{name}: got {written.get(name)!r}")
    features = Feature.NONE
    for name in written["features"]:
        features |= Feature[name]
    return Rule(
        architecture,
        passes,
        (least, most),
        features,
        dtypes,
        backend,
        kernels,
        instead_of,
        evidence,
        bool(written.get("all_features", False)),
        sizes,
        source,
    )


PASSES = {"forward", "backward", "weights", "weights_backward"}
SIZES = "M", "N", "heads"  # of all items


def size(spec: AttentionSpec, name: str) -> int:
    return spec.B * spec.H if name == "heads" else getattr(spec, name)


def _rules(found: files.Measured, written: list[dict[str, Any]], source: str) -> tuple[Rule, ...]:
    return tuple(parsed(x, found.identity["architecture"], source) for x in written)


@functools.cache
def committed() -> tuple[Rule, ...]:
    """The rules that come with the package."""
    found = map(files.read, sorted(files.COMMITTED.glob("*.json")))
    shown = Path(*files.COMMITTED.parts[-3:])  # fastattn/backends/measured
    return tuple(
        rule
        for x in found
        for rule in _rules(x, x.choices["rules"], (shown / x.path.name).as_posix())
    )


@functools.cache
def rules(device: torch.device) -> tuple[Rule, ...]:
    """The rules for a GPU. Those that were measured on this machine come last: the last one that
    admits a call decides."""
    found = files.here(device)
    if found is None:
        return committed()

    def parse(written: list[dict[str, Any]]) -> tuple[Rule, ...]:
        return _rules(found, written, str(found.path))

    return committed() + files.choices(device, "rules", parse, ())


def passes_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of the passes that a call needs."""
    forward = "weights" if spec.weights else "forward"
    backward = "weights_backward" if spec.weights else "backward"
    return (forward, backward) if spec.needs_grad else (forward,)
