"""`KVCache` as a state machine: random changes to a cache and its forks, compared with a model.

For each item, the model keeps a list of rows and its page numbers. It computes how many pages a
change takes: a cache is full if and only if no page is left. A call that raises must not change any
cache.
"""

import copy
import pickle
import random
from collections import Counter

import torch

import fastattn
from fastattn import KVCache
from fastattn.call.int4 import dequantised_int4, quantised_int4, row_bytes
from fastattn.call.quantisation import dequantised, quantised

HK = 2
PAGES = (None, 1, 2, 3, 4)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # torch cannot pickle storages of these


class Full(Exception):
    """The model has no page left, or no capacity."""


class Item:
    """rows: of each key what `Machine.stored` returns for it. pages: page numbers. goes_on: the
    item may write into its last page although that is shared: it was the page's only user before
    the page was shared, or has written there since; and it has dropped no key since."""

    def __init__(self, rows=(), pages=(), goes_on=False):
        self.rows, self.pages, self.goes_on = list(rows), list(pages), goes_on

    def copy(self, goes_on):
        return Item(self.rows, self.pages, goes_on)


class Pages:
    """The number of pages, and which items use each."""

    def __init__(self, count, page):
        self.count, self.page, self.made = count, page, 0

    def users(self, caches):
        return Counter(p for items in caches for item in items for p in item.pages)

    def take(self, n, caches):
        """n new page numbers. Raises Full if fewer than n pages are free."""
        if n > self.count - len(self.users(caches)):
            raise Full
        self.made += n
        return list(range(self.made - n, self.made))


class Machine:
    """Caches that share one pool, and the items that each is expected to have."""

    def __init__(self, chance, page, capacity, storage=None):
        self.chance, self.capacity, self.storage = chance, capacity, storage
        batch, self.latent = chance.randrange(1, 4), chance.random() < 0.3  # values are of keys
        self.D, self.DV = (64, 32) if storage == "int4" else (5, 3) if self.latent else (2, 3)
        self.generator = torch.Generator().manual_seed(chance.randrange(2**32))
        given = {"latent" if self.latent else "value_dim": self.DV}
        given |= dict(capacity=capacity, page_size=page, storage=storage)
        page = page or capacity
        self.pages = Pages(batch * -(-capacity // page), page)
        self.caches = [KVCache(batch, HK, self.D, **given)]
        self.items = [[Item() for _ in range(batch)]]
        self.fulls = 0

    # -- the model ---------------------------------------------------------------------------------

    def appended(self, items, news):
        """The items with these rows appended. New pages are taken from the common pool."""
        page, users = self.pages.page, self.pages.users(self.items)
        if any(len(x.rows) + len(n) > self.capacity for x, n in zip(items, news, strict=True)):
            raise Full
        copies = [
            b
            for b, (x, n) in enumerate(zip(items, news, strict=True))
            if n and len(x.rows) % page and not x.goes_on and users[x.pages[-1]] > 1
        ]
        writers = Counter(items[b].pages[-1] for b in copies)
        for p, n in writers.items():
            if n == users[p]:  # every user of the page writes to it: one of them keeps it
                copies.remove(next(b for b in copies if items[b].pages[-1] == p))
        more = [
            -(-(len(x.rows) + len(n)) // page) - len(x.pages)
            for x, n in zip(items, news, strict=True)
        ]
        taken = self.pages.take(sum(more) + len(copies), self.items)
        made = []
        for b, (x, n) in enumerate(zip(items, news, strict=True)):
            own = Item(x.rows + n, x.pages, x.goes_on or bool(n))
            if b in copies:
                own.pages[-1] = taken.pop()
            own.pages += [taken.pop() for _ in range(more[b])]
            made.append(own)
        return made

    def evicted(self, at, counts):
        """Items of cache `at` without their first rows. Unless whole pages are dropped, the
        remaining rows move to free pages, which include those that the eviction frees."""
        page, made, moved = self.pages.page, [], []
        for x, n in zip(self.items[at], counts, strict=True):
            pages = [] if n % page else x.pages[n // page :]
            made.append(Item(x.rows[n:], pages, x.goes_on))
            if n % page:
                moved.append(made[-1])
        others = [x for i, x in enumerate(self.items) if i != at]
        for x in moved:
            x.goes_on = x.goes_on or bool(x.rows)
            x.pages = self.pages.take(-(-len(x.rows) // page), [*others, made])
        return made

    def truncated(self, items, counts):
        made = []
        for x, n in zip(items, counts, strict=True):
            pages = x.pages[: -(-n // self.pages.page)]
            made.append(Item(x.rows[:n], pages, x.goes_on and n == len(x.rows)))
        return made

    # -- comparisons with the model ----------------------------------------------------------------

    def change(self, at, call, expected):
        """`call` gives the items of `expected`; or both report a full cache and nothing changes."""
        try:
            made = expected()
        except Full:
            before = [state(x) for x in self.caches]
            try:
                call(self.caches[at])
            except RuntimeError as error:
                assert "is full" in str(error), error
            else:
                raise AssertionError("expected a full cache") from None
            same(before, [state(x) for x in self.caches])
            self.fulls += 1
        else:
            call(self.caches[at])
            self.items[at] = made

    def new(self, n):
        k, v = (torch.randn(n, HK, d, generator=self.generator) for d in (self.D, self.DV))
        return k, k[..., : self.DV] if self.latent else v

    def append(self, at):
        items, most = self.items[at], self.pages.page + 2
        packed = self.chance.random() < 0.5
        counts = [self.chance.randrange(most) if self.chance.random() < 0.7 else 0 for _ in items]
        if not packed:
            counts = [self.chance.choice((1, 1, 2, most))] * len(items)
        news = [self.new(n) for n in counts]
        if packed:
            k, v = (torch.cat(x) for x in zip(*news, strict=True))
            given = k, v, torch.tensor([0, *counts]).cumsum(0)
        else:
            given = tuple(torch.stack(x).transpose(1, 2) for x in zip(*news, strict=True))
        given = (given[0], None, *given[2:]) if self.latent else given
        rows = [self.stored(k, v) for k, v in news]
        self.change(at, lambda x: x.append(*given), lambda: self.appended(items, rows))

    def append_own(self, at):
        """Append rows that are views of the cache's own pages."""
        cache, items = self.caches[at], self.items[at]
        if self.storage or self.latent:
            return
        k, v = (x[:, :1].transpose(1, 2)[: len(items)] for x in (cache.k_pages, cache.v_pages))
        written = all((x.abs() < 10).all() for x in (k, v))  # unwritten memory may hold anything
        if len(k) < len(items) or not written:
            return
        rows = [
            self.stored(x.clone(), y.clone())
            for x, y in zip(k.transpose(1, 2), v.transpose(1, 2), strict=True)
        ]
        self.change(at, lambda x: x.append(k, v), lambda: self.appended(items, rows))

    def fork(self, at):
        items, many = self.items[at], self.chance.randrange(1, 4)
        chosen = [self.chance.randrange(len(items)) for _ in range(many)]
        users = self.pages.users(self.items)
        for x in items:
            x.goes_on = x.goes_on or (bool(x.pages) and users[x.pages[-1]] == 1)
        self.caches.append(self.caches[at].fork(chosen))
        self.items.append([items[b].copy(False) for b in chosen])

    def beam(self, at):
        """Replace the cache by a fork of itself and append to every item, as beam search does."""
        self.fork(at)
        self.caches[at], self.items[at] = self.caches.pop(), self.items.pop()
        self.append(at)

    def let_go(self, at):
        if len(self.caches) > 1:
            del self.caches[at], self.items[at]

    def evict(self, at):
        counts = [self.chance.randrange(len(x.rows) + 1) for x in self.items[at]]
        if self.chance.random() < 0.5:
            counts = [n // self.pages.page * self.pages.page for n in counts]
        self.change(at, lambda x: x.evict(counts), lambda: self.evicted(at, counts))

    def truncate(self, at):
        counts = [max(0, len(x.rows) - self.chance.randrange(3)) for x in self.items[at]]
        items = self.items[at]
        self.change(at, lambda x: x.truncate(counts), lambda: self.truncated(items, counts))

    def free(self, at):
        items = self.items[at]
        b = self.chance.randrange(len(items))
        counts = [0 if i == b else len(x.rows) for i, x in enumerate(items)]
        self.change(at, lambda x: x.free([b]), lambda: self.truncated(items, counts))

    def deep_copy(self, at):
        """Replace all caches by one copy of them: the copies share a new pool."""
        copied = self.chance.choice((copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))))
        self.caches = (copy.deepcopy if self.storage in FLOAT8 else copied)(self.caches)

    def wrong(self, at):
        """Calls with invalid arguments change nothing."""
        cache = self.caches[at]
        k, v = (torch.zeros(cache.batch, HK, 1, d) for d in (self.D, self.DV))
        sparse = v.to_sparse()
        calls = (
            lambda: cache.append(k, v[..., :1]),
            lambda: cache.append(k, v.double()),
            lambda: cache.append(k, sparse),  # raises after k is written
            lambda: cache.evict(self.capacity + 1),
            lambda: cache.truncate(-1),
            lambda: cache.free([cache.batch]),
            lambda: cache.fork([-1]),
            lambda: cache.attention(k, mask=3),
        )
        before = [state(x) for x in self.caches]
        try:
            self.chance.choice(calls)()
        except (ValueError, TypeError, RuntimeError):
            same(before, [state(x) for x in self.caches])
        else:
            raise AssertionError("expected an error")

    STEPS = (
        *(append,) * 8,
        *(fork, fork, beam, beam, let_go, evict, evict, truncate, truncate, free),
        *(append_own, deep_copy, wrong),
    )

    def step(self):
        at = self.chance.randrange(len(self.caches))
        chosen = self.chance.choice(self.STEPS)
        if chosen is Machine.fork and len(self.caches) > 3:
            chosen = Machine.let_go
        chosen(self, at)
        self.check()
        return chosen.__name__

    def check(self):
        for cache, items in zip(self.caches, self.items, strict=True):
            assert cache.lengths.tolist() == [len(x.rows) for x in items], "lengths"
            free = self.pages.count - len(self.pages.users(self.items))
            assert cache.pages_free == free, f"got {cache.pages_free} free pages, expected {free}"
            self.check_contents(cache, items)

    def check_contents(self, cache, items):
        q = torch.randn(len(items), HK, 1, self.D, generator=self.generator)
        out = cache.attention(q, allow_empty_rows=True)
        nothing = self.stored(*self.new(0), of_keys=False)
        for b, x in enumerate(items):
            rows = [torch.stack(of) for of in zip(*x.rows, strict=True)] or nothing
            for found, numbers in zip(kept(cache, b), rows[:2], strict=True):
                assert torch.equal(bits(found), bits(numbers)), f"rows of item {b}"
            k, v = (of.transpose(0, 1)[None] for of in rows[2:])
            expected = fastattn.attention(q[b : b + 1], k, v, causal="bottom_right")
            close = 0 if self.storage is None else 1e-5
            assert torch.allclose(out[b : b + 1], expected, rtol=close, atol=close), f"item {b}"

    def stored(self, k, v, of_keys=True):
        """Rows as the cache keeps them, of keys and of values, without scales; and the numbers that
        they are. of_keys: for each key."""
        if self.storage is None:
            found = k, v, k, v
        else:
            k, v = self.in_few_bits(k), self.in_few_bits(v)
            if self.latent:  # values have the scale of a whole key
                v = k[0][..., : self.stored_width()], k[1][..., : self.DV]
            found = k[0], v[0], k[1], v[1]
        return list(zip(*found, strict=True)) if of_keys else found

    def in_few_bits(self, x):
        """What is stored of rows, and the numbers that it means."""
        if self.storage == "int4":
            rows = quantised_int4(x)
            return rows, dequantised_int4(rows, torch.float32)
        rows, scales = quantised(x, self.storage)
        return rows, dequantised(rows, scales, torch.float32)

    def stored_width(self):
        return row_bytes(self.DV) if self.storage == "int4" else self.DV


def kept(cache, b):
    """Keys and values of an item, read from its pages."""
    n, pages = int(cache.lengths[b]), cache.block_table[b]
    pages = pages[: -(-n // cache.page_size)]
    return tuple(x[pages].flatten(0, 1)[:n] for x in (cache.k_pages, cache.v_pages))


def state(cache):
    """All that a user sees of a cache, and the use counts of its pages."""
    contents = [x for b in range(cache.batch) for x in kept(cache, b)]
    users = cache._pool.users.clone()
    numbers = [cache.capacity, cache.nbytes, cache.pages_free, cache.k_pages.data_ptr()]
    return numbers, [cache.lengths, cache.block_table, users, *contents]


def same(before, after):
    for (numbers, tensors), (others, more) in zip(before, after, strict=True):
        assert numbers == others, f"a call that raised changed {numbers} to {others}"
        for x, y in zip(tensors, more, strict=True):
            assert torch.equal(bits(x), bits(y)), "a call that raised changed a cache"


def bits(x):
    return x.contiguous().view(torch.uint8) if x.numel() else x


def run(seed, steps=40):
    """Make this many random changes; return the number of those that found the cache full. The
    AssertionError of a failure names the seed."""
    chance = random.Random(seed)
    page, capacity = chance.choice(PAGES), chance.randrange(1, 11)
    storage = chance.choice((None, None, torch.int8, *FLOAT8, "int4"))
    machine, log = Machine(chance, page, capacity, storage), []
    for _ in range(steps):
        try:
            log.append(machine.step())
        except Exception as error:
            given = f"page_size={page}, capacity={capacity}, storage={storage}"
            raise AssertionError(
                f"cache_model.run({seed}, {steps}): {given}: step {len(log)} after "
                f"{' '.join(log[-8:])}: {error}"
            ) from error
    return machine.fulls


if __name__ == "__main__":
    import sys

    for seed in range(*map(int, sys.argv[1:])):
        run(seed)
