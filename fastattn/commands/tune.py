"""python -m fastattn tune: measure which kernels run calls fastest here, and keep the choice.

On a GPU, for each shape: Triton's tiles, the parts of keys of a few queries, and which of the
backends comes first. On CPUs: the instruction set, that for few rows, and the number of threads.
The choices are a JSON file in the user's cache folder, which later processes read; a call with
other bits than before is the price, as another instruction set or backend adds in another order.

A shape is words: dtype, sizes, and causal or training, as in
"bfloat16 B2 H16 Hk4 M2048 N2048 D128 causal training".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..api import attention
from ..backends import base
from ..backends.measured import files
from ..backends.native import libraries
from ..backends.preference import SIZES, Rule, passes_of, size
from ..backends.shared import gpu
from ..backends.triton import autotune
from ..call.spec import AttentionSpec, Feature, Options, Tensors
from ..call.validation import describe
from ..inspection.profiling import profile
from .race import Clock, DeviceClock, HostClock, Ratio, race, winner

MINUTES = 5.0
FEW_ROWS = 8  # the most rows of shapes that decide with which instruction set to decode
SHAPES = {
    "cpu": (
        "float32 B1 H8 M512 N512 D64 causal training",
        "bfloat16 B1 H8 M512 N512 D64 causal training",
        "float32 B1 H8 M1 N4096 D128",
        "bfloat16 B1 H32 Hk8 M1 N4096 D128",
    ),
    "cuda": (
        "bfloat16 B2 H16 M4096 N4096 D128 causal training",
        "bfloat16 B2 H32 M4096 N4096 D64 causal training",
        "bfloat16 B2 H16 M4096 N4096 D128 causal",
        "bfloat16 B8 H32 Hk8 M1 N8192 D128",
    ),
}
CLOCKS: dict[str, Callable[[], Clock]] = {"cpu": HostClock, "cuda": DeviceClock}
Programs = Mapping[Any, Callable[[], Any]]
Say = Callable[[str], None]
Race = dict[str, Any]  # "shape", "what", and the times of candidates over the first's, by name


class Shape(NamedTuple):
    dtype: str
    B: int
    H: int
    Hk: int
    M: int
    N: int
    D: int
    Dv: int
    causal: bool = False
    training: bool = False

    def __str__(self) -> str:
        sizes = [f"{x}{getattr(self, x)}" for x in self._fields[1:8]]
        flags = [x for x in self._fields[8:] if getattr(self, x)]
        return " ".join([self.dtype, *sizes, *flags])

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Raises ValueError for other words."""
        given: dict[str, Any] = {}
        for word in text.split():
            if word in ("float32", "float64", "bfloat16", "float16"):
                given["dtype"] = word
            elif word in ("causal", "training"):
                given[word] = True
            elif found := re.fullmatch(r"(B|H|Hk|M|N|D|Dv)([1-9]\d*)", word):
                given[found[1]] = int(found[2])
            else:
                example = SHAPES["cpu"][0]
                raise ValueError(f"--shape: got {word!r} in {text!r}, expected as in {example!r}")
        given = {"B": 1, "Hk": given.get("H"), "Dv": given.get("D")} | given
        if missing := {"dtype", "H", "M", "N", "D"} - given.keys():
            raise ValueError(f"--shape: got {text!r}, without {', '.join(sorted(missing))}")
        return cls(**given)

    def spec(self, device: torch.device) -> AttentionSpec:
        """What kind of call it is; the tensors have no memory."""
        t = self.tensors(torch.device("meta"))
        right = 0 if self.causal else None
        found = describe(Tensors(*t), Options(right=right, grad=self.training))
        return dataclasses.replace(found, device=device.type)

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        made = functools.partial(torch.randn, device=device, dtype=getattr(torch, self.dtype))
        q = made(self.B, self.H, self.M, self.D)
        return [q, made(self.B, self.Hk, self.N, self.D), made(self.B, self.Hk, self.N, self.Dv)]

    def program(self, backend: str, device: torch.device) -> Callable[[], Any]:
        """A call, and its backward pass in training."""
        q, k, v = (x.requires_grad_(self.training) for x in self.tensors(device))
        call = functools.partial(attention, q, k, v, causal=self.causal, backend=backend)
        if not self.training:
            return call
        dout = torch.randn_like(call())
        return lambda: torch.autograd.grad(call(), (q, k, v), dout)


def of_model(name: str, say: Callable[[str], None] = print) -> list[Shape]:
    """The shapes of a model's attention. name: "module:function"; the function returns the model
    and its inputs. Says which calls have what no shape has."""
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--model: got {name!r}, expected module:function")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model: got {name!r}: {error}") from error
    model, *inputs = make()
    found = []
    for measured in profile(model, *inputs).calls:
        call = measured.call
        what = f"a call with q {call.q}, k {call.k}"
        if not (len(call.q) == len(call.k) == 4 and min(*call.q, *call.k) > 0):
            say(f"{what} is skipped: a shape is of dense rows, (B,H,M,D)")
            continue
        (B, H, M, D), (_, Hk, N, _) = call.q, call.k
        options = [x for x in call.options.split(", ") if x]
        shape = Shape(call.dtype, B, H, Hk, M, N, D, D, "causal" in options, call.backward)
        left = [x for x in options if x not in ("causal", "grouped heads")]
        left += [f"a mask {call.mask}"] * bool(call.mask)
        if left:
            say(f"{what} is measured as {shape}, without {' and '.join(left)}")
        found.append(shape)
    if not found:
        raise ValueError(f"--model: no call of attention was seen in {name}")
    return list(dict.fromkeys(found))


@dataclasses.dataclass
class Tuner:
    """Races on one device, until a time of `time.monotonic`."""

    device: torch.device
    clock: Clock
    end: float
    say: Say
    races: list[Race] = dataclasses.field(default_factory=list)

    def program(
        self, shape: Shape, backend: str, make: Callable[..., Callable[[], Any]]
    ) -> Callable[[], Any] | None:
        """The call of a shape, which is made and run once; None if it cannot run."""
        try:
            made = make(shape, backend, self.device)
            made()
            return made
        except Exception as error:  # too little memory, as well
            self.say(f"{shape}: {backend} cannot run it: {type(error).__name__}: {_short(error)}")
            return None

    def race(self, shape: Shape, what: str, programs: Programs) -> dict[Any, Ratio]:
        """The ratios of the programs that run; none after the end."""
        if time.monotonic() > self.end:
            return {}
        ratios, failed = race(programs, self.clock)
        shown = {_named(name): round(x.median, 3) for name, x in ratios.items()}
        shown_failed = {_named(name): _short(why) for name, why in failed.items()}
        self.races.append(dict(shape=str(shape), what=what, ratios=shown, failed=shown_failed))
        times = ", ".join(f"{name} {x:.2f}" for name, x in shown.items())
        self.say(f"  {what}: {times or 'nothing runs'}")
        return ratios


def _short(why: object) -> str:
    return str(why).partition("\n")[0][:80]


def _named(name: Any) -> str:
    if isinstance(name, tuple) and hasattr(name, "BM"):
        return f"{name.BM}x{name.BN}, {name.warps} warps, {name.stages} stages"
    return str(name)


# ------------------------------------------------------------------------------------------ CPUs


def tune_cpu(tuner: Tuner, shapes: Iterable[Shape]) -> dict[str, Any]:
    """The choices of `libraries.Measured` that were raced, from the library's own defaults."""
    with libraries.by_default():
        return _tune_cpu(tuner, shapes)


def _tune_cpu(tuner: Tuner, shapes: Iterable[Shape]) -> dict[str, Any]:
    before, threads = libraries.cpu_defaults(), torch.get_num_threads()
    made = {shape: tuner.program(shape, "cpu", Shape.program) for shape in shapes}
    programs = {shape: x for shape, x in made.items() if x}
    isas = [x for x in libraries.cpu_isas() if x != libraries.MODEL]

    def on(isa: str, decoding: str, program: Callable[[], Any]) -> Any:
        libraries.select_cpu_isa(isa, decoding)
        return program()

    def with_threads(count: int, program: Callable[[], Any]) -> Any:
        torch.set_num_threads(count)
        return program()

    def best(what: str, some: Iterable[Shape], names: list[Any], wrapped: Callable) -> Any:
        """Of all shapes together, by the product of their ratios; None if nothing was raced."""
        raced, means = False, dict.fromkeys(names, Ratio(1.0, 1.0))
        for shape in some:
            made = {x: functools.partial(wrapped, x, programs[shape]) for x in names}
            tuner.say(f"{shape}")
            ratios = tuner.race(shape, what, made)
            raced |= len(ratios) > 1
            for name in names if ratios else ():
                ratio = ratios.get(name, Ratio(math.inf, math.inf))
                means[name] = Ratio(*(x * y for x, y in zip(means[name], ratio)))
        return winner(means) if raced else None

    few = [x for x in programs if x.M <= FEW_ROWS]
    many = [x for x in programs if x.M > FEW_ROWS]
    try:
        isa = best(
            "instruction set",
            many,
            [before[0], *(x for x in isas if x != before[0])],
            lambda x, program: on(x, before[1], program),
        )
        decoding = best(
            "instruction set of few rows",
            few,
            [before[1], *(x for x in isas if x != before[1])],
            lambda x, program: on(isa or before[0], x, program),
        )
        libraries.select_cpu_isa(isa or before[0], decoding or before[1])
        halves = itertools.takewhile(bool, (threads >> n for n in range(3)))
        most = best("threads", programs, list(halves), with_threads)
    finally:
        torch.set_num_threads(threads)
    chosen = dict(isa=isa, decoding=decoding, threads=most)
    found: dict[str, Any] = {name: x for name, x in chosen.items() if x is not None}
    return found | dict(threads=None) if most == threads else found  # as many as torch has


# ------------------------------------------------------------------------------------------ GPUs


def tune_gpu(
    tuner: Tuner,
    shapes: Iterable[Shape],
    program: Callable[[Shape, str, torch.device], Callable[[], Any]] = Shape.program,
) -> tuple[list[Rule], dict[autotune.Key, autotune.Choice]]:
    """The rules that are no defaults, and the tiles and splits that were raced."""
    made: list[Rule] = []
    tiles: dict[autotune.Key, autotune.Choice] = {}
    for shape in shapes:
        tuner.say(str(shape))
        spec = shape.spec(tuner.device)
        order = [x for x in base.ordered(spec, tuner.device) if x != "reference"]
        able = [x for x in order if not base.why_not(x, spec, tuner.device)]

        def chosen(key: autotune.Key, launches: dict, shape: Shape = shape) -> Any:
            ratios = tuner.race(shape, f"triton, {key.which}", launches)
            return winner(ratios) if ratios else None

        with autotune.searching(chosen, tiles):  # Triton's tiles are found before backends race
            each = {name: tuner.program(shape, name, program) for name in able}
            programs = {name: x for name, x in each.items() if x}
            ratios = tuner.race(shape, "backends", programs) if len(programs) > 1 else {}
        if ratios and (best := winner(ratios)) != (first := next(iter(ratios))):
            made.append(rule_of(spec, tuner.device, best, first))
    return made, tiles


def rule_of(spec: AttentionSpec, device: torch.device, backend: str, instead_of: str) -> Rule:
    """The rule of calls like this one: of its head dims and features, and of sizes up to the same
    power of two."""
    classes: Any = base.get(backend)
    kernels = set(classes.kernels(spec, device).values()) if backend == "cuda" else {""}
    widest = max(spec.D, spec.Dv)
    bounds = ((name, autotune.bucket(size(spec, name))) for name in SIZES)
    return Rule(
        gpu.architecture(device),
        passes_of(spec),
        (widest, widest),
        spec.features & ~Feature.GRAD,
        frozenset({spec.dtype}),
        backend,
        kernels.pop() if len(kernels) == 1 else "",
        instead_of,
        all_features=True,
        sizes=tuple((name, most // 2 + 1, most) for name, most in bounds),
    )


# ----------------------------------------------------------------------------------- the program


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The choices of a file with newer ones: those of the same call, or name of the CPU, replace.
    Raises what operations on another form raise."""
    both = old | new
    if "cpu" in old and "cpu" in new:
        libraries.Measured.parse(old["cpu"])
        both["cpu"] = old["cpu"] | new["cpu"]
    for name, same in (("rules", _calls_of), ("tiles", lambda x: x[0])):
        if name in old and name in new:
            fresh = [same(x) for x in new[name]]
            both[name] = [x for x in old[name] if same(x) not in fresh] + new[name]
    return both


def _calls_of(rule: dict[str, Any]) -> dict[str, Any]:
    return {x: y for x, y in rule.items() if x not in ("backend", "instead_of", "kernels")}


def _both_sets(cpu: dict[str, Any]) -> dict[str, Any]:
    """Choices of a CPU: a file has both instruction sets or none."""
    if not cpu.keys() & {"isa", "decoding"}:
        return cpu
    return dict(zip(("isa", "decoding"), libraries.cpu_defaults())) | cpu


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--shape", action="append", help="a call; may be given several times")
    parser.add_argument("--model", help="module:function, which returns a model and its inputs")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"default: {MINUTES:g}")
    parser.add_argument("--forget", action="store_true", help="delete the files; measure nothing")


def command(options: argparse.Namespace, say: Say = print) -> int:
    """Status 0 if the choices are kept, else 1.

    Raises:
        ValueError: A shape or a model is none, there is no such device, or it cannot be used.
    """
    if options.forget:
        return forget(say)
    if math.isnan(options.minutes):
        raise ValueError("--minutes: got nan, expected a number")
    name = options.device or ("cpu" if gpu.unavailable() else "cuda")
    if name == "cuda" and (why := gpu.unavailable()):
        raise ValueError(f"--device: got cuda, and {why}")
    if name == "cpu" and (why := libraries.cpu_unavailable()):
        raise ValueError(f"--device: got cpu, and {why}")
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", 0)
    shapes = [*map(Shape.parse, options.shape or ())]
    shapes += of_model(options.model, say) if options.model else []
    shapes = shapes or [*map(Shape.parse, SHAPES[name])]
    identity, path = files.identity(device), files.path_of(device)
    end = time.monotonic() + 60 * options.minutes
    say(f"{identity['chip']}: times over that of the first, by rounds in turn")
    tuner = Tuner(device, CLOCKS[name](), end, say)
    new: dict[str, Any]
    if name == "cpu":
        chosen = tune_cpu(tuner, shapes)
        new = dict(cpu=chosen) if chosen else {}
    else:
        rules, tiles = tune_gpu(tuner, shapes)
        new = dict(rules=[x.written() for x in rules], tiles=autotune.written(tiles))
    if time.monotonic() > end:
        say("the time is over: not every race was run")
    if not any(len(x["ratios"]) > 1 for x in tuner.races):
        say("nothing was raced: nothing is written")
        return 1
    return keep(path, identity, new | dict(races=tuner.races), say)


def forget(say: Say) -> int:
    """Delete the files of tune. Status 1 if one stays."""
    try:
        found = files.all_of_user()
    except OSError as error:
        say(f"the folder cannot be read: {error}")
        return 1
    status = 0
    for path in found:
        try:
            path.unlink(missing_ok=True)
            say(f"deleted {path}")
        except OSError as error:
            say(f"{path} cannot be deleted: {error}")
            status = 1
    return status


def keep(path: Any, identity: files.Identity, new: dict[str, Any], say: Say) -> int:
    """Write the choices, with those of before that are of the same identity. Of two processes at
    once the later one keeps the choices that it read before the other wrote."""
    try:
        before = files.read(path)
        if not files.differs(before.identity, identity):
            with contextlib.suppress(TypeError, IndexError, KeyError, AttributeError):
                new = joined(before.choices, new)
    except (OSError, ValueError):
        pass  # none, or a damaged one
    if cpu := new.get("cpu"):
        new = new | dict(cpu=_both_sets(cpu))
    content = files.text(identity, new)
    try:
        if not files.folder():
            raise OSError("the user has no home")
        files.write(path, content)
    except OSError as error:
        say(f"{path} cannot be written ({error}); FASTATTN_CACHE_DIR names another folder:")
        say(content)
        return 1
    say(f"wrote {path}: new processes read it; `python -m fastattn tune --forget` deletes it.")
    say("To send back: that file, and what `python -m fastattn --json` prints.")
    return 0
