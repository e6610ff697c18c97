"""A Mooncake Store in virtual time: segments, placement, leases, eviction. Extents instead of blocks.

What one put stored stays together: it lies in one place (or spread over all segments), is looked up, and so
leased, with all that follows it, and goes as one. An extent costs the same for 10 blocks as for 1,000.

    chain of a session   [ 0 .. 179 ][ 180 .. 359 ][ 360 .. 391 ]
    extents              head, w3     w3            w7               w7 took a turn while w3 was busy
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import log
from random import Random
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from replay.chains import Pieces, common

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

    def each_own_or_spread(self, starts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The same for all segments in turn, `starts` of shape (segments,)."""
        found = np.zeros(len(starts))
        for begin, end in self._by_owner.get(SPREAD, ()):
            found += np.maximum(0.0, end - np.maximum(starts, begin))
        found //= self._segments
        for owner in self._by_owner:
            if owner != SPREAD:
                found[owner] += self.own(owner, int(starts[owner]))
        return found


class Extent:
    """Blocks `start` to `end - 1` of `chain`, of which `missing` went with a segment, its first one among
    them: then none of it is of use until it is put again."""

    __slots__ = ("chain", "end", "first", "missing", "owner", "start", "touched")

    def __init__(self, chain: Pieces, start: int, end: int, owner: int, touched: float) -> None:
        self.chain = chain
        self.first: Final = chain[start]
        self.start = start
        self.end = end
        self.owner = owner
        self.touched = touched
        self.missing = 0


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
        # By the key of an extent's first block; the one touched longest ago first. A chain is touched from
        # its end to its head, so that no head goes before what follows it.
        self._extents: OrderedDict[int, Extent] = OrderedDict()

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
        at = start
        for extent, after in self._path(chain, end):
            if after > at:
                blocks = after - at
                if found and found[-1].owner == extent.owner:
                    blocks += found.pop().blocks
                found.append(Part(extent.owner, blocks))
                at = after
        return found

    def places(self, chain: Pieces, limit: int) -> Places:
        """Of its leading blocks that are there, at most `limit`. Changes nothing, takes no lease."""
        return Places(self.parts(chain, 0, limit), self._segments)

    def lookup(self, chain: Pieces, limit: int, now: float) -> int:
        """The same as `prefix`, as an engine asks it: what is found is leased."""
        path = self._path(chain, limit)
        self._touch([extent for extent, _ in path], now)
        return path[-1][1] if path else 0

    def put(self, chain: Pieces, end: int, writer: int, now: float) -> tuple[int, int]:
        """Stores what is missing of the leading `end` blocks. Returns how many blocks, and how many of them
        went to other segments than the writer's own."""
        path: list[Extent] = []
        at = stored = moved = 0
        while at < end:
            for extent, after in self._path(chain, end, at):
                extent.touched = now
                path.append(extent)
                at = after
            hole = self._extents.get(chain[at]) if at < end else None
            if hole is None:
                break
            hole.touched = now
            self._split(hole, common(chain, hole.chain, at, min(end, hole.end)))
            blocks = hole.missing
            if not self._make_room(blocks, now):
                self.refused_blocks += blocks
                self._touch(path, now)
                return stored, moved
            if blocks == hole.end - hole.start:
                hole.owner = self._place(blocks, writer)
            if hole.owner != SPREAD:
                self._used_by[hole.owner] += blocks
            hole.missing = 0
            self._used += blocks
            stored += blocks
            moved += 0 if hole.owner == writer else blocks - blocks // self._segments
        missing = end - at
        if missing and self._make_room(missing, now):
            stored += missing
            owner = self._place(missing, writer)
            moved += 0 if owner == writer else missing - missing // self._segments
            last = path[-1] if path else None
            if last is not None and last.end == at and last.owner == owner:
                last.chain, last.end = chain, end
            else:
                path.append(Extent(chain, at, end, owner, now))
                self._extents[path[-1].first] = path[-1]
            self._used += missing
            if owner != SPREAD:
                self._used_by[owner] += missing
        elif missing:
            self.refused_blocks += missing
        self._touch(path, now)
        return stored, moved

    def lose(self, segment: int, random: Random) -> None:
        """Its worker is gone, and with it what lay there: of extents on all segments, a block here and there.

        There is no other copy, so that of those only what comes before the first lost block is of use.
        """
        self._room -= self._sizes[segment]
        kept: OrderedDict[int, Extent] = OrderedDict()
        for first, extent in self._extents.items():
            blocks = extent.end - extent.start
            if extent.missing or extent.owner not in (segment, SPREAD):
                kept[first] = extent
                continue
            whole = 0 if extent.owner == segment else _until_lost(self._segments, random)
            if whole < blocks:
                lost, start = extent, extent.start + whole
                if whole:
                    lost = Extent(extent.chain, start, extent.end, SPREAD, extent.touched)
                    extent.end = start
                left = blocks - whole
                lost.missing = left if extent.owner == segment else max(1, left // self._segments)
                self._used -= lost.missing
                if extent.owner == segment:
                    self._used_by[segment] -= blocks
                kept[lost.first] = lost
            if whole:
                kept[first] = extent
        self._extents = kept

    def back(self, segment: int) -> None:
        """Its worker is there again, and the segment empty."""
        self._room += self._sizes[segment]

    def _split(self, hole: Extent, at: int) -> None:
        """Only what is before block `at` will be put again."""
        if at == hole.end:
            return
        blocks, rest = hole.end - hole.start, hole.end - at
        tail = Extent(hole.chain, at, hole.end, hole.owner, hole.touched)
        tail.missing = min(hole.missing - 1, hole.missing * rest // blocks)
        hole.end, hole.missing = at, hole.missing - tail.missing
        self._extents[tail.first] = tail

    def _path(self, chain: Pieces, limit: int, at: int = 0) -> list[tuple[Extent, int]]:
        """The extents along `chain` from `at` on until one is not whole, each with where it ends or parts."""
        extents = self._extents
        path: list[tuple[Extent, int]] = []
        while at < limit and (extent := extents.get(chain[at])) is not None and not extent.missing:
            end = extent.end if extent.end < limit else limit
            at = end if extent.chain is chain else common(chain, extent.chain, at, end)
            path.append((extent, at))
        return path

    def _touch(self, path: list[Extent], now: float) -> None:
        """From the end to the head."""
        move = self._extents.move_to_end
        for extent in reversed(path):
            extent.touched = now
            move(extent.first)

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
            first = next(iter(self._extents), None)
            if first is None or self._extents[first].touched + LEASE_S > now:
                break
            extent = self._extents[first]
            if extent.missing:
                self._used -= extent.end - extent.start - extent.missing
                extent.end = extent.start
            else:
                self._forget(extent, min(extent.end - extent.start, self._used - goal))
            if extent.start == extent.end:
                del self._extents[first]
        return self._used + blocks <= room

    def _forget(self, extent: Extent, blocks: int) -> None:
        """The last `blocks` blocks of an extent."""
        extent.end -= blocks
        self._used -= blocks
        self.evicted_blocks += blocks
        if extent.owner != SPREAD:
            self._used_by[extent.owner] -= blocks


def _until_lost(segments: int, random: Random) -> int:
    """How many blocks come before the first that lay on one of so many segments."""
    if segments == 1:
        return 0
    return int(log(1.0 - random.random()) / log(1.0 - 1.0 / segments))
