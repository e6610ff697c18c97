"""The block cache of one engine: prefix hits, references and eviction as vLLM has them, kept in runs.

vLLM keeps a free queue of single blocks. A request gives its blocks back tail first, a hit always takes a
prefix, and blocks leave the queue from its front; so what one request left behind is, at any time, a run of
neighbouring blocks of one chain, and only its end moves:

    chain of request A   [ 0 1 2 3 4 5 ]         free, next to go: 5, then 4 ...
    request B hits 0-2   [ 0 1 2 ] in use        [ 3 4 5 ] free, in the same place of the queue
    two blocks are taken                         [ 3 ]

A turn therefore costs its new blocks and a few runs, not the blocks of its context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple, TypeAlias

from workers.sim.queue import insert, unlink

Key: TypeAlias = Hashable
Keys: TypeAlias = Sequence[Key]
"""The chain of one request. A key stands for its whole prefix: equal keys have equal places and prefixes."""


class Evicted(NamedTuple):
    """Blocks `start` to `end - 1` of `chain` are no longer cached; the last one went first."""

    chain: Keys
    start: int
    end: int


class Run:
    """Blocks `start` to `end - 1` of `chain`. `before` holds the block at `start - 1`.

    Every user of a run also uses all runs before it. `sealed`: someone else has used it, so that the one who
    computed it may not extend it any more. `twin`: the next run that begins with the same key.
    """

    __slots__ = ("before", "chain", "children", "end", "newer", "older", "sealed", "start", "twin", "users")

    def __init__(self, chain: Keys, start: int, end: int, before: Run | None) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.before = before
        self.users = 0
        self.children = 0
        self.sealed = False
        self.twin: Run | None = None
        self.older: Run = self
        self.newer: Run = self


class Held:
    """The blocks one request uses: the runs that end in `tip`, and `blank` ones that have no key yet."""

    __slots__ = ("blank", "tip")

    def __init__(self) -> None:
        self.tip: Run | None = None
        self.blank = 0

    @property
    def cached(self) -> int:
        return self.tip.end if self.tip is not None else 0

    @property
    def blocks(self) -> int:
        return self.cached + self.blank


class BlockCache:
    """`capacity` blocks. As in vLLM several may hold the same key: those computed at the same time.

    Runs are found by their first keys alone, one after the other along a chain: whoever holds a run holds
    all that is before it, so what lies within it needs no entry of its own.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self.free = capacity
        self._blank = capacity  # free blocks without content: always taken first, as vLLM puts them in front
        self._first: dict[Key, Run] = {}  # the oldest of the runs that begin with that key
        self._queue: Final = Run((), 0, 0, None)  # newer than it: the first to go

    def hit(self, chain: Keys, limit: int) -> int:
        """How many leading blocks of `chain` are cached, at most `limit`. Changes nothing."""
        return self._walk(chain, limit)[0]

    def idle(self, chain: Keys, hit: int) -> int:
        """How many of the `hit` leading blocks are free, that is, would not be any more once used."""
        count, (end, run) = 0, self._walk(chain, hit)
        while run is not None and run.users == 0:
            count += end - run.start
            run, end = run.before, run.start
        return count

    def use(self, chain: Keys, hit: int) -> Held:
        """Takes the `hit` leading blocks into use; all of them are cached."""
        held = Held()
        _, run = self._walk(chain, hit)
        if run is not None:
            held.tip = run if run.end == hit else self._split(run, hit)
            self._take_up(held.tip)
        return held

    def _walk(self, chain: Keys, limit: int) -> tuple[int, Run | None]:
        """How far cached blocks go along `chain`, at most to `limit`, and the run that holds the last one."""
        limit = min(limit, len(chain))
        first, best = self._first, 0
        tip: Run | None = None
        places = [0] if limit else []
        for at in places:
            run = first.get(chain[at])
            while run is not None:
                end = run.end
                reached = _equal(chain, run.chain, at, end if end < limit else limit)
                if reached > best:
                    best, tip = reached, run
                if reached == end < limit and end not in places:
                    places.append(end)
                run = run.twin
        return best, tip

    def allocate(self, held: Held, blocks: int) -> list[Evicted]:
        """Gives `held` that many blocks more; no more than are free."""
        assert blocks <= self.free
        self.free -= blocks
        held.blank += blocks
        blank = min(blocks, self._blank)
        self._blank -= blank
        blocks -= blank
        evicted: list[Evicted] = []
        while blocks:
            run = self._queue.newer
            taken = min(blocks, run.end - run.start)
            evicted.append(Evicted(run.chain, run.end - taken, run.end))
            self._forget(run, taken)
            blocks -= taken
        return evicted

    def commit(self, held: Held, chain: Keys, end: int) -> None:
        """Blocks of `held` up to `end` have their content now and can be hit."""
        start = held.cached
        assert held.blank >= end - start > 0
        held.blank -= end - start
        run = held.tip
        if run is None or run.sealed:
            run = Run(chain, start, end, held.tip)
            run.users = 1
            if held.tip is not None:
                held.tip.children += 1
                held.tip.sealed = True
            held.tip = run
            self._enter(run)
        else:
            run.chain, run.end = chain, end

    def release(self, held: Held) -> None:
        """Gives all blocks back: those without content to the front of the queue, the rest tail first."""
        self._blank += held.blank
        self.free += held.blank
        held.blank = 0
        run, held.tip = held.tip, None
        freed: Run | None = None
        while run is not None:
            before = run.before
            run.users -= 1
            if run.users == 0:
                run.sealed = True
                self.free += run.end - run.start
                insert(run, self._queue.older)
                if freed is not None and freed.children == 0 and run.children == 1:
                    run = self._joined(run, freed)
                freed = run
            run = before

    def clear(self) -> bool:
        """Forgets all content; refused (False) while any block is in use."""
        if self.free != self.capacity:
            return False
        self._first.clear()
        self._blank = self.capacity
        self._queue.older = self._queue.newer = self._queue
        return True

    def _take_up(self, tip: Run) -> None:
        run: Run | None = tip
        while run is not None:
            if run.users == 0:
                unlink(run)
                self.free -= run.end - run.start
            run.users += 1
            run.sealed = True
            run = run.before

    def _split(self, run: Run, at: int) -> Run:
        """Two runs of one, cut in front of block `at`. Returns the first of them."""
        head = Run(run.chain, run.start, at, run.before)
        self._replace(run, head)
        head.users, head.children, head.sealed = run.users, 1, True
        run.start, run.before = at, head
        self._enter(run)
        if run.users == 0:
            insert(head, run)
        return head

    def _joined(self, head: Run, tail: Run) -> Run:
        """One run of two that stand behind one another in the queue and that nobody else refers to."""
        self._leave(tail)
        head.chain, head.end, head.children = tail.chain, tail.end, 0
        unlink(tail)
        return head

    def _forget(self, run: Run, blocks: int) -> None:
        """The last `blocks` blocks of a free run lose their content."""
        run.end -= blocks
        if run.end == run.start:
            self._leave(run)
            unlink(run)
            if run.before is not None:
                run.before.children -= 1

    def _enter(self, run: Run) -> None:
        """It can be found by its first key, behind those that can already."""
        run.twin = None
        last = self._first.setdefault(run.chain[run.start], run)
        while last is not run and last.twin is not None:
            last = last.twin
        if last is not run:
            last.twin = run

    def _leave(self, run: Run) -> None:
        key = run.chain[run.start]
        if self._first[key] is not run:
            self._before(run, key).twin = run.twin
        elif run.twin is not None:
            self._first[key] = run.twin
        else:
            del self._first[key]

    def _replace(self, run: Run, other: Run) -> None:
        """`other` is found in the place of `run`."""
        key = run.chain[run.start]
        other.twin = run.twin
        if self._first[key] is run:
            self._first[key] = other
        else:
            self._before(run, key).twin = other

    def _before(self, run: Run, key: Key) -> Run:
        """The twin that `run` is the next one of."""
        other = self._first[key]
        while other.twin is not run:
            assert other.twin is not None
            other = other.twin
        return other


def _equal(one: Keys, other: Keys, start: int, end: int) -> int:
    """How far two chains are equal, at most to `end`; they are at `start`."""
    if one is other or one[end - 1] == other[end - 1]:
        return end
    return bisect_left(range(start + 1, end), True, key=lambda at: one[at] != other[at]) + start + 1
