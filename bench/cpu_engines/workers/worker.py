"""The loop of a worker: python worker.py FOLDER ADAPTER VARIANT THREADS.

A question is a line of JSON on the standard input, its reply one on the standard output. What an
engine prints goes to the standard error.
"""

import gc
import importlib
import json
import os
import sys
import time
from typing import Any


def main(folder: str, name: str, variant: str, threads: int) -> None:
    sys.path.insert(0, folder)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    adapter = importlib.import_module(name)
    from protocol import Declined

    call = None

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal call
        if question["do"] == "sample":
            return {"seconds": sample(call, question["loops"])}
        call = None  # before the next row's tensors are made
        gc.collect()
        ready = adapter.prepare(question["sizes"], question["tensors"], threads, variant)
        ready.call()
        ready.write(question["out"])
        call = ready.call
        return {"precision": ready.precision}

    print(json.dumps({"version": adapter.version()}), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Declined as reason:
            reply = {"declined": str(reason)}
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            reply = {"failed": f"raised {type(error).__name__}: {text[:200]}"}
        print(json.dumps(reply), file=replies, flush=True)


def sample(call: Any, loops: int) -> float:
    """CPU seconds of this process a call, those of all its threads."""
    gc.disable()
    start = time.process_time()
    for _ in range(loops):
        call()
    seconds = time.process_time() - start
    gc.enable()
    return seconds / loops


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
