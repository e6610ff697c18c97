"""A Mooncake Store in virtual time: segments, placement, leases, eviction. Extents instead of blocks.

What one put stored lies in one place (or spread over all segments), and is looked up, and so leased, with all
that comes before it: so what was always looked up together is one extent, from whose end blocks go. It costs
the same for 10 blocks as for 1,000.

    chain of a session   [ 0 .. 179 ][ 180 .. 359 | 360 .. 391 ]
    extents              head, w3     w3            w7               w7 took a turn while w3 was busy
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log
from random import Random
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from replay.chains import Pieces, common
from workers.sim.queue import insert, unlink

Placement = Literal["random", "owner"]

# Mooncake's -eviction_high_watermark_ratio and -eviction_ratio, vLLM's lease (default_kv_lease_ttl).
_HIGH: Final = 0.9
_DROP: Final = 0.05
LEASE_S: Final = 10.0
# "Owner" of what lies block by block on all segments.
SPREAD: Final = -1


class Part(NamedTuple):
    """Consecutive blocks in one segment, or SPREAD over all."""

    owner: int
    blocks: int


class Places:
    """Where the leading blocks of one chain lie, for questions about every instance in turn."""

    __slots__ = ("_by_owner", "_segments", "blocks")

    def __init__(self, parts: Iterable[Part], segments: int) -> None:
        self._segments: Final = segments
        self._by_owner: Final[dict[int, list[tuple[int, int]]]] = {}
        at = 0
        for owner, blocks in parts:
            self._by_owner.setdefault(owner, []).append((at, at + blocks))
            at += blocks
        self.blocks: Final = at

    def own(self, segment: int, start: int) -> int:
        """How many blocks from `start` on lie in that segment, not counting those that lie on all."""
        own = 0
        for begin, end in self._by_owner.get(segment, ()):
            own += max(0, end - max(begin, start))
        return own

    def own_or_spread(self, segment: int, start: int) -> int:
        """The same with its share of those that lie on all."""
        if not self._by_owner.get(SPREAD):
            return self.own(segment, start) if segment in self._by_owner else 0
        return self.own(segment, start) + self.own(SPREAD, start) // self._segments

    def each_own(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`own` for all segments in turn, `starts` of shape (segments,)."""
        found = np.zeros_like(starts)
        for owner in self._by_owner:
            if owner != SPREAD:
                found[owner] = self.own(owner, int(starts[owner]))
        return found

    def each_own_or_spread(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`own_or_spread` for all segments in turn."""
        spread = np.zeros_like(starts)
        for begin, end in self._by_owner.get(SPREAD, ()):
            spread += np.maximum(0, end - np.maximum(starts, begin))
        return self.each_own(starts) + spread // self._segments


class Extent:
    """Blocks `start` to `end - 1` of `chain`, touched together.

    lies: in which segments, each with the end of what lies there. missing: so many of them went with a
    segment, the first one among them: then none of it is of use until it is put again, to one segment.
    """

    __slots__ = ("chain", "end", "lies", "missing", "newer", "older", "start", "touched")

    def __init__(self, chain: Pieces, start: int, lies: list[tuple[int, int]], touched: float) -> None:
        self.chain = chain
        self.start = start
        self.end = lies[-1][1]
        self.lies = lies
        self.touched = touched
        self.missing = 0
        self.older: Extent = self
        self.newer: Extent = self


class PoolModel:
    """One segment for each of `sizes`, in blocks. Owner placement prefers the writer's own if it has room.

    Puts are seen at once: they take milliseconds, and a session's next turn comes after its answer.
    """

    def __init__(self, sizes: Sequence[int], placement: Placement) -> None:
        self.evicted_blocks = 0
        self.refused_blocks = 0
        self._sizes: Final = tuple(sizes)
        self._segments: Final = len(self._sizes)
        self._room = sum(self._sizes)
        self._placement: Final[Placement] = placement
        self._used = 0
        self._used_by = [0] * len(self._sizes)
        self._first: dict[int, Extent] = {}  # by their first keys
        # Newer than it: the one touched longest ago. A chain is touched from its end to its head, so that no
        # head goes before what follows it.
        self._queue: Final = Extent(Pieces(()), 0, [(SPREAD, 0)], 0.0)

    @property
    def blocks(self) -> int:
        return self._used

    def prefix(self, chain: Pieces, limit: int) -> int:
        """How many leading blocks of `chain` are there, at most `limit`. Changes nothing, takes no lease."""
        path = self._path(chain, limit)
        return path[-1][1] if path else 0

    def parts(self, chain: Pieces, start: int, end: int) -> list[Part]:
        """Where blocks `start` to `end - 1` lie, as far as all before them are there."""
        found: list[Part] = []
        before, since, at = SPREAD, start, start
        for extent, after in self._path(chain, end):
            for owner, stop in extent.lies:
                stop = stop if stop < after else after
                if stop <= at:
                    continue
                if owner != before:
                    if at > since:
                        found.append(Part(before, at - since))
                    before, since = owner, at
                at = stop
        if at > since:
            found.append(Part(before, at - since))
        return found

    def places(self, chain: Pieces, limit: int) -> Places:
        """Of its leading blocks that are there, at most `limit`. Changes nothing, takes no lease."""
        return Places(self.parts(chain, 0, limit), self._segments)

    def lookup(self, chain: Pieces, limit: int, now: float) -> int:
        """The same as `prefix`, as an engine asks it: what is found is leased."""
        path, end = self._take(chain, limit, now)
        self._touch(path)
        return end

    def put(self, chain: Pieces, end: int, writer: int, now: float) -> tuple[int, int]:
        """Stores what is missing of the leading `end` blocks. Returns how many blocks, and how many of them
        went to other segments than the writer's own."""
        path: list[Extent] = []
        at = stored = moved = 0
        while at < end:
            taken, at = self._take(chain, end, now, at)
            path += taken
            hole = self._first.get(chain[at]) if at < end else None
            if hole is None:
                break
            hole.touched = now
            self._split(hole, common(chain, hole.chain, at, min(end, hole.end)))
            blocks = hole.missing
            if not self._make_room(blocks, now):
                self.refused_blocks += blocks
                self._touch(path)
                return stored, moved
            ((owner, _),) = hole.lies
            if blocks == hole.end - hole.start:
                owner = self._place(blocks, writer)
            self._fill(owner, blocks)
            hole.lies, hole.missing = [(owner, hole.end)], 0
            stored += blocks
            moved += 0 if owner == writer else blocks - blocks // self._segments
        missing = end - at
        if missing and self._make_room(missing, now):
            stored += missing
            owner = self._place(missing, writer)
            moved += 0 if owner == writer else missing - missing // self._segments
            last = path[-1] if path else None
            if last is not None and last.end == at:
                if last.lies[-1][0] == owner:
                    last.lies.pop()
                last.lies.append((owner, end))
                last.chain, last.end = chain, end
            else:
                path.append(Extent(chain, at, [(owner, end)], now))
                self._enter(path[-1], self._queue.older)
            self._fill(owner, missing)
        elif missing:
            self.refused_blocks += missing
        self._touch(path)
        return stored, moved

    def lose(self, segment: int, random: Random) -> None:
        """Its worker is gone, and with it what lay there: of extents on all segments, a block here and there.

        There is no other copy, so that of those only what comes before the first lost block is of use.
        """
        self._room -= self._sizes[segment]
        for extent in self._oldest_first():
            for _, end in reversed(extent.lies[:-1]):
                self._cut(extent, end)
        for extent in self._oldest_first():
            ((owner, _),) = extent.lies
            if extent.missing or owner not in (segment, SPREAD):
                continue
            blocks = extent.end - extent.start
            whole = 0 if owner == segment else _until_lost(self._segments, random)
            if whole < blocks:
                lost = self._cut(extent, extent.start + whole) if whole else extent
                left = blocks - whole
                lost.missing = left if owner == segment else max(1, left // self._segments)
                self._fill(owner, -lost.missing)

    def back(self, segment: int) -> None:
        """Its worker is there again, and the segment empty."""
        self._room += self._sizes[segment]

    def _split(self, hole: Extent, at: int) -> None:
        """Only what is before block `at` will be put again."""
        if at == hole.end:
            return
        blocks, rest = hole.end - hole.start, hole.end - at
        tail = self._cut(hole, at)
        tail.missing = min(hole.missing - 1, hole.missing * rest // blocks)
        hole.missing -= tail.missing
        self._touch([tail])

    def _cut(self, extent: Extent, at: int) -> Extent:
        """Blocks from `at` on become an extent of their own, which goes before what is left. Returns it."""
        place = sum(end <= at for _, end in extent.lies)
        tail = Extent(extent.chain, at, extent.lies[place:], extent.touched)
        del extent.lies[place:]
        if not extent.lies or extent.lies[-1][1] < at:
            extent.lies.append((tail.lies[0][0], at))
        extent.end = at
        self._enter(tail, extent.older)
        return tail

    def _path(self, chain: Pieces, limit: int, at: int = 0) -> list[tuple[Extent, int]]:
        """The extents along `chain` from `at` on until one is not whole, each with where it ends or parts."""
        first = self._first
        path: list[tuple[Extent, int]] = []
        while at < limit and (extent := first.get(chain[at])) is not None and not extent.missing:
            end = extent.end if extent.end < limit else limit
            at = end if extent.chain is chain else common(chain, extent.chain, at, end)
            path.append((extent, at))
        return path

    def _take(self, chain: Pieces, limit: int, now: float, at: int = 0) -> tuple[list[Extent], int]:
        """The same extents, leased, without what lies beyond them in other segments; and where they end."""
        taken: list[Extent] = []
        for extent, after in self._path(chain, limit, at):
            at = after
            if at < extent.end and len(extent.lies) > 1:
                stop = next(end for _, end in extent.lies if end >= at)
                if stop < extent.end:
                    self._cut(extent, stop)
            extent.touched = now
            taken.append(extent)
        return taken, at

    def _touch(self, path: list[Extent]) -> None:
        """From the end to the head: they are the newest."""
        queue = self._queue
        for extent in reversed(path):
            unlink(extent)
            insert(extent, queue.older)

    def _oldest_first(self) -> list[Extent]:
        found: list[Extent] = []
        extent = self._queue.newer
        while extent is not self._queue:
            found.append(extent)
            extent = extent.newer
        return found

    def _enter(self, extent: Extent, after: Extent) -> None:
        self._first[extent.chain[extent.start]] = extent
        insert(extent, after)

    def _fill(self, owner: int, blocks: int) -> None:
        self._used += blocks
        if owner != SPREAD:
            self._used_by[owner] += blocks

    def _place(self, blocks: int, writer: int) -> int:
        if self._placement == "owner" and self._used_by[writer] + blocks <= self._sizes[writer]:
            return writer
        return SPREAD

    def _make_room(self, blocks: int, now: float) -> bool:
        """False when what would have to go is leased still."""
        room = self._room
        if self._used + blocks <= room * _HIGH:
            return True
        goal = max(0, min(int(room * (_HIGH - _DROP)), room - blocks))
        while self._used > goal:
            extent = self._queue.newer
            if extent is self._queue or extent.touched + LEASE_S > now:
                break
            if extent.missing:
                self._used -= extent.end - extent.start - extent.missing
                extent.end = extent.start
            else:
                self._forget(extent, self._used - goal)
            if extent.start == extent.end:
                del self._first[extent.chain[extent.start]]
                unlink(extent)
        return self._used + blocks <= room

    def _forget(self, extent: Extent, blocks: int) -> None:
        """Up to `blocks` of its last blocks that lie in one segment."""
        owner, end = extent.lies.pop()
        start = extent.lies[-1][1] if extent.lies else extent.start
        extent.end = max(start, end - blocks)
        if extent.end > start:
            extent.lies.append((owner, extent.end))
        self._fill(owner, extent.end - end)
        self.evicted_blocks += end - extent.end


def _until_lost(segments: int, random: Random) -> int:
    """How many blocks come before the first that lay on one of so many segments."""
    if segments == 1:
        return 0
    return int(log(1.0 - random.random()) / log(1.0 - 1.0 / segments))
