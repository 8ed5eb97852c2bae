"""Verify fused attention against the float64 oracle, then time it against its peers.

python -m bench            the quick sweep, under three minutes on two cores
python -m bench --help     every command

masks.py cases.py    the measured cases: kinds of mask, sizes, passes, the grids of a sweep
peers.py others.py   the peers: a registry of ways to compute a case
verify.py            a call is timed only after this passes
timing.py            clocks and interleaved rounds
run.py               the loop: verify, then time, one record per cell
machine.py chips.py ceilings.py   the machine, and its measured limits
decoding.py modules.py tiny_call.py peak_memory.py   few rows on long keys; nn.MultiheadAttention;
                     the overhead of a call; memory
flushing.py          the cost of subnormal numbers
aims.py              the targets, compared with measurements
results.py comparison.py   a result file; a comparison of two, cell by cell
printed.py block_pool.py  the printed output; the tables of the README and of bench/results
pictures.py glance.py lines.py heatmap.py growth.py   the pictures
test_calls.py        ten calls for pytest-benchmark, to compare a change with the one before
commands.py __main__.py   the commands; their options
aot.py                    checks of the GPU kernels' compiled code, without a GPU
instructions.py instructions.c   instruction counts of the CPU kernels, compared with a record
"""
