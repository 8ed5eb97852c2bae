"""Every code block of the documentation is checked: Python runs, page by page; commands exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastattn.flash_attn
from fastattn import __main__
from tests.support.checkout import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHER_PAGES = [ROOT / x for x in ("README.md", ".github/CONTRIBUTING.md", "bench/README.md")]
BLOCK = re.compile(r"^( *)(`{3,})([^\n]*)\n(.*?)^\1\2\s*$", re.S | re.M)
LANGUAGES = ("python", "sh", "text")
NEEDS = {"guides/models.md": ("transformers", "diffusers")}
COMMANDS = (
    r"make (?P<target>[\w-]+)( \w+=\S+)*",
    r"python -m (?P<module>[\w.]+)( --?[\w-]+( \w+)?)*",
    r'python -m fastattn (?P<command>\w+)( --?[\w-]+( [\w:]+| "[\w ]+")?)*',
    r"numactl( --(cpunodebind=0|membind=0|interleave=all))+ python serve\.py",
    r"pip install (\.|torch|dist/fastattn-\*_\$\(uname -m\)\.whl)( --index-url \S+)?",
)

pytestmark = pytest.mark.skipif(not PAGES, reason="no docs: not a checkout")


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Each code block: its first line, language and text."""
    text = page.read_text("utf-8")
    for found in BLOCK.finditer(text):
        _, _, language, code = found.groups()
        yield text.count("\n", 0, found.start(4)), language, code


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def with_language(language: str) -> list[Path]:
    return [page for page in PAGES if any(x == language for _, x, _ in blocks(page))]


@functools.cache
def make_targets() -> set[str]:
    """The targets of the Makefile; several may have one rule."""
    rules = re.findall(r"^([\w-][\w -]*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    return set(" ".join(rules).split())


def is_program(module: str) -> bool:
    """Whether `python -m module` finds a file in the checkout."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun sets, for one process; and torch as it was, when the page has run."""
    port = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}
    for key, value in {**values, "MASTER_PORT": port}.items():
        monkeypatch.setenv(key, str(value))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    fastattn.flash_attn.uninstall()  # if a page failed before it did so
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("page", with_language("python"), ids=name)
def test_python_runs(page, one_rank):
    for module in NEEDS.get(name(page), ()):
        pytest.importorskip(module, reason=f"the page uses {module}")
    names: dict = {"__name__": "__main__"}
    for line, language, code in blocks(page):
        if language == "python":  # line numbers of errors are those of the page
            exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_language_that_is_checked(page):
    """And none is a directive of Sphinx, which a hub shows as a block of code."""
    assert {language for _, language, _ in blocks(page)} <= set(LANGUAGES)


@pytest.mark.parametrize("page", with_language("sh"), ids=name)
def test_commands_exist(page):
    for _, language, code in blocks(page):
        for line in code.splitlines() if language == "sh" else ():
            command = line.partition("  #")[0].strip()
            found = next(filter(None, (re.fullmatch(x, command) for x in COMMANDS)), None)
            assert found, f"no known command: {command}"
            names = found.groupdict()
            if "target" in names:
                assert names["target"] in make_targets(), command
            if "command" in names:
                assert names["command"] in __main__.COMMANDS, command
            if "module" in names:
                assert is_program(names["module"]), command


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.stem)
def test_commands_in_the_text_exist(page):
    """`python -m ...` and `make ...` in backticks, or at the start of a line."""
    text = page.read_text()
    for module in re.findall(r"(?:^|`)(?:FASTATTN_\w+=\w+ )?python -m ([\w.]+)", text, re.M):
        assert is_program(module), module
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.M)) <= make_targets()
