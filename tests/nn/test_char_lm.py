"""A small character-level transformer learns the same with our attention as with torch's.

It trains on source text of Python's standard library for 200 steps, from one initial state and with
one sequence of batches. Rounding makes the loss curves of any two implementations diverge. torch's
own curves differ between 1 and 2 threads; ours may differ from torch's three times as much.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastattn

FILES = ("argparse.py", "ast.py", "dataclasses.py", "heapq.py", "random.py")
STEPS, BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 200, 8, 64, 64, 4, 2


def standard_library():
    """(characters as numbers, the number of different ones)."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / name).read_text(encoding="utf-8") for name in FILES)
    number = {c: at for at, c in enumerate(sorted(set(text)))}
    return torch.tensor([number[c] for c in text]), len(number)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        x = self.embed(x) + self.place.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def loss_curve(text, characters, ours):
    torch.manual_seed(0)
    model = Model(characters)
    if ours:
        fastattn.convert(model)
        kinds = {type(block.attention) for block in model.blocks}
        assert kinds == {fastattn.MultiheadAttention}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        logits = model(rows[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # In float64, so that the loss's own rounding does not hide the distance.
        losses.append(F.cross_entropy(logits.detach().double(), rows[:, 1:].flatten()))
    return torch.stack(losses)


def distance(x, y):
    return (x - y).square().mean().sqrt().item()


def torchs_on_two_threads():
    """Run in a separate process with threads that sleep while they wait: on a busy machine,
    spinning threads take minutes for these small matrices."""
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    )
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads(done.stdout), dtype=torch.float64)


@pytest.mark.slow
def test_training_equals_torchs(threads):
    text, characters = standard_library()
    threads(1)
    torchs = loss_curve(text, characters, ours=False)
    ours = loss_curve(text, characters, ours=True)
    assert torchs[0] > 4 and torchs[-10:].mean() < 2.7, "the model learns"
    # If two threads split every sum as one does, torch's curves are equal. The smallest difference
    # between two correct programs is then the rounding of the logits.
    rounding = torch.finfo(torch.float32).eps * torchs.mean().item() / 4
    allowed = 3 * max(distance(torchs, torchs_on_two_threads()), rounding)
    assert 0 < distance(torchs, ours) <= allowed, (distance(torchs, ours), allowed)


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(loss_curve(*standard_library(), ours=False).tolist()))
