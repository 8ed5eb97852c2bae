"""A file has one concept: one that is longer than usual is split, or says why it is one file."""

import subprocess

import pytest

from tests.support.checkout import ROOT

LONGEST = {".py": 400} | dict.fromkeys((".cpp", ".h", ".cu", ".cuh"), 350)  # lines
# Why a long file is one file.
REASONS = {
    "bench/static_gpu/aot.py": "compiles kernels for an absent GPU, reads and judges their code",
    "csrc/cpu/backward/backward.h": "one class: a task, and the order of its sums",
    "csrc/cpu/runtime/library.cpp": "the C ABI of the CPU's kernels, in one place",
    "csrc/cpu/score/score_mod.h": "one interpreter, with every operator",
    "csrc/cpu/score/tile.h": "the score pipeline: forward and backward share each feature's code",
    "csrc/cuda/sm90/ptx.cuh": "a wrapper for each instruction, and the only file that may have it",
    "fastattn/backends/reference.py": "the passes, which share the gradients of scores",
    "fastattn/reference.py": "the operation as the mathematics states it, to be read as a whole",
    "fastattn/api.py": "the public functions, with the documentation of every argument",
    "fastattn/backends/native/libraries.py": "the mirror of csrc/abi.h, and the libraries with it",
    "fastattn/call/spec.py": "the table of a call, and the spec made of it",
    "fastattn/dropin/multihead.py": "one class, with the documentation of torch's arguments",
    "fastattn/dropin/sdpa.py": "one function, with the documentation of torch's arguments",
    "fastattn/flash_attn/flash_attn_interface.py": "the functions of the file of that name",
    "fastattn/kv_cache/cache.py": "one class, with the documentation of its methods",
    "fastattn/nn/layers.py": "the layers of encoder and decoder, with their documentation",
    "kernels/backward.py": "the passes of backward, which share the gradients of one tile",
    "kernels/score.py": "the score pipeline: forward and backward share each feature's code",
    "tests/bench/test_ledger.py": "one listing, read, counted and judged",
    "tests/gpu_emulation/emu/run.cpp": "fibers, schedules and launches share the state of one run",
    "tests/gpu_emulation/tests/test_emulator.py": "one library, compiled once",
    "tests/gpu_emulation/tests/test_ptx_hopper.py": "one module, compiled once",
    "tests/gpu_emulation/tests/test_ptx_hopper_misuse.py": "a table of misuses",
    "tests/gpu_emulation/tests/test_ptx_machine.py": "one module, compiled once",
    "tests/gpu_emulation/tests/test_ptx_values.py": "one module, compiled once",
    "tests/fuzz/parts.py": "a table of parts, from which the fuzzer draws by its order",
    "tests/mutation/test_cpu_mutants.py": "a table of faults",
    "tests/mutation/test_triton_mutants.py": "a table of faults",
    "tests/nn/test_nn.py": "the table in fastattn.nn names this file for each class that it tests",
    "tests/package/test_docstrings.py": "a parser of docstrings, and its own tests",
    "tests/semantics/test_argument_shapes.py": "one table of shapes",
    "tests/semantics/test_storage.py": "one property: the bits of dequantised rows, in any storage",
    "tests/support/tiers.py": "a table of tests",
    "tests/torch_api/test_sdpa_layout.py": "one property: results lie in memory as torch's do",
    "tests/triton/test_triton.py": "Triton's helpers and tiles, in its interpreter alone",
}


def lines_of(path):
    return len((ROOT / path).read_text().splitlines())


def long_files():
    """The files that git tracks, or would with `git add`, and that are longer than usual."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("git does not list the files of this folder")
    paths = [ROOT / x for x in found.stdout.splitlines()]
    paths = [x for x in paths if x.suffix in LONGEST and x.is_file()]
    assert len(paths) > 400
    return {str(x.relative_to(ROOT)) for x in paths if lines_of(x) > LONGEST[x.suffix]}


def test_a_long_file_says_why():
    unknown = sorted(long_files() - set(REASONS))
    assert not unknown, f"split {unknown} where a concept ends, or give each a reason in REASONS"


def test_a_reason_is_of_a_long_file():
    short = sorted(set(REASONS) - long_files())
    assert not short, f"{short} need no reason: delete the lines from REASONS"
