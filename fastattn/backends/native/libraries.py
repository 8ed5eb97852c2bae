"""The Python side of csrc/abi.h: arguments as bytes, and the libraries that read them.

For development, FASTATTN_LIBRARY names another build of libfastattn_cpu.so to load,
FASTATTN_CUDA_LIBRARY one of libfastattn_cuda.so, FASTATTN_EXTENSION_LIBRARY one of the extension.
FASTATTN_CPU_ISA forces one of the instruction sets that `cpu_isas` lists.
FASTATTN_EXTENSION=off does not load the extension that packs arguments in C++ (see marshalling.py).
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from ...call.environment import setting
from ...call.spec import (
    ARGUMENTS,
    DROPOUT_PERIODS,
    NATIVE_NAMES,
    REAL,
    WHOLE,
    AttentionSpec,
)
from ...namespace import PACKAGE
from ..measured import files
from .elf import why_broken

FORWARD, BACKWARD, WEIGHTS, WEIGHTS_BACKWARD, JVP, FORWARD_JVP, SECOND = range(7)  # FaPass
OK, BAD_LENGTH, NO_MEMORY, BAD_OFFSET, BAD_PAGE, BAD_INDEX, INTERRUPTED = range(7)  # FaStatus
BAD_EXTENT = 1 << 16  # plus the index in `WRITTEN` of the tensor
CPU_MAX_HEAD_DIM, CUDA_MAX_HEAD_DIM = 1024, 256  # FA_CPU_MAX_HEAD_DIM, FA_CUDA_MAX_HEAD_DIM
DTYPE = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
    torch.int8: 5,
    torch.float8_e4m3fn: 6,
    torch.float8_e5m2: 7,
    torch.uint8: 8,  # rows in four bits: `int4`
}

# The fields of FaScoreMod, the last of FaCall.
MOD_POINTERS = ("code", "floats", "ints", "dfloats", "outside")
MOD_TENSOR = "classes"
MOD = (*MOD_POINTERS, MOD_TENSOR)
OWN = [a for a in ARGUMENTS.values() if a.field not in MOD]
OWN_DIFFERENTIABLE = [a.field for a in OWN if a.gradient]
# The other fields of FaCall. Each number is 8 bytes, so the struct has no padding.
TENSORS = (
    *(a.field for a in OWN if a.passed_as != "pointer"),
    *("out", "weights"),
    *(f"d{name}" for name in OWN_DIFFERENTIABLE),
    *("dout", "dlse", "dweights"),
)
POINTERS = (*(a.field for a in OWN if a.passed_as == "pointer"), "workspace")
MOVED = (  # the tangents; they follow the scalars
    *(f"{name}_t" for name in OWN_DIFFERENTIABLE),
    *("out_t", "lse_t", "dout_t", "dlse_t"),
)
WRITTEN = (  # enum FaWritten: the tensors that are passed with their sizes
    *("out", "lse", "weights"),
    *(f"d{name}" for name in OWN_DIFFERENTIABLE),
    *("out_t", "lse_t"),
)
TENSOR = struct.Struct("=Q4qq")  # data, stride[4], dtype
EXTENT = struct.Struct("=4q")  # size[4]
POINTER = struct.Struct("=Q")
SCALARS = struct.Struct(f"={len(WHOLE) + 1}q{len(REAL)}d")  # `threads` follows WHOLE
LAST = struct.Struct(f"={len(DROPOUT_PERIODS)}q")
PERIODS = tuple(NATIVE_NAMES[name] for name in DROPOUT_PERIODS)
SIZES = tuple(f"{name}_size" for name in WRITTEN)
FIELDS = " ".join((*TENSORS, *POINTERS, *WHOLE, "threads", *REAL, *MOVED, *PERIODS, *SIZES, *MOD))
BEFORE_SCALARS = len(TENSORS) * TENSOR.size + len(POINTERS) * 8
AFTER_SCALARS = len(MOVED) * TENSOR.size
PARAMS_SIZE = BEFORE_SCALARS + SCALARS.size + AFTER_SCALARS + LAST.size  # FaParams
MOD_AT = PARAMS_SIZE + len(SIZES) * EXTENT.size  # FaScoreMod
SIZE = MOD_AT + len(MOD_POINTERS) * 8 + TENSOR.size  # FaCall


def offset(field: str) -> int:
    """The offset in bytes of a field in FaCall, which begins with FaParams."""
    if field in SIZES:
        return PARAMS_SIZE + SIZES.index(field) * EXTENT.size
    if field in MOD:
        return MOD_AT + MOD.index(field) * 8
    if field in MOVED:
        return BEFORE_SCALARS + SCALARS.size + MOVED.index(field) * TENSOR.size
    at = FIELDS.split().index(field)
    return min(at, len(TENSORS)) * TENSOR.size + max(0, at - len(TENSORS)) * 8


WORKSPACE, THREADS = offset("workspace"), offset("threads")


def form(spec: AttentionSpec) -> bytes:
    """FaCall with the scalars of a call; tensors, sizes and threads are 0."""
    whole = (getattr(spec, name) for name in WHOLE)
    scalars = SCALARS.pack(*whole, 0, *(getattr(spec, name) for name in REAL))
    again = LAST.pack(*(getattr(spec, name) for name in DROPOUT_PERIODS))
    after = SIZE - PARAMS_SIZE
    return bytes(BEFORE_SCALARS) + scalars + bytes(AFTER_SCALARS) + again + bytes(after)


Entry = Callable[..., Any]  # a function of a library


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Library:
    """A native library, loaded."""

    path: Path
    dll: ctypes.CDLL

    def __init__(self, path: Path):
        if why := why_broken(path):
            raise OSError(why)
        # CDLL, not PyDLL, releases the GIL during calls.
        self.path, self.dll = path, ctypes.CDLL(str(path))

    def entry(self, name: str, result: Any, *arguments: Any, dll: ctypes.CDLL | None = None) -> Any:
        function = getattr(dll or self.dll, name)
        function.restype, function.argtypes = result, arguments
        return function

    def check_abi(self, fields: str, head_dim: str, expected_head_dim: int) -> None:
        """Check these two entries before others are looked up: another version may lack some."""
        got = self.entry(fields, ctypes.c_char_p)().decode()
        self._same("the fields of FaParams are", got, FIELDS)
        got = self.entry(head_dim, ctypes.c_int64)()
        self._same("the largest head dim is", got, expected_head_dim)

    def _same(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            raise OSError(
                f"{self.path} was built from another version of csrc/abi.h: {what} {got} there "
                f"and {expected} in fastattn/backends/native/libraries.py; build it again"
            )


class CpuLibrary(Library):
    """libfastattn_cpu.so."""

    def __init__(self, path: Path):
        super().__init__(path)
        integer, params, text = ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p
        self.check_abi("fa_abi_fields", "fa_cpu_max_head_dim", CPU_MAX_HEAD_DIM)
        self.workspace: Entry = self.entry("fa_cpu_workspace", integer, params, integer)
        self.entry("fa_cpu_host", None, params)(python_host())
        locked = ctypes.PyDLL(str(path))  # these release the GIL themselves, and raise
        self.run: Entry = self.entry("fa_cpu_run", integer, params, integer, integer, dll=locked)
        self.run_at: int = _address(self.run)
        self.index: Entry = self.entry("fa_cpu_index", integer, params, dll=locked)
        self.append: Entry = self.entry("fa_cpu_append", integer, params)
        self.norm_rope: Entry = self.entry("fa_cpu_norm_rope", integer, params)
        self.append_at: int = _address(self.append)
        self.isas: Entry = self.entry("fa_cpu_isas", text)
        self.isa: Entry = self.entry("fa_cpu_isa", text)
        self.why: Entry = self.entry("fa_cpu_why", text)
        self.unit: Entry = self.entry("fa_cpu_unit", text, params)
        self.score_mod_ops: str = self.entry("fa_cpu_score_mod_ops", text)().decode()
        self.select: Entry = self.entry("fa_cpu_select", integer, text, text)
        self.float32_on_tiles: Entry = self.entry("fa_cpu_float32_on_tiles", None, integer)
        self.poison: Entry = self.entry("fa_cpu_poison", None, integer)


class CudaLibrary(Library):
    """libfastattn_cuda.so. It loads without a GPU, and without CUDA."""

    def __init__(self, path: Path):
        super().__init__(path)
        integer, params, text = ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p
        self.check_abi("fa_cuda_abi_fields", "fa_cuda_max_head_dim", CUDA_MAX_HEAD_DIM)
        # params, pass, multiprocessors, architecture
        self.workspace: Entry = self.entry("fa_cuda_workspace", integer, params, *(integer,) * 3)
        self.workspace_at: int = _address(self.workspace)
        # params, pass, device, multiprocessors, architecture, stream
        numbers = (integer,) * 4
        self.run: Entry = self.entry("fa_cuda_run", integer, params, *numbers, ctypes.c_void_p)
        self.run_at: int = _address(self.run)
        # params, pass, architecture
        self.kernels: Entry = self.entry("fa_cuda_kernels", text, params, integer, integer)
        self.driver_error: Entry = self.entry("fa_cuda_driver_error", integer)
        # 0 for the library's, 1 for the driver's
        self.version: Entry = self.entry("fa_cuda_version", integer, integer)
        self.translates: Entry = self.entry("fa_cuda_translates", integer)
        self.error: Entry = self.entry("fa_cuda_error", text, integer)
        self.failed_kernel: Entry = self.entry("fa_cuda_failed_kernel", text)


Loaded = TypeVar("Loaded", bound=Library)
MODEL = "amx_model"  # the instruction set of tests
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def _candidates(name: str, variable: str = "") -> list[Path]:
    if named := os.environ.get(variable):
        return [Path(named).absolute()]  # the loader would search for a bare name
    package = sys.modules[PACKAGE]  # in an editable install it has two folders
    return [Path(folder) / "lib" / name for folder in package.__path__]


def _note(candidates: list[Path], name: str) -> str:
    """The reason that set-up wrote into the file `name` if it did not build the library."""
    notes = (p.with_name(name) for p in candidates)
    where = ", ".join(map(str, candidates))
    why = next((p.read_text() for p in notes if os.path.exists(p)), None)
    return why or f"no {where} (pip install .)"


def build() -> dict[str, str]:
    """What set-up wrote of the libraries that it built: the commit of their sources, the compiler,
    the instruction sets, and why there are no CUDA kernels or no extension ("" if there are). Empty
    if they were not built."""
    path = next((p for p in _candidates("build.json") if os.path.exists(p)), None)
    return {} if path is None else json.loads(path.read_text())


@functools.cache
def _open_cpu() -> CpuLibrary | str:
    """The library with its own choices, or the reason there is none."""
    candidates = _candidates(f"libfastattn_cpu{SUFFIX}", "FASTATTN_LIBRARY")
    path = next((p for p in candidates if os.path.exists(p)), None)
    if path is None:
        where = ", ".join(map(str, candidates))
        how = "`pip install .`, then run Python outside the folder of the sources"
        return f"the native library was not built: no {where} ({how})"
    try:
        return CpuLibrary(path)
    except (OSError, AttributeError) as error:
        return f"the native library does not load: {error}"


@functools.cache
def _load_cpu() -> CpuLibrary | str:
    """The library with the instruction sets of FASTATTN_CPU_ISA or a file, or the reason there is
    none."""
    library = _open_cpu()
    if isinstance(library, str):
        return library
    cpu_defaults()
    wanted = os.environ.get("FASTATTN_CPU_ISA")
    named = os.fsencode(wanted or "")
    if not wanted:
        _select_measured(library)
    elif library.select(named, named):
        have = library.isas().decode()
        return (
            f"FASTATTN_CPU_ISA: got {wanted!r}, expected one that this machine runs and this build "
            f"has: {have} (FASTATTN_ISAS=all at set-up builds every one)"
        )
    library.float32_on_tiles(int(setting("FASTATTN_FLOAT32") == "tiles"))
    return library


class Measured(NamedTuple):
    """The choices for the CPU of a file that was measured here; None leaves the default."""

    isa: str | None = None
    decoding: str | None = None  # for few rows
    threads: int | None = None  # the most that a call takes of torch's

    @classmethod
    def parse(cls, written: dict[str, Any]) -> Measured:
        found = cls(**written)
        texts = found.isa, found.decoding
        if texts != (None, None) and not all(isinstance(x, str) and x for x in texts):
            raise ValueError(f"isa, decoding: got {texts}")
        if MODEL in texts:
            raise ValueError(f"isa, decoding: got {MODEL}, which is for tests")
        if found.threads is not None and not (type(found.threads) is int and found.threads > 0):
            raise ValueError(f"threads: got {found.threads!r}")
        return found


@functools.cache
def measured() -> Measured:
    """What the user's file for this CPU chooses; nothing if it names an instruction set that is not
    here."""
    device = torch.device("cpu")
    found, library = files.choices(device, "cpu", Measured.parse, Measured()), _open_cpu()
    if found.isa is None or isinstance(library, str):
        return found
    isas = library.isas().decode()
    if {found.isa, found.decoding} <= set(isas.split(",")):
        return found
    why = f"it chooses {found.isa} and {found.decoding}, and this build has {isas}"
    files.ignored(files.path_of(device), why)
    return Measured()


def _select_measured(library: CpuLibrary) -> None:
    isa, decoding, _ = measured()
    if isa and decoding:
        library.select(isa.encode(), decoding.encode())


_defaults: list[None] = []  # the blocks of `by_default`


@contextmanager
def by_default() -> Generator[None]:
    """In the block calls run as without a file and FASTATTN_CPU_ISA."""
    before = cpu_selected()
    select_cpu_isa(*cpu_defaults())
    _defaults.append(None)
    try:
        yield
    finally:
        _defaults.pop()
        select_cpu_isa(*before)


def _num_threads() -> Callable[[], int]:
    """torch.get_num_threads, with the bound of a file if there may be one: decided at import, where
    callers of every call take it; the file is read by the first."""
    where = files.folder()
    try:
        names = os.listdir(where) if where and os.path.isdir(where) else []
    except OSError:  # `measured` warns if the file cannot be read either
        names = ["cpu-"]
    if not any(x.startswith("cpu-") for x in names):
        return torch.get_num_threads

    def bounded() -> int:
        most = None if _defaults else measured().threads
        return min(torch.get_num_threads(), most) if most else torch.get_num_threads()

    return bounded


get_num_threads: Callable[[], int] = _num_threads()


@functools.cache
def _load_cuda() -> CudaLibrary | str:
    """The library, or the reason there is none."""
    candidates = _candidates(f"libfastattn_cuda{SUFFIX}", "FASTATTN_CUDA_LIBRARY")
    path = next((p for p in candidates if os.path.exists(p)), None)
    if path is None:
        return f"the CUDA kernels were not built: {_note(candidates, 'no_cuda.txt')}"
    try:
        return CudaLibrary(path)
    except (OSError, AttributeError) as error:
        return f"the CUDA kernels do not load: {error}"


@functools.cache
def _load_extension() -> ModuleType | str:
    """The extension, or the reason there is none."""
    if setting("FASTATTN_EXTENSION") == "off":
        return "FASTATTN_EXTENSION is off"
    name, suffix = "fastattn_marshalling", ".abi3.so"
    candidates = _candidates(name + suffix, "FASTATTN_EXTENSION_LIBRARY")
    path = next((p for p in candidates if os.path.exists(p)), None)
    if path is None:
        return f"it was not built: {_note(candidates, 'no_extension.txt')}"
    if suffix not in machinery.EXTENSION_SUFFIXES:
        return "this Python has no stable ABI"
    if why := why_broken(path):
        return f"it does not load: {why}"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return f"got torch {torch.__version__}, expected 2.10 or newer, which has DLPack's table"
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    try:
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, AttributeError, ValueError) as error:
        return f"it does not load: {error}"
    if module.fields != FIELDS:
        return f"{path} was built from another version of csrc/abi.h; build it again"
    return module


def _reason(loaded: Library | ModuleType | str) -> str | None:
    return loaded if isinstance(loaded, str) else None


def _required(loaded: Loaded | str) -> Loaded:
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


def cpu_unavailable() -> str | None:
    """Why the CPU kernels cannot run here, or None."""
    return _reason(_load_cpu())


def cuda_unavailable() -> str | None:
    """Why the CUDA library cannot be loaded, or None. This does not depend on the GPU."""
    return _reason(_load_cuda())


def extension_unavailable() -> str | None:
    """Why Python code packs the arguments of kernels, not the extension; or None."""
    return _reason(_load_extension())


def extension() -> ModuleType | None:
    """The functions of marshalling.py in C++, or None if they cannot be loaded."""
    module = _load_extension()
    return None if isinstance(module, str) else module


@functools.cache
def cpu() -> CpuLibrary:
    """The CPU kernels. Raises RuntimeError with the reason if they cannot run here."""
    return _required(_load_cpu())


@functools.cache
def cuda() -> CudaLibrary:
    """The CUDA kernels. Raises RuntimeError with the reason if there are none."""
    return _required(_load_cuda())


def cpu_isas() -> list[str]:
    """The instruction sets that kernels exist for and this machine has, best first. amx_model, the
    last, is AMX's tiles in software, for tests: it is never chosen by default."""
    return cpu().isas().decode().split(",")


def cpu_isa() -> str:
    """The instruction set in use."""
    return cpu().isa().decode()


def cpu_isa_reason() -> str:
    """Why `cpu_isa` is in use: a property of this chip, or the variable that names it."""
    if os.environ.get("FASTATTN_CPU_ISA") == cpu_isa():
        return "FASTATTN_CPU_ISA names it"
    path = cpu_measured()
    return f"measured on this machine ({path})" if path else cpu().why().decode()


def cpu_measured() -> str:
    """The file that chose the instruction set in use; "" if none did."""
    chosen = not os.environ.get("FASTATTN_CPU_ISA") and measured().isa == cpu_isa()
    return str(files.path_of(torch.device("cpu"))) if chosen else ""


def cpu_unit(spec: AttentionSpec) -> str:
    """The instruction set that runs the passes of this call."""
    return _unit(cpu(), spec)


def _unit(library: CpuLibrary, spec: AttentionSpec) -> str:
    params = bytearray(form(spec))
    TENSOR.pack_into(params, offset("q"), 0, 0, 0, 0, 0, DTYPE[spec.dtype])
    return library.unit(bytes(params)).decode()


def cpu_units() -> dict[str, dict[str, str]]:
    """For each dtype, the instruction set for a call of many rows, and of one row on many keys."""
    units = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        many, one = (_unit(cpu(), _example(m, dtype)) for m in (4096, 1))
        units[str(dtype)[6:]] = {"many rows": many, "one row": one}
    return units


def _example(rows: int, dtype: torch.dtype) -> AttentionSpec:
    sizes: dict[str, Any] = dict(B=1, H=1, Hk=1, N=4096, D=64, Dv=64, device="cpu", scale=1.0)
    return AttentionSpec(M=rows, dtype=dtype, **sizes)


@functools.cache
def cpu_defaults() -> tuple[str, str]:
    """`cpu_selected` of a library for which nothing has been selected: its first caller is
    `_load_cpu`, before it selects."""
    library = _required(_open_cpu())
    return library.isa().decode(), _unit(library, _example(1, torch.bfloat16))


def cpu_selected() -> tuple[str, str]:
    """The instruction set in use, and that for few rows, as `select_cpu_isa` takes them."""
    return cpu_isa(), cpu_units()["bfloat16"]["one row"]


def select_cpu_isa(name: str, decoding: str | None = None) -> None:
    """Use the kernels compiled for `name`, in the whole process; or `decoding`'s for few rows."""
    if cpu().select(name.encode(), (decoding or name).encode()):
        raise ValueError(f"name: got {decoding or name!r}, expected one of {cpu_isas()}")


def poison(on: bool) -> None:
    """For tests: let the kernels fill their scratch memory with NaN before they use it."""
    cpu().poison(int(on))


def python_host() -> bytes:
    """FaHost. Python runs the handlers of signals on its main thread alone."""
    names = "PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals"
    entries = (_address(getattr(ctypes.pythonapi, x)) for x in names)
    return struct.pack("=4Q", *entries, threading.main_thread().ident)
