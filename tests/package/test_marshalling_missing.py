"""Without the extension, or the CUDA kernels: the reason, at set-up and in use."""

import json
from pathlib import Path

import pytest
import torch

from fastattn.backends.native import libraries, marshalling
from tests.package.test_marshalling import needs_extension
from tests.support.backends import INTERPRETED
from tests.support.checkout import configured
from tests.support.fresh_python import python
from tests.support.marks import parametrize

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")


# ---------------------------------------------------------------------------- without the extension


@pytest.fixture
def loaded(monkeypatch):
    """A function that loads the file at a path as the extension."""

    def load(path):
        monkeypatch.setattr(libraries, "_candidates", lambda name, variable="": [path])
        return libraries._load_extension.__wrapped__()

    return load


def test_a_missing_extension_has_a_reason(loaded, monkeypatch, tmp_path):
    monkeypatch.delenv("FASTATTN_EXTENSION", raising=False)
    path = tmp_path / "fastattn_marshalling.abi3.so"
    assert loaded(path).startswith(f"it was not built: no {path}")
    (tmp_path / "no_extension.txt").write_text("of a reason")
    assert loaded(path) == "it was not built: of a reason"
    path.write_bytes(b"no library")
    assert "is no shared library" in loaded(path)
    whole = libraries.cpu().path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "it does not load" in loaded(path) and "cut short" in loaded(path)
    path.write_bytes(whole)  # intact, but another library
    assert "it does not load" in loaded(path)
    monkeypatch.setenv("FASTATTN_EXTENSION", "off")
    assert loaded(path) == "FASTATTN_EXTENSION is off"
    monkeypatch.delenv("FASTATTN_EXTENSION")
    monkeypatch.setattr(libraries.machinery, "EXTENSION_SUFFIXES", [".so"])
    assert loaded(path) == "this Python has no stable ABI"


def test_missing_cuda_kernels_have_a_reason(monkeypatch, tmp_path):
    path, load = tmp_path / "libfastattn_cuda.so", libraries._load_cuda.__wrapped__
    monkeypatch.setenv("FASTATTN_CUDA_LIBRARY", str(path))
    (tmp_path / "no_cuda.txt").write_text("of a reason")
    assert load() == "the CUDA kernels were not built: of a reason"
    path.write_bytes(b"no library")
    assert load().startswith("the CUDA kernels do not load: ")


@needs_extension
def test_one_of_another_abi_is_not_used(loaded, monkeypatch):
    path = Path(marshalling.extension.__file__)
    assert loaded(path).fields == libraries.FIELDS
    monkeypatch.setattr(libraries, "FIELDS", libraries.FIELDS + " more")
    assert "another version of csrc/abi.h" in loaded(path)


@needs_extension
def test_a_torch_without_dlpack_exchange_is_a_reason(loaded, monkeypatch):
    path = Path(marshalling.extension.__file__)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert "expected 2.10 or newer, which has DLPack's table" in loaded(path)


@parametrize("header", [None, "#error of an old Python"], ids=["none", "broken"], fast=1)
def test_without_headers_the_reason_is_written(tmp_path, header):
    """A file with the reason replaces the extension; if that is required, it is an error."""
    python = ["-DSKBUILD_SABI_VERSION=3.10", f"-DPython_INCLUDE_DIR={tmp_path}"]
    if header:
        (tmp_path / "Python.h").write_text(header)
    done = configured(tmp_path / "build", *python, FASTATTN_EXTENSION="auto")
    assert done.returncode == 0, done.stderr
    reason = (tmp_path / "build" / "no_extension.txt").read_text()
    expected = "does not compile here" if header else f"there is no {tmp_path}/Python.h"
    assert expected in reason and ("of an old Python" if header else "python3-dev") in reason
    assert "fastattn_marshalling" not in (tmp_path / "build" / "build.ninja").read_text()
    done = configured(tmp_path / "build", *python, FASTATTN_EXTENSION="on")
    assert done.returncode and "FASTATTN_EXTENSION is on, but" in " ".join(done.stderr.split())


@parametrize(
    "wanted, reason", [("off", "FASTATTN_EXTENSION was off"), ("auto", "pip builds it")], fast=1
)
def test_without_the_extension_the_reason_is_written(tmp_path, wanted, reason):
    assert configured(tmp_path, FASTATTN_EXTENSION=wanted).returncode == 0
    assert (tmp_path / "no_extension.txt").read_text().startswith(reason)


@pytest.mark.slow
def test_an_unknown_value_is_refused(tmp_path):
    done = configured(tmp_path, FASTATTN_EXTENSION="maybe")
    assert done.returncode and "got 'maybe', expected on, off or auto" in done.stderr


@pytest.mark.slow
def test_the_report_has_the_reason(capsys, monkeypatch):
    from fastattn import __main__

    found = json.loads(python("-m", "fastattn", "--json").stdout)["extension"]
    assert found["available"] == (marshalling.extension is not None)
    monkeypatch.setattr(libraries, "extension_unavailable", lambda: "it is Sunday")
    __main__.main([])
    assert "it is Sunday" in capsys.readouterr().out
