"""Calls of fastattn by models of transformers, for the tests of this folder."""

import pytest


@pytest.fixture(autouse=True)
def small(one_thread):
    """Models are tiny: threads would only wait for each other."""


@pytest.fixture
def calls(monkeypatch, registered):
    """The arguments of every call by name; "call" is the function that was called."""
    from fastattn.integrations import transformers_attention

    found = []
    for name in ("attention", "attention_packed"):
        original = getattr(transformers_attention, name)

        def spy(*args, original=original, name=name, **kwargs):
            told = {x: y for x, y in kwargs.items() if y is not None}
            found.append(told | dict(call=name, args=args))
            return original(*args, **kwargs)

        monkeypatch.setattr(transformers_attention, name, spy)
    return found
