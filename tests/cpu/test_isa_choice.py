"""The instruction set is chosen by properties of the chip, and the reason is reported."""

import ctypes
import itertools
import os
import re
import shutil
import subprocess

import pytest
import torch

import fastattn
from fastattn.__main__ import report, show
from fastattn.backends.native import libraries
from tests.support.backends import variant
from tests.support.checkout import ROOT, configured
from tests.support.marks import parametrize

pytestmark = pytest.mark.skipif(
    bool(libraries.cpu_unavailable()), reason=str(libraries.cpu_unavailable())
)
ISAS = [] if libraries.cpu_unavailable() else libraries.cpu_isas()
ALL = "avx512_bf16,avx512,avx2,generic"
TILES = "amx_bf16," + ALL


def chosen(vendor, family, model, isas):
    """(instruction set, the one that decodes, reason) for any chip, present or not."""
    text, number = ctypes.c_char_p, ctypes.c_int64
    served = libraries.cpu().entry("fa_cpu_served", text, text, number, number, text)
    found = served(vendor.encode(), family, model, isas.encode()).decode()
    names, why = found.split(": ", 1)
    return *names.split(", "), why


@pytest.mark.parametrize(
    "vendor, family, model, isa, says",
    [
        ("GenuineIntel", 6, 207, "avx512", "Emerald Rapids, measured"),
        ("GenuineIntel", 6, 143, "avx512", "Sapphire Rapids, not measured"),
        ("GenuineIntel", 6, 173, "avx512", "Granite Rapids, not measured"),
        ("GenuineIntel", 6, 85, "avx512", "not in the table"),
        ("GenuineIntel", 19, 1, "avx512", "not in the table"),
        ("AuthenticAMD", 25, 97, "avx512_bf16", "Zen 4, measured"),
        ("AuthenticAMD", 26, 68, "avx512_bf16", "Zen 5, measured"),
        ("AuthenticAMD", 27, 1, "avx512_bf16", "not in the table"),
        ("CentaurHauls", 7, 11, "avx512_bf16", "not in the table"),
    ],
)
def test_chip_decides(vendor, family, model, isa, says):
    found, decoding, why = chosen(vendor, family, model, ALL)
    assert (found, decoding) == (isa, "avx512_bf16")
    assert says in why and f"{vendor} family {family} model {model}" in why
    assert ("only decodes" in why) == (isa == "avx512")


@pytest.mark.parametrize(
    "model, says",
    [
        (207, "Emerald Rapids, not measured with these kernels"),
        (143, "Sapphire Rapids, not measured"),
        (173, "Granite Rapids, not measured"),
        (300, "not measured"),
    ],
)
def test_tiles_are_preferred_if_available(model, says):
    for isas in (TILES, TILES + ",amx_model", "amx_bf16,avx512,avx2,generic"):
        found, decoding, why = chosen("GenuineIntel", 6, model, isas)
        assert (found, decoding) == ("amx_bf16", isas.split(",")[1])
        assert says in why and f"GenuineIntel family 6 model {model}" in why


@pytest.mark.parametrize("isas", ["avx512,avx2,generic", "avx2,generic", "generic"])
def test_without_bfloat16_the_widest_vectors(isas):
    for vendor, family, model in (("GenuineIntel", 6, 143), ("AuthenticAMD", 25, 33), ("", 0, 0)):
        found, decoding, why = chosen(vendor, family, model, isas)
        assert found == decoding == isas.split(",")[0] and "widest" in why


def test_the_first_listed_isa_is_chosen():
    listed = libraries.cpu_isas()
    assert sorted(listed) == sorted(x for x in [*TILES.split(","), "amx_model"] if x in listed)
    assert listed[0] != "amx_model"  # the chip's tiles in software, for tests
    with variant(listed[-1]):
        assert libraries.cpu_isa() == listed[-1]
        assert libraries.cpu().why() == b"selected by its name"


@pytest.mark.parametrize("isa", ISAS)
def test_each_dtype_names_its_compute_unit(isa):
    """Tiles multiply dtypes that have planes; for float64 the vector ISA is reported."""
    q = torch.ones(1, 1, 3, 4)
    with variant(isa):
        units, explained = libraries.cpu_units(), str(fastattn.explain(q, q, q))
    wide = "avx512" if isa.startswith("amx") else isa
    assert units.keys() == {"float32", "bfloat16", "float16", "float64"}
    for dtype, passes in units.items():
        assert set(passes.values()) == {wide if dtype == "float64" else isa}
    assert f"cpu: would run, on {isa}\n" in explained


def lse_of_rows(rows):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 64, generator=draw).bfloat16() for n in (rows, 300, 300))
    return fastattn.attention(q, k, v, return_lse=True, backend="cpu")[1]


@pytest.mark.parametrize("isa, decoding", [*itertools.permutations(ISAS, 2)])
def test_one_set_decodes_for_another(isa, decoding):
    """As `chosen` has it for some chips, here with any two sets: bit for bit."""
    alone = {}
    for name in (isa, decoding):
        with variant(name):
            alone[name] = lse_of_rows(1), lse_of_rows(64), libraries.cpu_units()
    with variant(isa):
        libraries.select_cpu_isa(isa, decoding)
        one, many, units = lse_of_rows(1), lse_of_rows(64), libraries.cpu_units()
    assert torch.equal(one, alone[decoding][0]) and torch.equal(many, alone[isa][1])
    for dtype, passes in units.items():
        assert passes["one row"] == alone[decoding][2][dtype]["one row"]
        assert passes["many rows"] == alone[isa][2][dtype]["many rows"]


def test_the_report_has_the_reason_for_the_isa():
    found = report()["cpu"]
    assert found["why"] == libraries.cpu_isa_reason() in show(report())


def test_a_set_that_is_not_there_is_named_with_those_that_are(monkeypatch):
    """A build of some sets lacks others that the machine runs."""
    monkeypatch.setenv("FASTATTN_CPU_ISA", "sse")
    assert libraries._load_cpu.__wrapped__() == (
        "FASTATTN_CPU_ISA: got 'sse', expected one that this machine runs and this build has: "
        f"{','.join(ISAS)} (FASTATTN_ISAS=all at set-up builds every one)"
    )


BEST = libraries.cpu_isas()[0] if not libraries.cpu_unavailable() else ""
NATIVE = {"generic", BEST} | ({"avx512"} if BEST in ("amx_bf16", "avx512_bf16") else set())


def levels_of(isa, text):
    """The optimisation of each unit of an instruction set in a build file."""
    flags = re.findall(r"^  FLAGS = (.*)$", text, re.M)
    return [re.findall(r"-O(\d)", x)[-1] for x in flags if f"FA_ISA={isa} " in x]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the sets are those of x86-64")
@parametrize(
    "sets, built",
    [
        ("", {"generic", *ALL.split(","), "amx_bf16", "amx_model"}),
        ("all", {"generic", *ALL.split(","), "amx_bf16", "amx_model"}),
        ("avx2", {"generic", "avx2"}),
        ("amx_bf16", {"generic", "avx512", "amx_bf16"}),
        ("avx512_bf16,generic", {"generic", "avx512", "avx512_bf16"}),
        ("native", NATIVE),
        ("native,avx2", NATIVE | {"avx2"}),
    ],
    fast=1,
)
def test_chosen_sets_are_built(tmp_path, sets, built):
    done = configured(tmp_path, FASTATTN_ISAS=sets, FASTATTN_EXTENSION="off")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "build.ninja").read_text()
    found = set(re.findall(r"DFA_ISA=(\w+)", text))
    generic = set(levels_of("generic", text))  # a fallback for this machine alone, or others' best
    if "native" in sets:
        if os.environ.get("FASTATTN_CPU_ISA") or not found <= set(
            fastattn.__build__["instruction_sets"].split()
        ):
            pytest.skip("a set is named, or the library in use lacks this machine's best")
        assert (generic == {"1"}) == (NATIVE > {"generic"})
    else:
        assert (generic == {"1"}) == (sets in ("avx2", "amx_bf16"))
    assert found == built
    known = re.search(r"DFA_ISAS\S*=(.*?)\"", text)[1]
    assert set(re.findall(r"ISA\((\w+),", known)) == built


@pytest.mark.slow
def test_generic_is_fast_in_a_build_for_other_machines(tmp_path):
    more = {"FASTATTN_EXTENSION": "off", "FASTATTN_PORTABLE": "on"}
    assert configured(tmp_path, FASTATTN_ISAS="avx2", **more).returncode == 0
    assert set(levels_of("generic", (tmp_path / "build.ninja").read_text())) == {"3", "2"}


# The program of the build, on a chip that the environment names, which runs every set.
CHIP = """
#include <cstdlib>
#define FA_PRINT_BEST
#define main main_of_this_chip
#include "kernel_choice.cpp"
#undef main
int main(int count, char** names) {
  const fa::Chip chip{getenv("VENDOR"), atoi(getenv("FAMILY")), atoi(getenv("MODEL"))};
  const auto any_set = [](const std::string&) { return true; };
  fputs(fa::best_of(chip, any_set, count - 1, names + 1).c_str(), stdout);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="there is no c++")
def test_a_native_build_has_the_best_set(tmp_path):
    (tmp_path / "chip.cpp").write_text(CHIP)
    program, runtime = tmp_path / "chip", ROOT / "csrc" / "cpu" / "runtime"
    command = ["c++", "-std=c++17", f"-I{runtime}", tmp_path / "chip.cpp", "-o", program]
    subprocess.run(command, check=True)
    sets = {ALL: [], TILES + ",amx_model": [], "avx512,avx2,generic": [], "generic": []}
    for chip in (("GenuineIntel", 6, 207), ("GenuineIntel", 6, 85), ("AuthenticAMD", 26, 68)):
        environment = dict(zip(("VENDOR", "FAMILY", "MODEL"), map(str, chip), strict=True))
        for isas, seen in sets.items():
            command = [program, *reversed(isas.split(","))]
            found = subprocess.check_output(command, env=environment, text=True)
            assert found == chosen(*chip, isas.removesuffix(",amx_model"))[0]
            seen.append(found)
    assert sets[ALL] == ["avx512"] * 2 + ["avx512_bf16"]
    assert sets[TILES + ",amx_model"][0] == "amx_bf16"


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the sets are those of x86-64")
def test_the_first_copy_of_an_inline_function_is_the_right_one(tmp_path):
    """A linker keeps it: one that every machine can run, and of those at -O3 that one."""
    assert configured(tmp_path, FASTATTN_EXTENSION="off").returncode == 0
    text = (tmp_path / "build.ninja").read_text()
    linked = re.search(r"^build libfastattn_cpu\.so: .*?\|", text, re.M)[0].split()
    flags = dict(re.findall(r"^build (\S+\.o): .*\n(?:  .*\n)*?  FLAGS = (.*)$", text, re.M))
    objects = [(name, flags[name]) for name in linked if name in flags]
    assert all("runtime" in name for name, _ in objects[:2])
    sets = [re.search(r"DFA_ISA=(\w+)", x)[1] for _, x in objects[2:]]
    order = ["generic", *reversed(ALL.split(",")[:-1]), "amx_bf16", "amx_model"]
    assert sets == sorted(sets, key=order.index) and set(sets) == set(order)
    for isa in order:
        levels = [re.findall(r"-O(\d)", x)[-1] for _, x in objects if f"FA_ISA={isa} " in x]
        assert levels == sorted(levels, reverse=True) and len(levels) > 2, isa
        assert set(levels) == {"3", "2"}, isa


@pytest.mark.slow
def test_an_unknown_set_is_named(tmp_path):
    done = configured(tmp_path, FASTATTN_ISAS="avx2,sse", FASTATTN_EXTENSION="off")
    assert done.returncode and "got 'sse', expected some of generic, avx2" in done.stderr


@pytest.mark.slow
def test_another_machine_has_no_native_set(tmp_path):
    other = "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={os.uname().machine}"
    done = configured(tmp_path, *other, FASTATTN_ISAS="native", FASTATTN_EXTENSION="off")
    assert done.returncode and "got 'native' in a build for another machine" in done.stderr
