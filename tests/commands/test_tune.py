"""`python -m fastattn tune`: what it chooses by fake clocks, on the CPU and on a stub of a GPU, and
what becomes of the file."""

import argparse
import json
import os

import pytest
import torch

from fastattn import __main__
from fastattn.backends import base
from fastattn.backends.measured import files
from fastattn.backends.native import libraries
from fastattn.backends.preference import parsed
from fastattn.backends.shared import gpu
from fastattn.backends.triton import autotune, tile_configs
from fastattn.backends.triton.backend import Triton
from fastattn.backends.triton.tile_configs import Config
from fastattn.call.spec import Tensors
from fastattn.commands import race, tune
from fastattn.commands.race import Ratio, winner
from fastattn.commands.tune import Shape
from tests.support import launch_stub
from tests.support.backends import INTERPRETED
from tests.support.fresh_python import python

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")
SMALL = ("float32 B1 H1 M20 N20 D8 training", "bfloat16 B1 H2 Hk1 M1 N40 D8 causal")
CPU = torch.device("cpu")
DEFAULTS = {} if INTERPRETED else dict(zip(("isa", "decoding"), libraries.cpu_defaults()))


class Clock:
    """Takes seconds from a table by the names of programs; runs each program once."""

    def __init__(self, seconds):
        self.seconds, self.ran = seconds, set()

    def __call__(self, name, program):
        if program not in self.ran:
            self.ran.add(program)
            program()
        return self.seconds(name) if callable(self.seconds) else self.seconds.get(name, 1.0)


@pytest.fixture
def tuned(tmp_path, monkeypatch, capsys):
    """Run the command on small shapes by a clock: (status, the file's choices, printed text)."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))

    def run(seconds, *arguments, shapes=SMALL):
        monkeypatch.setitem(tune.CLOCKS, "cpu", lambda: Clock(seconds))
        given = [x for shape in shapes for x in ("--shape", shape)]
        status = __main__.main(["tune", "--device", "cpu", *given, *arguments])
        path = files.path_of(CPU)
        choices = files.read(path).choices if path.exists() else None
        return status, choices, capsys.readouterr().out

    return run


def equal(name):
    return 1.0


# ------------------------------------------------------------------------------------- the CPU


def test_where_all_are_equal_the_defaults_are_chosen(tuned, threads):
    threads(2)
    before = libraries.cpu_units(), torch.get_num_threads()
    status, choices, text = tuned(equal)
    assert status == 0 and choices["cpu"] == DEFAULTS | dict(threads=None)
    assert "instruction set: " in text and "generic 1.00" in text and "threads: " in text
    assert (libraries.cpu_units(), torch.get_num_threads()) == before
    assert [x["what"] for x in choices["races"]] == [
        *("instruction set", "instruction set of few rows", "threads", "threads")
    ]


def test_the_fastest_instruction_set_and_count_are_chosen(tuned, threads):
    threads(4)
    _, choices, _ = tuned({"generic": 0.5, 2: 0.9})
    assert choices["cpu"] == dict(isa="generic", decoding="generic", threads=2)


def test_each_is_timed_on_its_instruction_set_and_count(tuned, monkeypatch, threads):
    threads(2)
    ran = []
    program = Shape.program

    def spied(shape, backend, device):
        call = program(shape, backend, device)

        def run():
            ran.append((shape.M, *libraries.cpu_selected(), torch.get_num_threads()))
            return call()

        return run

    monkeypatch.setattr(Shape, "program", spied)
    isa, decoding = libraries.cpu_selected()
    tuned({})
    others = [x for x in libraries.cpu_isas() if x != "amx_model"]
    expected = {(20, x, decoding, 2) for x in others} | {(1, isa, x, 2) for x in others}
    assert set(ran) == expected | {(m, isa, decoding, n) for m in (1, 20) for n in (1, 2)}


def test_a_gain_within_noise_is_none():
    still = Ratio(1.0, 1.0)
    assert winner({"a": still, "b": Ratio(0.98, 0.99)}) == "a"
    assert winner({"a": still, "b": Ratio(0.8, 1.01)}) == "a"
    assert winner({"a": still, "b": Ratio(0.8, 0.9), "c": Ratio(0.7, 0.9)}) == "c"


def test_programs_take_turns_and_those_that_raise_are_left_out():
    order = []

    def sample(name, program):
        order.append(name)
        if name == "broken":
            raise RuntimeError("out of resource")
        return {"first": 2.0, "other": 1.0}[name]

    programs = dict.fromkeys(("broken", "first", "other"), print)
    ratios, failed = race.race(programs, sample, rounds=2)
    assert ratios == {"first": Ratio(1.0, 1.0), "other": Ratio(0.5, 0.5)}
    assert failed == {"broken": "RuntimeError: out of resource"}
    assert order == ["broken", "first", "other", "first", "other", "other", "first"]
    assert race.race({"broken": print}, sample) == ({}, failed)


def test_ratios_are_of_one_round():
    """Load that slows a whole round chooses nothing."""
    seconds = iter([1, 1] + [x for n in (2, 0, 3, 1, 5, 4, 6, 8, 7) for x in (3**n, 3**n)])
    ratios, _ = race.race(dict(a=print, b=print), lambda *given: next(seconds))
    assert ratios["b"] == Ratio(1.0, 1.0)


def test_the_host_clock_takes_the_fastest_call_after_the_first(monkeypatch):
    now = iter([0.0, 0.003, 0.004, 0.006])
    monkeypatch.setattr(race, "SAMPLE", 0.005)
    monkeypatch.setattr(race.time, "perf_counter", lambda: next(now))
    calls = []
    assert race.HostClock()("a", lambda: calls.append(0)) == pytest.approx(0.001)
    assert len(calls) == 4


TOO_LARGE = "float32 B64 H64 M1000000 N8 D64"


@pytest.mark.parametrize(
    "arguments, shapes", [(["--minutes", "0"], SMALL), ([], (TOO_LARGE,))], ids=["time", "memory"]
)
def test_where_nothing_is_raced_the_file_stays(arguments, shapes, tuned):
    assert tuned({"generic": 0.5}, *arguments, shapes=shapes)[:2] == (1, None)
    tuned({"generic": 0.5})
    before = files.path_of(CPU).read_text()
    status, _, text = tuned({"generic": 0.1}, *arguments, shapes=shapes)
    assert status == 1 and files.path_of(CPU).read_text() == before
    assert "nothing was raced: nothing is written" in text
    assert ("the time is over" if arguments else "cpu cannot run it: ") in text


TWICE = """
import torch
from fastattn import __main__
from fastattn.backends.measured import files
from fastattn.backends.native import libraries
from fastattn.commands import tune
torch.set_num_threads(2)
seconds = {"generic": 0.5, 1: 0.6}
seen = set()
def clock(name, program):
    program()
    seen.add(libraries.get_num_threads())
    return seconds.get(name, 1.0)
tune.CLOCKS["cpu"] = lambda: clock
shapes = ["--shape", "float32 H1 M20 N20 D8", "--shape", "float32 H1 M1 N40 D8"]
before = libraries.cpu_selected(), libraries.get_num_threads()
assert __main__.main(["tune", "--device", "cpu", *shapes]) == 0
assert before == (libraries.cpu_selected(), libraries.get_num_threads())
found = files.read(files.path_of(torch.device("cpu"))).choices
first = [next(iter(x["ratios"])) for x in found["races"]]
print("found", libraries.cpu_selected()[0], found["cpu"], first, seen, sep="|")
"""


def test_a_second_run_chooses_what_the_first_did(tmp_path):
    """In new processes, which take the file's choices, or FASTATTN_CPU_ISA's, and race all again
    from the defaults."""
    where = dict(FASTATTN_CACHE_DIR=str(tmp_path))
    runs = [
        python("-c", TWICE, **where, **more).stdout.splitlines()[-1].split("|")
        for more in ({}, {}, dict(FASTATTN_CPU_ISA="generic"))
    ]
    assert [x[1] for x in runs[1:]] == ["generic"] * 2
    assert all(x[2:] == runs[0][2:] for x in runs)
    chosen = dict(isa="generic", decoding="generic", threads=1)
    assert runs[0][2] == str(chosen) and runs[0][4] == "{1, 2}"


def test_a_run_of_few_rows_keeps_what_was_chosen_for_many(tuned, threads):
    threads(2)
    tuned({"generic": 0.5, 1: 0.5})
    assert tuned(equal, shapes=SMALL[1:])[1]["cpu"] == DEFAULTS | dict(isa="generic", threads=None)


def test_a_run_of_few_rows_alone_writes_both_sets(tuned, threads):
    threads(1)
    found = tuned({"generic": 0.5}, shapes=SMALL[1:])[1]["cpu"]
    assert found == DEFAULTS | dict(decoding="generic")


# ------------------------------------------------------------------------------------- the file


def test_the_printed_lines_say_what_to_send_back(tuned, tmp_path):
    _, _, text = tuned(equal)
    assert f"wrote {files.path_of(CPU)}" in text and "To send back: that file" in text


def test_a_folder_that_cannot_be_written_prints_the_file(tuned, tmp_path):
    (tmp_path / "cache").write_text("in its place")
    status, choices, text = tuned({"generic": 0.5})
    assert status == 1 and choices is None and "cannot be written" in text
    printed = json.loads(text[text.index("\n{") :])
    assert printed["choices"]["cpu"]["isa"] == "generic"
    assert printed["identity"] == files.identity(CPU)


def test_forget_deletes_the_files(tuned, tmp_path, capsys):
    tuned(equal)
    other = tmp_path / "cache" / "mine.json"
    other.write_text("kept")
    path = files.path_of(CPU)
    assert __main__.main(["tune", "--forget"]) == 0
    assert not path.exists() and other.exists() and f"deleted {path}" in capsys.readouterr().out
    assert __main__.main(["tune", "--forget"]) == 0


def test_forget_deletes_no_file_of_others(tuned, tmp_path, capsys):
    """Only what is a file of choices, or has the name of one of this chip's."""
    tuned(equal)
    path, folder = files.path_of(CPU), tmp_path / "cache"
    other_chip, foreign = folder / "cpu-another.json", folder / "cpu-usage.json"
    other_chip.write_text(path.read_text())
    foreign.write_text('{"usage": 3}')
    path.write_text("{")
    assert __main__.main(["tune", "--forget"]) == 0
    assert [*folder.iterdir()] == [foreign]
    path.mkdir()
    capsys.readouterr()
    assert __main__.main(["tune", "--forget"]) == 1
    assert f"{path} cannot be deleted: " in capsys.readouterr().out


def test_forget_says_that_a_folder_cannot_be_read(tuned, tmp_path, monkeypatch, capsys):
    tuned(equal)

    def denied(path):
        raise PermissionError(f"denied: {path}")

    capsys.readouterr()
    monkeypatch.setattr(os, "listdir", denied)
    assert __main__.main(["tune", "--forget"]) == 1
    assert "the folder cannot be read: denied" in capsys.readouterr().out


def test_a_later_run_replaces_the_choices_and_a_damaged_file(tuned):
    assert tuned({"generic": 0.5})[1]["cpu"]["isa"] == "generic"
    assert tuned(equal)[1]["cpu"].items() >= DEFAULTS.items()
    files.path_of(CPU).write_text("{")
    assert tuned(equal)[0] == 0


@pytest.mark.parametrize(
    "old",
    [dict(cpu=5), dict(rules=None), dict(rules=[1]), dict(tiles=5), dict(tiles=[[]])],
    ids=str,
)
def test_choices_of_another_form_are_replaced(old, tmp_path):
    path = tmp_path / "cpu-x.json"
    rule = dict(backend="cuda", instead_of="triton", kernels="", head_dims=[64, 64])
    new = dict(rules=[rule], tiles=[[{"M": 1}, 2]], cpu=DEFAULTS)
    files.write(path, files.text(dict(chip="x"), old))
    assert tune.keep(path, dict(chip="x"), new, lambda text: None) == 0
    assert files.read(path).choices == new


def test_rules_and_tiles_of_other_calls_are_kept():
    def rule(D, backend):
        return dict(head_dims=[D, D], backend=backend, instead_of="x", kernels="")

    old = dict(rules=[rule(64, "cuda"), rule(128, "cuda")], tiles=[[{"M": 1}, 2], [{"M": 2}, 3]])
    new = dict(rules=[rule(64, "triton")], tiles=[[{"M": 2}, 4]])
    assert tune.joined(old, new) == dict(
        rules=[rule(128, "cuda"), rule(64, "triton")], tiles=[[{"M": 1}, 2], [{"M": 2}, 4]]
    )
    assert tune.joined({}, new) == new and tune.joined(old, {}) == old


# ------------------------------------------------------------------------------------ the shapes


def test_a_shape_is_read_as_it_is_printed():
    shape = Shape("bfloat16", 2, 16, 4, 30, 40, 128, 64, causal=True, training=True)
    assert Shape.parse(str(shape)) == shape
    assert Shape.parse("float32 H4 M1 N9 D16") == Shape("float32", 1, 4, 4, 1, 9, 16, 16)
    for device in tune.SHAPES:
        assert all(map(Shape.parse, tune.SHAPES[device]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "float32 H4 M1 N9 D16 X3"], "got 'X3' in "),
        (["--shape", "float32 H4 M1 N9"], "without D"),
        (["--model", "torch"], "got 'torch', expected module:function"),
        (
            ["--model", "nosuch_module:make"],
            "got 'nosuch_module:make': No module named '",
        ),
        (["--model", "json:nosuch"], "got 'json:nosuch': module 'json' has no attribute 'nosuch'"),
        (["--minutes", "nan"], "--minutes: got nan, expected a number"),
        (["--device", "cuda"], "--device: got cuda, and torch sees no CUDA GPU"),
    ],
)
def test_what_is_not_understood_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "unavailable", lambda: "torch sees no CUDA GPU")
    assert __main__.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def a_model():
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    return layer, torch.randn(2, 9, 32)


def test_shapes_of_a_model(monkeypatch, threads):
    from fastattn.inspection import profiling

    threads(1)
    monkeypatch.setattr(profiling, "SECONDS", 0.02)
    monkeypatch.setattr(tune.importlib, "import_module", lambda name: argparse.Namespace(f=a_model))
    said = []
    expected = [Shape("float32", 2, 4, 4, 9, 9, 8, 8, training=True)]
    assert tune.of_model("models:f", said.append) == expected
    (line,) = said
    assert line.endswith(f"is measured as {expected[0]}, without dropout 0.1")


class Masked(torch.nn.Module):
    """A call with a mask and a scale, and one of packed rows."""

    def forward(self, q):
        mask = torch.rand(2, 1, 9, 9) > 0.5
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask, scale=0.3)
        return out + torch.nn.functional.scaled_dot_product_attention(q[0], q[0], q[0])


def test_what_no_shape_has_is_said(monkeypatch, threads):
    from fastattn.inspection import profiling

    threads(1)
    monkeypatch.setattr(profiling, "SECONDS", 0.02)
    make = argparse.Namespace(f=lambda: (Masked(), torch.randn(2, 4, 9, 8)))
    monkeypatch.setattr(tune.importlib, "import_module", lambda name: make)
    said = []
    (shape,) = tune.of_model("models:f", said.append)
    simple = f"is measured as {shape}, without a scale and a mask (2, 1, 9, 9) bool, dense"
    skipped = "a call with q (4, 9, 8), k (4, 9, 8) is skipped: a shape is of dense rows, (B,H,M,D)"
    assert sorted(said) == sorted([f"a call with q (2, 4, 9, 8), k (2, 4, 9, 8) {simple}", skipped])


# --------------------------------------------------------------------------- a GPU, by the stub

TRAINED = Shape("bfloat16", 1, 2, 2, 300, 300, 64, 64, training=True)
DECODED = Shape("bfloat16", 1, 4, 2, 1, 4096, 64, 64)


@pytest.fixture
def stub(monkeypatch):
    """The Triton backend on a stub of an H100, and a CUDA backend; calls are on CPU tensors."""
    if why := launch_stub.why_no_triton():
        pytest.skip(why)
    monkeypatch.setattr(base, "ordered", lambda spec, device: ["triton", "cuda", "reference"])
    monkeypatch.setattr(base, "why_not", lambda name, spec, device: [])
    monkeypatch.setattr(gpu, "architecture", lambda device: 90)
    monkeypatch.setattr(base.get("cuda").__class__, "kernels", lambda *given: {"forward": "sm_90"})
    of_pass = tile_configs.candidates  # each takes half a second to compile
    monkeypatch.setattr(tile_configs, "candidates", lambda *given: of_pass(*given)[:1])
    with launch_stub.stubbed(90) as made:
        yield made


def program(shape, backend, device):
    """A call of Triton's kernels on CPU tensors, which the stub launches; of others, nothing."""
    spec, t = shape.spec(CPU), Tensors(*shape.tensors(CPU))

    def run():
        if backend != "triton":
            return
        outs = Triton().forward(spec, t)
        if shape.training:
            Triton().backward(spec, t, outs, (outs[0], None), ("q", "k", "v"))

    return run


def raced(seconds, *shapes):
    tuner = tune.Tuner(CPU, Clock(seconds), float("inf"), lambda text: None)
    return *tune.tune_gpu(tuner, shapes, program), tuner.races


def test_tiles_of_each_pass_and_the_backend_are_raced(stub):
    rules, tiles, races = raced(lambda name: 0.5 if name == "cuda" else 1.0, TRAINED)
    assert {x.which for x in tiles} == {"forward", "dq", "dkv"}
    assert [x["what"] for x in races] == [
        *("triton, forward", "triton, dq", "triton, dkv", "backends")
    ]
    assert all(len(x["ratios"]) == 2 for x in races)
    (rule,) = rules
    assert (rule.backend, rule.instead_of, rule.passes) == (
        "cuda",
        "triton",
        ("forward", "backward"),
    )
    spec = TRAINED.spec(torch.device("cuda"))
    assert rule.admits(spec, 90) and not rule.admits(spec, 80)
    for other in (dict(M=600), dict(N=100), dict(B=9), dict(D=32, Dv=32), dict(causal=True)):
        assert not rule.admits(TRAINED._replace(**other).spec(torch.device("cuda")), 90), other
    assert parsed(json.loads(json.dumps(rule.written())), 90, "") == rule


def test_the_default_backend_needs_no_rule(stub):
    shape = TRAINED._replace(training=False)
    assert raced(lambda name: 2.0 if name == "cuda" else 1.0, shape)[0] == []
    assert raced(equal, shape)[0] == []


def test_parts_of_keys_are_raced(stub):
    defaults = []

    def seconds(name):
        if isinstance(name, int):
            defaults.append(name)
            return 1.0 if name == 1 else 2.0
        return 1.0

    _, tiles, _ = raced(seconds, DECODED)
    (splits,) = (y for x, y in tiles.items() if x.which == "splits")
    assert splits == 1 and defaults[0] > 1


def test_a_stored_tile_is_launched(stub, monkeypatch):
    """In later calls of other processes, where nothing is raced."""
    chosen = []

    def seconds(name):
        if isinstance(name, Config):
            chosen.append(name)
            return 0.5 if name == chosen[1] else 1.0  # not the default
        return 1.0

    shape = TRAINED._replace(training=False)
    _, tiles, _ = raced(seconds, shape)
    (tile,) = tiles.values()
    launched = []
    stub.launched = lambda made, *given: launched.append((made.num_warps, made.num_stages))
    program(shape, "triton", CPU)()
    monkeypatch.setattr(autotune, "stored", lambda device: tiles)
    for _ in range(2):
        program(shape, "triton", CPU)()
    assert launched == [x[2:] for x in (chosen[0], tile, tile)] and tile == chosen[1]


def test_backends_race_with_the_tiles_that_were_found(stub):
    ran, launched = {}, []
    stub.launched = lambda made, *given: launched.append((made.num_warps, made.num_stages))

    class Spied(Clock):
        def __call__(self, name, program):
            launched.clear()
            program()
            ran.setdefault(name, []).append(list(launched))
            return self.seconds(name)

    default = []

    def seconds(name):
        if not isinstance(name, Config):
            return 1.0
        default.append(name)
        return 1.0 if name == default[0] else 0.5

    tuner = tune.Tuner(CPU, Spied(seconds), float("inf"), lambda text: None)
    _, tiles = tune.tune_gpu(tuner, [TRAINED._replace(training=False)], program)
    (tile,) = tiles.values()
    assert tile != default[0] and {str(x) for x in ran["triton"]} == {str([tile[2:]])}


def test_after_the_time_no_tile_is_kept(stub):
    tuner = tune.Tuner(CPU, Clock(equal), 0.0, lambda text: None)
    assert tune.tune_gpu(tuner, [TRAINED], program) == ([], {}) and tuner.races == []


def test_a_tile_of_a_file_is_raced_again(stub, monkeypatch):
    """Where a call before the search has kept the file's tile."""
    default = []

    def seconds(name):
        if isinstance(name, Config):
            default.append(name)
        return 1.0

    shape = TRAINED._replace(training=False)
    _, first, _ = raced(seconds, shape)
    (key,) = first
    monkeypatch.setattr(autotune, "stored", lambda device: {key: default[1]})
    spec, t = shape.spec(CPU), Tensors(*shape.tensors(CPU))

    def called_before(shape, backend, device):
        return (lambda: Triton().forward(spec, t)) if backend == "triton" else (lambda: None)

    Triton().forward(spec, t)  # keeps the file's tile
    tuner = tune.Tuner(CPU, Clock(equal), float("inf"), lambda text: None)
    _, tiles = tune.tune_gpu(tuner, [shape], called_before)
    assert tiles == {key: default[0]}
