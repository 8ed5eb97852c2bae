"""A program for the Python of SGLang's environment: an engine that answers lines of JSON.

As vllm_engine.py: its argument is the arguments of sglang.Engine.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import time
import types

MARK = "ANSWER "
# What SGLang imports at its start, and its models of text on CPUs never call.
NEVER_CALLED = ("torchvision", "torchaudio", "IPython", "gguf")


class Anything(type):
    """A class. Each attribute of it is the name of that attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Empty(types.ModuleType):
    __version__ = "0.28.0"

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in NEVER_CALLED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())  # SGLang spawns processes that import this file


def answer(found):
    print(MARK + json.dumps(found), flush=True)


def main():
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    answer({})
    for line in sys.stdin:
        asked = json.loads(line)
        greedy = dict(temperature=0, max_new_tokens=asked["tokens"], ignore_eos=True)
        begin = time.perf_counter()
        found = engine.generate(input_ids=asked["prompts"], sampling_params=greedy)
        seconds = time.perf_counter() - begin
        answer({"tokens": [x["output_ids"] for x in found], "seconds": seconds})
    engine.shutdown()


if __name__ == "__main__":
    main()
