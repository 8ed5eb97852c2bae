"""Compile fastattn into its build folder, with a line for each file that is done. pip then finds
everything compiled, and shows nothing of its own while it compiles.

build.py                compile
build.py COMMAND...     run this command meanwhile, and end it where the build is interrupted

The status is 1 if the build failed: the compiler's output is printed, and its cause where it is
none of the sources; or if the command failed. What was compiled before an interruption is kept.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

COMPILE = """
import tempfile
from scikit_build_core.build import build_editable
with tempfile.TemporaryDirectory() as folder:
    build_editable(folder, {"messages.after-failure": ""})
"""
STEP = re.compile(r"\[(\d+/\d+)\] (?:Building|Linking) .* (\S+)$")
KILLED = re.compile(r"\bKilled\b|code=137")
MEMORY = (
    "A compiler was killed (signal 9): out of memory? CMAKE_BUILD_PARALLEL_LEVEL=1 in the "
    "environment compiles one file at a time."
)
KEPT = "What was compiled is kept: the same command goes on from there."


def name_of(path):
    """avx512_forward of CMakeFiles/fa_avx512_forward.dir/cpu/unit.cpp.o."""
    target = re.search(r"fa_(\w+)\.dir/", path)
    return target[1] if target else os.path.basename(path)


def cause(status, output):
    """What ended a build, unless it is what the compiler says of a source; else None."""
    if status < 0:
        return f"The build was ended by {signal.Signals(-status).name}. {KEPT}"
    return f"{MEMORY} {KEPT}" if KILLED.search(output) else None


def main(meanwhile):
    begun, output, started = time.monotonic(), [], []

    def start(command, **more):
        # A session is a group of processes, for a signal to reach all of them.
        started.append(subprocess.Popen(command, start_new_session=True, **more))
        return started[-1]

    try:
        other = start(meanwhile) if meanwhile else None
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        build = start([sys.executable, "-c", COMPILE], **pipes)
        for line in build.stdout:
            output.append(line)
            if step := STEP.match(line.strip()):
                seconds = time.monotonic() - begun
                print(f"[{step[1]} {seconds:4.0f} s] {name_of(step[2])}", flush=True)
        status = build.wait()
        failed = other.wait() if other else 0
    except KeyboardInterrupt:
        for group in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGINT)
        for group in started:
            group.communicate()  # until the last of them has ended
        print(f"\nThe build was interrupted. {KEPT}", file=sys.stderr)
        return 130
    text = "".join(output)
    if status:
        print(text, cause(status, text) or "", sep="\n", file=sys.stderr)
    if failed:
        print(f"{' '.join(meanwhile)} failed with status {failed}.", file=sys.stderr)
    return int(status != 0 or failed != 0)


if __name__ == "__main__":
    # Also if they are ignored, as in the background of a shell. nohup asks for just that, though.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
