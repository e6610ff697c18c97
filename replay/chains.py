"""Chains of block keys that take no memory per block: keys of a trace are numbers we choose."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, overload

import numpy as np


class Pieces(Sequence[int]):
    """Ranges back to back. A session of 100,000 tokens is two of them: the head it shares, and its own."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("bases", "ends", "ranges")

    def __init__(self, ranges: Iterable[range]) -> None:
        """ends: where each range ends in the chain; bases: what to add to a place in it to get its key."""
        self.ranges: Final = [each for each in ranges if each]
        self.ends: Final = list(accumulate(map(len, self.ranges)))
        self.bases: Final = [each.stop - end for each, end in zip(self.ranges, self.ends, strict=True)]

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        """A slice is an array of 64-bit words: made twenty times as fast as a list, and packed as it is."""
        if isinstance(index, slice):
            return self._slice(*index.indices(len(self)))
        if index < 0:
            index += len(self)
            if index < 0:
                raise IndexError(index)
        return self.bases[bisect_right(self.ends, index)] + index

    def _slice(self, start: int, stop: int, step: int) -> array[int]:
        if step != 1:
            return array("Q", [self[at] for at in range(start, stop, step)])
        found = array("Q")
        place = bisect_right(self.ends, start)
        while start < stop:
            end, base = min(stop, self.ends[place]), self.bases[place]
            found.frombytes(np.arange(base + start, base + end, dtype=np.uint64).tobytes())
            start = end
            place += 1
        return found

    def __iter__(self) -> Iterator[int]:
        for each in self.ranges:
            yield from each

    def __repr__(self) -> str:
        return f"Pieces({self.ranges})"


def common(one: Pieces, other: Pieces, start: int, end: int) -> int:
    """Where two chains part: they are equal up to `start`; looked at up to `end`, no farther than both go."""
    if one is other:
        return max(start, min(end, len(one)))
    at, ends, others = start, one.ends, other.ends
    here, there = bisect_right(ends, at), bisect_right(others, at)
    while at < end and here < len(ends) and there < len(others) and one.bases[here] == other.bases[there]:
        at = min(ends[here], others[there])
        here += at == ends[here]
        there += at == others[there]
    return max(start, min(at, end))
