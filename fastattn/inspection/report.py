"""The report of `fastattn.profile`: as text, as JSON, as a picture."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple

from .call_record import SDPA, CallRecord

WORTH = 1.03  # a smaller speed-up is noise
FEW = 5  # with fewer rounds, `gains` spans all of them, not their quartiles

TRANSFORMERS = '`fastattn.integrations.transformers.register()` and attn_implementation="fastattn"'
UNSEEN = """\
No attention call was seen. Perhaps the model
  multiplies its own matrices (transformers: attn_implementation="fastattn" after
  `fastattn.integrations.transformers.register()`, or "sdpa"; timm:
  `timm.layers.set_fused_attn(True, experimental=True)`),
  bound the function to a name of its own at import, or is traced or scripted."""


class ModelTimes(NamedTuple):
    """Seconds of two runs of the model, one after the other, so that other load slows both."""

    now: float
    ours: float
    converted: bool  # modules were converted, too, not only the function patched


@dataclass
class Measured:
    """Measurements of one kind of call.

    The keys of the dicts are ways to run it: "now" (as the model runs it), "sdpa" (patched), or
    "shown" (with arguments for what its mask shows).
    """

    call: CallRecord
    ours_runs: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # of one call
    bytes: dict[str, int] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)

    def total(self, way: str) -> float:
        """Sum the seconds of all calls of the kind.

        A way without timings takes the seconds of "sdpa" or "now"; a kind without timings takes
        those of the profiled run.
        """
        if not self.seconds:
            return self.call.seconds
        best = self.seconds.get(way, self.seconds.get("sdpa", self.seconds.get("now", 0.0)))
        return best * self.call.count


@dataclass(frozen=True)
class Profile:
    """Report the attention of a model.

    `str()` is the text.

    Attributes:
        model: The name of the model's class, or of the method.
        of_transformers: True for a model of the transformers library.
        step: "forward", or "forward and backward".
        threads: The number of torch's threads.
        rounds: The seconds of the whole model as it is, and on fastattn, one pair for each round.
        calls: The measurements of each kind of call; seconds of a call are the minimum of a few.

    Example:
        >>> import torch
        >>> import fastattn
        >>> report = fastattn.profile(torch.nn.MultiheadAttention(32, 4), *torch.randn(3, 9, 1, 32))
        >>> report.now >= report.attention > 0
        True
    """

    model: str
    of_transformers: bool  # a model of the transformers library
    step: str  # "forward", or "forward and backward"
    threads: int
    rounds: list[ModelTimes]
    calls: list[Measured]

    @property
    def now(self) -> float:
        """The seconds of the model as it is: the minimum of the rounds."""
        return min(x.now for x in self.rounds)

    @property
    def ours(self) -> float:
        """The seconds of the model on fastattn: `now` divided by `gain`."""
        return self.now / self.gain

    @property
    def gains(self) -> tuple[float, float, float]:
        """The low, middle and high speed-up.

        These are quartiles of the rounds; of fewer than FEW rounds their minimum, median and
        maximum.
        """
        ratios = [x.now / x.ours for x in self.rounds]
        if len(ratios) < FEW:
            return min(ratios), median(ratios), max(ratios)
        low, middle, high = quantiles(ratios * 2, n=4, method="inclusive")
        return low, middle, high

    @property
    def gain(self) -> float:
        """The middle speed-up of `gains`."""
        return self.gains[1]

    @property
    def shown(self) -> float:
        """The estimated seconds of the model on fastattn with small masks.

        They are `ours` minus what the calls save with arguments for what their masks show.
        """
        saved = sum(m.total("sdpa") - m.total("shown") for m in self.calls)
        return max(self.ours - max(saved, 0.0), 1e-9)

    @property
    def attention(self) -> float:
        """The seconds of `now` that are attention.

        They are at most `now`: noise could make their sum larger.
        """
        return min(self.now, sum(m.total("now") for m in self.calls))

    def verdict(self) -> str:
        """Judge in a sentence whether fastattn is worth it, and name the line of code to add.

        Returns:
            The sentence; or, if no attention call was seen, the possible reasons.

        Example:
            >>> import torch
            >>> import fastattn
            >>> report = fastattn.profile(torch.nn.Linear(4, 4), torch.randn(1, 4))
            >>> report.verdict().partition(".")[0]
            'No attention call was seen'
        """
        converted = self.rounds[0].converted
        if not self.calls and not converted:
            return UNSEEN
        if not converted and all(m.call.function.startswith("fastattn") for m in self.calls):
            return "All of it is fastattn already."
        line = " and ".join(self.lines())
        better, (low, gain, high) = self.now / self.shown, self.gains
        by = f" ({TRANSFORMERS})" * self.of_transformers
        small = f" Masks kept small{by}: about {better:.2f}x." * (better > gain * WORTH)
        if low >= 1 and gain >= WORTH:
            return f"Worth it: {gain:.2f}x by {line}.{small}"
        if high <= 1 and gain <= 1 / WORTH:
            return f"Not worth it: {gain:.2f}x by {line}.{small}"
        return f"No difference that could be measured here: {gain:.2f}x by {line}.{small}"

    def lines(self) -> list[str]:
        """List the lines of code that make the model run on fastattn.

        Returns:
            One or two of `fastattn.convert(model)` and `with fastattn.sdpa():`.

        Example:
            >>> import torch
            >>> import fastattn
            >>> report = fastattn.profile(torch.nn.Linear(4, 4), torch.randn(1, 4))
            >>> report.lines()
            ['`with fastattn.sdpa():`']
        """
        lines = ["fastattn.convert(model)"] if self.rounds[0].converted else []
        calls = (m.call for m in self.calls)
        if not lines or any(x.function == SDPA and not x.of_multihead for x in calls):
            lines.append("`with fastattn.sdpa():`")
        return lines

    def __str__(self) -> str:
        share = self.attention / self.now
        low, gain, high = self.gains
        lines = [
            f"{self.model}, {self.step}, {_counted(self.threads, 'thread')}: {_time(self.now)}, "
            f"attention {_time(self.attention)} of it ({share:.0%})",
            f"  with fastattn {_time(self.ours)}, {gain:.2f}x (measured; {low:.2f} to {high:.2f})",
        ]
        if self.shown < self.ours / WORTH:
            gain = self.now / self.shown
            lines.append(f"  and masks kept small {_time(self.shown)}, {gain:.2f}x (estimated)")
        lines += [f"  {self.verdict()}", ""]
        for m in self.calls:
            lines += _entry(m, self)
        return "\n".join(lines)

    def json(self) -> str:
        """Write the report as JSON, with every module's name.

        Returns:
            The text of a JSON object. Seconds and bytes of calls are those of one call.

        Example:
            >>> import json
            >>> import torch
            >>> import fastattn
            >>> report = fastattn.profile(torch.nn.Linear(4, 4), torch.randn(1, 4))
            >>> sorted(json.loads(report.json()))
            ['attention_seconds', 'calls', 'model', 'seconds', 'step', 'threads', 'verdict']
        """
        return json.dumps(
            {
                "model": self.model,
                "step": self.step,
                "threads": self.threads,
                "seconds": {"now": self.now, "fastattn": self.ours, "shown": self.shown},
                "attention_seconds": self.attention,
                "verdict": self.verdict(),
                "calls": [_record(m) for m in self.calls],
            },
            indent=1,
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a bar chart to an image file: attention's milliseconds by kind of call and by way.

        Args:
            path: The image file; its ending gives the format.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            Needs the library matplotlib.

            >>> import os
            >>> import tempfile
            >>> import torch
            >>> import fastattn
            >>> report = fastattn.profile(torch.nn.Linear(4, 4), torch.randn(1, 4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "attention.png")
            ...     report.plot(path)
            ...     os.path.getsize(path) > 0
            True
        """
        from matplotlib.figure import Figure

        ways = {"now": "now", "sdpa": "fastattn", "shown": "fastattn, mask kept small"}
        figure = Figure(figsize=(8, 1.5 + 0.9 * max(1, len(self.calls))), layout="constrained")
        axes = figure.add_subplot()
        for at, (way, name) in enumerate(ways.items()):
            places = [i + 0.27 * (at - 1) for i, m in enumerate(self.calls) if way in m.seconds]
            times = [1e3 * m.total(way) for m in self.calls if way in m.seconds]
            axes.barh(places, times, 0.25, label=name)
        names = [f"{_place(m.call)}\nq {_sizes(m.call.q)}" for m in self.calls]
        axes.set_yticks(range(len(self.calls)), names)
        axes.invert_yaxis()
        axes.set_xlabel("ms, all calls")
        axes.set_title(f"{self.model}, {self.step}: {self.gain:.2f}x with fastattn")
        axes.legend()
        figure.savefig(path)


def _place(call: CallRecord) -> str:
    return f"{call.path or 'the model'} ({_counted(call.count, 'call')})"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _entry(m: Measured, report: Profile) -> list[str]:
    call = m.call
    keys = _sizes(call.k)
    if call.fewest < call.k[-2]:
        keys = keys.replace(f", {call.k[-2]}, ", f", {call.fewest} to {call.k[-2]}, ")
    alone = "without backward" if "backward" in report.step and not call.backward else ""
    call_text = ", ".join(
        filter(None, [f"q {_sizes(call.q)}, k {keys} {call.dtype}", call.options, alone])
    )
    lines = [f"{_place(call)}: {call_text}"]
    if call.function != SDPA:
        lines.append(f"  {call.function}")
    if call.mask:
        lines.append(f"  mask {call.mask}{_advice(m, report.of_transformers)}")
    lines.append(f"  now {call.runs}: {_cost(m, 'now')}")
    if m.ours_runs:
        known = "sdpa" in m.seconds or "sdpa" in m.trouble
        lines.append(f"  {call.by} {m.ours_runs}{': ' * known}{_cost(m, 'sdpa') * known}")
    if "shown" in m.seconds:
        lines.append(f"  as shown: {_cost(m, 'shown')}")
    return lines


def _advice(m: Measured, of_transformers: bool) -> str:
    """What a mask shows, and the arguments to pass instead, unless they raised."""
    structure = m.call.mask_structure
    if structure is None:
        return ""
    if not structure.instead or "shown" in m.trouble:
        return f": {structure.what}"
    taken = f" ({structure.taken})" * bool(structure.taken)
    return f", but {structure.what}{taken}: {_instead(m.call, of_transformers)}"


def _instead(call: CallRecord, of_transformers: bool) -> str:
    structure = call.mask_structure
    assert structure is not None
    if of_transformers and not call.of_multihead:
        return f"{TRANSFORMERS} keep it so"
    if call.of_multihead or call.by == "converted":
        given = "no mask" if not structure.arguments else structure.instead
        return f"pass {given} to fastattn.attention, in a module of your own"
    given = {"scale": "scale", "dropout_p": f"{call.arguments.get('dropout_p', 0.0):g}"}
    asked = [x for x in given if call.arguments.get(x)]
    return structure.call.removesuffix(")") + "".join(f", {x}={given[x]}" for x in asked) + ")"


def _cost(m: Measured, way: str) -> str:
    if way in m.trouble:
        return m.trouble[way]
    if way not in m.seconds:
        return f"{_time(m.call.seconds / m.call.count)} a call, as it ran"
    now = None if way == "now" else m.seconds.get("now")
    times = "" if now is None else f", {now / m.seconds[way]:.2f}x"
    return f"{_time(m.seconds[way])} a call{times}, {m.bytes[way] / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _sizes(shape: tuple[int, ...]) -> str:
    return f"({', '.join('*' if n < 0 else str(n) for n in shape)})"


def _record(m: Measured) -> dict[str, Any]:
    call = m.call
    return {
        "function": call.function,
        "where": dict(call.where),
        "calls": call.count,
        "q": call.q,
        "k": call.k,
        "dtype": call.dtype,
        "options": call.options,
        "mask": call.mask or None,
        "shows": call.mask_structure and call.mask_structure.what,
        "instead": (call.mask_structure and call.mask_structure.instead) or None,
        "runs": call.runs,
        "patched_runs": m.ours_runs or None,
        "seconds": m.seconds,
        "bytes": m.bytes,
        "trouble": m.trouble,
    }
