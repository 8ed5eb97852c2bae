"""A whole nn.MultiheadAttention, with its projections, against the same module converted.

Both are verified against torch's module in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastattn

from ..cases import FORWARD, TRAINING
from ..measure import run, timing
from ..measure.verify import BOUNDS, relative_errors
from ..peers.registry import BASELINE, SUBJECT

EMBED, HEADS, LENGTH, BATCH = 512, 8, 2048, 1
HIDDEN = 0.25
Record = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """How the module is called."""

    train: bool = False  # forward and backward, in training mode
    padded: bool = False
    weights: bool = False

    @property
    def what(self) -> str:
        return TRAINING if self.train else FORWARD


MODES = {
    "train": Mode(train=True),
    "eval": Mode(),
    "eval + padding": Mode(padded=True),
    "eval + weights": Mode(weights=True),
}


def flops(name: str, length: int = LENGTH) -> float:
    """Useful floating-point operations of a call: four projections, and attention to the keys that
    are not hidden. Backward counts each projection twice and attention two and a half times."""
    mode = MODES[name]
    projections = 4 * 2.0 * BATCH * length * EMBED**2
    attention = 4.0 * BATCH * length**2 * EMBED * (1 - HIDDEN * mode.padded)
    return (3 if mode.train else 1) * projections + (3.5 if mode.train else 1) * attention


def measure(
    device: str,
    modes: Sequence[str] = tuple(MODES),
    length: int = LENGTH,
    seconds: float = 1.0,
    threads: Sequence[int] | None = None,
) -> list[Record]:
    """A record for each mode: verified, then milliseconds and the ratio at each thread count."""
    return [_mode(device, name, length, seconds, threads) for name in modes]


def _mode(
    device: str, name: str, length: int, seconds: float, threads: Sequence[int] | None
) -> Record:
    mode = MODES[name]
    modules, x = _modules(device), _input(device, length)
    exact = _results(copy.deepcopy(modules[BASELINE]).double(), x.double(), mode)
    reasons = {peer: _judge(_results(m, x, mode), exact) for peer, m in modules.items()}
    programs = {
        peer: _program(module, x, mode)
        for peer, module in modules.items()
        if not (reasons[SUBJECT] or reasons[peer])
    }
    timings = []
    for count, clock in timing.clocks(device, threads) if programs else ():
        with timing.torch_threads(count), torch.set_grad_enabled(mode.train):
            laps = run.totals(timing.interleaved(programs, clock, seconds), mode.what)
        row: Record = {peer: _milliseconds(values) for peer, values in laps.items()}
        for peer, program in programs.items():
            if host := clock.host(program):
                row[peer]["host_ms"] = 1e3 * sum(host[i] for i in run.PARTS[mode.what])
        if BASELINE in laps:
            row[BASELINE]["speedup"] = run.ratio(laps[BASELINE], laps[SUBJECT])
        about = {"threads": count, "clock": clock.name, "others": clock.others}
        timings.append({**about, "peers": row})
    return {
        "mode": name,
        "pass": mode.what,
        "case": f"B{BATCH} E{EMBED} H{HEADS} N{length} float32",
        "status": "failed" if reasons[SUBJECT] else "ok",
        "reasons": reasons,
        "timings": timings,
    }


def _modules(device: str) -> dict[str, nn.MultiheadAttention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, device=device)
    ours = copy.deepcopy(theirs)
    fastattn.convert(ours)
    return {SUBJECT: ours, BASELINE: theirs}


def _input(device: str, length: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(BATCH, length, EMBED, generator=generator, device=device)


def _program(module: nn.MultiheadAttention, x: Tensor, mode: Mode) -> timing.Program:
    module.train(mode.train)
    hidden = _hidden(x) if mode.padded else None

    def forward(_: Any) -> Any:
        return module(x, x, x, key_padding_mask=hidden, need_weights=mode.weights)

    if not mode.train:
        return (forward,)
    x = x.detach().requires_grad_()
    leaves = [x, *module.parameters()]
    dout = torch.ones_like(x)
    return forward, lambda out: torch.autograd.grad(out[0], leaves, dout)


def _hidden(x: Tensor) -> Tensor:
    """(B, N) bool, as nn.MultiheadAttention takes it: True hides a key."""
    first = int((1 - HIDDEN) * x.shape[1])
    return (torch.arange(x.shape[1], device=x.device) >= first).expand(x.shape[:2])


def _results(module: nn.MultiheadAttention, x: Tensor, mode: Mode) -> list[Tensor]:
    """Everything that a call returns: the output, the weights, the gradients."""
    program: Sequence[Callable[[Any], Any]] = _program(module, x, mode)
    with torch.set_grad_enabled(mode.train):
        out = program[0](None)
        results = [y for y in out if y is not None]
        return results + (list(program[1](out)) if mode.train else [])


def _judge(actual: list[Tensor], exact: list[Tensor]) -> str:
    """Why these results are wrong, or ""."""
    for i, (x, y) in enumerate(zip(actual, exact, strict=True)):
        error, _ = relative_errors(x.detach().double().flatten(), y.detach().flatten())
        if not error <= BOUNDS["float32"][0]:
            return f"result {i} is off by {error:.1e} (at most {BOUNDS['float32'][0]:.0e})"
    return ""


def _milliseconds(seconds: list[float]) -> Record:
    return {f"{key}_ms": value * 1e3 for key, value in timing.quartiles(seconds).items()}
