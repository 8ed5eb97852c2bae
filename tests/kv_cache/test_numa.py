"""The pages of a cache follow the policy of numactl, as docs/guides/many_cores.md says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A cache of 16 MB: the policy of its pages, how many each node has, and what it decodes.
PROGRAM = """
import json, torch, fastattn
torch.manual_seed(0)
cache = fastattn.KVCache(1, 4, 64, capacity=8192, page_size=64)
for _ in range(4):
    cache.append(*torch.randn(2, 1, 4, 2048, 64))
out = cache.attention(torch.randn(1, 4, 1, 64))
with open("/proc/self/numa_maps") as file:
    maps = {int(line.split()[0], 16): line.split() for line in file}
of_keys = maps[max(x for x in maps if x <= cache.k_pages.data_ptr())]
nodes = {x.split("=")[0]: int(x.split("=")[1]) for x in of_keys if x[0] == "N" and x[1].isdigit()}
print(json.dumps([of_keys[1], nodes, out.flatten().tolist()]))
"""
MAPS = Path("/proc/self/numa_maps")


def decoded(*before):
    command = [*before, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interleaved():
    if shutil.which("numactl") is None:
        pytest.skip("numactl is not installed")
    if not os.access(MAPS, os.R_OK):
        pytest.skip(f"no {MAPS}: a kernel without NUMA")
    if subprocess.run(["numactl", "--interleave=all", "true"]).returncode:
        pytest.skip("numactl may not set the policy here")
    return decoded("numactl", "--interleave=all")


def test_pages_of_a_cache_are_interleaved(interleaved):
    policy, _, out = interleaved
    plain_policy, _, plain = decoded()
    assert policy.startswith("interleave") and not plain_policy.startswith("interleave")
    assert out == plain


def test_each_node_has_its_share(interleaved):
    _, nodes, _ = interleaved
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        pytest.skip("this machine has one node")
    assert len(nodes) > 1 and max(nodes.values()) < 1.5 * min(nodes.values())
