"""Chains of block keys that take no memory per block: keys of a trace are numbers we choose."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

import numpy as np


class Pieces(Sequence[int]):
    """Ranges back to back. A session of 100,000 tokens is two of them: the head it shares, and its own."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_ends", "_ranges")

    def __init__(self, ranges: Iterable[range]) -> None:
        self._ranges: Final = [each for each in ranges if each]
        ends: list[int] = []
        total = 0
        for each in self._ranges:
            total += len(each)
            ends.append(total)
        self._ends: Final = ends

    @property
    def ranges(self) -> Sequence[range]:
        return self._ranges

    def piece(self, index: int) -> tuple[int, int]:
        """The key at `index`, and up to where each following key is one more than the one before."""
        place = bisect_right(self._ends, index)
        end = self._ends[place]
        return self._ranges[place][index - end], end

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        """A slice is an array of 64-bit words: made twenty times as fast as a list, and packed as it is."""
        ends = self._ends
        if isinstance(index, int):
            if index < 0:
                index += len(self)
            piece = bisect_right(ends, index)
            if index < 0 or piece == len(ends):
                raise IndexError(index)
            return self._ranges[piece][index - ends[piece]]  # counted from the end of the piece
        start, stop, step = index.indices(len(self))
        if step != 1:
            return array("Q", [self[at] for at in range(start, stop, step)])
        found = array("Q")
        piece = bisect_right(ends, start)
        while start < stop:
            end = min(stop, ends[piece])
            first = self._ranges[piece][start - ends[piece]]
            found.frombytes(np.arange(first, first + end - start, dtype=np.uint64).tobytes())
            start = end
            piece += 1
        return found

    def __iter__(self) -> Iterator[int]:
        for each in self._ranges:
            yield from each

    def __repr__(self) -> str:
        return f"Pieces({self._ranges})"


def common(one: Pieces, other: Pieces, start: int, end: int) -> int:
    """Where two chains part: they are equal up to `start`; looked at up to `end`, no farther than both go."""
    end = min(end, len(one), len(other))
    if one is other:
        return max(start, end)
    at = start
    while at < end:
        (left, left_end), (right, right_end) = one.piece(at), other.piece(at)
        if left != right:
            break
        at = min(end, left_end, right_end)
    return at
