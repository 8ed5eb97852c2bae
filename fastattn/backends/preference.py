"""The order in which backends are tried, and the calls on some GPUs that have another order."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..call.spec import AttentionSpec, Feature, Tensors

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


class Figures(NamedTuple):
    """What the main loops of some kernels take together for 64 x 64 scores, by the ledger."""

    instructions: int
    bound: int  # cycles of the busiest unit of a multiprocessor


class Evidence(NamedTuple):
    """Kernels in bench/results/ledger-sm_*.txt that run the passes of a rule, for calls of the same
    head dims and features. They are named as in "forward D96 plain"."""

    of_backend: dict[str, Figures]
    of_other: dict[str, Figures]  # of `instead_of`, which may pad head dims to others


class Rule(NamedTuple):
    """Calls for which `backend` comes before `instead_of` on GPUs of one architecture: they have
    all of these properties, and the kernels of class `kernels` run each of their passes."""

    architecture: int  # 90 for compute capability 9.0
    passes: tuple[str, ...]  # as `passes_of` returns them
    head_dims: tuple[int, int]  # the least and the most that the larger of D and Dv may be
    features: Feature  # the call has no other features
    dtypes: frozenset[torch.dtype]
    backend: str
    kernels: str
    instead_of: str
    evidence: tuple[Evidence, ...]

    def admits(self, spec: AttentionSpec, architecture: int) -> bool:
        least, most = self.head_dims
        return (
            architecture == self.architecture
            and passes_of(spec) == self.passes
            and least <= max(spec.D, spec.Dv) <= most
            and not spec.features & ~(self.features | Feature.GRAD)
            and spec.dtype in self.dtypes
        )

    def brief(self) -> str:
        least, most = self.head_dims
        what = f"{' and '.join(self.passes)} with D from {least} to {most}"
        return f"before {self.instead_of} on sm_{self.architecture} for {what}"

    def __str__(self) -> str:
        features = ", ".join(str(x.name).lower() for x in Feature if x & self.features)
        dtypes = " and ".join(sorted(str(x)[6:] for x in self.dtypes))
        return (
            f"{self.backend} {self.brief()}, in {dtypes}, plain or with {features}, if kernels of "
            f"{self.kernels} run them"
        )


# A rule needs a measurement, or until there is one a bound that is lower by this factor.
MARGIN = 1.1
RULES: list[Rule] = []


def passes_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of the passes that a call needs."""
    forward = "weights" if spec.weights else "forward"
    backward = "weights_backward" if spec.weights else "backward"
    return (forward, backward) if spec.needs_grad else (forward,)
