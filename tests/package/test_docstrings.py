"""Public docstrings have one form, which tools render, and their examples run.

The form is Google's: a first line of one sentence, text, then the sections of SECTIONS in this
order. Args has the parameters of the signature. Shape has the tensors. An example that cannot run
everywhere begins with a line of REQUIREMENTS: "Needs a GPU.", for instance.
"""

import contextlib
import dataclasses
import doctest
import importlib.util
import inspect
import pkgutil
import re
import runpy
import typing
from types import FunctionType

import pytest
import torch
from torch import Tensor

from fastattn.flash_attn import activations, bert_padding, losses, mha, norms, rotary
from tests.support.checkout import ROOT
from tests.support.marks import parametrize

# Those of the reference, and of the package's modules that only users of flash-attn import.
NAMES = [*runpy.run_path(str(ROOT / "docs" / "extensions" / "docstrings.py"))["FILES"]]
NAMES += [f"flash_attn.bert_padding.{x}" for x in bert_padding.__all__]
NAMES += [f"flash_attn.mha.{x}" for x in mha.__all__]
NAMES += [f"flash_attn.rotary.{x}" for x in rotary.__all__]
NAMES += [f"flash_attn.norms.{x}" for x in norms.__all__]
NAMES += [f"flash_attn.losses.{x}" for x in losses.__all__]
NAMES += [f"flash_attn.activations.{x}" for x in activations.__all__]

# Attributes is for the classes that public functions return, and that only fastattn makes.
SECTIONS = ("Args", "Attributes", "Shape", "Returns", "Raises", "Example")
HEADER = re.compile(r"([A-Z]\w+):")
ENTRY = re.compile(r" {4}([\w.*]+(?:, [\w.*]+)*)(?: \([^)]*\))?: \S")

# A verb in its base form does not end like this, and is none of these words.
NO_VERB = re.compile(
    r"(?:.*[^s]s|.*ing|A|An|The|This|What|Which|How|Where|Why|All|Each|Every|One|If)$"
)

# Functions and classes that refuse none of their arguments: the others say what they raise.
UNCHECKED = {
    *("MultiheadAttention", "Place", "mla.Weights", "mla.join", "mla.keys"),
    *("nn.BahdanauAttention", "nn.ConcatenatedHeads", "nn.EncoderDecoder", "nn.KeyValueCache"),
    *("nn.DecoderLayer.new_cache", "nn.EncoderLayer.new_cache", "nn.FeedForward.forward"),
    *("nn.LuongAttention", "nn.Residual", "nn.Residual.forward", "nn.ScaledDotProductAttention"),
    *("nn.SelfAttention", "nn.SinusoidalPositionalEncoding", "nn.record_weights"),
    *("nn.state_from_torch", "nn.state_to_torch"),
    *(f"flash_attn.bert_padding.{x}" for x in bert_padding.__all__),
    *(f"flash_attn.{x}.get_scheduler_metadata" for x in ("flash_attn_3", "cute")),
    "flash_attn.cute.BlockSparseTensorsTorch",
    *(f"flash_attn.mha.{x}Attention" for x in ("Cross", "FlashCross", "FlashSelf", "Self")),
    *("flash_attn.mha.MHA.allocate_inference_cache", "flash_attn.rotary.rotate_half"),
}

REQUIREMENTS = re.compile(r"Needs (a GPU|several ranks|the library (\w+))\.$", re.MULTILINE)


# ------------------------------------------------------------------------------------ the form


def parse(doc):
    """(the lines before the sections, the lines of each section by its name)"""
    text, sections = [], []
    for line in doc.split("\n"):
        if header := HEADER.fullmatch(line):
            sections.append((header[1], []))
        elif sections:
            sections[-1][1].append(line)
        else:
            text.append(line)
    return text, sections


def parameters(public):
    """The names of the parameters as users see them, and as the code of a function lists them.

    They differ where the code has `**arguments` and the signature says which.
    """
    mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    try:
        shown = inspect.signature(public).parameters.values()
    except (TypeError, ValueError):
        return [], []
    shown = [mark.get(x.kind, "") + x.name for x in shown if x.name != "self"]
    if not isinstance(public, FunctionType):
        return shown, shown
    listed, _, last = inspect.getargs(inspect.unwrap(public).__code__)
    return shown, [x for x in listed if x != "self"] + ([f"**{last}"] if last else [])


def hints(public):
    """The annotations of the parameters and of "return", as objects; without those not known."""
    function = inspect.unwrap(public)
    try:
        signature = inspect.signature(public)
    except (TypeError, ValueError):
        return {}
    given = {x.name: x.annotation for x in signature.parameters.values() if x.name != "self"}
    found = {}
    for name, hint in {**given, "return": signature.return_annotation}.items():
        if hint is not inspect.Parameter.empty:
            with contextlib.suppress(NameError):  # a name that only type checkers import
                names = dict(getattr(function, "__globals__", {}))
                found[name] = eval(hint, names) if isinstance(hint, str) else hint
    return found


def entries(section):
    """The names of a section's entries. Other lines are indented further, below an entry."""
    found = []
    for line in filter(None, section):
        if entry := ENTRY.match(line):
            found += entry[1].split(", ")
        else:
            assert found and line.startswith(" " * 8), f"got {line!r}, expected `name: text`"
    return found


# ---------------------------------------------------------------------------- the public names


class Public(typing.NamedTuple):
    name: str
    object: typing.Any
    is_result: bool = False  # a dataclass that a public function returns
    owner: type | None = None  # of a method


def members(name, public, is_result=False):
    """A public object, and if it is a class its public methods and properties.

    Methods that override one of torch.nn.Module, as extra_repr does, have torch's documentation.
    """
    yield Public(name, public, is_result)
    own = dict(vars(public)) if isinstance(public, type) else {}
    if isinstance(public, type) and issubclass(public, torch.nn.Module):
        own["forward"] = public.forward  # of a base class, too
    for member, x in own.items():
        x = x.__func__ if isinstance(x, (classmethod, staticmethod)) else x
        of_torch = issubclass(public, torch.nn.Module) and hasattr(torch.nn.Module, member)
        if member.startswith("_") or (of_torch and member != "forward"):
            continue
        if isinstance(x, (FunctionType, property)):
            yield Public(f"{name}.{member}", x, owner=public)


def results(public):
    """The dataclasses of fastattn that a function returns."""
    hint = hints(public).get("return")
    for x in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(x) and x.__module__.startswith("fastattn"):
            yield x


def documented():
    """All that is public and fastattn's own."""
    for name in NAMES:
        x = pkgutil.resolve_name(f"fastattn.{name}")
        if x.__module__.startswith("fastattn"):
            yield from members(name, x)
            for result in results(x) if not isinstance(x, type) else ():
                yield from members(result.__qualname__, result, True)


ALL = {x.name: x for x in documented()}.values()


every_public = pytest.mark.parametrize("public", [pytest.param(x, id=x.name) for x in ALL])
every_with_sections = pytest.mark.parametrize(
    "public", [pytest.param(x, id=x.name) for x in ALL if not isinstance(x.object, property)]
)


@every_public
def test_the_first_line_is_a_sentence(public):
    """A verb in the imperative begins it, but for classes and properties."""
    assert public.object.__doc__
    first, *more = parse(inspect.getdoc(public.object))[0]
    assert first.endswith(".") and not re.search(r"[.!?]\s+\S", first)
    assert not (more and more[0]), "expected an empty line after the first"
    assert isinstance(public.object, (type, property)) or not NO_VERB.match(first.split()[0])


@every_with_sections
def test_sections_are_in_order_and_end_the_text(public):
    sections = parse(inspect.getdoc(public.object))[1]
    names = [name for name, _ in sections]
    assert names == [x for x in SECTIONS if x in names]
    for _, lines in sections:
        assert any(lines) and all(x.startswith(" ") for x in lines if x)


@every_with_sections
def test_a_section_is_there_if_it_has_something_to_say(public):
    """The docstring of a module may have the Shape and the Example of its forward, as torch's."""
    x, is_class = public.object, isinstance(public.object, type)
    found = {name for name, _ in parse(inspect.getdoc(x))[1]}
    shown, given = parameters(x)[0], hints(x)
    expected = {"Example"}
    if public.is_result:
        expected.add("Attributes")
    else:
        expected |= {"Args"} if shown else set()
        checks = shown and public.name not in UNCHECKED
        expected |= {"Raises"} if checks else set()
    if not is_class and given.get("return", Tensor) is not None:
        expected.add("Returns")
    if not is_class and any("Tensor" in str(hint) for hint in given.values()):
        expected.add("Shape")
    if not is_class:
        unknown = not given.keys() >= {name.lstrip("*") for name in shown}
        assert found & {"Returns", "Shape"} <= expected | ({"Shape"} if unknown else set())
    if x.__name__ == "forward" and public.owner and public.owner.__doc__:
        of_owner = {name for name, _ in parse(inspect.getdoc(public.owner))[1]}
        expected -= {"Shape", "Example"} & of_owner
    assert expected <= found


@every_with_sections
def test_entries_are_those_of_the_code(public):
    x = public.object
    doc = inspect.getdoc(x)
    sections = dict(parse(doc)[1])
    found = {
        name: entries(sections.get(name, ())) for name in ("Args", "Attributes", "Shape", "Raises")
    }
    if public.is_result:
        assert found["Attributes"] == [field.name for field in dataclasses.fields(x)]
    else:
        assert found["Args"] in parameters(x)
    given = hints(x)
    tensors = {
        name
        for name in found["Args"]
        if Tensor in (given.get(name), *typing.get_args(given.get(name)))
    }
    assert isinstance(x, type) or not found["Shape"] or tensors <= set(found["Shape"])
    for name in found["Raises"]:
        error = pkgutil.resolve_name(name if "." in name else f"builtins.{name}")
        assert issubclass(error, BaseException)
    example = "\n".join(sections.get("Example", [">>> "]))
    assert ">>> " in example
    assert "+SKIP" not in doc, 'expected a line "Needs ...", which gives the reason'
    assert "Needs " not in example or REQUIREMENTS.search(example)


# ------------------------------------------------------------------------------------ examples


def run(doc, name):
    """Run the examples of a docstring; the output is that of doctest, empty if all are right."""
    torch.manual_seed(0)
    case = doctest.DocTestParser().get_doctest(doc, {}, name, name, 0)
    output = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.REPORT_NDIFF)
    runner.run(case, out=output.append)
    return "".join(output)


def why_skipped(doc):
    """The reason why an example cannot run here, or None."""
    for what, library in REQUIREMENTS.findall(doc):
        if what == "a GPU" and not torch.cuda.is_available():
            return "needs a GPU"
        if what == "several ranks":
            return "needs several ranks, which torchrun starts"
        if library and importlib.util.find_spec(library) is None:
            return f"needs the library {library}"
    return None


@parametrize(
    ("doc", "name"),
    [
        pytest.param(inspect.getdoc(x), name, id=name)
        for name, x, *_ in ALL
        if x.__doc__ and ">>> " in x.__doc__
    ],
    fast=46,
)
def test_example(doc, name):
    if reason := why_skipped(doc):
        pytest.skip(reason)
    assert run(doc, name) == ""
