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
    evidence: tuple[str, ...]  # files of bench/results that timed both backends on such calls

    def admits(self, spec: AttentionSpec, architecture: int) -> bool:
        least, most = self.head_dims
        return (
            architecture == self.architecture
            and passes_of(spec) == self.passes
            and least <= max(spec.D, spec.Dv) <= most
            and not spec.features & ~(self.features | Feature.GRAD)
            and spec.dtype in self.dtypes
        )

    def calls(self) -> str:
        least, most = self.head_dims
        unless = "" if self.features & Feature.BAND else " if nothing is causal or windowed"
        return f"{' and '.join(self.passes)} with D {least} to {most}{unless}"

    def __str__(self) -> str:
        features = ", ".join(str(x.name).lower() for x in Feature if x & self.features)
        dtypes = " and ".join(sorted(str(x)[6:] for x in self.dtypes))
        where = f"{self.backend} before {self.instead_of} on sm_{self.architecture}"
        return (
            f"{where} for {self.calls()}, in {dtypes}, plain or with {features}, if kernels of "
            f"{self.kernels} run them"
        )


_HALF = frozenset({torch.bfloat16, torch.float16})
# What the loops of plain kernels compute, as they have no code for anything else.
_PLAIN = Feature.BAND | Feature.LENGTHS | Feature.SINKS | Feature.GQA | Feature.PACKED
_FORWARD, _TRAINING = ("forward",), ("forward", "backward")


def _on_hopper(passes: tuple[str, ...], head_dims: tuple[int, int], evidence: str) -> Rule:
    return Rule(90, passes, head_dims, _PLAIN, _HALF, "cuda", "sm_90", "triton", (evidence,))


RULES: list[Rule] = [
    _on_hopper(_TRAINING, (33, 128), "gpu/nvidia-h200-experiments.json"),
    _on_hopper(_FORWARD, (33, 192), "nvidia-h100-80gb-hbm3.json"),
]


def passes_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of the passes that a call needs."""
    forward = "weights" if spec.weights else "forward"
    backward = "weights_backward" if spec.weights else "backward"
    return (forward, backward) if spec.needs_grad else (forward,)
