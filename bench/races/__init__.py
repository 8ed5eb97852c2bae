"""The rows of `python -m bench race`, by table. A row is a Race (race.py) or a Case (cases.py)."""
