"""Verify fused attention against the float64 oracle, then time it against its peers.

python -m bench            the quick sweep, under two minutes on two cores
python -m bench --help     every command

masks.py cases.py          the measured cases: kinds of mask, sizes, passes, the grids of a sweep
commands.py __main__.py    the commands; their options
measure                    verification (a call is timed only after it passes), clocks, rounds
peers                      a registry of ways to compute a case
cpu_engines                other engines, each in an environment of its own
benchmarks                 what is measured besides the sweep, a module for each command
reporting, plots           result files, comparison, printed output, pages; pictures
static_gpu                 machine code of the GPU kernels, compiled and counted without a GPU
test_calls.py              ten calls for pytest-benchmark, to compare a change with the one before
"""
