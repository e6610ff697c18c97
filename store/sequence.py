"""One publisher's batches in order, each once, and proof that it is still the same publisher.

A vLLM publisher numbers its batches from 0 and keeps the last 10,000 for replay; nothing in the stream names
the process. So a replay always asks for the last batch already applied as well: if that one comes back with
the same content the publisher is the same, if it does not, everything known of it is forgotten:

    applied 0..7, then 10 arrives    ask from 7    7 8 9 come back, 7 is ours      8, 9, 10 are applied
    applied 0..7, reconnected        ask from 7    7 comes back, but not ours       reset, ask from 0
    applied 0..7, reconnected        ask from 7    nothing comes back              reset, ask from 0
    applied 0..7, then 9000 arrives  ask from 7    8500 is the first to come back  doubt, 8500.. are applied
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

import xxhash

StreamState: TypeAlias = Literal["exact", "catching-up", "degraded"]
"""exact: every batch of the publisher's life was applied, or since its GPU cache was empty. degraded: some
never will be; what they stored is unknown, what they may have removed is in doubt. catching-up: not
connected, or not yet one of the two."""

# Live batches kept while a replay runs: twice a publisher's replay buffer (vLLM 0.32 `buffer_steps`).
MAX_HELD: Final = 20_000
MAX_HELD_BYTES: Final = 256 << 20
# Replays in a row that brought nothing new before a gap counts as lost for good.
MAX_FRUITLESS: Final = 3


@dataclass(frozen=True, slots=True)
class Deliver:
    """Apply this batch now."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget everything known of the publisher, or with `same`: doubt it.

    same: it is the same publisher still, but batches of it are missing for good. What was known may have been
    removed in them.
    """

    why: str
    same: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Request a replay from `start` on; an earlier request is abandoned. attempt: 0, or the retry it is."""

    start: int
    attempt: int


Action: TypeAlias = Deliver | Reset | Ask


@dataclass(frozen=True, slots=True)
class Mark:
    """The last batch applied: enough to recognise its publisher again."""

    seq: int
    fingerprint: int

    @classmethod
    def of(cls, seq: int, payload: bytes) -> "Mark":
        # A payload starts with the time of its batch, so lives of a publisher do not share contents.
        return cls(seq, xxhash.xxh3_64_intdigest(payload))


class _Replay(Enum):
    NONE = 0
    CATCH_UP = 1
    CHECK = 2  # asks for the last batch only to see that nothing followed it
    REBUILD = 3  # asks for everything after a time in which no replay could be had


class Sequencer:
    """Pure: every input answers with what is to be done, in that order, before the next input.

    `live` takes what came in on the present connection, `replayed` the answers to the last `Ask` only.
    `mark` and `complete` continue from a snapshot: nothing counts as exact before a replay has proven it.
    """

    def __init__(self, *, can_replay: bool, mark: Mark | None = None, complete: bool = False) -> None:
        self.gaps = 0
        self.missed = 0
        self.mark: Mark | None = mark
        self.complete = complete
        self._can_replay: Final = can_replay
        self._next: int | None = mark.seq + 1 if mark else (0 if can_replay else None)
        self._connected = False
        self._same_life = False  # proven on this connection: the publisher is the one that `mark` is of
        self._newest_live = -1
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._dropped = False
        self._replay = _Replay.NONE
        self._asked: Mark | None = None
        self._replies = 0
        self._fruitless = 0
        self._progress = 0  # batches delivered since the last Ask
        self._rebuildable = False
        self._doubtful = False  # something is known, in doubt, and no mark says of which publisher

    @property
    def state(self) -> StreamState:
        if not self._connected or self._replay is _Replay.CATCH_UP:
            return "catching-up"
        return "exact" if self.complete else "degraded"

    @property
    def proven(self) -> bool:
        """Whether the publisher is known to be the one that `mark` is of."""
        return self._connected and self._same_life and self.mark is not None

    @property
    def replaying(self) -> bool:
        return self._replay is not _Replay.NONE

    def connected(self) -> Iterator[Action]:
        self._connected = True
        self._newest_live = -1
        self._let_go()
        self._fruitless = 0
        self._same_life = self.mark is None
        if self.mark is None and self._doubtful:
            yield self._forget("reconnected, and nothing proves that the publisher is the same")
        if self._can_replay:
            yield self._ask(_Replay.CATCH_UP)
        elif self.mark is not None:
            yield self._forget("reconnected, and nothing proves that the publisher is the same")

    def disconnected(self) -> None:
        self._connected = False
        self._replay = _Replay.NONE
        self._let_go()

    def restarted(self) -> Iterator[Action]:
        """Somebody else knows that this is a new publisher. A new connection follows."""
        yield self._forget("restarted")
        self.disconnected()

    def live(self, seq: int, payload: bytes) -> Iterator[Action]:
        if seq <= self._newest_live:
            self._let_go()
            why = f"sequence went back from {self._newest_live} to {seq}"
            self._newest_live = seq
            yield self._forget(why)
            self._fruitless = 0
            if self._can_replay:
                self._hold(seq, payload)
                yield self._ask(_Replay.CATCH_UP)
                return
        self._newest_live = seq
        if not self._same_life or self._replay in (_Replay.CATCH_UP, _Replay.REBUILD):
            self._hold(seq, payload)
        elif self._next is None:
            self._start_at(seq)
            yield self._deliver(seq, payload)
        elif seq == self._next:
            yield self._deliver(seq, payload)
        elif seq > self._next:
            self.gaps += 1
            self._hold(seq, payload)
            yield from self._close_gap()

    def lost(self) -> Iterator[Action]:
        """Live batches were dropped on our side."""
        self.gaps += 1
        self._dropped = True
        if self._connected and self._same_life and self._replay in (_Replay.NONE, _Replay.CHECK):
            yield from self._close_gap()

    def unreadable(self) -> None:
        """The batch last delivered could not be used: what it said is lost."""
        self.missed += 1
        self.complete = False

    def emptied(self) -> None:
        """The batch last delivered said that the GPU cache is empty: whatever was missed of it is void."""
        self.complete = True
        self._rebuildable = False

    def prove(self) -> Iterator[Action]:
        """See that nothing was published that did not arrive; try again what could not be replayed."""
        if self._can_replay and self._connected and self._replay is _Replay.NONE:
            yield self._ask(_Replay.REBUILD if self._rebuildable and not self.complete else _Replay.CHECK)

    def replayed(self, seq: int, payload: bytes) -> Iterator[Action]:
        if self._asked is not None and seq < self._asked.seq:
            return
        self._replies += 1
        if self._replies == 1:
            yield from self._first_reply(seq, payload)
        elif self._next is None or seq == self._next:
            yield self._deliver(seq, payload)
        elif seq > self._next:
            # A ROUTER drops replies beyond its high-water mark without a word: what came through is kept.
            self._hold(seq, payload)

    def replay_ended(self) -> Iterator[Action]:
        if self._dropped and not self._replies:
            self._replay = _Replay.NONE
            self._rebuildable = True
            yield from self._ask_again_or_give_up("replies are lost on our side")
            return
        if not self._replies and self._asked is not None and not self._same_life:
            yield from self._new_life(f"the publisher has not come as far as batch {self._asked.seq}")
            return
        if not self._replies and self.mark is None and not self._held:
            self._next, self.complete = 0, True  # nothing was published yet
        self._same_life = True
        self._rebuildable = False
        self._replay = _Replay.NONE
        yield from self._drain()
        if self._held or self._dropped:
            yield from self._ask_again_or_give_up("the publisher does not replay what is missing")
        else:
            self._fruitless = 0

    def replay_failed(self) -> Iterator[Action]:
        """No answer came, or it broke off."""
        kind, self._replay = self._replay, _Replay.NONE
        if self._same_life:
            yield from self._drain()
        if kind is not _Replay.CATCH_UP and not (self._replies or self._held or self._dropped):
            return
        self._rebuildable = True
        yield from self._ask_again_or_give_up("no replay to be had")

    def _first_reply(self, seq: int, payload: bytes) -> Iterator[Action]:
        if self._dropped:
            # The true first reply may be what was dropped: nothing follows from this one.
            self._replies = 0
            self._hold(seq, payload)
        elif self._replay is _Replay.REBUILD:
            yield self._forget("rebuilt from a replay")
            self._start_at(seq)
            yield self._deliver(seq, payload)
        elif self._asked is None:
            if self.mark is None:
                self._start_at(seq)
            if seq == self._next:
                yield self._deliver(seq, payload)
        elif seq == self._asked.seq:
            if Mark.of(seq, payload) != self._asked:
                yield from self._new_life(f"batch {seq} is not the one known under that number")
            self._same_life = True
        elif self._same_life and self._next is not None and seq <= self._next:
            if seq == self._next:
                yield self._deliver(seq, payload)
        else:
            lost = seq - self._asked.seq - 1
            why = f"{lost} batches after {self._asked.seq} cannot be replayed any more"
            yield self._forget(why, same=self._same_life)
            self._next = seq
            self.missed += lost
            yield self._deliver(seq, payload)

    def _new_life(self, why: str) -> Iterator[Action]:
        """A replay showed that the publisher is another; what is held came from it as well."""
        yield self._forget(why)
        self._fruitless = 0
        yield self._ask(_Replay.CATCH_UP)

    def _close_gap(self) -> Iterator[Action]:
        if self._can_replay:
            self._fruitless = 0
            yield self._ask(_Replay.CATCH_UP)
        else:
            yield from self._give_up("a gap, and no replay endpoint")

    def _ask_again_or_give_up(self, why: str) -> Iterator[Action]:
        self._fruitless = 0 if self._progress else self._fruitless + 1
        if self._fruitless < MAX_FRUITLESS:
            yield self._ask(_Replay.CATCH_UP)
        else:
            yield from self._give_up(why)

    def _ask(self, kind: _Replay) -> Ask:
        self._asked = None if kind is _Replay.REBUILD else self.mark
        self._replay, self._replies, self._progress = kind, 0, 0
        self._dropped = False
        return Ask(self._asked.seq if self._asked else 0, self._fruitless)

    def _give_up(self, why: str) -> Iterator[Action]:
        """Go on without what is missing, which may have removed what is known."""
        self._fruitless = 0
        self.complete = self.mark is None and 0 in self._held
        known = self._next or 0
        if self.mark is not None:
            yield self._forget(why, same=self._same_life)
        while self._held:
            first = min(self._held)
            if first > known:
                self.missed += first - known
                if self.mark is not None:
                    yield self._forget(why, same=self._same_life)
                self.complete = False
            self._next = first
            yield from self._drain()
            known = self._next
        if self._dropped:
            self._dropped = False
            if self.mark is not None:
                yield self._forget(why, same=self._same_life)
        self._same_life = True
        if self.mark is None:
            self._next = None

    def _drain(self) -> Iterator[Action]:
        """Deliver what is held as far as it follows without a gap."""
        for seq in sorted(self._held):
            if self._next is not None and seq > self._next:
                return
            payload = self._held.pop(seq)
            self._held_bytes -= len(payload)
            if seq == self._next:
                yield self._deliver(seq, payload)

    def _forget(self, why: str, *, same: bool = False) -> Reset:
        self.mark = None
        self._doubtful = same
        self._next = 0 if self._can_replay else None
        self.complete = False
        self._same_life = True
        return Reset(why, same)

    def _start_at(self, seq: int) -> None:
        """`seq` is the first batch of this life that can be had."""
        self._next = seq
        self.complete = seq == 0
        self.missed += seq

    def _deliver(self, seq: int, payload: bytes) -> Deliver:
        self.mark = Mark.of(seq, payload)
        self._doubtful = False
        self._next = seq + 1
        self._progress += 1
        return Deliver(seq, payload)

    def _hold(self, seq: int, payload: bytes) -> None:
        if len(self._held) >= MAX_HELD or self._held_bytes + len(payload) > MAX_HELD_BYTES:
            self._dropped = True
        elif seq not in self._held:
            self._held[seq] = payload
            self._held_bytes += len(payload)

    def _let_go(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self._dropped = False
