"""A Mooncake Store in virtual time: segments, placement, leases, eviction. Extents instead of blocks.

What one put stored stays together: it lies in one place (or spread over all segments), is looked up, and so
leased, with all that follows it, and goes as one. An extent costs the same for 10 blocks as for 1,000.

    chain of a session   [ 0 .. 179 ][ 180 .. 359 ][ 360 .. 391 ]
    extents              head, w3     w3            w7               w7 took a turn while w3 was busy
"""

from __future__ import annotations

from collections import OrderedDict
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
        at = 0
        while at < limit and (extent := self._extents.get(chain[at])) is not None:
            at = common(chain, extent.chain, at, min(limit, extent.end))
        return at

    def parts(self, chain: Pieces, start: int, end: int) -> list[Part]:
        """Where blocks `start` to `end - 1` lie, all of them being there."""
        found: list[Part] = []
        at = 0
        while at < end:
            extent = self._extents[chain[at]]
            after = common(chain, extent.chain, at, min(end, extent.end))
            if after > start:
                blocks = after - max(start, at)
                if found and found[-1].owner == extent.owner:
                    blocks += found.pop().blocks
                found.append(Part(extent.owner, blocks))
            at = after
        return found

    def lookup(self, chain: Pieces, limit: int, now: float) -> int:
        """The same as `prefix`, as an engine asks it: what is found is leased."""
        path: list[int] = []
        at = 0
        while at < limit and (extent := self._extents.get(chain[at])) is not None:
            path.append(chain[at])
            at = common(chain, extent.chain, at, min(limit, extent.end))
            extent.touched = now
        for first in reversed(path):
            self._extents.move_to_end(first)
        return at

    def put(self, chain: Pieces, end: int, writer: int, now: float) -> tuple[int, int]:
        """Stores what is missing of the leading `end` blocks. Returns how many blocks, and how many of them
        went to other segments than the writer's own."""
        path: list[Extent] = []
        at = 0
        while at < end and (extent := self._extents.get(chain[at])) is not None:
            path.append(extent)
            at = common(chain, extent.chain, at, min(end, extent.end))
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
        for extent in reversed(path):
            self._extents.move_to_end(extent.chain[extent.start])
        return stored, moved

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
