"""The block cache against a plain model of vLLM's: single blocks in a free queue."""

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.blocks import BlockCache, Held


@dataclass
class PlainCache:
    """vLLM's BlockPool block by block: free blocks in a queue, the front of which goes first."""

    capacity: int
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    key: dict[int, object] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    where: dict[object, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for block in range(self.capacity):
            self.queue[block] = None
            self.users[block] = 0

    def use(self, chain: list[object], hit: int) -> list[int]:
        blocks = [self.where[key][0] for key in chain[:hit]]
        for block in blocks:
            self.queue.pop(block, None)
            self.users[block] += 1
        return blocks

    def hit(self, chain: list[object], limit: int) -> int:
        count = 0
        while count < min(limit, len(chain)) and chain[count] in self.where:
            count += 1
        return count

    def allocate(self, blocks: list[int], count: int) -> list[object]:
        removed = []
        for _ in range(count):
            block, _ = self.queue.popitem(last=False)
            self.users[block] = 1
            blocks.append(block)
            if block in self.key:
                key = self.key.pop(block)
                self.where[key].remove(block)
                if not self.where[key]:
                    del self.where[key]
                removed.append(key)
        return removed

    def commit(self, blocks: list[int], chain: list[object], start: int, end: int) -> None:
        for place in range(start, end):
            self.key[blocks[place]] = chain[place]
            self.where.setdefault(chain[place], []).append(blocks[place])

    def release(self, blocks: list[int]) -> None:
        first, last = [], []
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                (last if block in self.key else first).append(block)
        for block in reversed(first):
            self.queue[block] = None
            self.queue.move_to_end(block, last=False)
        for block in last:
            self.queue[block] = None


def chain_of(branch: list[int]) -> list[object]:
    """Keys of the prompt whose every `branch` entry names the next four blocks."""
    keys: list[object] = []
    for depth in range(len(branch)):
        keys += [(tuple(branch[: depth + 1]), place) for place in range(4)]
    return keys


CAPACITY = 40
# Every chain is a beginning of one of these.
CHAINS = [chain_of(list(branch)) for branch in itertools.product((0, 1), repeat=6)]
branches = st.lists(st.integers(0, 1), min_size=1, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), branches, st.integers(0, 23)),
        st.tuples(st.just("grow"), st.integers(0, 7), st.integers(1, 9)),
        st.tuples(st.just("end"), st.integers(0, 7), st.just(0)),
    ),
    max_size=60,
)


@dataclass
class Request:
    chain: list[object]
    held: Held
    blocks: list[int]


@settings(max_examples=500, deadline=None)
@given(steps)
def test_runs_hit_and_evict_as_single_blocks_do(steps: list[tuple[str, object, int]]) -> None:
    """While no two blocks have one key: of such twins vLLM takes the older block by block, we a whole run."""
    cache, plain = BlockCache(CAPACITY), PlainCache(CAPACITY)
    active: list[Request] = []
    for kind, what, number in steps:
        if kind == "start":
            chain = chain_of(what)
            hit = cache.hit(chain, number)
            assert hit == plain.hit(chain, number)
            new = len(chain) - hit
            idle = cache.idle(chain, hit)
            if plain.hit(chain, 99) > hit:
                continue
            if new + idle > cache.free:
                continue
            held, blocks = cache.use(chain, hit), plain.use(chain, hit)
            same_eviction(cache, plain, held, blocks, min(new, 3))
            active.append(Request(chain, held, blocks))
        elif active and kind == "grow":
            request = active[what % len(active)]
            room = min(number, cache.free)
            same_eviction(cache, plain, request.held, request.blocks, room)
            end = min(len(request.blocks), len(request.chain))
            start = request.held.cached
            if end > start and request.chain[start] in plain.where:
                end = start
            if end > start:
                cache.commit(request.held, request.chain, end)
                plain.commit(request.blocks, request.chain, start, end)
        elif active and kind == "end":
            request = active.pop(what % len(active))
            cache.release(request.held)
            plain.release(request.blocks)
        assert cache.free == len(plain.queue)
        for chain in CHAINS:
            assert cache.hit(chain, len(chain)) == plain.hit(chain, len(chain))
    for request in active:
        cache.release(request.held)
        plain.release(request.blocks)
    assert cache.free == CAPACITY
    assert everything(cache) == plain.allocate([], CAPACITY)
    assert not any(cache.hit(chain, 1) for chain in CHAINS)


@settings(max_examples=500, deadline=None)
@given(steps)
def test_with_twins_what_was_committed_and_not_evicted_hits(steps: list[tuple[str, object, int]]) -> None:
    cache = BlockCache(CAPACITY)
    active: list[tuple[list[object], Held]] = []
    there: Counter[object] = Counter()

    def take(held: Held, blocks: int) -> None:
        blank = held.blank
        there.subtract(removed(cache, held, blocks))
        assert held.blank == blank + blocks
        assert min(there.values(), default=0) >= 0

    for kind, what, number in steps:
        if kind == "start":
            chain = chain_of(what)
            hit = cache.hit(chain, number)
            assert hit == sum(1 for _ in itertools.takewhile(lambda key: there[key], chain[:number]))
            new = len(chain) - hit
            if new + cache.idle(chain, hit) <= cache.free:
                active.append((chain, cache.use(chain, hit)))
                take(active[-1][1], new)
        elif active and kind == "grow":
            chain, held = active[what % len(active)]
            end = min(held.cached + number, len(chain))
            if end > held.cached:
                there.update(chain[held.cached : end])
                cache.commit(held, chain, end)
        elif active and kind == "end":
            cache.release(active.pop(what % len(active))[1])
        for chain in CHAINS:
            assert cache.hit(chain, 24) == sum(1 for _ in itertools.takewhile(lambda key: there[key], chain))
    for _, held in active:
        cache.release(held)
    assert cache.free == CAPACITY
    take(Held(), CAPACITY)
    assert not +there


def everything(cache: BlockCache) -> list[object]:
    return removed(cache, Held(), cache.free)


def removed(cache: BlockCache, held: Held, count: int) -> list[object]:
    return [
        run.chain[place]
        for run in cache.allocate(held, count)
        for place in reversed(range(run.start, run.end))
    ]


def same_eviction(cache: BlockCache, plain: PlainCache, held: Held, blocks: list[int], count: int) -> None:
    assert removed(cache, held, count) == plain.allocate(blocks, count)


def test_a_block_computed_twice_is_announced_twice_and_hits_until_both_are_gone() -> None:
    cache = BlockCache(6)
    chain = ["a", "b", "c"]
    one, two = cache.use(chain, 0), cache.use(chain, 0)
    for held in (one, two):
        cache.allocate(held, 3)
        cache.commit(held, chain, 3)
    cache.release(one)
    cache.release(two)
    third = cache.use([], 0)
    assert removed(cache, third, 3) == ["c", "b", "a"]
    assert cache.hit(chain, 3) == 3
    assert removed(cache, third, 3) == ["c", "b", "a"]
    assert cache.hit(chain, 3) == 0


def test_nothing_is_forgotten_while_in_use() -> None:
    cache = BlockCache(4)
    held = cache.use(["a"], 0)
    cache.allocate(held, 1)
    cache.commit(held, ["a"], 1)
    assert not cache.clear()
    cache.release(held)
    assert cache.clear()
    assert cache.hit(["a"], 1) == 0
    assert cache.free == 4
