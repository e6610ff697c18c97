"""The state of an index at one instant, taken piece by piece while it goes on changing.

Whatever is about to change and was not taken yet is kept first, as it was:

    begun     runs r0 r1 r2        nothing taken
    advance   r0 is taken
    r2 grows  r2 is kept as it was, then changed
    advance   r1 as it is, r2 as it was kept
"""

import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import msgspec

from store.events import Tier
from store.holders import Holder
from store.runs import Run, numbers_of

# The event loop's step may take 5 ms (DESIGN), and a turn waits for it.
_STEP_S: Final = 0.001
# Runs between two looks at the clock: each takes 3 us, or 30 where 64 targets hold parts of it.
_PIECE: Final = 32

HolderState: TypeAlias = tuple[str, Tier, int, int, int | None, dict[int, int], dict[int, int]]
"""target, tier, group, number, need, loose, more of a holder."""
RunState: TypeAlias = tuple[bytes, list[int], list[tuple[int, str]]]
"""Keys as 64-bit words of this machine, numbers of those that hold all, (number, mask in decimal) of those
that hold some."""

_encode: Final = msgspec.msgpack.Encoder().encode
_holder: Final = msgspec.msgpack.Decoder(HolderState)
_runs: Final = msgspec.msgpack.Decoder(list[RunState])


class IndexSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """What an index held, encoded: holders one by one, runs in pieces, the least recently used first."""

    holders: list[bytes]
    runs: list[bytes]

    def each_holder(self) -> Iterable[HolderState]:
        return map(_holder.decode, self.holders)

    def each_run(self) -> Iterable[RunState]:
        return (run for piece in self.runs for run in _runs.decode(piece))


class Capture:
    """One index's state when this was made. Before a holder or a run changes, the index must `keep` it.

    runs: the most recently used first. number: larger than that of any capture before. ended: called with it
    once all is taken.
    """

    def __init__(
        self, holders: Iterable[Holder], runs: Iterable[Run], number: int, ended: Callable[[int], None]
    ) -> None:
        self._number: Final = number
        self._ended: Final = ended
        self._holders_left: list[Holder] = list(holders)
        self._runs_left: list[Run] = list(runs)
        self._holders_kept: dict[int, bytes] = {}
        self._runs_kept: dict[Run, RunState] = {}
        self._snapshot = IndexSnapshot([], [])

    def keep(self, run: Run) -> None:
        """`run` is about to change, or to go."""
        if run.taken < self._number:
            run.taken = self._number
            self._runs_kept[run] = _state(run)

    def keep_holder(self, holder: Holder) -> None:
        if holder.taken < self._number:
            holder.taken = self._number
            self._holders_kept[id(holder)] = _holder_state(holder)

    def advance(self) -> bool:
        """Take some more, about a millisecond's worth. Whether all is taken."""
        until = time.perf_counter() + _STEP_S
        while self._take_some() and time.perf_counter() < until:
            pass
        done = not self._holders_left and not self._runs_left
        if done:
            self._ended(self._number)
        return done

    def _take_some(self) -> bool:
        """One holder, or a piece of the runs. False when nothing is left."""
        if self._holders_left:
            holder = self._holders_left.pop()
            kept_holder = self._holders_kept.pop(id(holder), None)
            holder.taken = self._number
            self._snapshot.holders.append(kept_holder or _holder_state(holder))
            return True
        piece: list[RunState] = []
        for _ in range(min(_PIECE, len(self._runs_left))):
            run = self._runs_left.pop()
            kept = self._runs_kept.pop(run, None)
            run.taken = self._number
            piece.append(kept or _state(run))
        if piece:
            self._snapshot.runs.append(_encode(piece))
        return bool(piece)

    def whole(self) -> IndexSnapshot:
        """All of it, at once as far as it was not taken yet."""
        while not self.advance():
            pass
        return self._snapshot


def _state(run: Run) -> RunState:
    return run.packed, list(numbers_of(run.full)), [(n, str(bits)) for n, bits in run.partial.items()]


def _holder_state(holder: Holder) -> bytes:
    state: HolderState = (
        holder.target,
        holder.tier,
        holder.group,
        holder.number,
        holder.need,
        holder.loose,
        holder.more,
    )
    return _encode(state)
