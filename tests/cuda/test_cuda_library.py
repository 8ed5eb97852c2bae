"""The library that nvcc makes of the CUDA kernels: when it is built, what it contains, that it
loads, and its error messages without a GPU.

With FASTATTN_CUDA=on (make test-cuda), a missing nvcc is a failure; otherwise a skip.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from bench.static_gpu import cuda_library, ptxas
from bench.static_gpu.budgets import nvidia_tool
from tests.support.checkout import ROOT

pytestmark = pytest.mark.slow

FORCED = os.environ.get("FASTATTN_CUDA") == "on"


def configure(folder, **environment):
    try:
        return cuda_library.configure(folder, **environment)
    except cuda_library.NotBuilt as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def library():
    """The path of the library."""
    try:
        return cuda_library.build()
    except cuda_library.NotBuilt as missing:
        assert not FORCED, missing
        pytest.skip(str(missing))


def without_gpu(code, library):
    """The output of a Python process that uses the library and sees no GPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "FASTATTN_CUDA_LIBRARY": str(library)}
    done = subprocess.run(
        [sys.executable, *code], env=os.environ | hidden, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_code_for_sm_80_and_sm_90_and_ptx_for_newer_gpus(library):
    """For every source file. A driver needs a minute to translate a missing one, at a user's first
    call, and in each process if its cache cannot be written."""
    pytest.importorskip("triton", reason="cuobjdump comes with Triton")
    binaries = nvidia_tool("cuobjdump", "--list-elf", str(library))
    texts = nvidia_tool("cuobjdump", "--list-ptx", str(library))
    sources = set((ROOT / "csrc" / "cuda").rglob("*.cu"))
    of_sm90 = {x for x in sources if x.parent.name == "sm90"}
    others = len(sources - of_sm90) - bool(of_sm90)  # sm90_absent.cu is there if they are not
    expected = Counter({"sm_80.cubin": others, "sm_90.cubin": others, "sm_90.ptx": others})
    expected += Counter({"sm_90a.cubin": len(of_sm90)})
    assert Counter(re.findall(r"sm_\d+a?\.\w+", binaries + texts)) == expected, binaries + texts


def test_it_needs_no_library_of_cuda(library):
    if not shutil.which("readelf"):
        pytest.skip("reading what a library needs takes readelf")
    stdout = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", stdout)
    assert needed and not any("cuda" in x or "nv" in x for x in needed), needed


def test_it_exports_its_c_abi_and_no_more(library):
    if not shutil.which("nm"):
        pytest.skip("reading what a library exports takes nm")
    stdout = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True
    ).stdout
    exported = set(re.findall(r" T (\w+)", stdout))
    header = (ROOT / "csrc" / "abi.h").read_text()
    assert exported == set(re.findall(r"\b(fa_cuda_\w+)\(", header)) | {"fa_cuda_probe"}
    assert " W " not in stdout and " B " not in stdout, stdout


def test_it_loads_without_a_gpu(library):
    found = json.loads(without_gpu(["-m", "fastattn", "--json"], library))["backends"]["cuda"]
    assert found == {"available": False, "reason": "torch sees no CUDA GPU"}


FAILING = """
import torch
from fastattn.backends.native import libraries
from fastattn.dispatch import operation
from fastattn.backends.native import cuda
import fastattn

class Pretending(cuda.Cuda):
    chip, stream = lambda self, x: (0, 80), lambda self, x: 0

operation.choose = lambda spec, asked, device: Pretending()
q = torch.zeros(1, 1, 3, 8, dtype=torch.float16)
try:
    fastattn.attention(q, q, q)
except RuntimeError as error:
    print(error)
"""


def test_the_drivers_error_is_raised(library):
    text = without_gpu(["-c", FAILING], library)
    assert re.match(r"the CUDA kernels failed at cudaSetDevice: .+ \(CUDA error \d+;", text), text


# --- when it is built -----------------------------------------------------------------------------


def fake_nvcc(folder, version):
    """A fake nvcc that prints a version and compiles nothing."""
    tool = folder / "nvcc"
    tool.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && echo "Cuda compilation tools, release {version}, V{version}.1"\n'
        '[ "$1" = --version ] || { echo "fatal error: no compiler" >&2; exit 1; }\n'
    )
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize(
    "wanted, reason",
    [("off", "FASTATTN_CUDA was off"), ("auto", "no NVIDIA GPU was there"), ("", "no NVIDIA GPU")],
    ids=["off", "auto", "unsaid"],
)
def test_without_a_build_the_reason_is_written(tmp_path, wanted, reason):
    if wanted != "off" and [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]:
        pytest.skip("there is a GPU here")
    assert configure(tmp_path, FASTATTN_CUDA=wanted).returncode == 0
    assert (tmp_path / "no_cuda.txt").read_text().startswith(reason)


@pytest.mark.parametrize(
    "wanted, version, complaint",
    [
        ("on", "12.1", "is of CUDA 12.1, older than 12.8"),
        ("on", "", "nvcc --version does not tell its release"),
        ("on", "12.8", "nvcc does not compile here: fatal error: no compiler"),
        ("maybe", "13.0", "FASTATTN_CUDA: got 'maybe', expected on, off or auto"),
    ],
    ids=["old", "silent", "unable", "unknown"],
)
def test_an_impossible_build_is_refused(tmp_path, wanted, version, complaint):
    done = configure(tmp_path, FASTATTN_CUDA=wanted, CUDACXX=fake_nvcc(tmp_path, version))
    assert done.returncode and complaint in " ".join(done.stderr.split())


def test_one_build_folder_follows_each_setting(library, tmp_path):
    """On, off, on for other architectures, and on again: no setting affects the next."""

    def configured(**environment):
        done = configure(tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        return code_of(tmp_path)["sm80/forward"]

    usual = {"80,code=[sm_80]", "90,code=[compute_90,sm_90]"}
    assert configured(FASTATTN_CUDA="on") == usual
    assert configured(FASTATTN_CUDA="off") == set()
    others = {"80,code=[compute_80,sm_80]", "120,code=[sm_120]"}
    assert configured(FASTATTN_CUDA="on", CUDAARCHS="80;120-real") == others
    assert configured(FASTATTN_CUDA="on") == usual


def code_of(folder):
    """By source below csrc/cuda, without its suffix, the code that nvcc makes of it in a configured
    build: what follows "arch=compute_"."""
    found = defaultdict(set)
    text = (folder / "build.ninja").read_text()
    form = r"\.dir/([\w/]+)\.cu\.o: CUDA_COMPILER(.*?)\n\n"
    for source, rule in re.findall(form, text, re.DOTALL):
        found[source] |= set(re.findall(r"code=arch=compute_(\w+,code=\[[\w,]+\])", rule))
    return found


@pytest.fixture(scope="module")
def with_sm90(tmp_path_factory):
    """A folder with a copy of csrc that has one more source in sm90/."""
    if not ptxas.find_nvcc():
        assert not FORCED, "no nvcc was found"
        pytest.skip("no nvcc was found")
    folder = tmp_path_factory.mktemp("with_sm90")
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "csrc" / "cuda" / "sm90" / "one_more.cu").write_text("")
    return folder


SM90, PLAIN_SM90 = {"90a,code=[sm_90a]"}, "90,code=[sm_90]"


@pytest.mark.parametrize(
    "wanted, others",
    [
        ("", {"80,code=[sm_80]", "90,code=[compute_90,sm_90]"}),
        ("80-real;90-real", {"80,code=[sm_80]", PLAIN_SM90}),
        ("90a-real;80-real", {"80,code=[sm_80]", PLAIN_SM90}),
        ("90a", {"90,code=[compute_90,sm_90]"}),
    ],
)
def test_sources_of_sm90_have_code_for_sm_90a_alone(wanted, others, with_sm90):
    """Also if another value was set before."""
    folder = with_sm90 / "build"
    sources = with_sm90 / "csrc"
    assert configure(folder, sources=sources, FASTATTN_CUDA="on", CUDAARCHS="80").returncode == 0
    done = configure(folder, sources=sources, FASTATTN_CUDA="on", CUDAARCHS=wanted)
    assert done.returncode == 0, done.stderr
    found = code_of(folder)
    assert found["sm90/one_more"] == SM90 and found["sm80/forward"] == found["library"] == others
    assert "sm90_absent" not in found


def without_90a(folder):
    """An nvcc that cannot compile for sm_90a."""
    tool = folder / "nvcc"
    lines = (
        "#!/bin/sh",
        "said='nvcc fatal : Value \"sm_90a\" is not defined'",
        'case "$*" in *-arch=sm_90a*) echo "$said" >&2; exit 1; esac',
        f'exec "{ptxas.nvcc()}" "$@"',
    )
    tool.write_text("\n".join(lines))
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize(
    "wanted, reason",
    [
        ("80-real;120-real", "CUDAARCHS (80-real;120-real) names no 90"),
        ("90", "nvcc does not compile for sm_90a: nvcc fatal : Value 'sm_90a' is not defined"),
    ],
    ids=["not named", "not known"],
)
def test_without_sm_90a_the_reason_is_in_the_library(wanted, reason, with_sm90, tmp_path):
    folder = tmp_path / "build"
    environment = dict(FASTATTN_CUDA="on", CUDAARCHS=wanted)
    if wanted == "90":
        environment["CUDACXX"] = without_90a(tmp_path)
    done = configure(folder, sources=with_sm90 / "csrc", **environment)
    assert done.returncode == 0 and "for sm_90a: not built: " in done.stdout, done.stderr
    found = code_of(folder)
    assert "sm90/one_more" not in found and found["sm90_absent"] == found["sm80/forward"] != set()
    made = "cuda/CMakeFiles/fastattn_cuda.dir/sm90_absent.cu.o"
    done = cuda_library.cmake("--build", folder, "--target", made)
    assert done.returncode == 0, done.stdout
    text = (folder / made).read_bytes()
    assert b"no kernel of this class is built: " in text and reason.encode() in text
