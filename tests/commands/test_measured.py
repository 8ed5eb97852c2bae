"""Files of measured choices: which of them count, and what reads them."""

import json
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import fastattn
from fastattn.backends import preference
from fastattn.backends.measured import files
from fastattn.backends.native import libraries
from fastattn.backends.preference import Rule, parsed
from fastattn.call.spec import Feature
from fastattn.commands import tune
from tests.support.backends import INTERPRETED
from tests.support.fresh_python import python

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
IDENTITY = dict(fastattn="1.0", chip="A chip", torch="2.13", driver="580.65")
RULE = Rule(
    architecture=90,
    passes=("forward",),
    head_dims=(64, 64),
    features=Feature.BAND | Feature.GQA,
    dtypes=frozenset({torch.bfloat16}),
    backend="triton",
    kernels="",
    instead_of="cuda",
    all_features=True,
    sizes=(("M", 513, 1024), ("heads", 1, 8)),
    source="a file",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of files; the machine is one of IDENTITY. `files.here.cache_clear()` forgets."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "identity", lambda device: dict(IDENTITY))
    monkeypatch.setattr(files, "cpu_name", lambda: IDENTITY["chip"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: IDENTITY["chip"])
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()


def forget():
    files.here.cache_clear()
    libraries.measured.cache_clear()
    preference.rules.cache_clear()


def written(choices, device=CPU, **changes):
    path = files.path_of(device)
    files.write(path, files.text(IDENTITY | changes, choices))
    forget()
    return path


def read(name="cpu", parse=dict):
    return files.choices(CPU, name, parse, "the default")


# ------------------------------------------------------------------------------ which files count


def test_a_file_of_this_machine_counts(cache):
    path = written({"cpu": {"isa": "generic"}})
    assert path == cache / "cpu-a-chip.json" and read() == {"isa": "generic"}
    assert read("tiles") == "the default"


def test_a_folder_that_is_not_there_costs_one_look(cache, monkeypatch):
    monkeypatch.setattr(files, "path_of", lambda device: pytest.fail("the chip was asked for"))
    monkeypatch.setattr(files, "read", lambda path: pytest.fail("a file was read"))
    assert files.here(CPU) is None and read() == "the default"


def test_a_chip_without_a_file_has_none(cache):
    written({"cpu": {}}, torch.device("cuda"))
    assert files.here(CPU) is None


@pytest.mark.parametrize("name", IDENTITY)
def test_a_stale_file_is_ignored_with_a_word(name, cache):
    path = written({"cpu": {"isa": "generic"}}, **{name: "another"})
    now = IDENTITY[name]
    with pytest.warns(
        UserWarning, match=rf"{path} .*with {name} another, and here is {now}\. .*--f"
    ):
        assert read() == "the default"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read() == "the default"  # it warns once


def test_a_file_that_lacks_a_line_of_the_identity_is_ignored(cache):
    path = files.path_of(CPU)
    files.write(path, files.text({"chip": IDENTITY["chip"]}, {"cpu": {}}))
    with pytest.warns(UserWarning, match="measured with fastattn None, and here is 1.0"):
        assert files.here(CPU) is None


DAMAGE = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2],
    "a list": lambda text: b"[]",
    "null": lambda text: b"null",
    "no text": lambda text: b"\xff\xfe\x00",
    "another format": lambda text: text.replace(b'"format": 1', b'"format": 2'),
    "a format that is true": lambda text: text.replace(b'"format": 1', b'"format": true'),
    "deeply nested": lambda text: b"[" * 200000,
    "no choices": lambda text: text.replace(b'"choices"', b'"others"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_with_a_word(damage, cache):
    path = written({"cpu": {"isa": "generic"}})
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match=f"{path} is ignored: it is damaged"):
        assert read() == "the default"


def test_choices_of_another_form_are_ignored_with_a_word(cache):
    path = written({"cpu": {"isa": 5, "decoding": 5}})
    with pytest.warns(UserWarning, match=f"{path} is ignored: its cpu are damaged"):
        assert libraries.measured() == libraries.Measured()


@pytest.mark.parametrize(
    "choices",
    [
        *(dict(threads=0), dict(threads=True), dict(isa="avx2"), dict(cores=3), []),
        *(dict(isa="", decoding=""), dict(isa="amx_model", decoding="avx2")),
    ],
    ids=str,
)
def test_what_is_no_choice_of_a_cpu_is_refused(choices):
    with pytest.raises((TypeError, ValueError)):
        libraries.Measured.parse(choices)


VARIABLES = ("FASTATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA")


@pytest.mark.parametrize(
    "system, variables, folder",
    [
        ("linux", dict(FASTATTN_CACHE_DIR="/a", XDG_CACHE_HOME="/b"), "/a"),
        ("linux", dict(XDG_CACHE_HOME="/b"), "/b/fastattn"),
        ("linux", dict(HOME="/c"), "/c/.cache/fastattn"),
        ("linux", dict(HOME="/c", FASTATTN_CACHE_DIR="~/a"), "/c/a"),
        ("darwin", dict(HOME="/c"), "/c/Library/Caches/fastattn"),
        ("win32", dict(LOCALAPPDATA="/d"), "/d/fastattn"),
    ],
)
def test_files_lie_in_the_cache_folder_of_the_system(system, variables, folder, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert files.folder() == folder


def test_without_a_home_there_is_no_file(monkeypatch, tmp_path):
    """Not one in a folder named ~ of the working directory."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    forget()
    for variable in ("", "~/x"):
        monkeypatch.setenv("FASTATTN_CACHE_DIR", variable)
        assert files.folder() == "" and files.here(CPU) is None
        assert libraries._num_threads() is torch.get_num_threads
        said = []
        assert tune.keep(files.path_of(CPU), {}, {}, said.append) == 1
        assert "the user has no home" in said[0]
    assert not [*tmp_path.iterdir()]


# ----------------------------------------------------------------------------------- writing them


def test_an_interrupted_write_leaves_the_old_file(cache, monkeypatch):
    path = written({"cpu": {}})
    whole = path.read_text()

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        files.write(path, "other")
    assert path.read_text() == whole and list(cache.iterdir()) == [path]


def test_writers_at_once_leave_one_whole_file(cache):
    path = written({"cpu": {"isa": "0", "decoding": "0"}})

    def write(at):
        for _ in range(50):
            files.write(path, files.text(IDENTITY, {"cpu": {"isa": str(at) * 999}}))

    writers = [threading.Thread(target=write, args=(at,)) for at in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert files.read(path).identity == IDENTITY
    assert list(cache.iterdir()) == [path]


@pytest.mark.slow
def test_two_processes_at_once_leave_one_whole_file(cache):
    path = files.path_of(CPU)
    program = f"""
import sys
from pathlib import Path
from fastattn.backends.measured import files
for at in range(200):
    mine = files.text(dict(chip=sys.argv[1]), dict(cpu=sys.argv[1] * 999))
    files.write(Path({str(path)!r}), mine)
"""
    both = [subprocess.Popen([sys.executable, "-c", program, x]) for x in ("one", "other")]
    while any(x.poll() is None for x in both):
        if path.exists():
            found = files.read(path)
            assert found.choices["cpu"] == found.identity["chip"] * 999
    assert [x.returncode for x in both] == [0, 0] and list(cache.iterdir()) == [path]


# -------------------------------------------------------------------------------- rules of a GPU


def test_a_rule_is_read_as_it_is_written():
    text = json.dumps(RULE.written())
    assert parsed(json.loads(text), 90, "a file") == RULE
    assert "M 513 to 1024, heads 1 to 8, in bfloat16, with band, gqa" in str(RULE)


def test_every_committed_file_has_rules():
    found = list(files.COMMITTED.glob("*.json"))
    rules = preference.committed()
    assert len(found) == 1 and {x.source for x in rules} == {
        "fastattn/backends/measured/sm_90.json"
    }
    assert [x.architecture for x in rules] == [90, 90] and all(x.evidence for x in rules)


def test_rules_of_this_machine_come_last(cache, monkeypatch):
    path = written({"rules": [RULE.written()]}, GPU)
    # The architecture is a line of the identity of a GPU.
    whole = dict(IDENTITY, architecture=90)
    files.write(path, files.text(whole, {"rules": [RULE.written()]}))
    monkeypatch.setattr(files, "identity", lambda device: whole)
    forget()
    assert preference.rules(GPU) == (*preference.committed(), RULE._replace(source=str(path)))


def test_damaged_rules_leave_the_committed_ones(cache, monkeypatch):
    whole = dict(IDENTITY, architecture=90)
    monkeypatch.setattr(files, "identity", lambda device: whole)
    for damage in (
        *({"passes": 3}, {"passes": "forward"}, {"passes": []}, {"sizes": [1]}),
        *({"dtypes": ["float3"]}, {"dtypes": ["nn"]}, {"features": ["COLOUR"]}),
        *({"backend": "cuda"}, {"backend": "foo"}, {"instead_of": 3}, {"evidence": [1]}),
        *({"kernels": None}, {"kernels": "sm_90"}),
        *({"sizes": [["M", "a", "b"]]}, {"sizes": [["M", 1, True]]}, {"head_dims": [64, 1e999]}),
    ):
        path = written({"rules": [RULE.written() | damage]}, GPU)
        files.write(path, files.text(whole, files.read(path).choices))
        forget()
        with pytest.warns(UserWarning, match="its rules are damaged"):
            assert preference.rules(GPU) == preference.committed()


# ----------------------------------------------------------------------------------- the CPU

SHOWN = """
import fastattn, torch
from fastattn.backends.native import libraries
from fastattn.kv_cache import new_rows
from fastattn.rotation import kernel
from fastattn.selection import indexer
for module in (new_rows, kernel, indexer):
    assert module.get_num_threads is libraries.get_num_threads, module
q = torch.randn(1, 1, 30, 8)
found = fastattn.explain(q, q, q)
print(found.unit, found.measured, libraries.cpu_isa_reason(), libraries.get_num_threads(), sep="|")
print(str(found).splitlines()[1])
"""


@pytest.mark.skipif(INTERPRETED, reason="about the native library")
def test_a_process_takes_the_instruction_set_and_threads_of_a_file(tmp_path):
    """FASTATTN_CPU_ISA names another. The bits are those of that instruction set."""
    cpu = dict(isa="generic", decoding="generic", threads=1)
    where = dict(FASTATTN_CACHE_DIR=str(tmp_path))
    name = files.path_of(CPU).name
    files.write(tmp_path / name, files.text(files.identity(CPU), {"cpu": cpu}))
    first, second = python("-c", SHOWN, **where).stdout.splitlines()
    path = str(tmp_path / name)
    assert first == f"generic|{path}|measured on this machine ({path})|1"
    assert second == f"  cpu: would run, on generic, as measured ({path})"
    other = next(x for x in libraries.cpu_isas() if x not in ("generic", "amx_model"))
    first, _ = python("-c", SHOWN, **where, FASTATTN_CPU_ISA=other).stdout.splitlines()
    assert first == f"{other}||FASTATTN_CPU_ISA names it|1"


@pytest.mark.skipif(INTERPRETED, reason="about the native library")
def test_an_instruction_set_that_is_not_here_is_ignored_with_a_word(cache):
    written({"cpu": dict(isa="mmx", decoding="mmx")})
    before = libraries.cpu_selected()
    with pytest.warns(UserWarning, match=r"it chooses mmx and mmx, and this build has .*generic"):
        libraries._select_measured(libraries.cpu())
    assert libraries.cpu_selected() == before and libraries.cpu_measured() == ""


@pytest.mark.skipif(INTERPRETED, reason="about the native library")
def test_a_block_by_default_ignores_what_was_chosen(cache, threads):
    threads(2)
    written({"cpu": dict(isa="generic", decoding="generic", threads=1)})
    before, count = libraries.cpu_selected(), libraries._num_threads()
    libraries.select_cpu_isa("generic")
    try:
        with libraries.by_default():
            assert (libraries.cpu_selected(), count()) == (libraries.cpu_defaults(), 2)
        assert (libraries.cpu_selected(), count()) == (("generic", "generic"), 1)
    finally:
        libraries.select_cpu_isa(*before)


@pytest.mark.skipif(INTERPRETED, reason="about the native library")
@pytest.mark.parametrize("isa", ["mmx", "\udc80"], ids=["unknown", "a lone surrogate"])
def test_a_file_that_is_ignored_bounds_no_threads(isa, cache, threads):
    threads(2)
    written({"cpu": dict(isa=isa, decoding=isa, threads=1)})
    with pytest.warns(UserWarning, match="and this build has "):
        assert libraries._num_threads()() == 2
    assert libraries.measured() == libraries.Measured()


def test_a_folder_that_cannot_be_listed_breaks_no_import(cache, threads, monkeypatch):
    """The first call reads the file, and warns if it cannot."""

    def denied(path):
        raise PermissionError("denied")

    threads(2)
    path = written({"cpu": dict(threads=1)})
    monkeypatch.setattr(os, "listdir", denied)
    count = libraries._num_threads()
    assert count() == 1  # the file itself can be read
    monkeypatch.setattr(files, "read", denied)
    forget()
    with pytest.warns(UserWarning, match=f"{path} is ignored: it is damaged .denied"):
        assert count() == 2


def test_the_identity_of_a_cpu_has_its_extensions(monkeypatch):
    """Two machines of one name: a virtual one hides some."""
    info = "model name\t: A chip\nflags\t\t: fpu {}avx512f avx2 sse amx_tile\n"
    found = []
    for hidden in ("", "avx512_bf16 "):
        monkeypatch.setattr(files, "_text", lambda path, hidden=hidden: info.format(hidden))
        files.cpu_flags.cache_clear()
        found.append(files.identity(CPU))
    files.cpu_flags.cache_clear()
    assert found[0]["flags"] == "amx_tile avx2 avx512f"
    assert "flags amx_tile avx2 avx512f, and here is amx_tile avx2 avx512_bf16 " in files.differs(
        *found
    )


def test_without_a_file_threads_are_torchs():
    assert libraries._num_threads() is torch.get_num_threads


def test_a_bound_of_threads_never_adds_any(cache, threads):
    written({"cpu": dict(threads=3)})
    count = libraries._num_threads()
    for given, taken in ((1, 1), (3, 3), (5, 3)):
        threads(given)
        assert count() == taken
    q = torch.randn(1, 1, 4, 8)
    assert fastattn.explain(q, q, q).measured == ""
