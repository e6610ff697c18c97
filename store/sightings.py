"""What was last seen of blocks in the pool: the cache that spares a turn its round trip. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from store.mooncake_http import Replicas
from store.segments import Segments

# How long a block that is there is believed in, while objects vanish from the pool (eviction, removal) ...
BUSY_S: Final = 5.0
# ... and while the master's counters prove that none does. They are read every second.
QUIET_S: Final = 60.0
# How long a missing block is believed missing: spares the siblings of a burst, and not every engine announces
# what it stores (under MultiConnector none does).
ABSENT_S: Final = 0.25

Stop = Literal["end", "absent", "unknown"]
# The place of blocks of which no segment has all in memory; no segment or host is called so.
DISK: Final = "disk"
_ON_DISK: Final = frozenset((DISK,))


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """One answer about one or more blocks, asked for at `at`.

    parts: the copies of each object that the block is made of, empty when one of them is missing. None: the
    worker that stored the block announced it, so it is whole, but where is not known.
    open: all that is known is that the block changed at `at`, so what was asked before is worth nothing.
    """

    at: float
    parts: tuple[Replicas, ...] | None
    open: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks `start` to `stop - 1` can be read whole in each of `places` (segment names, hosts, DISK)."""

    start: int
    stop: int
    places: frozenset[str]


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a chain is there: `blocks` leading blocks, then its end, a missing block or one not known."""

    blocks: int
    stop: Stop
    stretches: tuple[Stretch, ...]


class Sightings:
    """Of the blocks of one key layout, by 64-bit key; the last `capacity / 2` to `capacity` blocks seen.

    followed_since: what was asked for from then on is kept up to date by events of the master, so that it
    holds until one says otherwise; infinite while there are none.
    """

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        # Two generations instead of an order: deleting a dict's oldest entry one by one is quadratic.
        self._young: dict[int, Sighting] = {}
        self._old: dict[int, Sighting] = {}
        self._lossy_at = float("-inf")
        self.followed_since = float("inf")

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def clear(self) -> None:
        self._young = {}
        self._old = {}

    def objects_vanished(self, now: float) -> None:
        """Some did, unknown which, before `now`: what was seen until then holds for a short time only."""
        self._lossy_at = now

    def saw(self, key: int, sighting: Sighting) -> None:
        """An answer is dropped when something newer is known: an announcement may overtake it."""
        known = self._young.get(key) or self._old.get(key)
        if known is None or known.at <= sighting.at:
            if len(self._young) >= self._half and key not in self._young:
                self._old, self._young = self._young, {}
            self._young[key] = sighting

    def announced(self, keys: Iterable[int], now: float) -> None:
        """The blocks are whole in the pool now, says who stored them."""
        sighting = Sighting(now, None)
        for key in keys:
            self.saw(key, sighting)

    def came(self, key: int, now: float) -> None:
        """An object of the block was stored: if the block was missing, it need not be any more."""
        known = self._young.get(key) or self._old.get(key)
        if known is not None and known.parts == ():
            self.saw(key, Sighting(now, (), open=True))

    def went(self, key: int, now: float, *, unseen: bool = False) -> None:
        """An object of the block lost a copy, perhaps not the last one.

        unseen: note it even if nothing is known, since an older answer may be under way.
        """
        if unseen or key in self._young or key in self._old:
            self.saw(key, Sighting(now, (), open=True))

    def unknown(
        self,
        keys: Sequence[int],
        blocks: Iterable[int],
        segments: Segments,
        now: float,
        *,
        to_absent: bool = False,
    ) -> list[int]:
        """Those of `blocks` (indexes of `keys`, ascending) that must be asked for.

        to_absent: up to the first that is known to be missing; no block after that can count.
        """
        young, old = self._young, self._old
        judged: dict[int, Stop] = {}
        found: list[int] = []
        for block in blocks:
            sighting = young.get(keys[block]) or old.get(keys[block])
            if sighting is None:
                found.append(block)
                continue
            verdict = judged.get(id(sighting))
            if verdict is None:
                verdict = judged[id(sighting)] = self._judge(sighting, segments, now)[0]
            if verdict == "unknown":
                found.append(block)
            elif verdict == "absent" and to_absent:
                break
        return found

    def states(self, keys: Iterable[int], segments: Segments, now: float) -> list[Stop]:
        """Of each block: "end" when it is there, "absent", or "unknown"."""
        found: list[Stop] = []
        for key in keys:
            sighting = self._young.get(key) or self._old.get(key)
            found.append("unknown" if sighting is None else self._judge(sighting, segments, now)[0])
        return found

    def unplaced(self, keys: Sequence[int]) -> list[int]:
        """The blocks (indexes of `keys`) that are known from announcements only: nobody said where."""
        young, old = self._young, self._old
        found = [young.get(key) or old.get(key) for key in keys]
        return [block for block, each in enumerate(found) if each is not None and each.parts is None]

    def walk(self, keys: Sequence[int], segments: Segments, now: float) -> Walk:
        """The leading blocks that are there now, as far as known. 0.1 us a block."""
        young, old = self._young, self._old
        stretches: list[Stretch] = []
        judged: dict[int, tuple[Stop, frozenset[str]]] = {}
        last: Sighting | None = None
        places: frozenset[str] = frozenset()
        start = count = 0
        stop: Stop = "end"
        for key in keys:
            sighting = young.get(key) or old.get(key)
            if sighting is not last or sighting is None:
                if sighting is None:
                    stop = "unknown"
                    break
                verdict = judged.get(id(sighting))
                if verdict is None:
                    verdict = judged[id(sighting)] = self._judge(sighting, segments, now)
                if verdict[0] != "end":
                    stop = verdict[0]
                    break
                if verdict[1] != places:
                    if count > start:
                        stretches.append(Stretch(start, count, places))
                    start, places = count, verdict[1]
                last = sighting
            count += 1
        if count > start:
            stretches.append(Stretch(start, count, places))
        return Walk(count, stop, tuple(stretches))

    def _judge(self, sighting: Sighting, segments: Segments, now: float) -> tuple[Stop, frozenset[str]]:
        """ "end": the walk goes on. The places are those where the whole block can be read."""
        if sighting.open:
            return "unknown", frozenset()
        age, followed = now - sighting.at, sighting.at >= self.followed_since
        if sighting.parts == ():
            return ("absent" if followed or age < ABSENT_S else "unknown"), frozenset()
        if not followed and age >= (BUSY_S if sighting.at <= self._lossy_at else QUIET_S):
            return "unknown", frozenset()
        if sighting.parts is None:
            return ("end" if sighting.at > segments.shrunk_at else "unknown"), frozenset()
        common: frozenset[str] | None = None
        on_disk = False
        for part in sighting.parts:
            there = [each for each in part.endpoints if segments.readable(each, sighting.at, now)]
            if not there and not part.elsewhere:
                # Copies may have moved meanwhile (drain): a fresh answer decides, a stale one is asked again.
                fresh = age < ABSENT_S and sighting.at > segments.shrunk_at
                return ("absent" if fresh else "unknown"), frozenset()
            on_disk = on_disk or (not there and part.disk)
            places = frozenset[str]().union(*(segments.places(each) for each in there))
            common = places if common is None else common & places
        # A block is read as slowly as its slowest part.
        return "end", _ON_DISK if on_disk else common or frozenset()
