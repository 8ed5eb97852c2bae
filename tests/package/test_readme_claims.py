"""The documentation matches the code: arguments, environment variables, files, the example."""

import inspect
import re
from pathlib import Path

import pytest

import fastattn
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
    section = re.split(r"^## ", page.read_text().split(f"## {heading}\n")[1], flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    names: dict = {}
    exec(example, names)
    assert names["q"].grad.shape == names["q"].shape


def test_every_argument_has_its_row():
    parameters = inspect.signature(fastattn.attention).parameters.values()
    has = {(f"`{x.name}`", f"`{x.default}`") for x in parameters if x.kind == x.KEYWORD_ONLY}
    documented = [tuple(row[:2]) for row in rows(README, "The arguments of `attention`")]
    assert set(documented) == has and len(documented) == len(has)


def test_every_environment_variable_has_its_row():
    files = [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    files += [path for x in FOLDERS for kind in SOURCES for path in (ROOT / x).rglob(kind)]
    found = {
        name for path in files if path.is_file() for name in VARIABLE.findall(path.read_text())
    }
    documented = [row[0].strip("`") for row in rows(CONTRIBUTING, "Environment variables")]
    assert sorted(documented) == sorted(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page):
    for link in re.findall(r"\]\(([^)#:]*)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_with_the_name_of_a_file_leads_to_it(page):
    for text, link in re.findall(r"\[`?([\w./-]+[.]\w+)`?\]\(([^)#:]+)", page.read_text()):
        assert Path(text).name == Path(link).name, text


@pytest.mark.parametrize("page", [README, CONTRIBUTING, ROOT / "bench" / "README.md"], ids=str)
def test_every_make_target_named_is_one(page):
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), flags=re.M)
    assert named and set(named) <= {target for rule in rules for target in rule.split()}
