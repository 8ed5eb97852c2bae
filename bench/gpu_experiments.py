"""python -m bench.gpu_experiments: the open decisions about kernels of sm_90, in ten minutes there.

Each experiment races a few ways to one result, and has one number that settles a decision; the
printed line has the number, its bound, and what to do. The results of variants are compared before
they are timed. Without a GPU, or with --rehearse, CPU backends run tiny sizes: no number counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fastattn
from fastattn.commands.race import Clock, DeviceClock, HostClock, race

from .measure import machine
from .report import results

MINUTES = 10.0
ALIKE = 0.03  # the largest difference of results, over the largest number
REPEATS = 50  # backward passes, for equal bits
# By variant TFLOP/s, or calls submitted in a microsecond; microseconds by kernel.
Numbers = dict[str, float]


class Call(NamedTuple):
    """A call without grouped heads: head dim, length, pass, and arguments."""

    D: int
    N: int
    backward: bool = False
    causal: bool = True
    M: int = 0  # 0: as many rows as keys
    dtype: torch.dtype = torch.bfloat16
    more: tuple[str, ...] = ()  # of MORE
    tokens: int = 16384  # batch x N
    columns: int = 2048  # heads x D

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.N)

    @property
    def heads(self) -> int:
        return max(1, self.columns // self.D)

    def inputs(self, device: str) -> list[torch.Tensor]:
        g = torch.Generator(device).manual_seed(self.N + self.D)
        B, H, M = self.batch, self.heads, self.M or self.N
        made = functools.partial(torch.randn, device=device, dtype=self.dtype, generator=g)
        return [made(B, H, n, self.D) for n in (M, self.N, self.N, M)]

    def tflop(self) -> float:
        M = self.M or self.N
        pairs = M * (M + 1) / 2 if self.causal and M == self.N else M * self.N
        products = 10 if self.backward else 4
        return products * self.D * pairs * self.batch * self.heads / 1e12


MORE: dict[str, dict[str, Any]] = {
    "softcap": dict(softcap=20.0),
    "dropout": dict(dropout_p=0.1, seed=1),
    "deterministic": dict(deterministic=True),
    "any order": dict(deterministic=False),
}
Attend = Callable[..., torch.Tensor]


def ours(backend: str, *more: str) -> Attend:
    """`attention` on a backend, with these of MORE."""

    def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {}
        for name in (*call.more, *more):
            given |= MORE[name]
        return fastattn.attention(q, k, v, causal=call.causal, backend=backend, **given)

    return attend


def cudnn(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    own = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else list(SDPBackend.__members__.values())
    with sdpa_kernel(own):
        return scaled_dot_product_attention(q, k, v, is_causal=call.causal)


CUDA, TRITON, TURNS, ANY = "cuda", "triton", "cuda, in turn", "cuda, any order"
WAYS: dict[str, Attend] = {
    CUDA: ours("cuda"),
    TRITON: ours("triton"),
    TURNS: ours("cuda", "deterministic"),
    ANY: ours("cuda", "any order"),
    "cudnn": cudnn,
}


class Experiment(NamedTuple):
    """`number` makes of the measured numbers the one that decides: at least `bound`, then `yes`,
    else `no`."""

    name: str
    call: Call
    ways: tuple[str, ...]
    number: Callable[[Numbers], float]
    bound: float
    yes: str
    no: str
    kind: str = "race"  # of MEASURES


def over(one: str, other: str) -> Callable[[Numbers], float]:
    """How many times as fast one way is as the other."""
    return lambda found: found[one] / found[other]


def speed(one: str) -> Callable[[Numbers], float]:
    return lambda found: found[one]


RULE = "fastattn/backends/measured/sm_90.json"


def _beside_triton(name: str, call: Call) -> Experiment:
    yes, no = f"cuda first: a rule of {RULE}", "Triton first"
    return Experiment(name, call, (CUDA, TRITON), over(CUDA, TRITON), 1.03, yes, no)


EXPERIMENTS = (
    Experiment(
        *("order of tasks, D 128", Call(128, 8192), (CUDA, "cudnn"), speed(CUDA), 600),
        "alternating sections balance the blocks",
        "the theory of order is wrong: schedule.cuh",
    ),
    Experiment(
        *("order of tasks, D 256", Call(256, 8192), (CUDA, "cudnn"), speed(CUDA), 521),
        "alternating sections balance the blocks",
        "the theory of order is wrong: schedule.cuh",
    ),
    Experiment(
        *(
            "turns of dq, D 128",
            Call(128, 8192, True),
            (ANY, TURNS, "cudnn"),
            over(TURNS, ANY),
            0.95,
        ),
        "one order by default: it costs little",
        "any order by default, as it is",
    ),
    Experiment(
        *("turns of dq, D 64", Call(64, 2048, True), (ANY, TURNS, "cudnn"), over(TURNS, ANY), 0.95),
        "one order by default: it costs little",
        "any order by default, as it is",
    ),
    Experiment(
        *("misses of L2 in backward", Call(128, 8192, True), (CUDA, "cudnn"), over(CUDA, "cudnn")),
        *(0.97, "heads by 32 MB hold", "heads in flight, or rows downwards: backward.cuh"),
    ),
    Experiment(
        *("a fixed cost of tasks", Call(64, 1024), (CUDA, "cudnn"), over(CUDA, "cudnn"), 0.97),
        "none is left to win",
        "the next Q waits for the store of outputs: forward.cuh",
    ),
    Experiment(
        *("bits in turn", Call(128, 2048, True), (TURNS,), speed("equal"), 1.0),
        *("deterministic keeps its word", "turns are broken: dq_accum.cuh", "bits"),
    ),
    Experiment(
        *("small kernels of backward", Call(64, 2048, True), (CUDA,), speed("share of the rest")),
        *(0.1, "delta, or the rounding of dq, is worth work", "the main loop is what is left"),
        "kernels",
    ),
    Experiment(
        *("time to submit", Call(64, 64, causal=False), (CUDA, "cudnn"), over(CUDA, "cudnn"), 1.0),
        "no launch path is needed",
        "the extension's fast path should launch CUDA's kernels, too",
        "host",
    ),
    _beside_triton("forward, D 256", Call(256, 4096)),
    _beside_triton("backward, D 32", Call(32, 4096, True)),
    _beside_triton("forward, D 32", Call(32, 4096)),
    _beside_triton("one row", Call(128, 8192, causal=False, M=1)),
    _beside_triton("forward, softcap", Call(64, 4096, more=("softcap",))),
    _beside_triton("forward, dropout", Call(64, 4096, more=("dropout",))),
    _beside_triton("backward, dropout", Call(64, 4096, True, more=("dropout",))),
)


# ---------------------------------------------------------------------------------- measuring


def programs(x: Experiment, device: str, ways: dict[str, Attend]) -> dict[str, Callable[[], Any]]:
    """The ways of an experiment, each of which returned what the first one did.

    Raises:
        ValueError: The result of one is another.
    """
    *qkv, dout = x.call.inputs(device)
    made: dict[str, Callable[[], Any]] = {}
    first: torch.Tensor | None = None
    for name in x.ways:
        leaves = [t.clone().requires_grad_(x.call.backward) for t in qkv]
        made[name] = functools.partial(ways[name], x.call, *leaves)
        if x.call.backward:
            out = made[name]()
            made[name] = functools.partial(
                torch.autograd.grad, out, leaves, dout, retain_graph=True
            )
        got = made[name]()
        got = got[0] if x.call.backward else got
        first = got if first is None else first
        error = float((got - first).abs().max() / first.abs().max())
        if not error <= ALIKE:
            raise ValueError(
                f"{name} differs from {x.ways[0]} by {error:.3f} of the largest number"
            )
    return made


def timed(x: Experiment, made: dict[str, Callable[[], Any]], clock: Clock) -> Numbers:
    """TFLOP/s by way, of the median."""
    seconds: dict[str, list[float]] = {name: [] for name in made}

    def recorded(name: str, program: Callable[[], Any]) -> float:
        seconds[name].append(clock(name, program))
        return seconds[name][-1]

    _, failed = race(made, recorded)
    if failed:
        raise ValueError(str(failed))
    return {name: x.call.tflop() / statistics.median(some[1:]) for name, some in seconds.items()}


def host(x: Experiment, made: dict[str, Callable[[], Any]], clock: Clock) -> Numbers:
    """Submitted calls in a microsecond, without waiting for the device."""
    found = {}
    for name, program in made.items():
        start = time.perf_counter()
        for _ in range(200):
            program()
        found[name] = 200 / (time.perf_counter() - start) / 1e6
    return found


def bits(x: Experiment, made: dict[str, Callable[[], Any]], clock: Clock) -> Numbers:
    """1 if repeats have equal gradients, else 0."""
    (program,) = made.values()
    first = program()
    again = (program() for _ in range(REPEATS))
    return {"equal": float(all(all(map(torch.equal, first, y)) for y in again))}


def kernels(x: Experiment, made: dict[str, Callable[[], Any]], clock: Clock) -> Numbers:
    """Microseconds of each kernel, and the share of all but the longest."""
    (program,) = made.values()
    activity = torch.profiler.ProfilerActivity
    device = activity.CUDA if torch.cuda.is_available() else activity.CPU
    with torch.profiler.profile(activities=[device]) as profiled:
        program()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    name = "self_device_time_total" if device == activity.CUDA else "self_cpu_time_total"
    found = {str(e.key)[:60]: float(getattr(e, name)) for e in profiled.key_averages()}
    total = sum(found.values())
    return found | {"share of the rest": 1 - max(found.values()) / total if total else 0.0}


MEASURES = {"race": timed, "host": host, "bits": bits, "kernels": kernels}


class Setting(NamedTuple):
    """Where experiments run; a rehearsal has tiny calls, on the backends of CPUs."""

    device: str
    clock: Clock
    ways: dict[str, Attend]
    small: bool


def on_gpu() -> Setting:
    return Setting("cuda", DeviceClock(), WAYS, False)


def rehearsed() -> Setting:
    ways = WAYS | {x: ours("cpu") for x in (CUDA, TURNS, ANY)} | {TRITON: ours("reference")}
    return Setting("cpu", HostClock(), ways, True)


def settled(x: Experiment, where: Setting) -> dict[str, Any]:
    """The record of an experiment: its numbers and decision, or why there are none."""
    if where.small:
        few: dict[str, Any] = dict(N=48, M=min(x.call.M, 48), D=16, tokens=48, columns=32)
        x = x._replace(call=x.call._replace(**few))
    record: dict[str, Any] = dict(name=x.name, bound=x.bound)
    try:
        found = MEASURES[x.kind](x, programs(x, where.device, where.ways), where.clock)
        number = x.number(found)
    except Exception as error:
        return record | dict(failed=f"{type(error).__name__}: {str(error)[:300]}")
    decision = x.yes if number >= x.bound else x.no
    return record | dict(number=round(number, 3), decision=decision, found=found)


def lines(record: dict[str, Any]) -> Iterator[str]:
    if "failed" in record:
        yield f"{record['name']}: failed: {record['failed']}"
        return
    sign = ">=" if record["number"] >= record["bound"] else "<"
    yield f"{record['name']}: {record['number']:g} {sign} {record['bound']:g}: {record['decision']}"
    yield "  " + ", ".join(f"{name} {x:.4g}" for name, x in record["found"].items())


def main(arguments: list[str] | None = None) -> int:
    """Status 1 if an experiment failed or was not reached. Raises ValueError if none is named."""
    parser = argparse.ArgumentParser("python -m bench.gpu_experiments", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="the default without a GPU")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="experiments with TEXT")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: bench/results/local")
    options = parser.parse_args(arguments)
    rehearsal = options.rehearse or not torch.cuda.is_available()
    where = rehearsed() if rehearsal else on_gpu()
    if rehearsal:
        print("A rehearsal: no GPU is used, and nothing here is a measurement of one.", flush=True)
    end = time.monotonic() + 60 * options.minutes
    asked = [
        x for x in EXPERIMENTS if not options.only or any(text in x.name for text in options.only)
    ]
    if not asked:
        names = [x.name for x in EXPERIMENTS]
        raise ValueError(f"--only: got {options.only}, expected some of {names}")
    records = []
    with contextlib.suppress(KeyboardInterrupt):
        for x in asked:
            if time.monotonic() > end:
                print(f"the time is over: {len(asked) - len(records)} are left", file=sys.stderr)
                break
            records.append(settled(x, where))
            print(*lines(records[-1]), sep="\n", flush=True)
    chip = "rehearsal" if rehearsal else torch.cuda.get_device_name()
    found = dict(kind="gpu experiments", rehearsal=rehearsal, chip=chip, records=records)
    folder = options.output or machine.RESULTS / "local"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-experiments-{'-'.join(chip.lower().split())}.json"
    results.replace(path, json.dumps(found | dict(versions=machine.versions()), indent=1) + "\n")
    print(f"wrote {path}")
    return int(len(records) < len(asked) or any("failed" in x for x in records))


if __name__ == "__main__":
    sys.exit(main())
