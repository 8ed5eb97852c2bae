"""Patches that are counted, that overlap across threads, and that other people make beside ours."""

import os
import pickle
import threading
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.dropin import patching
from tests.torch_api.test_patching import TORCHS, K, Q, V

# torch warns of nested tensors (a prototype), torch.jit (deprecated), and its slow vmap of sdpa.
pytestmark = [
    pytest.mark.usefixtures("one_thread", "nothing_is_small", "undone"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested tensors",
        "ignore:`?torch.jit",
        "ignore:There is a performance",
    ),
]


def test_patches_are_counted(calls):
    fastattn.patch()
    fastattn.patch()
    fastattn.unpatch()
    F.scaled_dot_product_attention(Q, K, V)
    fastattn.unpatch()
    F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 1
    with fastattn.sdpa(), pytest.raises(RuntimeError, match="got no patch to undo"):
        fastattn.unpatch()


def test_an_exception_restores_and_a_decorator_patches(calls):
    with pytest.raises(KeyError), fastattn.sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCHS

    @fastattn.sdpa()
    def decorated():
        return F.scaled_dot_product_attention(Q, K, V)

    decorated(), decorated()
    assert len(calls) == 2


def test_blocks_overlap_across_threads(calls):
    entered, left = threading.Event(), threading.Event()

    def other():
        with fastattn.sdpa():
            entered.set()
            left.wait(10)
            F.scaled_dot_product_attention(Q, K, V)

    thread = threading.Thread(target=other)
    with fastattn.sdpa():
        thread.start()
        assert entered.wait(10)
    assert F.scaled_dot_product_attention is not TORCHS
    left.set()
    thread.join()
    assert len(calls) == 1


def test_a_function_taken_inside_sdpa_is_torchs_afterwards(calls):
    with fastattn.sdpa():
        kept = F.scaled_dot_product_attention
    for function in (kept, pickle.loads(pickle.dumps(kept))):
        torch.testing.assert_close(function(Q, K, V), TORCHS(Q, K, V), rtol=0, atol=0)
    assert not calls


@pytest.fixture
def restored():
    yield
    F.scaled_dot_product_attention = TORCHS


def test_another_librarys_patch_over_ours_stays(calls, restored):
    """Another library's patch over ours stays, and calls ours again in the next `sdpa()`."""
    with fastattn.sdpa():
        beneath = F.scaled_dot_product_attention

        def theirs(*args, **kwargs):
            return beneath(*args, **kwargs)

        F.scaled_dot_product_attention = theirs
    assert F.scaled_dot_product_attention is theirs
    F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 0
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is theirs and len(calls) == 1
    F.scaled_dot_product_attention = TORCHS
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 2


def test_torchs_own_put_back_is_patched_again(calls, restored):
    """Another library patched first, and restores torch's function before our patch is undone."""
    F.scaled_dot_product_attention = lambda *args, **kwargs: TORCHS(*args, **kwargs)
    fastattn.patch()
    F.scaled_dot_product_attention = TORCHS
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 1
    fastattn.unpatch()
    assert F.scaled_dot_product_attention is TORCHS
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is TORCHS and len(calls) == 2


def test_a_patch_that_never_calls_ours_is_replaced(calls, restored):
    """Also after an earlier patch that did call ours and has been removed."""
    with fastattn.sdpa():
        beneath = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *args, **kwargs: beneath(*args, **kwargs)
    theirs = F.scaled_dot_product_attention = lambda *args, **kwargs: TORCHS(*args, **kwargs)
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is theirs and len(calls) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_patches():
    """The child gets a lock that is free, although another thread held it at the fork."""
    held, done = threading.Event(), threading.Event()

    def other():
        with patching._lock:
            held.set()
            done.wait(0.2)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about fork with threads, from 3.12 on
        child = os.fork()
    if child == 0:
        taken = patching._lock.acquire(timeout=5)
        os._exit(0 if taken else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_another_librarys_patch_under_ours_runs_if_ours_declines(calls, restored):
    seen = []
    theirs = F.scaled_dot_product_attention = lambda *x, **y: seen.append(x)
    with fastattn.sdpa(), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is theirs
    assert len(seen) == 1 and not calls
    F.scaled_dot_product_attention = TORCHS
    with fastattn.sdpa():
        pass
