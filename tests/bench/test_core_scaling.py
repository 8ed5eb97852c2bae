"""The simulator of many cores: its properties, exact examples, the tasks of calls, and the page."""

import math
import random

import pytest
import torch

from bench.__main__ import main
from bench.benchmarks import core_scaling, scheduler
from bench.benchmarks.scheduler import SUSTAINED, Machine, Tasks, run, threads_of
from bench.benchmarks.task_times import PARTS, Call, Phase, Runs, least_of
from bench.reporting import results
from fastattn.backends.native import libraries
from fastattn.examples.common import new_figure

FREE = dict(wake=0.0, take=0.0)


def machine(cores, memory=math.inf, **other):
    """A machine that reads `memory` bytes a second."""
    return Machine("", cores, 1, memory / SUSTAINED, **other)


def random_phases(seed):
    some = random.Random(seed)
    return [
        Tasks([some.uniform(1, 9) for _ in range(some.randint(1, 60))], some.uniform(0, 400))
        for _ in range(some.randint(1, 3))
    ]


def seconds(phases, cores, memory=math.inf, **other):
    return run(phases, machine(cores, memory), **FREE | other).seconds


@pytest.mark.parametrize("seed", range(20))
def test_properties(seed):
    phases = random_phases(seed)
    alone = sum(sum(x.seconds) for x in phases)
    longest = sum(max(x.seconds) for x in phases)
    read = sum(x.bytes for x in phases)
    assert seconds(phases, 1) == pytest.approx(alone)
    assert seconds(phases, 10_000) == pytest.approx(longest)
    assert seconds(phases, 10_000, 1.0) >= read * (1 - 1e-9)  # bytes over bandwidth
    assert seconds(phases, 10_000, 1e-3) == pytest.approx(read * 1e3)
    rates = [seconds(phases, 7, x) for x in (1e-2, 1.0, 20.0, 1e9)]
    assert rates == sorted(rates, reverse=True)
    for cores in (2, 5, 16):
        found = run(phases, machine(cores), **FREE)
        assert max(alone / cores, longest) <= found.seconds * (1 + 1e-9)
        assert found.seconds <= alone / cores + longest  # Graham's bound for lists
        assert found.busy == pytest.approx(alone)
        assert 0 <= found.imbalance < 1


def test_equal_tasks_take_no_longer_on_more_cores():
    times = [seconds([Tasks([1.0] * 48)], n) for n in range(1, 50)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    "tasks, cores, memory, expected",
    [
        (Tasks([3, 3, 2, 2, 2]), 2, math.inf, 7),  # 3+2+2 beside 3+2: in the order of tasks
        (Tasks([1, 1, 1, 4]), 2, math.inf, 5),  # the longest last
        (Tasks([4, 1, 1, 1]), 2, math.inf, 4),
        (Tasks([1.0] * 4, 40), 4, 20.0, 2),  # four read 10 a second each, half of it is there
        (Tasks([2.0, 1.0], 30), 2, 10.0, 3),  # 2 s at half speed, then 1 s at the full
        (Tasks([5, 5, 5], chain=1, lag=1), 3, math.inf, 7),  # each ends one after the one before
        (Tasks([9, 2, 2], chain=1, lag=1), 3, math.inf, 11),
        (Tasks([4, 4, 4, 4], chain=2, lag=1), 4, math.inf, 5),  # two chains
    ],
)
def test_examples(tasks, cores, memory, expected):
    assert seconds([tasks], cores, memory) == pytest.approx(expected)


def test_waking_and_taking():
    two = [Tasks([1.0] * 8), Tasks([1.0] * 3)]
    assert seconds(two, 8, wake=0.5) == pytest.approx(2 + 0.5 * (3 + 3))  # 8 threads in both
    assert seconds(two, 1, wake=0.5, take=0.5) == 11
    # Eight tasks are taken one after the other, a tenth of a second each.
    assert seconds([Tasks([1.0] * 8)], 8, take=0.1) == pytest.approx(1.8)


def test_threads_by_the_work_of_a_call():
    assert threads_of(2.5 * 2**20, 64, 100) == 3
    assert threads_of(math.inf, 64, 100) == 64 and threads_of(math.inf, 64, 9) == 9
    found = run([Tasks([1.0] * 64)], machine(64), 2.0 * 2**20, **FREE)
    assert found.seconds == 22 and found.bound == "threads"


def test_the_limit_that_binds():
    def bound(tasks, cores, memory=math.inf):
        return run([tasks], machine(cores, memory)).bound

    assert bound(Tasks([1.0] * 100), 2) == "compute"
    assert bound(Tasks([1.0] * 3), 8) == "tasks"
    assert bound(Tasks([1.0] * 100, 1e3), 8, 10.0) == "memory"
    assert bound(Tasks([1e-9] * 100), 64) == "wake"


def test_where_pages_are():
    two = machine(8, 10.0, nodes=2, link=2.0)
    assert [two.memory(x) for x in ("local", "interleaved", "one node")] == [20, 8, 4]
    assert machine(8, 10.0).memory("interleaved") == 10
    with pytest.raises(ValueError, match="placement: got 'far', expected local"):
        two.memory("far")


# -- the tasks of calls ----------------------------------------------------------------------------


def _needs_library():
    if why := libraries.cpu_unavailable():
        pytest.skip(why)


def test_tasks_of_decoding_do_not_depend_on_threads():
    _needs_library()
    runs = Runs(Call("forward", 2, 4, 2, 1, 1030, 16))
    assert {tuple(runs.counts(n)) for n in (1, 7, 192)} == {(3 * 2 * 2, 2 * 4)}


def test_every_task_of_backward_is_timed():
    _needs_library()
    phases = Runs(Call("backward", 1, 4, 2, 300, 300, 16, causal=True)).phases(1, 0.0, least=2)
    assert phases[1].tasks % (3 * 2) == 0  # chunks of keys, key heads
    for x in phases:
        assert len(x.seconds) == min(x.tasks, PARTS) and all(t > 0 for t in x.seconds)


def test_a_phase_has_a_time_for_each_task():
    assert Phase(3, [1.0, 2.0, 3.0]).each() == [1, 2, 3]
    many = Phase(70, [float(x) for x in range(PARTS)]).each()
    assert len(many) == 70 and many == sorted(many) and set(many) == set(range(PARTS))
    assert least_of([[Phase(2, [1.0, 5.0])], [Phase(2, [2.0, 3.0])]]) == [Phase(2, [1.0, 3.0])]


def test_tasks_of_backward_add_to_dq_in_turn():
    """Two chunks of keys, of four key heads with two query heads each and three tiles of rows."""
    call = Call("backward", 1, 8, 4, 192, 256, 32)
    keys = core_scaling.tasks_of(call, [Phase(24, [1.0]), Phase(8, [6.0] * 8)])[1]
    assert (keys.chain, keys.lag) == (4, 1.0)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_is_the_committed_one(tmp_path, capsys):
    assert main(["scaling", "--output", str(tmp_path)]) == 0
    text = (tmp_path / core_scaling.PAGE).read_text()
    assert text in capsys.readouterr().out
    assert text == (results.FOLDER / core_scaling.PAGE).read_text()
    for where in scheduler.MACHINES:
        assert where.name in text


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", core_scaling.VALIDATED)
def test_the_simulation_is_near_real_runs(name, threads):
    """As they were recorded."""
    assert 0.75 <= core_scaling.validated(core_scaling.read(), name, threads) <= 1.25


def test_a_short_decoding_keeps_many_cores_busy():
    record = core_scaling.read()
    where = scheduler.GENOA_64
    found = core_scaling.simulate(record, "decode, 8 heads on 8, 2k", where)
    assert found.bounds["threads"] == 0


def test_a_picture_of_speed_against_cores():
    pytest.importorskip("matplotlib")
    figure = core_scaling.draw(new_figure, core_scaling.read(), cores=(1, 8, 64))
    (axis,) = figure.axes
    assert len(axis.lines) == len(core_scaling.DRAWN) + 1


def test_dtypes_change_bytes_and_work():
    wide, half = (core_scaling.decoding(8, 4096, dtype=x) for x in (torch.float32, torch.bfloat16))
    assert wide.bytes == 2 * half.bytes and wide.work > half.work
