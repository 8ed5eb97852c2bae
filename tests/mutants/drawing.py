"""Which places are drawn."""

import random
import subprocess

from . import cpp_rules, python_rules

RULES = {".py": python_rules.faults, ".h": cpp_rules.faults, ".cpp": cpp_rules.faults}
FOLDERS = ("csrc/common", "csrc/cpu", "fastattn", "kernels")
# What this machine does not run: other processors, a GPU. And numbers that decide of speed alone.
LEFT_OUT = (
    "csrc/common/glibc.h",
    "csrc/cpu/amx/amx_enable.h",
    "csrc/cpu/base/arm_product.h",
    "csrc/cpu/runtime/platform.h",
    "fastattn/backends/cuda",
    "fastattn/backends/sm90",
    "fastattn/examples",
    "tile_configs.py",
)


def files(root, only=""):
    """The files in which faults are drawn, as paths from the root."""
    command = ["git", "-C", str(root), "ls-files", *([only] if only else FOLDERS)]
    every = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    suited = [x for x in every if x.endswith(tuple(RULES))]
    return [x for x in suited if not any(part in x for part in LEFT_OUT)]


def drawn(root, seed, only=""):
    """Faults in an order drawn by the seed, at most one for each line."""
    lines = {}
    for name in files(root, only):
        rules = RULES["." + name.rpartition(".")[2]]
        for fault in rules(name, (root / name).read_text()):
            lines.setdefault((name, fault.line), []).append(fault)
    draw = random.Random(seed)
    places = sorted(lines)
    draw.shuffle(places)
    for place in places:  # by rule first: a line has more numbers than bounds
        by_rule = {}
        for fault in lines[place]:
            by_rule.setdefault(fault.rule, []).append(fault)
        yield draw.choice(by_rule[draw.choice(sorted(by_rule))])
