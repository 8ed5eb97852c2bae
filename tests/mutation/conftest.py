import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "mutation":
            item.add_marker(pytest.mark.slow)
