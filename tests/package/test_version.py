"""The version comes from git tags; without them a build has one fallback."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

import pytest

import fastattn
from fastattn import version
from tests.support.checkout import ROOT

GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]


@pytest.fixture
def checkout(tmp_path):
    """A function that runs git in a new checkout with one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*arguments):
        command = [*GIT, "-C", tmp_path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    git.root = tmp_path.resolve()
    return git


def test_without_a_tag_there_is_none(checkout):
    assert version.of_tags(checkout.root) is None


@pytest.mark.parametrize("tag", ["v1.2.3", "v1.0rc1", "v1.0a2", "v2.0b10", "v2-beta", "v1_2", "x"])
def test_the_last_tag_that_is_a_version_is_the_version(checkout, tag):
    is_version = tag not in ("v2-beta", "v1_2", "x")
    checkout("tag", "v0.9")
    checkout("commit", "-q", "--allow-empty", "-m", "second")
    checkout("tag", tag)
    found = version.of_tags(checkout.root)
    assert found == tag[1:] if is_version else found.startswith("0.9.post1+g")
    checkout("commit", "-q", "--allow-empty", "-m", "third")
    found, _, commit = version.of_tags(checkout.root).partition("+g")
    assert found == (f"{tag[1:]}.post1" if is_version else "0.9.post2")
    assert commit and checkout("rev-parse", "HEAD").startswith(commit)


def test_variables_of_another_checkout_do_not_count(checkout, tmp_path_factory, monkeypatch):
    """As in a git hook, where git sets GIT_DIR."""
    checkout("tag", "v9.9.9")
    monkeypatch.setenv("GIT_DIR", str(checkout.root / ".git"))
    assert version.of_tags(tmp_path_factory.mktemp("unpacked").resolve()) is None


def test_a_checkout_of_another_user_has_its_tags(checkout, monkeypatch):
    """As in a container that builds a mounted checkout. This variable is of git's own tests."""
    checkout("tag", "v1.2.3")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(subprocess.CalledProcessError):
        checkout("describe")
    assert version.of_tags(checkout.root) == "1.2.3"


def test_tags_of_a_project_around_it_do_not_count(checkout):
    checkout("tag", "v9.9.9")
    inside = checkout.root / "vendored"
    inside.mkdir()
    assert version.of_tags(inside) is None


def test_an_sdist_has_its_version_in_pkg_info(tmp_path):
    assert version.of_sdist(tmp_path) is None
    text = "Metadata-Version: 2.2\nName: x\nVersion: 3.4.5\n\n1 / √D\n"
    (tmp_path / "PKG-INFO").write_text(text, encoding="utf-8")
    assert version.of_sdist(tmp_path) == "3.4.5"
    (tmp_path / "fastattn").mkdir()
    shutil.copy(version.__file__, tmp_path / "fastattn")
    code = "import version; print(version.dynamic_metadata('version'))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "utf8=0", "-c", code]
    where = dict(cwd=tmp_path / "fastattn", env=ascii_only)
    assert subprocess.check_output(command, text=True, **where) == "3.4.5\n"


def test_the_installed_package_was_built_by_this_rule():
    """An editable install keeps the version of the time at which it was made."""
    assert importlib.metadata.version("fastattn") == fastattn.__version__
    assert version.dynamic_metadata("version") == (version.of_tags(ROOT) or version.FALLBACK)
    with pytest.raises(ValueError, match="got field 'name'"):
        version.dynamic_metadata("name")


def test_without_metadata_there_is_the_same_fallback(monkeypatch):
    def nameless(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nameless)
    assert fastattn.__version__ == version.FALLBACK
