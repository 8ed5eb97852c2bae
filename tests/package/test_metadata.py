"""What an index and a user see of a build: links, `fastattn.__build__`, names to install."""

import importlib.metadata
import os
import re
import runpy
import sysconfig

import pytest

import fastattn
import fastattn.examples
from fastattn.backends.native import libraries
from tests.support.checkout import ROOT
from tests.support.fresh_python import python


@pytest.fixture
def index_readme():
    return runpy.run_path(str(ROOT / ".ci" / "index_readme.py"))


def test_relative_links_are_made_absolute(index_readme):
    given = "[a](b/c.md#d) ![e](f.png) [g](https://h) [i](#j)"
    wanted = "[a](//x/blob/main/b/c.md#d) ![e](//x/raw/main/f.png) [g](https://h) [i](#j)"
    assert index_readme["absolute"](given, "//x") == wanted


def test_the_readme_of_the_build_has_no_relative_link(index_readme):
    text = index_readme["dynamic_metadata"]("readme")["text"]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 5 and all(link.startswith("https://") for link in links)
    with pytest.raises(ValueError, match="got field 'name'"):
        index_readme["dynamic_metadata"]("name")


def test_the_metadata_has_what_an_index_shows():
    about = importlib.metadata.metadata("fastattn")
    assert {"Homepage", "Changelog", "Issues"} == {
        url.partition(",")[0] for url in about.get_all("Project-URL")
    }
    assert about["Keywords"] and about["Author-email"] and about.get_all("Classifier")


def test_the_build_tells_what_is_inside():
    if libraries.cpu_unavailable() or "FASTATTN_LIBRARY" in os.environ:
        pytest.skip("another library than the installed one")
    build = fastattn.__build__
    assert set(libraries.cpu_isas()) <= set(build["instruction_sets"].split())
    assert re.match(r"(GNU|Clang) \d+", build["compiler"])
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", build["commit"])


def test_without_libraries_the_build_is_empty(monkeypatch, tmp_path):
    monkeypatch.setattr(libraries, "_candidates", lambda name: [tmp_path / name])
    assert libraries.build() == {}


@pytest.mark.slow
def test_the_examples_are_listed():
    assert python("-m", "fastattn.examples").stdout.strip() == fastattn.examples.__doc__.strip()


def test_a_free_threaded_python_is_refused(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
    with pytest.raises(ImportError, match="got a build without the global interpreter lock"):
        runpy.run_path(str(ROOT / "fastattn" / "require_torch.py"))
