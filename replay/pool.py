"""A Mooncake Store in virtual time: segments, placement, leases, eviction. Extents instead of blocks.

What one put stored stays together: it lies in one place (or spread over all segments), is looked up, and so
leased, with all that follows it, and goes as one. An extent costs the same for 10 blocks as for 1,000.

    chain of a session   [ 0 .. 179 ][ 180 .. 359 ][ 360 .. 391 ]
    extents              head, w3     w3            w7               w7 took a turn while w3 was busy
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

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

    __slots__ = ("_by_owner", "_segments")

    def __init__(self, parts: Iterable[Part], segments: int) -> None:
        self._segments: Final = segments
        self._by_owner: Final[dict[int, list[tuple[int, int]]]] = {}
        at = 0
        for owner, blocks in parts:
            self._by_owner.setdefault(owner, []).append((at, at + blocks))
            at += blocks

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


class Extent:
    """Blocks `start` to `end - 1` of `chain`."""

    __slots__ = ("chain", "end", "owner", "start", "touched")

    def __init__(self, chain: Pieces, start: int, end: int, owner: int, touched: float) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.owner = owner
        self.touched = touched


class PoolModel:
    """`segments` of equal size, in blocks. Owner placement prefers the writer's own while it has room.

    Puts are seen at once: they take milliseconds, and a session's next turn comes after its answer.
    """

    def __init__(self, segments: int, blocks_each: int, placement: Placement) -> None:
        self.evicted_blocks = 0
        self.refused_blocks = 0
        self._segments: Final = segments
        self._each: Final = blocks_each
        self._placement: Final[Placement] = placement
        self._used = 0
        self._used_by = [0] * segments
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
        """Where blocks `start` to `end - 1` lie, all of them being there."""
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

    def places(self, chain: Pieces, end: int) -> Places:
        return Places(self.parts(chain, 0, end), self._segments)

    def lookup(self, chain: Pieces, limit: int, now: float) -> int:
        """The same as `prefix`, as an engine asks it: what is found is leased."""
        path = self._path(chain, limit)
        self._touch([extent for extent, _ in path], now)
        return path[-1][1] if path else 0

    def put(self, chain: Pieces, end: int, writer: int, now: float) -> tuple[int, int]:
        """Stores what is missing of the leading `end` blocks. Returns how many blocks, and how many of them
        went to other segments than the writer's own."""
        found = self._path(chain, end)
        path = [extent for extent, _ in found]
        at = found[-1][1] if found else 0
        for extent in path:
            extent.touched = now
        missing = end - at
        stored = moved = 0
        if missing and self._make_room(missing, now):
            stored = missing
            owner = self._place(missing, writer)
            moved = 0 if owner == writer else missing - missing // self._segments
            last = path[-1] if path else None
            if last is not None and last.end == at and last.owner == owner:
                last.chain, last.end = chain, end
            else:
                path.append(Extent(chain, at, end, owner, now))
                self._extents[chain[at]] = path[-1]
            self._used += missing
            if owner != SPREAD:
                self._used_by[owner] += missing
        elif missing:
            self.refused_blocks += missing
        self._touch(path, now)
        return stored, moved

    def _path(self, chain: Pieces, limit: int) -> list[tuple[Extent, int]]:
        """The extents along `chain` as far as they are without a gap, each with where it ends or parts."""
        extents = self._extents
        path: list[tuple[Extent, int]] = []
        at = 0
        while at < limit and (extent := extents.get(chain[at])) is not None:
            end = extent.end if extent.end < limit else limit
            at = end if extent.chain is chain else common(chain, extent.chain, at, end)
            path.append((extent, at))
        return path

    def _touch(self, path: list[Extent], now: float) -> None:
        """From the end to the head."""
        for extent in reversed(path):
            extent.touched = now
            self._extents.move_to_end(extent.chain[extent.start])

    def _place(self, blocks: int, writer: int) -> int:
        if self._placement == "owner" and self._used_by[writer] + blocks <= self._each:
            return writer
        return SPREAD

    def _make_room(self, blocks: int, now: float) -> bool:
        """False when what would have to go is leased still."""
        room = self._segments * self._each
        if self._used + blocks <= room * _HIGH:
            return True
        goal = max(0, min(int(room * (_HIGH - _DROP)), room - blocks))
        while self._used > goal:
            first = next(iter(self._extents), None)
            if first is None or self._extents[first].touched + LEASE_S > now:
                break
            extent = self._extents[first]
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
