"""The documentation matches the code and the measurements: ratios, environment variables, files,
the example."""

import re
import subprocess
from pathlib import Path

import pytest

from bench.cpu_engines.report import nearest
from bench.report import glance, results
from tests.support.checkout import ROOT

README, CONTRIBUTING = ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"
DEBUGGING = CONTRIBUTING.with_name("DEBUGGING.md")
PAGES = [
    README,
    CONTRIBUTING,
    DEBUGGING,
    *sorted(ROOT.glob("[!.b]*/README.md")),
    *ROOT.glob("bench/**/*.md"),
    *ROOT.glob("fastattn/**/*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "DESIGN.md",
]
VARIABLE = re.compile(
    r"\b(?:FASTATTN_[A-Z_0-9]*[A-Z0-9]|TRITON_INTERPRET|CUDAARCHS|CMAKE_BUILD_\w+LEVEL)\b"
)
SOURCES = ("*.py", "*.cmake", "CMakeLists.txt")
FOLDERS = ("fastattn", "kernels", "csrc", "bench", "tests", ".ci")

pytestmark = pytest.mark.skipif(not README.exists(), reason="no README.md: not a checkout")


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its header row."""
    section = re.split(r"^## ", page.read_text().split(f"# {heading}\n")[1], flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    names: dict = {}
    exec(example, names)
    assert names["q"].grad.shape == names["q"].shape


@pytest.fixture(scope="module")
def measured() -> list[dict]:
    return [results.read(path) for path in results.committed()]


def training(measured: list[dict], mask: str) -> list[float]:
    """The ratio to torch on each machine of a sweep."""
    return [found[mask] for x in measured if (found := glance.speedups(x))]


def engine(measured: list[dict], row: str) -> list[float]:
    """The ratio to the nearest engine."""
    found = [x for result in measured for x in result.get("engines", ()) if x["row"] == row]
    return [near[1] for x in found if (near := nearest(x))]


def race(measured: list[dict], section: str, what: str) -> list[float]:
    found = [x for result in measured for x in result.get(section, ()) if x["what"] == what]
    return [x["ratio"]["median"] for x in found if x["dtype"] == "float32"]


def plain_beside_torch(measured: list[dict]) -> list[float]:
    found = [
        x for x in measured if x["kind"] == "engines" and x["machine"]["mkl"]["path"] == "AVX-512"
    ]
    rows = [x for result in found for x in result["engines"]]
    rows = [x for x in rows if re.match("prefill float32 full B1 ", x["row"])]
    return [x["peers"]["torch"]["ratio"]["median"] for x in rows]


def beside_cudnn(_: list[dict]) -> list[float]:
    ratios = []
    for cell in results.read(ROOT / "bench/results/gpu/nvidia-h200-experiments.json")["cells"]:
        ms = {k: v["median_ms"] for x in cell["timings"] for k, v in x["peers"].items()}
        if "torch-cudnn" in ms and cell["N"] >= 2048:
            ratios.append(ms["torch-cudnn"] / ms["fastattn-cuda"])
    return ratios


def megabytes(measured: list[dict], peer: str) -> list[float]:
    """What a call takes beyond its tensors, with dropout on 4,096 tokens."""
    found = [x for result in measured for x in result["memory"] if x["mask"] == "dropout"]
    return [x["extra_bytes"] / 1e6 for x in found if (x["N"], x["peer"]) == (4096, peer)]


def span(values: list[float], digits: int) -> str:
    return " to ".join(dict.fromkeys(f"{x:.{digits}f}" for x in (min(values), max(values))))


RATIOS = {  # of each row of the table, by its first words
    "training, float32, a window of 256": (training, "window"),
    "training, float32, dropout": (training, "dropout"),
    "training, float32, causal": (training, "causal"),
    "training, float32, nothing": (training, "full"),
    "eight causal prompts": (engine, "packed float32 causal B8 H8 N128-1024 D64"),
    "one new token on 4,096": (engine, "decode bfloat16 B1 H32:8 N4096 D128"),
    "one new token on 8,192": (engine, "decode bfloat16 int8 B1 H32:8 N8192 D128"),
    "a mask of documents": (race, "flex", "torch with a dense mask over documents, causal"),
    "a Hessian-vector product": (
        *(race, "derivatives"),
        "torch's math path over Hessian-vector product, N = 8192",
    ),
    "parity: plain float32": (plain_beside_torch,),
    "parity: bfloat16 on an H200": (beside_cudnn,),
}


def test_every_ratio_of_the_readme_is_measured(measured):
    found = {name: function(measured, *args) for name, (function, *args) in RATIOS.items()}
    ours, torchs = (span(megabytes(measured, peer), 0) for peer in ("fastattn", "torch"))
    for words, _, number in rows(README, "Where it wins, and where it does not"):
        shown = re.sub(r"\[|\]\(.*", "", number)
        if words.startswith("memory"):
            assert shown == f"{ours} MB, not {torchs}"
        else:
            (name,) = (x for x in found if words.startswith(x))
            digits = len(shown.rpartition(".")[2])
            assert shown == span(found.pop(name), digits), words
    assert not found


def test_every_environment_variable_has_its_row():
    files = [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    files += [path for x in FOLDERS for kind in SOURCES for path in (ROOT / x).rglob(kind)]
    found = {
        name for path in files if path.is_file() for name in VARIABLE.findall(path.read_text())
    }
    documented = [row[0].strip("`") for row in rows(CONTRIBUTING, "Environment variables")]
    assert sorted(documented) == sorted(found)


@pytest.fixture(scope="module")
def tracked() -> set[Path]:
    """The files that every clone has, and their folders."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("git does not list the files of this folder")
    files = {ROOT / path for path in found.stdout.split("\0") if path}
    return files | {folder for file in files for folder in file.parents}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page, tracked):
    for link in re.findall(r"\]\(([^)#:]*)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).resolve() in tracked, link
