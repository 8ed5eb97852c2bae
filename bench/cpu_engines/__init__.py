"""Other engines' CPU attention beside ours, each in an environment of its own.

cases.py         the rows: sizes, dtypes, storage of the cache
environments.py  how an environment is made by one command, and where it is
peers.py         the peers: an environment, an adapter, a variant
process.py        a worker's process, and its protocol as this side speaks it
measure.py       a row: same tensors for all, verification against float64, interleaved rounds
report.py        the nearest engine of a row; lines and tables
workers          what runs in an engine's environment: the loop, and an adapter for each engine
"""
