"""A call on each backend, for the tests of this folder."""

import pytest

import fastattn

BACKENDS = [name for name, why in fastattn.available_backends().items() if why is None]


@pytest.fixture(params=BACKENDS)
def attention(request):
    """fastattn.attention on one backend."""

    def run(*tensors, **kwargs):
        return fastattn.attention(*tensors, backend=request.param, **kwargs)

    run.backend = request.param
    return run
