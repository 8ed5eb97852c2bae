"""The commands of `python -m fastattn` that compute: check and tune."""
