"""The rules change what they say, and nothing that no test could see. A fault that a test detects
is reported as detected, and one that none does survives."""

import subprocess

import pytest

from tests.mutants import __main__ as program
from tests.mutants import cpp_rules, drawing, python_rules
from tests.mutants.tree import Tree

PYTHON = {
    "x = a < b": ["off by one: x = (a <= b)"],
    "x = a == b": ["negated: x = (a != b)"],
    "x = a and b": ["and for or: x = (a or b)"],
    "x = a + b": ["sign: x = (a - b)", "term dropped: x = (a)"],
    "x = a // b": ["operands swapped: x = (b // a)"],
    "x = -a": ["sign: x = (a)"],
    "x = 7": ["off by one: x = 8"],
    "x = True": ["negated: x = False"],
    "x = np.min(a)": ["min for max: x = np.max(a)"],
    "if a:\n    b": ["guard dropped: if True:", "guard dropped: if False:"],
    "x.y = a": ["statement dropped: pass"],
    "f(a)": ["statement dropped: pass"],
    "é = a < b": ["off by one: é = (a <= b)"],
    '"""1 < 2"""\n__all__ = ["a"]\nraise ValueError(1 + 2)': [],
    "def f(x: A[1] = None) -> B[2]:\n    assert isinstance(x, int), 3": [],
    "@overload\ndef f(x: int = 3): ...": [],
    "tl.multiple_of(x, 16)\nwarnings.warn('a' if b else 'c')": [],
}
CPP = {
    "x = a < b;": ["off by one: x = a <= b;", "statement dropped: ;"],
    "bool x = a != b;": ["negated: bool x = a == b;"],
    "bool x = a && b;": ["and for or: bool x = a || b;"],
    "int x = a + b * c;": ["sign: int x = a - b * c;", "term dropped: int x = a;"],
    "int x = (a - b);": [
        "sign: int x = (a + b);",
        "term dropped: int x = (a);",
        "operands swapped: int x = (b - a);",
    ],
    "int x = -a;": ["sign: int x = a;"],
    "if (!a) return;": [
        "guard dropped: if (true) return;",
        "guard dropped: if (false) return;",
        "negated: if (a) return;",
    ],
    "int x = 0x1Fu;": ["off by one: int x = 32u;"],
    "auto x = std::min(a, b);": ["min for max: auto x = std::max(a, b);"],
    "{ f(a); }": ["statement dropped: { ; }"],
    "{ a[i].b += c; }": ["sign: { a[i].b -= c; }", "statement dropped: { ; }"],
    "template <class T> Vec<T> f(T&& a, const T* b);": [],
    '// a < b\n#if A < 1\n#endif\nstatic_assert(A == 1, "a < b");': [],
    'const char* x = "a < b";': [],
}


def written(rules, source):
    """What the faults of a text make of their line."""
    found = []
    for fault in rules.faults("a", source):
        lines = source.splitlines(), fault.plant(source).splitlines()
        changed = [new for old, new in zip(*lines) if old != new]
        found.append(f"{fault.rule}: {changed[0].strip()}")
    return found


@pytest.mark.parametrize("source", PYTHON)
def test_faults_of_python(source):
    assert written(python_rules, source) == PYTHON[source]


@pytest.mark.parametrize("source", CPP)
def test_faults_of_cpp(source):
    assert sorted(written(cpp_rules, source)) == sorted(CPP[source])


def test_the_same_bytecode_is_no_fault():
    assert python_rules.alike("x = 1 + 1\n\n", "x = (2)")
    assert not python_rules.alike("def f(): return 1", "def f(): return 2")


def test_a_seed_draws_the_same_places_and_each_line_once():
    few = [*zip(range(200), drawing.drawn(program.ROOT, 1, "csrc/cpu/score"))]
    assert few == [*zip(range(200), drawing.drawn(program.ROOT, 1, "csrc/cpu/score"))]
    places = [(fault.file, fault.line) for _, fault in few]
    assert len(set(places)) == len(places) == 200


TOY = {
    "fastattn/__init__.py": "",
    "fastattn/sums.py": "def add(a, b):\n    return a + b\n\n\ndef unused(a):\n    return not a\n",
    "tests/features/test_sums.py": """from fastattn import sums


def test_add():
    assert sums.add(1, 2) == 3
""",
}


@pytest.fixture
def toy(tmp_path):
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@a"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path


@pytest.mark.slow
def test_a_fault_is_detected_and_one_that_nothing_tests_survives(
    toy, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(program, "ROOT", toy)
    tree = Tree(toy, tmp_path_factory.mktemp("mutants"), 1)
    assert program.unaltered([tree], False) is None
    trial = program.Trial(drawing.drawn(toy, 0), 2)
    trial.work(tree)
    detected, survived = sorted(trial.results, key=lambda x: x["line"])
    assert detected["detected_by"] == "tests/features/test_sums.py::test_add"
    assert survived["detected_by"] is None
    assert {x: (toy / x).read_text() for x in TOY} == TOY
