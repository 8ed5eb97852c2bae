"""Verify fused attention against the float64 oracle, then time it against its peers.

python -m bench            the quick sweep, under two minutes on two cores
python -m bench --help     the commands; README.md says what each file is for
"""
