"""Set-up: what it checks before a build, what it shows of one, and what each target installs."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.checkout import ROOT as CHECKOUT

NAMES = ("torch", "scikit-build-core", "pytest")


def floors():
    """{package: the minimum version in pyproject.toml}."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)', text))


class Machine:
    """Fake packages that the check finds before the real ones."""

    def __init__(self, folder):
        self.packages = folder / "packages"
        self.packages.mkdir()

    def has(self, name, version):
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def preflight(self, *arguments):
        done = subprocess.run(
            [sys.executable, str(CHECKOUT / ".ci" / "preflight.py"), *arguments],
            env=os.environ | {"PYTHONPATH": str(self.packages)},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_no_message_if_nothing_is_missing(machine):
    for name in NAMES:
        machine.has(name, floors()[name])
    assert machine.preflight("--as-is") == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_too_old_stops_an_installation_as_is(name, machine):
    machine.has(name, "0.1")
    status, output = machine.preflight("--as-is")
    assert status == 1
    assert f"has {name} 0.1, expected {floors()[name]} or newer: " in output
    assert f"pip install '{name}>={floors()[name]}'" in output and "without VENV=" in output
    assert machine.preflight() == (0, "")  # pip fetches a newer one


def test_a_package_that_is_missing_stops_it_too(machine):
    script = str(CHECKOUT / ".ci" / "preflight.py")
    command = [sys.executable, "-I", "-S", script, "--as-is"]  # installed packages are not found
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    for name in NAMES:
        assert f"has no {name}, expected {floors()[name]} or newer: " in done.stderr


@pytest.mark.parametrize("version", ["3.3.1", "2.9"])
def test_an_outdated_optional_dependency_only_warns(version, machine):
    machine.has("triton", version)
    status, output = machine.preflight("--as-is")
    assert status == 0
    assert f"has triton {version}, expected {floors()['triton']} or newer: " in output


@pytest.mark.parametrize(
    "version", ["2.8.0a0+1f2e3d", "2.8", "2.13.0+cu130", "10.0", "3.0.0.dev20270101"]
)
def test_versions_are_compared_by_their_numbers(version, machine):
    machine.has("torch", version)
    assert machine.preflight("--as-is") == (0, "")


BUILD = """
import os, subprocess, sys
def build_editable(folder, settings):
    ninja = subprocess.Popen(["sleep", "{seconds}"])
    print("*** Building project with Ninja...")
    print("[1/3] Building CXX object CMakeFiles/fa_avx512_forward.dir/cpu/unit.cpp.o", flush=True)
    {then}
    print("[3/3] Linking CXX shared library libfastattn_cpu.so", flush=True)
"""
KILLED = 'sys.exit("g++: fatal error: Killed signal terminated program cc1plus")'
KEPT = "What was compiled is kept: the same command goes on from there."


def building(machine, then, seconds, meanwhile=(), ignored=()):
    """build.py as it starts with these signals ignored, on a build that takes these seconds."""
    package = machine.packages / "scikit_build_core"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "build.py").write_text(BUILD.format(then=then, seconds=seconds))
    command = [sys.executable, str(CHECKOUT / ".ci" / "build.py"), *meanwhile]
    traps = " ".join(f"trap '' {int(x)};" for x in ignored)
    return subprocess.Popen(
        ["sh", "-c", f'{traps} exec "$0" "$@"', *command],
        env=os.environ | {"PYTHONPATH": str(machine.packages)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "then, status, shown, said",
    [
        ("", 0, "libfastattn_cpu.so", None),
        ('sys.exit("x.h:3: error: no y")', 1, "", "error: no y"),
        (KILLED, 1, "", "CMAKE_BUILD_PARALLEL_LEVEL=1 in the environment compiles one"),
        ("os.kill(os.getpid(), 9)", 1, "", f"The build was ended by SIGKILL. {KEPT}"),
    ],
    ids=["done", "error", "killed compiler", "killed"],
)
def test_a_build_shows_its_files_and_why_it_ended(then, status, shown, said, machine):
    with building(machine, then, seconds=0) as build:
        output, errors = build.communicate()
    assert build.returncode == status
    assert re.match(r"\[1/3 +\d+ s\] avx512_forward\n", output)
    assert re.findall(r"(?m)^\[3/3 +\d+ s\] (.*)$", output) == ([shown] if shown else [])
    assert "install g++" not in errors and (said in errors if said else not errors)
    assert ("out of memory?" in errors) == (then is KILLED)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_leaves_nothing_running(sent, machine):
    """The pipe ends when the last process that holds it has: the build's, and the command's. Shells
    start what runs in the background with SIGINT ignored."""
    meanwhile = ("sh", "-c", "sleep 60; true")
    ignored = (signal.SIGINT, signal.SIGTERM)
    with building(machine, "ninja.wait()", 60, meanwhile, ignored) as build:
        build.stdout.readline()
        begun = time.monotonic()
        build.send_signal(sent)
        errors = build.communicate()[1]
    assert build.returncode == 130 and time.monotonic() - begun < 50
    assert f"The build was interrupted. {KEPT}" in errors and "Traceback" not in errors


def test_a_build_under_nohup_goes_on(machine):
    with building(machine, "ninja.wait()", 1, ignored=(signal.SIGHUP,)) as build:
        build.stdout.readline()
        build.send_signal(signal.SIGHUP)
        build.communicate()
    assert build.returncode == 0


@pytest.mark.parametrize("command, status", [("exit 0", 0), ("sleep 0.5; exit 3", 1)])
def test_a_failed_command_beside_the_build_fails_it(command, status, machine):
    with building(machine, "", 0, ("sh", "-c", command)) as build:
        output, errors = build.communicate()
    assert build.returncode == status and "[3/3 " in output
    assert errors == (f"sh -c {command} failed with status 3.\n" if status else "")


STAMP = """#!/bin/sh
echo '{"dir_info": {"editable": true}, "url": "file://%s"}'
"""


@pytest.mark.parametrize(
    "goal, there, sets, packages",
    [
        ("bench", "", "native", "bench"),
        ("test", "", "native,amx_model", "dev"),
        ("test-slow", "", "all", "dev"),
        ("bench", "bench", None, None),
        ("bench", "dev", None, None),
        ("test", "bench", "native,amx_model", "dev"),
        ("lint", "all", None, None),
        ("test-slow", "dev", "all", "dev"),
        ("bench FASTATTN_ISAS=avx2", "dev", "avx2", "bench"),
        ("test-slow FASTATTN_ISAS=avx2", "dev-isas-avx2", None, None),
    ],
)
def test_a_target_sets_up_what_is_missing(goal, there, sets, packages, tmp_path):
    """`there` is the stamp of an earlier set-up."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(STAMP % CHECKOUT)
    python.chmod(0o755)
    if there:
        (tmp_path / f".fastattn-{there}").touch()
    environment = {k: x for k, x in os.environ.items() if not k.startswith(("FASTATTN_", "MAKE"))}
    command = ["make", "-n", f"VENV={tmp_path}", *goal.split()]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    built = re.findall(r"FASTATTN_ISAS=(\S+) \S+ \.ci/build\.py", done.stdout)
    assert built == ([sets] if sets else [])
    assert re.findall(r"-e '\.\[(\w+)\]'", done.stdout) == ([packages] if packages else [])
    # Ctrl-C at make reaches what runs in the foreground, and build.py ends what it started.
    assert not re.search(r"(?<!&)&(?!&)\s*\\?$", done.stdout, re.M)
    torch = re.findall(r"\.ci/build\.py \S+ -m pip .* install .* torch$", done.stdout, re.M)
    assert len(torch) == bool(sets)
