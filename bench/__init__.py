"""Verify fused attention against the float64 oracle, then time it against its peers.

python -m bench            the quick sweep, under three minutes on two cores
python -m bench --help     every command

masks.py cases.py    what is measured: kinds of mask, sizes, passes, the grids of a sweep
peers.py others.py   who is measured: a registry of ways to compute a case
verify.py            a call is timed only after this passes
timing.py            clocks and interleaved rounds
run.py               the loop: verify, then time, one record a cell
machine.py chips.py ceilings.py   where it ran, and what that machine can do at most
decoding.py modules.py tiny_call.py peak_memory.py   long keys; nn.MultiheadAttention; a call with
                     almost nothing to do; bytes
flushing.py          what subnormal numbers cost
aims.py              the targets, held against what is measured
results.py comparison.py   a result file; two of them, cell by cell
printed.py pages.py  the printed page; the tables of the README and of bench/results
pictures.py glance.py lines.py heatmap.py growth.py   the pictures
test_calls.py        ten calls for pytest-benchmark, one change against the one before
commands.py __main__.py   what each command does; its options
aot.py                    the compiled code of the GPU kernels, judged with no GPU
instructions.py instructions.c   what the CPU kernels execute, counted and compared with the record
"""
