"""Public docstrings have one form, which tools render, and their examples run.

The form is Google's: a first line of one sentence, text, then the sections of SECTIONS in this
order. Args has the parameters of the signature. Shape has the tensors. An example that cannot run
everywhere begins with a line of REQUIREMENTS: "Needs a GPU.", for instance.
"""

import ast
import builtins
import contextlib
import dataclasses
import doctest
import importlib.util
import inspect
import re
import textwrap
import typing
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import fastattn
import fastattn.distributed
from tests.support.marks import parametrize

PACKAGES = (
    fastattn,
    fastattn.nn,
    fastattn.distributed,
    fastattn.flash_attn,
    fastattn.integrations,
)
# The oracle has no __all__: its other functions are the parts of this one.
NAMES = {"fastattn.reference": ("attention",)}

# Attributes is for the classes that public functions return, and that only fastattn makes.
SECTIONS = ("Args", "Attributes", "Shape", "Returns", "Raises", "Example")
HEADER = re.compile(r"([A-Z]\w+):")
ENTRY = re.compile(r" {4}([\w.*]+(?:, [\w.*]+)*)(?: \([^)]*\))?: \S")

# A verb in its base form does not end like this, and is none of these words.
NO_VERB = re.compile(
    r"(?:.*[^s]s|.*ing|A|An|The|This|What|Which|How|Where|Why|All|Each|Every|One|If)$"
)

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

    They differ where the code has `**arguments` and the signature says which. What the code takes
    by position only to refuse it is no parameter.
    """
    mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    try:
        shown = inspect.signature(public).parameters.values()
    except (TypeError, ValueError):
        return [], []
    shown = [mark.get(x.kind, "") + x.name for x in shown if x.name != "self"]
    if not isinstance(public, FunctionType):
        return shown, shown
    code = inspect.unwrap(public).__code__
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    by_name = [next(names) for _ in range(code.co_kwonlyargcount)]
    rest = ["*" + next(names)] if code.co_flags & inspect.CO_VARARGS else []
    last = ["**" + next(names)] if code.co_flags & inspect.CO_VARKEYWORDS else []
    rest = [x for x in rest if x in shown]
    return shown, [x for x in positional + rest + by_name + last if x != "self"]


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


def is_tensor(hint):
    return hint is Tensor or Tensor in typing.get_args(hint)


def called(function):
    """The functions of fastattn that this one calls by their names or as methods of self."""
    function = inspect.unwrap(function)
    owner = getattr(inspect.getmodule(function), function.__qualname__.partition(".")[0], None)
    for node in ast.walk(tree(function)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            found = function.__globals__.get(node.func.id)
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
            found = getattr(owner, node.func.attr, None)
        else:
            continue
        found = inspect.unwrap(found) if callable(found) else None
        if isinstance(found, FunctionType) and found.__globals__["__name__"].startswith("fastattn"):
            yield found


def tree(function):
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], [])


def has_raise(function):
    return any(isinstance(x, ast.Raise) and x.exc is not None for x in ast.walk(tree(function)))


def checks_arguments(public):
    """True if the function raises, or if it has parameters and calls a function that raises."""
    function = vars(public).get("__init__") if isinstance(public, type) else public
    if function is None:
        return False
    function = inspect.unwrap(function)
    if has_raise(function):
        return True
    if not parameters(public)[0]:
        return False
    known, left = {function}, [function]
    while left:
        for each in called(left.pop()):
            if each not in known:
                if has_raise(each):
                    return True
                known.add(each)
                left.append(each)
    return False


def entries(lines):
    """The names of a section's entries, and its lines that are neither an entry nor part of one."""
    names, wrong = [], []
    for line in lines:
        if entry := ENTRY.match(line):
            names += entry[1].split(", ")
        elif line and not (names and line.startswith(" " * 8)):
            wrong.append(line)
    return names, wrong


def is_exception(name):
    found = getattr(builtins, name, None)
    if "." in name:
        module, _, name = name.rpartition(".")
        found = getattr(importlib.import_module(module), name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def faults(public, is_result=False, owner=None):
    """What is wrong with the form of a docstring, as texts. owner: the class, for a method.

    The docstring of a module may have the Shape and the Example of its forward, as torch's do.
    """
    doc = inspect.getdoc(public) if public.__doc__ else None
    if not doc:
        return ["no docstring"]
    text, sections = parse(doc)
    first, *more = text
    names = [name for name, _ in sections]
    found = []
    if not first.endswith(".") or re.search(r"[.!?]\s+\S", first) or (more and more[0]):
        found.append(f"first line: got {first!r}, expected one sentence and an empty line")
    if isinstance(public, property):
        return found
    is_class = isinstance(public, type)
    if not is_class and NO_VERB.match(first.split()[0]):
        found.append(f"first line: got {first!r}, expected a verb first, in the imperative")
    order = [x for x in SECTIONS if x in names]
    if names != order:
        return [*found, f"sections: got {names}, expected some of {SECTIONS}, in this order, once"]
    body = dict(sections)
    for name, lines in body.items():
        if outside := [x for x in lines if x and not x.startswith(" ")]:
            found.append(f"{name}: got {outside}, expected no text after the sections")
        if not any(lines):
            found.append(f"{name}: got an empty section")

    expected = {"Example"}
    shown, listed = parameters(public)
    given = hints(public)
    if is_result:
        fields = [x.name for x in dataclasses.fields(public)]
        got = entries(body.get("Attributes", ()))[0]
        if got != fields:
            found.append(f"Attributes: got {got}, expected {fields}")
        expected.add("Attributes")
    else:
        got = entries(body.get("Args", ()))[0]
        if got not in (shown, listed):
            found.append(f"Args: got {got}, expected {listed}")
        expected |= {"Args"} if shown else set()
        expected |= {"Raises"} if checks_arguments(public) else set()
    if not is_class:
        if given.get("return", Tensor) is not None:
            expected.add("Returns")
        elif "Returns" in body:
            found.append("Returns: got this section, expected none: nothing is returned")
        if any("Tensor" in str(hint) for hint in given.values()):
            expected.add("Shape")
        elif "Shape" in body and given.keys() >= {x.lstrip("*") for x in shown}:
            found.append("Shape: got this section, expected none: there is no tensor")
    if getattr(public, "__name__", "") == "forward" and owner and owner.__doc__:
        expected -= {"Shape", "Example"} & {x for x, _ in parse(inspect.getdoc(owner))[1]}
    found += [f"{x}: got none, expected this section" for x in SECTIONS if x in expected - {*body}]

    for name in ("Args", "Attributes", "Shape", "Raises"):
        if wrong := entries(body.get(name, ()))[1]:
            found.append(f"{name}: got {wrong}, expected `name: text` for each")
    missing = [x for x in entries(body.get("Args", ()))[0] if is_tensor(given.get(x))]
    missing = [x for x in missing if x not in entries(body.get("Shape", ()))[0]]
    if missing and "Shape" in body and not is_class:
        found.append(f"Shape: got none of {missing}, expected each tensor")
    for name in entries(body.get("Raises", ()))[0]:
        if not is_exception(name):
            found.append(f"Raises: got {name}, expected the name of an exception")
    example = "\n".join(body.get("Example", ()))
    if "Example" in body and ">>> " not in example:
        found.append("Example: got no `>>>`")
    if "+SKIP" in doc:
        found.append('Example: got +SKIP, expected a line "Needs ...", which gives the reason')
    if "Needs " in example and not REQUIREMENTS.search(example):
        found.append(f"Example: got an unknown reason, expected {REQUIREMENTS.pattern}")
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
    for member, x in vars(public).items() if isinstance(public, type) else ():
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


def public_names(module):
    """The names of a module without __all__ are those of its own functions and classes."""
    own = NAMES.get(module.__name__) or getattr(module, "__all__", None)
    if own is not None:
        return own
    made = (FunctionType, type)
    here = {x: y for x, y in vars(module).items() if isinstance(y, made) and x[0] != "_"}
    return [x for x, y in here.items() if y.__module__ == module.__name__]


def documented(module):
    """All that is public in a module."""
    for name in public_names(module):
        x = getattr(module, name)
        full = f"{module.__name__}.{name}"
        if isinstance(x, ModuleType):
            if x not in PACKAGES:
                yield from documented(x)
        elif callable(x):
            yield from members(full, x)
            for result in results(x) if not isinstance(x, type) else ():
                yield from members(f"{module.__name__}.{result.__qualname__}", result, True)


def unique(found):
    """Without names of an object that another name has already."""
    known = {}
    for public in found:
        known.setdefault(id(public.object), public)
    return list(known.values())


ALL = unique(x for package in PACKAGES for x in documented(package))


@pytest.mark.parametrize("public", [pytest.param(public, id=public.name) for public in ALL])
def test_form(public):
    assert faults(*public[1:]) == []


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


# --------------------------------------------------------------------------- tests of this test

RIGHT = """\
Scale a tensor.

The text: of any length.

Args:
    x: The tensor. It may
        have any shape.
    factor: The factor.

Shape:
    x: (...), float32.
    out: (...), float32.

Returns:
    out.

Raises:
    ValueError: factor is 0.

Example:
    >>> 2 * 3
    6
"""


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    if not factor:
        raise ValueError("factor: got 0, expected another number")
    return factor * x


def grouped(x: Tensor, **arguments: float) -> Tensor:
    return scaled(x, **arguments)


def documented_by(doc, function=scaled):
    made = FunctionType(function.__code__, function.__globals__, function.__name__)
    made.__annotations__ = function.__annotations__
    made.__doc__ = doc
    return made


def without(section):
    return re.sub(rf"{section}:\n(?: .*\n)+\n?", "", RIGHT)


def test_a_docstring_of_the_right_form_has_no_fault():
    assert faults(documented_by(RIGHT)) == []
    group = RIGHT.replace("    factor: The factor.", "    **arguments: Those of scaled.")
    assert faults(documented_by(group, grouped)) == []
    assert faults(documented_by(group)) != []


@pytest.mark.parametrize(
    ("doc", "word"),
    [
        (None, "no docstring"),
        *((without(section), section) for section in SECTIONS if section != "Attributes"),
        (without("Raises") + "\nRaises:\n    ValueError: factor is 0.\n", "in this order"),
        (RIGHT.replace("Args:", "Arguments:"), "sections"),
        (RIGHT + "\nMore text.\n", "after the sections"),
        (RIGHT.replace("    factor: ", "    factors: "), "Args"),
        (RIGHT.replace("    factor: The factor.\n", ""), "Args"),
        (RIGHT.replace("    factor: ", "    no entry "), "Args"),
        (RIGHT.replace("    x: (...), float32.\n", ""), "Shape"),
        (RIGHT.replace("ValueError", "WrongError"), "Raises"),
        (RIGHT.replace("ValueError: ", ""), "Raises"),
        (RIGHT.replace(">>> ", ""), "Example"),
        (RIGHT.replace("2 * 3", "2 * 3  # doctest: +SKIP"), "Example"),
        (RIGHT.replace("    >>>", "    Needs luck.\n\n    >>>"), "Example"),
        (RIGHT.replace("Scale a tensor.", "Scale a tensor"), "first line"),
        (RIGHT.replace("Scale a tensor.", "Scale a tensor. Return it."), "first line"),
        (RIGHT.replace("Scale a tensor.\n", "Scale a tensor.\nReturn it."), "first line"),
        (RIGHT.replace("Scale a", "Scales a"), "imperative"),
        (RIGHT.replace("Scale a", "The scaled"), "imperative"),
    ],
)
def test_a_fault_of_the_form_is_noticed(doc, word):
    found = faults(documented_by(doc))
    assert found and any(word in fault for fault in found)


def test_the_fields_of_a_result_are_noticed():
    made = dataclasses.make_dataclass("Made", ["seconds"])
    made.__doc__ = "Report.\n\nAttributes:\n    seconds: A time.\n\nExample:\n    >>> 1\n    1\n"
    assert faults(made, is_result=True) == []
    made.__doc__ = made.__doc__.replace("seconds", "minutes")
    assert "Attributes" in faults(made, is_result=True)[0]


def test_a_module_may_have_the_example_of_its_forward():
    forward = documented_by(without("Example"))
    module = type("Module", (), {"__doc__": RIGHT})
    assert any("Example" in fault for fault in faults(forward, owner=module))  # of another name
    forward.__name__ = "forward"
    assert faults(forward, owner=module) == []
    module.__doc__ = without("Example")
    assert any("Example" in fault for fault in faults(forward, owner=module))


def test_a_raise_that_is_reached_through_calls_is_noticed():
    assert checks_arguments(fastattn.convert) and checks_arguments(fastattn.attention)
    assert not checks_arguments(fastattn.available_backends)


def test_a_wrong_example_is_noticed():
    assert run(RIGHT, "right") == ""
    assert "- 7\n    + 6" in run(RIGHT.replace("    6", "    7"), "wrong")
    assert "NameError" in run(RIGHT.replace("2 * 3", "two"), "wrong")


def test_an_example_that_cannot_run_has_a_reason(monkeypatch):
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    needs = "Example:\n    Needs {}.\n\n    >>> 1\n"
    for what in ("a GPU", "several ranks", "the library no_such_library"):
        assert what in why_skipped(needs.format(what))
    assert why_skipped(needs.format("the library torch")) is None
    assert why_skipped(RIGHT) is None
