"""What a Mooncake master's own KV events say of objects, and what that makes of blocks. Pure.

The format is that of Mooncake's `kv_event_publisher.cpp` (RFC 1527). A payload is the array
`[milliseconds, events, rank]`; an event is a map with `event_type` (`stored`, `removed`, `cleared`),
`object_key` and `tenant_id`. One event is of one object on one medium: `removed` may leave a copy on another,
so it only says that what was known of the block holds no more. Hashes and parents are not filled in: the key
is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from store.keys import KeyLayout
from store.sightings import Sightings

# What the workers' look-ups and the master's HTTP take where nothing else is said.
_TENANT: Final = "default"
# Blocks of which some ranks' objects have come; the others follow within a step of the engine.
_HALVES: Final = 1 << 14


class BadEvents(Exception):
    """The payload is no batch of a master; nothing of it can be used."""


class ObjectEvent(msgspec.Struct, frozen=True, gc=False):
    event_type: str
    object_key: str | None = None
    tenant_id: str | None = None


class _Batch(msgspec.Struct, array_like=True, gc=False):
    milliseconds: Any
    events: list[ObjectEvent]


_batch: Final = msgspec.msgpack.Decoder(_Batch)


def decode(payload: bytes) -> Sequence[ObjectEvent]:
    """The events of one batch. Raises BadEvents."""
    try:
        events = _batch.decode(payload).events
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadEvents(str(error)) from error
    if any(each.object_key is None and each.event_type in ("stored", "removed") for each in events):
        raise BadEvents("events without object_key (kv_events_emit_object_key)")
    return events


class _Blocks:
    """Blocks of one layout, each made of as many objects as it has ranks."""

    def __init__(self, sightings: Sightings, ranks: int) -> None:
        self.sightings = sightings
        self._whole = (1 << ranks) - 1
        # Two generations, as in `Sightings`.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def stored(self, rank: int, key: int, now: float) -> None:
        ranks = self._taken(key) | 1 << rank
        if ranks == self._whole:
            self.sightings.announced((key,), now)
            return
        self._put(key, ranks)
        self.sightings.came(key, now)

    def removed(self, rank: int, key: int, now: float, *, asking: bool) -> None:
        if left := self._taken(key) & ~(1 << rank):
            self._put(key, left)
        self.sightings.went(key, now, unseen=asking)

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def _taken(self, key: int) -> int:
        return self._young.pop(key, 0) | self._old.pop(key, 0)

    def _put(self, key: int, ranks: int) -> None:
        if len(self._young) >= _HALVES:
            self._old, self._young = self._young, {}
        self._young[key] = ranks


class ObjectEvents:
    """Tells what was seen of blocks (`Sightings`) of the objects that come and go.

    asking: whether answers of the master may be under way that are older than an event. Counts are since the
    start; foreign: objects of layouts or tenants that nobody here asks for.
    """

    def __init__(self, asking: Callable[[], bool]) -> None:
        self._asking = asking
        self._blocks: dict[KeyLayout, _Blocks] = {}
        self._routes: dict[str, list[tuple[_Blocks, int]]] = {}
        self.stored = self.removed = self.cleared = self.foreign = self.unknown = 0

    def follow(self, layout: KeyLayout, sightings: Sightings) -> None:
        """`layout` is of one KV group."""
        prefixes = layout.prefixes()
        blocks = self._blocks[layout] = _Blocks(sightings, len(prefixes))
        for rank, prefix in enumerate(prefixes):
            self._routes.setdefault(prefix, []).append((blocks, rank))

    def leave(self, layout: KeyLayout) -> None:
        gone = self._blocks.pop(layout, None)
        for prefix in layout.prefixes() if gone is not None else ():
            left = [(blocks, rank) for blocks, rank in self._routes.pop(prefix) if blocks is not gone]
            if left:
                self._routes[prefix] = left

    def forget(self) -> None:
        """What was told of objects until now is worth nothing."""
        for blocks in self._blocks.values():
            blocks.clear()

    def apply(self, events: Sequence[ObjectEvent], now: float) -> bool:
        """Whether all objects of the pool went at once, and with them whatever was known."""
        cleared, asking = False, self._asking()
        for event in events:
            kind, name = event.event_type, event.object_key
            if (event.tenant_id or _TENANT) != _TENANT:
                self.foreign += 1
            elif kind == "cleared":
                self.cleared += 1
                cleared = True
            elif kind not in ("stored", "removed") or name is None:
                self.unknown += 1
            else:
                self._object(kind == "stored", name, now, asking)
        return cleared

    def _object(self, stored: bool, name: str, now: float, asking: bool) -> None:
        at = name.rfind("@") + 1
        routes, key = self._routes.get(name[:at], ()), _key(name[at:])
        if not routes or key is None:
            self.foreign += 1
            return
        self.stored += stored
        self.removed += not stored
        for blocks, rank in routes:
            if stored:
                blocks.stored(rank, key, now)
            else:
                blocks.removed(rank, key, now, asking=asking)


def _key(digest: str) -> int | None:
    """The 64-bit key of a block whose digest is this text; None if it is no digest."""
    try:
        return int(digest[-16:], 16)
    except ValueError:
        return None
