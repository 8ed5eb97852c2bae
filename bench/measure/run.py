"""The loop: verify each pass of a case, time it if it is right, yield one record per cell."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import fastattn
from fastattn.inspection.explain_call import Explanation

from ..cases import BACKWARD, FORWARD, TRAINING, Case
from ..peers.registry import PEERS, SUBJECT, Peer, arguments
from . import isolated_process, progress, timing
from .machine import load
from .records import Record, ratio
from .roofline import Limits
from .verify import Judge, Verdict, differentiable

PARTS = {FORWARD: (0,), BACKWARD: (1,), TRAINING: (0, 1)}  # phases of a program in each pass
IDENTITY = ("dtype", "mask", "B", "H", "Hk", "M", "N", "D")


class Lap(NamedTuple):
    """Seconds per call and phase, by name and round, at one thread count; with the clock's name and
    its `others`."""

    threads: int | None
    clock: str
    others: float | None
    samples: dict[str, list[list[float]]]


class Heat(NamedTuple):
    """The result of a race: a lap for each thread count. `hosts` are seconds to submit each phase,
    by name, if a device was timed."""

    verdicts: dict[str, Verdict]
    laps: list[Lap]
    scope: str
    hosts: dict[str, list[float]]


class Plan(NamedTuple):
    """How each case is measured. `seconds` is the timing budget of a cell at one thread count;
    `threads` are the counts, by default one and all."""

    passes: tuple[str, ...]
    peers: tuple[str, ...]  # names in PEERS
    limits: Limits
    seconds: float
    threads: Sequence[int] | None = None


def cells(
    cases: Iterable[Case], plan: Plan, process: isolated_process.Process | None = None
) -> Iterator[Record]:
    """Yield one JSON-ready record per case and pass, as soon as the case is done. The work runs in
    `process`, if it is given: a peer that ends the process loses only its own entry."""
    if process is not None:
        yield from _cells_apart(process, cases, plan)
        return
    for case in cases:
        yield from _cells_of(case, plan, {})


def _cells_of(case: Case, plan: Plan, lost: Mapping[str, str]) -> list[Record]:
    """The records of a case. `lost` names peers that are not tried, and why."""
    trained = [what for what in plan.passes if what != FORWARD]  # timed as parts of one program
    judge = Judge(case, gradients=bool(trained))
    clocks = timing.clocks(case.device, plan.threads)
    found = []
    for whats in ([FORWARD] * (FORWARD in plan.passes), trained):
        if whats:
            heat = race(plan, case, whats[0], clocks, judge, lost)
            found += [_record(case, what, heat, plan.limits) for what in whats]
    return found


LIVES = 3  # a peer that ended the process in this many cells is not tried again


def _cells_apart(
    process: isolated_process.Process, cases: Iterable[Case], plan: Plan
) -> Iterator[Record]:
    deaths: Counter[str] = Counter()
    for case in cases:
        progress.show(f"measuring {case}, {', '.join(plan.passes)}: {', '.join(plan.peers)}")
        lost = {
            name: f"not tried: it ended the process in {count} cells"
            for name, count in deaths.items()
            if count >= LIVES
        }
        while True:
            try:
                yield from process.call(_cells_of, case, plan, lost)
                break
            except isolated_process.Died as death:
                peer, reason = death.at, str(death)
                if peer is not None and peer not in lost:  # retry without it
                    lost[peer] = reason
                    deaths[peer] += 1
                    continue
            except isolated_process.Raised as error:
                reason = str(error)
            verdicts = dict.fromkeys(plan.peers, Verdict(reason))
            yield from (_unmeasured(case, what, reason, verdicts) for what in plan.passes)
            break


def race(
    plan: Plan,
    case: Case,
    what: str,
    clocks: Sequence[tuple[int | None, timing.Clock]],
    judge: Judge,
    lost: Mapping[str, str],
) -> Heat:
    """Verify each peer that is not in `lost`, then time those that passed, in interleaved rounds.
    Nothing is timed if the subject failed."""
    verdicts = {}
    for name in plan.peers:
        if reason := lost.get(name):
            verdicts[name] = Verdict(reason)
            continue
        with isolated_process.at(name):
            verdicts[name] = judge(PEERS[name], what)
    scope = judge.oracle.scope(what)
    programs = {}
    if not verdicts[SUBJECT].reason:
        passed = (name for name in plan.peers if not verdicts[name].reason)
        programs = {x: program(PEERS[x], case, what, judge.oracle.inputs) for x in passed}
    laps, hosts = [], {}
    for threads, clock in clocks:
        with timing.torch_threads(threads), torch.set_grad_enabled(what != FORWARD):
            samples, reasons = timed(programs, clock, plan.seconds)
        verdicts |= {name: Verdict(reason) for name, reason in reasons.items()}
        if SUBJECT not in samples:
            return Heat(verdicts, [], scope, {})
        laps.append(Lap(threads, clock.name, clock.others, samples))
        hosts = {name: host for name in samples if (host := clock.host(programs[name]))}
    return Heat(verdicts, laps, scope, hosts)


def timed(
    programs: Mapping[str, timing.Program], clock: timing.Clock, seconds: float
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Samples of `timing.interleaved` for programs that do not raise, and the others' errors."""
    left, reasons = dict(programs), {}
    while left:
        try:
            return timing.interleaved(left, clock, seconds), reasons
        except timing.Failed as failed:
            name, error = failed.name, failed.__cause__ or failed
            reason = f"{isolated_process.one_line(error)}, while timed"
        with isolated_process.at(name):
            isolated_process.recover(reason)
        reasons[name] = reason
        del left[name]
    return {}, reasons


def program(peer: Peer, case: Case, what: str, inputs: Any) -> timing.Program:
    call = peer.prepare(case)
    if what == FORWARD:
        return (lambda _: call(inputs),)
    inputs = differentiable(case, inputs)
    leaves = [getattr(inputs, name) for name in case.leaves]
    return (
        lambda _: call(inputs),
        lambda out: torch.autograd.grad(out, leaves, inputs.dout),
    )


def _record(case: Case, what: str, heat: Heat, limits: Limits) -> Record:
    choice = explain(case)
    declined = choice.declined if choice.backend == "reference" else {}
    row = _unmeasured(case, what, heat.verdicts[SUBJECT].reason, heat.verdicts)
    row |= {"backend": choice.backend, "declined": declined, "verified": heat.scope}
    for lap in heat.laps:
        about = {"threads": lap.threads, "clock": lap.clock, "others": lap.others}
        found = _summary(case, what, lap.threads, lap.samples, heat.hosts, limits)
        row["timings"].append(about | found)
    return row


def _unmeasured(case: Case, what: str, reason: str, verdicts: Mapping[str, Verdict]) -> Record:
    """The record of a cell without times."""
    return {
        "pass": what,
        **{name: getattr(case, name) for name in IDENTITY},
        "backend": "none",
        "declined": {},
        "status": "failed" if reason else "ok",
        "reason": reason,
        "verified": "",
        "peers": {name: dataclasses.asdict(x) for name, x in verdicts.items()},
        "load": load(),
        "timings": [],
    }


def explain(case: Case) -> Explanation:
    """Which of our backends runs the case, and why others do not. That depends on kinds, not sizes,
    so one row and one key are enough."""
    small = dataclasses.replace(case, B=1, N=1, M=1)
    q, k, v, _, bias = small.inputs()
    given = arguments(small) | ({"mask": bias} if small.rule.added else {})
    return fastattn.explain(q, k, v, **given)


def _summary(
    case: Case, what: str, threads: int | None, samples: Mapping, hosts: Mapping, limits: Limits
) -> Record:
    """Medians and quartiles by peer; our speed-up over each, a ratio per round; and, if a device
    was timed, the milliseconds that the host takes to submit the call."""
    seconds = {  # of the pass, a value for each round
        name: [sum(laps[i] for i in PARTS[what]) for laps in rounds]
        for name, rounds in samples.items()
    }
    ours = seconds[SUBJECT]
    peers: Record = {}
    for name, values in seconds.items():
        peers[name] = _figures(case, what, threads, values, limits)
        if name in hosts:
            peers[name]["host_ms"] = 1e3 * sum(hosts[name][i] for i in PARTS[what])
        if name != SUBJECT:
            peers[name]["speedup"] = ratio(values, ours)
    return {"rounds": len(ours), "peers": peers}


def _figures(
    case: Case, what: str, threads: int | None, seconds: list[float], limits: Limits
) -> Record:
    """Milliseconds, GF/s of useful work, GB/s of keys and values read, and each rate in percent of
    its limit, None if that limit was not measured."""
    quartiles = timing.quartiles(seconds)
    gflops = case.flops(what) / quartiles["median"] / 1e9
    gbs = case.kv_bytes / quartiles["median"] / 1e9
    return {f"{key}_ms": value * 1e3 for key, value in quartiles.items()} | {
        "gflops": gflops,
        "percent_of_peak": _percent(gflops, limits.gflops(case.dtype, threads)),
        "kv_gbs": gbs,
        "percent_of_read": _percent(gbs, limits.read_gbs(threads, case.kv_bytes)),
    }


def _percent(value: float, limit: float | None) -> float | None:
    return 100 * value / limit if limit else None
