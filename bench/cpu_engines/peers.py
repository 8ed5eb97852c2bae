"""The peers: which adapter computes, in which environment, as which variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..peers.registry import BASELINE, SUBJECT
from .environments import ENVIRONMENTS, Environment

UNQUANTISED = f"{SUBJECT} unquantised"


@dataclass(frozen=True)
class Peer:
    """`adapter` is a module of the folder workers, `variant` one of its ways to compute. Without an
    environment it runs in this process's Python."""

    name: str
    adapter: str
    variant: str = ""
    environment: Environment | None = None

    @property
    def family(self) -> str:
        """The engine, of which variants share a column."""
        return self.name.split()[0]


def _in(environment: str, adapter: str, names: dict[str, str]) -> list[Peer]:
    """By variant, the names of peers."""
    where = ENVIRONMENTS[environment]
    return [Peer(name, adapter, variant, where) for variant, name in names.items()]


PEERS = {
    peer.name: peer
    for peer in (
        Peer(SUBJECT, "ours"),
        Peer(UNQUANTISED, "ours", "unquantised"),
        Peer(BASELINE, "torch_sdpa"),
        *_in(
            "onnxruntime",
            "onnx_operators",
            {x: f"onnxruntime {x}" for x in ("MHA", "GQA", "Attention")},
        ),
        *_in("openvino", "openvino_sdpa", {"": "openvino"}),
        *_in("vllm", "vllm_kernels", {"": "vllm"}),
        *_in("vllm", "sglang_kernels", {"": "sglang"}),
        *_in(
            "ggml", "ggml_library", {"": "ggml"} | {x: f"ggml {x}" for x in ("f16", "q8_0", "q4_0")}
        ),
    )
}
# What of a family is an engine to beat: not ourselves.
FAMILIES = tuple(dict.fromkeys(p.family for p in PEERS.values() if p.family != SUBJECT))


def selected(names: Sequence[str]) -> dict[str, Peer]:
    """Ours, and the peers of these families or names; all by default.

    Raises ValueError at a name that is none."""
    known = {*FAMILIES, *PEERS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--engines: got {unknown}, expected some of {sorted(known)}")
    ours = (SUBJECT, UNQUANTISED)
    return {
        name: peer
        for name, peer in PEERS.items()
        if name in ours or not names or name in names or peer.family in names
    }
