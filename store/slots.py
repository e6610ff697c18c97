"""Which run has a block: its number by the block's key, for millions of keys."""

import sys
from collections.abc import Iterable
from typing import Final

# A dict grows, or is copied into a smaller one, in one step: 416 ms of CPU at 5.6 million keys, 20 ms at
# 350,000. So there are 64 of them, by the highest bits of the key (the lowest ones place it in its dict).
_PARTS: Final = 64
_SHIFT: Final = 58
# An entry takes 37 to 75 bytes of a dict that has not shrunk.
_SPARSE_BYTES: Final = 300
_EMPTY_BYTES: Final = 64 * _PARTS
# Keys copied at once when parts are made smaller: 2 ms.
_COPIED: Final = 50_000


class Slots:
    """Keys are 64-bit; values are numbers, so that the garbage collector never walks through millions."""

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._next = 0
        self._count = 0
        self._bytes, self._sized_at = 0, -1

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        return self._parts[key >> _SHIFT].get(key)

    def disjoint(self, keys: Iterable[int]) -> bool:
        """Whether none of `keys` is known."""
        parts = self._parts
        for key in keys:  # noqa: SIM110 - a generator costs half as much again
            if key in parts[key >> _SHIFT]:
                return False
        return True

    def put(self, keys: list[int], number: int) -> None:
        """Keys that are not known yet, each once."""
        self.move(keys, number)
        self._count += len(keys)

    def move(self, keys: list[int], number: int) -> None:
        """Keys that are known: another run has them now."""
        parts = self._parts
        for key in keys:
            parts[key >> _SHIFT][key] = number

    def forget(self, keys: list[int]) -> None:
        """Keys that are known."""
        parts = self._parts
        for key in keys:
            del parts[key >> _SHIFT][key]
        self._count -= len(keys)

    def bytes(self) -> int:
        """What the dicts take, without the keys; measured again when the count has changed by 1 %."""
        if abs(self._count - self._sized_at) > self._sized_at >> 7:
            self._bytes, self._sized_at = sum(map(sys.getsizeof, self._parts)), self._count
        return self._bytes

    def shrink(self) -> None:
        """Dicts keep the room of their best days: rebuild one once an eighth is used, and others like it.

        Looks at one dict where there is nothing to do.
        """
        if not self._count and self.bytes() > _EMPTY_BYTES:
            self._parts, self._sized_at = [{} for _ in range(_PARTS)], -1
        copied = 0
        for _ in range(_PARTS):
            at, part = self._next, self._parts[self._next]
            self._next = (at + 1) % _PARTS
            if sys.getsizeof(part) < _SPARSE_BYTES * (len(part) + 2) or copied > _COPIED:
                return
            self._parts[at] = dict(part)
            self._sized_at = -1
            copied += len(part)
