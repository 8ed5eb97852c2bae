"""Explain a call: the cost of each strategy, which would run, and why the others would not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..api import Arguments, resolved, with_arguments
from ..dispatch.library_ops import opaque_to_dynamo
from . import cost_model
from .attention_call import STRATEGIES, Strategy, cheapest, weighed, whole, why_not
from .consistency import need_team
from .cost_model import CallSizes, Cost, Machine, machine_of, size_of
from .layout import CONTIGUOUS, Layout


@dataclass(frozen=True)
class DistributedExplanation:
    """What `explain` found: the strategy that would run, and the cost of each.

    Nothing was measured. Print it for a table.

    Attributes:
        call: The sizes of the call, which are the same on every rank.
        machine: The rates that were assumed.
        strategy: The strategy that would run.
        costs: For each strategy that could run: seconds, bytes sent and bytes of memory, of the
            rank with the most work.
        declined: The reason for each of the other strategies.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from fastattn import distributed
        >>> store = dist.HashStore()  # of a group with one rank; torchrun makes groups of several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> explanation = distributed.explain(*torch.randn(3, 1, 4, 16, 8), strategy="ring")
        >>> explanation.strategy, explanation.costs["ring"].sent
        ('ring', 0)
        >>> explanation.declined["usp"]
        "group: got 1 dimension for strategy='usp', expected a mesh of 2"
        >>> dist.destroy_process_group()
    """

    call: CallSizes
    machine: Machine
    strategy: str
    costs: dict[str, Cost]
    declined: dict[str, str]

    def __str__(self) -> str:
        c = self.call
        rows, keys = (sum(map(size_of, of)) for of in (c.rows, c.keys))
        dtype = str(c.dtype).removeprefix("torch.")
        passes = "forward and backward" if c.backward else "forward"
        ranks = " x ".join(map(str, c.mesh))
        sizes = f"q ({c.B}, {c.H}, {rows}, {c.D}), k ({c.B}, {c.Hk}, {keys}, {c.D}) {dtype}"
        lines = [f"{sizes} on {ranks} ranks, {passes}; by rates of {self.machine.name}"]
        for name in STRATEGIES:
            lines.append(f"  {name}: {self._verdict(name)}")
        return "\n".join(lines)

    def _verdict(self, name: str) -> str:
        if name in self.declined:
            return self.declined[name]
        cost, least = self.costs[name], self.costs[cheapest(self.costs)]
        said = f"{_time(cost.seconds)}, sends {_bytes(cost.sent)}, memory {_bytes(cost.memory)}"
        if name == self.strategy:
            return f"{said}: would run"
        if cost is least:
            return f"{said}: takes the least time, but another one was requested"
        return f"{said}: could run, takes {cost.seconds / least.seconds:.2f} times the least"


@opaque_to_dynamo
@with_arguments
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    layout: Layout = CONTIGUOUS,
    agree: bool = True,
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> DistributedExplanation:
    """Explain what `fastattn.distributed.attention` with these arguments would do.

    The result has an estimate for each strategy: time, bytes sent and memory of a rank. No
    attention is computed. All ranks must call this function, because they exchange their sizes.
    Each gets the same result.

    Args:
        q, k, v, group: As in `fastattn.distributed.attention`.
        strategy: As in `fastattn.distributed.attention`. One that is named would run.
        layout, agree, return_lse: As in `fastattn.distributed.attention`.
        **arguments: Those of `fastattn.distributed.attention`.

    Shape:
        q: (B, H, M, D), M rows of this rank.
        k: (B, Hk, N, D), N keys of this rank.
        v: (B, Hk, N, Dv).

    Returns:
        An `DistributedExplanation`; print it.

    Raises:
        ValueError, TypeError, RuntimeError: As `fastattn.distributed.attention`.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from fastattn import distributed
        >>> store = dist.HashStore()  # of a group with one rank; torchrun makes groups of several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> explanation = distributed.explain(*torch.randn(3, 1, 4, 16, 8), strategy="gather")
        >>> print(str(explanation).partition(";")[0])
        q (1, 4, 16, 8), k (1, 4, 16, 8) float32 on 1 ranks, forward
        >>> dist.destroy_process_group()
    """
    team = need_team(group)
    given = resolved(arguments, "fastattn.distributed.explain")
    invariant = bool(given["row_invariant"])
    given = given | {"seed": 0 if given["seed"] is None else given["seed"]}  # so that none is drawn
    how = dict(strategy=strategy, layout=layout, return_lse=return_lse)
    about = whole(q, k, v, team, how, agree, given)
    call, costs = weighed(about, q, k, v)
    reasons = {x: why_not(x, call.H, call.mesh, invariant) for x in STRATEGIES if x not in costs}
    machine = machine_of(q.device.type)
    if strategy != "auto" and strategy not in costs:  # it was requested, so it would run
        costs |= {strategy: cost_model.cost(strategy, call, machine)}
        del reasons[strategy]
    chosen = cheapest(costs) if strategy == "auto" else strategy
    return DistributedExplanation(call, machine, chosen, costs, reasons)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(n: int) -> str:
    return f"{n / 1e9:.3g} GB" if n >= 1e9 else f"{n / 1e6:.3g} MB"
