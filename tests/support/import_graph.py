"""The imports of a package as a graph of modules and of folders: its layers and its cycles.

python -m tests.support.import_graph [FOLDER]    print them, of fastattn or of the package there
"""

import ast
import sys
from functools import cached_property
from pathlib import Path

from tests.support.checkout import ROOT


class Graph:
    """modules: {"api": path, "backends.base": path, ...}, names below the package. Compiled files
    and the folder `kernels`, which an editable install adds, are not among them."""

    def __init__(self, folder):
        self.package = folder.name
        self.modules = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] != "kernels":
                name = ".".join(parts)
                self.modules[name.removesuffix(".__init__") if len(parts) > 1 else name] = path
        self.strings = {f"{self.package}.{name}" for name in self.modules}

    def imported(self, name, path):
        """The modules of this package that a module imports anywhere in its text, or names in a
        string, as arguments of `importlib.import_module`."""
        here = f"{self.package}.{name}".split(".")
        package = here if path.name == "__init__.py" and name != "__init__" else here[:-1]
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join(base + (node.module.split(".") if node.module else []))
                found |= {f"{base}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and node.value in self.strings:
                found.add(node.value)
        return {known for x in found if (known := self.resolve(x))} - {name}

    def resolve(self, dotted):
        """ "fastattn.api.call" -> "api": the longest prefix that is a module of this package."""
        parts = dotted.split(".")
        if parts[0] != self.package:
            return None
        for end in range(len(parts), 1, -1):
            if (name := ".".join(parts[1:end])) in self.modules:
                return name
        return "__init__"

    @cached_property
    def edges(self):
        """{module: the modules that it imports}."""
        return {name: self.imported(name, path) for name, path in self.modules.items()}


def folder_of(name):
    """The folder of a module below the package; a module that lies flat is its own."""
    return name.partition(".")[0]


def between_folders(edges):
    """The same graph of folders."""
    graph = {folder_of(name): set() for name in edges}
    for name, others in edges.items():
        graph[folder_of(name)] |= {folder_of(x) for x in others} - {folder_of(name)}
    return graph


def cycles(edges):
    """The sets of nodes that reach each other (Tarjan's strongly connected components)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in index:
            visit(node)
    return [x for x in found if len(x) > 1]


def layers(edges):
    """The nodes of a graph without cycles, the highest layer first: a node is one layer above the
    highest node that it imports."""
    height = {}

    def of(node):
        if node not in height:
            height[node] = 1 + max(map(of, edges[node]), default=-1)
        return height[node]

    top = max(map(of, edges))
    return [sorted(x for x in edges if height[x] == h) for h in range(top, -1, -1)]


def main(folder=ROOT / "fastattn"):
    edges = Graph(Path(folder).resolve()).edges
    for what, graph in (("modules", edges), ("folders", between_folders(edges))):
        circles = cycles(graph)
        arrows = sum(map(len, graph.values()))
        print(f"{len(graph)} {what}, {arrows} arrows, {len(circles)} circles", end="")
        print("" if circles else f", {len(layers(graph))} layers")
        for circle in circles:
            print("  circle:", ", ".join(sorted(circle)))
    if not circles:
        for layer in layers(graph):
            print("  " + ", ".join(layer))


if __name__ == "__main__":
    main(*sys.argv[1:])
