"""Test fastattn's wheel with several versions of torch and of Python: `make test-torch`."""
