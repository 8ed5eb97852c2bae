"""python -m fastattn check: compare every backend on this machine with the oracle, in minutes.

The calls are a covering array: every two levels of the factors of a call are in one of them; and a
few that have three. The oracle computes in float64 on the CPU. A result may err by a few times what
the same formulas lose in the dtype of the call, and by some roundings of its largest number.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import base
from ..backends.native import libraries
from ..dispatch.operation import forget_plans
from .covering import Row, covering
from .sample_calls import FACTORS, FIXED, Call, excludes, made

MINUTES = 5.0
TIMES = {"out": 2, "lse": 0}  # of the baseline's largest error; 3 for gradients
ROUNDINGS = 16
SHOWN = 5  # wrong calls of a backend that are printed


class Way(NamedTuple):
    """A backend on a device; on a CPU with one of its instruction sets."""

    backend: str
    device: str
    isa: str = ""

    def __str__(self) -> str:
        return f"{self.backend} {self.isa}".strip()

    def again(self, seed: int, call: int) -> str:
        """The command that repeats a call."""
        isa = ["--isa", self.isa] if self.isa else []
        way = ["--device", self.device, "--backend", self.backend, *isa]
        return shlex.join(
            ["python", "-m", "fastattn", "check", *way, "--seed", f"{seed}", "--call", f"{call}"]
        )


def ways(device: str) -> list[Way]:
    """What runs calls on a device."""
    found = []
    for name, why in base.available_backends().items():
        if why or device not in (base.get(name).support.devices or ()):
            continue
        isas = libraries.cpu_isas() if name == "cpu" else [""]
        found += [Way(name, device, x) for x in isas if x != libraries.MODEL]
    return found


@contextmanager
def on(way: Way) -> Generator[None]:
    """Calls in the block run on the instruction set of the way."""
    if not way.isa:
        yield
        return
    before = libraries.cpu_selected()
    libraries.select_cpu_isa(way.isa)
    forget_plans()
    try:
        yield
    finally:
        libraries.select_cpu_isa(*before)
        forget_plans()


# ------------------------------------------------------------------------------------- the judge


class Expected:
    """The oracle's results of a call, and how far a result may be from them."""

    exact: dict[str, Tensor]
    bounds: dict[str, float]

    def __init__(self, call: Call):
        dtype = call.dout.dtype
        wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        with_lse = call if call.dlse is not None else call._replace(dlse=_zeros(call))
        exact, rough = with_lse.by_oracle(torch.float64), with_lse.by_oracle(dtype)
        logits = 1 + _largest(exact["lse"])  # a unit in the last place of one, in each probability
        unit = ROUNDINGS * logits * wide.eps
        stored = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
        terms = _cancelling(call, exact["out"])
        self.exact = (
            exact if call.dlse is not None else {x: exact[x] for x in exact.keys() - {"lse"}}
        )
        self.bounds = {}
        for name, x in self.exact.items():
            times = 2 if "k_scale" in call.given else TIMES.get(name, 3)  # queries may be rounded
            bound = times * _largest(rough[name].double() - x)
            bound += (unit + 2 * stored * (name != "lse")) * _largest(x)
            self.bounds[name] = bound + (unit + stored / 2) * terms.get(name, 0.0) + 1e4 * wide.tiny

    def worst(self, found: dict[str, Tensor]) -> tuple[float, str]:
        """The largest error as a multiple of its bound, infinite for NaN, and the result's name."""
        errors = {name: self._error(name, found[name]) for name in self.exact}
        name = max(errors, key=errors.__getitem__)
        return errors[name], name

    def _error(self, name: str, got: Tensor) -> float:
        exact, got = self.exact[name], got.double()
        special = ~exact.isfinite()
        if got.shape != exact.shape or not torch.equal(got[special], exact[special]):
            return float("inf")
        error = (got - exact).masked_fill(special, 0).abs()
        return float(error.nan_to_num(torch.inf).max()) / self.bounds[name] if got.numel() else 0.0


def _largest(x: Tensor) -> float:
    """The largest finite absolute value; 0 of nothing."""
    x = x.masked_fill(~x.isfinite(), 0).abs()
    return float(x.max()) if x.numel() else 0.0


def _zeros(call: Call) -> Tensor:
    return torch.zeros(call.dout.shape[:-1], dtype=torch.float64)


def _cancelling(call: Call, out: Tensor) -> dict[str, float]:
    """The size of the terms that cancel in gradients through scores: each row subtracts
    delta = sum(dout out). Errors of n rows add up as the square root of n."""
    q, k = (_usual(call.tensors[x].double()) for x in "qk")
    D, rows = call.tensors["q"].shape[-1], out[..., 0].numel()
    delta = _usual((call.dout.double() * out).abs().sum(-1))
    by, alike = abs(call.given.get("scale", D**-0.5)) * delta, rows**0.5
    return dict(dq=by * k, dk=by * q * alike, dmask=delta * alike, dsinks=delta * alike)


def _usual(x: Tensor) -> float:
    """The root mean square of what is finite."""
    x = x[x.isfinite()]
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


# ----------------------------------------------------------------------------------- the program


@dataclass
class Verdict:
    """What is known of a way so far."""

    way: Way
    of: int
    calls: int = 0
    declined: int = 0
    wrong: int = 0
    worst: float = 0.0
    name: str = "out"  # of the result with the worst error

    def __str__(self) -> str:
        if not self.calls:
            return f"{self.way}: none of {self.of} calls ran: nothing is known"
        text = f"{self.way}: {self.calls} calls"
        if self.declined:
            text += f" ({self.declined} more declined)"
        if missing := self.of - self.calls - self.declined:
            text += f" ({missing} more not reached in the time)"
        text += f", worst error {self.worst:.2g} of the bound ({self.name}): "
        return text + (f"WRONG in {self.wrong}" if self.wrong else "right")

    def judge(self, call: Call, expected: Expected) -> str:
        """Run a call: what is wrong with it, or ""."""
        try:
            with on(self.way):
                found = call.run(self.way.backend, self.way.device)
            error, name = expected.worst(found)
            problem = f"{name} errs by {error:.3g} of the bound" if not error <= 1 else ""
        except NotImplementedError:
            self.declined += 1
            return ""
        except Exception as raised:
            error, name = float("inf"), "it raised"
            problem = f"{type(raised).__name__}: {str(raised)[:200]}"
        self.calls += 1
        self.wrong += bool(problem)
        if error > self.worst:
            self.worst, self.name = error, name
        return problem


def _words(row: Row) -> str:
    """The levels of a row that are not the first of their factor, and its sizes."""
    always = "form", "dtype", "M", "N", "D, Dv"
    parts = (f"{x}={y}" for x, y in row.items() if x in always or y != FACTORS[x][0])
    return " ".join(parts).replace("D, Dv=", "D,Dv=")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: both, if there is one")
    parser.add_argument("--backend", help="only this one of those that can run here")
    parser.add_argument("--isa", help="only this instruction set of the CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"default: {MINUTES:g}")
    parser.add_argument("--seed", type=int, default=0, help="draws other calls")
    parser.add_argument("--call", type=int, help="only the call of this number")


def command(options: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Status 0 if all is right, 1 if a result is wrong, 2 if nothing ran.

    Raises:
        ValueError: No way to run calls has these names, there is no such call, or no time.
    """
    if not options.minutes > 0:
        raise ValueError(f"--minutes: got {options.minutes:g}, expected more than 0")
    devices = [options.device] if options.device else ["cuda", "cpu"]
    found = [way for device in devices for way in ways(device)]
    asked = [x for x in found if options.backend in (None, x.backend)]
    asked = [x for x in asked if options.isa in (None, x.isa)]
    if any(not any(x.device == device for x in found) for device in devices):
        for name, why in base.available_backends().items():
            if why:
                say(f"{name}: not checked: {why}")
    if not asked:
        have = ", ".join(map(str, found)) or "none"
        raise ValueError(
            f"--backend, --isa: got {options.backend}, {options.isa}, expected one of {have}"
        )
    rows = list(enumerate([*FIXED, *covering(FACTORS, excludes, options.seed)]))
    if options.call is not None:
        if not 0 <= options.call < len(rows):
            raise ValueError(f"--call: got {options.call}, expected 0 to {len(rows) - 1}")
        rows = [rows[options.call]]
    end = time.monotonic() + 60 * options.minutes
    verdicts = [Verdict(way, len(rows)) for way in asked]
    for number, row in rows:
        if time.monotonic() > end:
            break
        call = made(row, options.seed + number)
        expected = Expected(call)
        for verdict in verdicts:
            problem = verdict.judge(call, expected)
            if problem and verdict.wrong <= SHOWN:
                say(f"  {verdict.way}: {problem}\n    {_words(row)}")
                say(f"    {verdict.way.again(options.seed, number)}")
    for verdict in verdicts:
        say(str(verdict))
    if any(x.wrong for x in verdicts):
        return 1
    return 0 if all(x.calls for x in verdicts) else 2
