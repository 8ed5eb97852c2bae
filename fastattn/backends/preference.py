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

    def calls(self) -> str:
        least, most = self.head_dims
        return f"{' and '.join(self.passes)} with D {least} to {most}"

    def __str__(self) -> str:
        features = ", ".join(str(x.name).lower() for x in Feature if x & self.features)
        dtypes = " and ".join(sorted(str(x)[6:] for x in self.dtypes))
        where = f"{self.backend} before {self.instead_of} on sm_{self.architecture}"
        return (
            f"{where} for {self.calls()}, in {dtypes}, plain or with {features}, if kernels of "
            f"{self.kernels} run them"
        )


# A rule needs a measurement, or until there is one a bound that is lower by this factor.
MARGIN = 1.1
_HALF = frozenset({torch.bfloat16, torch.float16})
# What the loops of plain kernels compute, as they have no code for anything else.
_PLAIN = Feature.BAND | Feature.LENGTHS | Feature.SINKS | Feature.GQA | Feature.PACKED


def _on_hopper(
    passes: tuple[str, ...],
    head_dims: tuple[int, int],
    features: Feature,
    *evidence: tuple[dict[str, Figures], dict[str, Figures]],
) -> Rule:
    pairs = tuple(Evidence(*x) for x in evidence)
    return Rule(90, passes, head_dims, features, _HALF, "cuda", "sm_90", "triton", pairs)


# Triton's kernels pad head dims to powers of two.
RULES: list[Rule] = [
    _on_hopper(
        ("forward", "backward"),
        (33, 128),
        _PLAIN,
        (
            {"forward D64 plain": Figures(767, 261), "dqkv D64 plain": Figures(1196, 768)},
            {
                "forward D64 plain": Figures(954, 264),
                "dq D64 plain": Figures(1014, 384),
                "dkv D64 plain": Figures(1616, 652),
            },
        ),
        (
            {"forward D128 plain": Figures(851, 512), "dqkv D128 plain": Figures(1587, 1331)},
            {
                "forward D128 plain": Figures(1048, 512),
                "dq D128 plain": Figures(1420, 768),
                "dkv D128 plain": Figures(1752, 1100),
            },
        ),
    ),
    _on_hopper(
        ("forward",),
        (65, 96),
        _PLAIN,
        (
            {"forward D96 plain": Figures(834, 384)},
            {"forward D128 plain": Figures(1048, 512)},
        ),
    ),
    _on_hopper(
        ("forward",),
        (129, 192),
        _PLAIN,
        (
            {"forward D192 plain": Figures(1095, 768)},
            {"forward D256 plain": Figures(1876, 1056)},
        ),
    ),
]


def passes_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of the passes that a call needs."""
    forward = "weights" if spec.weights else "forward"
    backward = "weights_backward" if spec.weights else "backward"
    return (forward, backward) if spec.needs_grad else (forward,)
