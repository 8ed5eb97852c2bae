"""The CPU's kernels with a fault: what includes the altered file is compiled again, at -O1."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

# The second fuses products and sums, as -O2 does: tests know the errors of fused ones.
QUICK = ["-O1", "-fexpensive-optimizations", "-w", "-MD"]


class NotBuilt(Exception):
    """The compiler refuses the sources."""


class Kernels:
    """The library of the sources in `csrc`, built in a folder: generic, and what FASTATTN_ISAS has.
    A fault is planted in each set, but those of AMX's tiles in their model alone."""

    def __init__(self, csrc, build, isas):
        self.build, self.on_tiles = build, "amx" in isas
        build.mkdir(parents=True, exist_ok=True)
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        given = dict(PATH=tools, FASTATTN_ISAS=isas, FASTATTN_CUDA="off", FASTATTN_EXTENSION="off")
        run(
            ["cmake", "-GNinja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-B", ".", csrc],
            self.build,
            **given,
        )
        commands = json.loads((self.build / "compile_commands.json").read_text())
        self.objects = {}  # by the object's name: its command
        for x in commands:
            command = shlex.split(x["command"])
            self.objects[command[command.index("-o") + 1]] = [*command, *QUICK]
        self.clean, self.includes = self.build / "clean.so", {}
        for name, command in self.objects.items():
            (self.build / name).parent.mkdir(parents=True, exist_ok=True)
            run(command, self.build)
            text = (self.build / name).with_suffix(".d").read_text().replace("\\\n", " ")
            self.includes[name] = {str(Path(self.build, x).resolve()) for x in text.split()[1:]}
        self.link(self.clean, {})

    def altered(self, path):
        """The library with this file as it is now, or None if no object differs."""
        objects = self.compiled(path.resolve())
        if not objects:
            return None
        self.link(self.build / "fault.so", objects)
        return self.build / "fault.so"

    def compiled(self, path):
        """{object: the file of the one that differs}"""
        suited = [x for x in self.objects if "amx_model" in x or not self.on_tiles]
        suited.sort(key=lambda x: "generic" in x)  # which differs only where others do
        altered = {}
        for name in suited:
            if str(path) not in self.includes[name] or ("generic" in name and not altered):
                continue
            target = self.build / "altered" / name.replace("/", "-")
            target.parent.mkdir(exist_ok=True)
            command = [str(target) if x == name else x for x in self.objects[name]]
            run(command, self.build)
            if target.read_bytes() != (self.build / name).read_bytes():
                altered[name] = target
        return altered

    def link(self, target, altered):
        target.unlink(missing_ok=True)  # a library that is loaded is not written to
        compiler = next(iter(self.objects.values()))[0]
        objects = [altered.get(x, x) for x in self.objects if "marshalling" not in x]
        run([compiler, "-shared", "-fopenmp", "-o", target, *objects], self.build)


def run(command, folder, **environment):
    done = subprocess.run(
        [str(x) for x in command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise NotBuilt(re.sub(r"\s+", " ", done.stderr[-400:]))
