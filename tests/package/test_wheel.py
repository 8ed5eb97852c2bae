"""The wheel: its name, its contents, and a call from it in an empty environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import fastattn
from tests.support import build_lock
from tests.support.checkout import ROOT as CHECKOUT

LIBRARY = "fastattn/lib/libfastattn_cpu.so"
EXTENSION = "fastattn/lib/fastattn_marshalling.abi3.so"

ONE_CALL = """
import torch, fastattn
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3))
ours = fastattn.attention(q, k, v, causal=True, backend="cpu")
torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(ours, torchs)
torch.testing.assert_close(torch.autograd.grad(ours.sum(), q), torch.autograd.grad(torchs.sum(), q))
print(fastattn.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """stdout of a command that must succeed without the checkout or a registry."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # Builds share one folder: a wheel of the sets that set-up has built compiles nothing.
    sets = fastattn.__build__["instruction_sets"].split()
    env["FASTATTN_ISAS"] = env.get("FASTATTN_ISAS") or ",".join(x for x in sets if x != "generic")
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("scikit_build_core", reason="building the wheel needs scikit-build-core")
    pytest.importorskip("pip", reason="building the wheel needs pip")
    dist = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    with build_lock.alone("wheel"):  # builds share one folder
        run(*build, "--wheel-dir", dist, CHECKOUT, cwd=dist)
    (path,) = dist.iterdir()
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that contains the wheel and uses torch from this one.

    A .pth line adds this environment's packages behind the wheel's own, without running the hook
    through which an editable install would lead back to the checkout.
    """
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", site]
    run(*install, wheel, cwd=home)
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def archive(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def test_name_binds_the_wheel_to_a_platform_and_the_stable_abi(wheel):
    assert re.fullmatch(r"fastattn-[\w.+]+-cp310-abi3-\w+\.whl", wheel.name)
    assert not wheel.name.endswith("-any.whl"), "it holds a compiled library"


def test_the_wheel_has_the_extension_or_the_reason(archive):
    found = set(archive.namelist()) & {EXTENSION, "fastattn/lib/no_extension.txt"}
    assert len(found) == 1
    assert_unbound(archive.read(*found))


def assert_unbound(content):
    """The libraries are bound to no version of torch or of Python."""
    for needed in (b"libtorch", b"libc10", b"libpython"):
        assert needed not in content


def test_without_the_extension_it_is_for_any_python(tmp_path):
    """Tests only the name, which a build reports to pip before it compiles."""
    pytest.importorskip("scikit_build_core", reason="naming the wheel needs scikit-build-core")
    code = (
        "from scikit_build_core.settings.skbuild_read_settings import SettingsReader as R;"
        "print(R.from_file('pyproject.toml').settings.wheel.py_api)"
    )
    for value, tag in (("off", "py3"), ("auto", "cp310"), ("", "cp310")):
        env = os.environ | {"FASTATTN_EXTENSION": value}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)
        assert done.stdout.split()[-1:] == [tag], done.stdout + done.stderr


def test_contents(wheel, archive):
    names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    told = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert top == {"fastattn", "fastattn_plugins", told}
    points = archive.read(f"{told}/entry_points.txt").decode()
    assert {x for x in points.split() if ":" in x} == {
        "fastattn_plugins:vllm",
        "fastattn_plugins:sglang",
    }
    assert any(name.startswith("fastattn/kernels/") for name in names)
    assert "fastattn/kernels/__init__.py" not in names
    of_type_checkers = {"fastattn/py.typed", "fastattn/flash_attn/flash_attn_interface.pyi"}
    assert of_type_checkers <= set(names)
    assert any(re.fullmatch(r"[^/]+\.dist-info/(licenses/)?LICENSE", name) for name in names)
    assert_unbound(archive.read(LIBRARY))


def test_every_module_of_the_checkout_is_in_the_wheel(archive):
    modules = {str(p.relative_to(CHECKOUT)) for p in CHECKOUT.glob("fastattn/**/*.py")}
    for data in ("fastattn/**/*.txt", "fastattn/backends/**/*.json"):
        modules |= {str(p.relative_to(CHECKOUT)) for p in CHECKOUT.glob(data)}
    modules |= {f"fastattn/{p.relative_to(CHECKOUT)}" for p in CHECKOUT.glob("kernels/**/*.py")}
    modules.add("fastattn_plugins/__init__.py")
    assert modules <= set(archive.namelist())


@pytest.mark.slow
def test_one_call_away_from_the_checkout(python, tmp_path):
    where = Path(run(python, "-I", "-c", ONE_CALL, cwd=tmp_path).strip())
    assert python.parents[1] in where.parents


@pytest.mark.slow
def test_report_of_what_is_here(python, tmp_path):
    assert "cpu" in run(python, "-I", "-m", "fastattn", cwd=tmp_path)
    json.loads(run(python, "-I", "-m", "fastattn", "--json", cwd=tmp_path))


def test_no_top_level_kernels(python, tmp_path):
    """Another package is named kernels; ours must neither install nor hide it."""
    code = (
        "import importlib.util as u; s = u.find_spec('kernels');"
        "print(s and [s.origin, *(s.submodule_search_locations or [])])"
    )
    assert str(python.parents[1]) not in run(python, "-I", "-c", code, cwd=tmp_path)
