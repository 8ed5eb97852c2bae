"""Calls with every pair of arguments and properties, from lists of levels: `test_calls.py`."""
