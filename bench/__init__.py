"""Verify fused attention against the float64 oracle, then time it against torch.

python -m bench            the quick sweep, under three minutes on two cores
python -m bench --full     every length and head dim

cases.py    what is measured: sizes, masks, dtypes, passes
peers.py    who is measured: a registry of ways to compute a case
verify.py   a cell is timed only after this passes
timing.py   clocks and interleaved rounds
run.py      the loop: verify, then time, one record a cell
machine.py  where it ran, and the ceilings of that machine
overhead.py memory.py   a tiny call; extra bytes with dropout
aot.py      the compiled code of the GPU kernels, judged with no GPU
instructions.py instructions.c   what the CPU kernels execute, counted and compared with the record
report.py   the table and the verdict on the claims
plot.py     the picture
"""
