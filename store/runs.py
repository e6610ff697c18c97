"""Runs: stretches of consecutive blocks with who holds which of them.

A block's key names everything before it, so consecutive blocks need no links: looking up the key that follows
a run in the chain finds the next run. Who holds a run is a bit for each holder that has all of it, and a bit
for each block for those that have some of it:

    keys     k0 k1 k2 k3      first k0, last k3
    full     {a}              a holds k0..k3
    partial  {b: 0b1011}      b holds k0, k1 and k3: its prefix ends after k1
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

# Blocks in a run at most. Longer runs make matching faster (fewer look-ups: 5,000 blocks are 20 runs) and
# removals in random order slower (finding a key within its run).
LIMIT: Final = 256
ONES: Final = tuple((1 << n) - 1 for n in range(LIMIT + 1))
KEY_BYTES: Final = 8


class Run:
    """At most LIMIT blocks. dead: how many of them nobody holds (they stay until the run is rebuilt).

    slot: where the index keeps the run. parent: the run before this one, if known when this one was made, and
    children: how many name this run so; both only serve to give up leaves first. taken: the number of the
    last capture that has this run, or did not need it (store/capture.py).
    """

    __slots__ = (
        *("children", "dead", "first", "full", "last", "packed", "parent", "partial", "size", "slot"),
        "taken",
    )

    def __init__(self, keys: Sequence[int], slot: int, parent: "Run | None", taken: int = 0) -> None:
        self.packed = pack(keys)
        self.size = len(keys)
        self.first = keys[0]
        self.last = keys[-1]
        self.full = 0
        self.partial: dict[int, int] = {}
        self.dead = 0
        self.slot: Final = slot
        self.parent = parent
        self.children = 0
        self.taken = taken
        if parent is not None:
            parent.children += 1

    def go_on_from(self, parent: "Run | None") -> None:
        """`parent` is the run before this one from now on."""
        if self.parent is not parent:
            if self.parent is not None:
                self.parent.children -= 1
            if parent is not None:
                parent.children += 1
            self.parent = parent

    def offset(self, key: int) -> int:
        """Where `key` stands in this run, which has it."""
        if key == self.first:
            return 0
        found = self.packed.find(key.to_bytes(KEY_BYTES, sys.byteorder), KEY_BYTES)
        while found % KEY_BYTES:
            found = self.packed.find(key.to_bytes(KEY_BYTES, sys.byteorder), found + 1)
        return found // KEY_BYTES

    def listed(self, start: int = 0, stop: int = LIMIT) -> list[int]:
        numbers = array("Q")
        numbers.frombytes(self.packed[start * KEY_BYTES : stop * KEY_BYTES])
        return numbers.tolist()

    def common(self, offset: int, keys: Sequence[int], at: int) -> int:
        """How many of `keys`, from `at` on, are this run's blocks from `offset` on. Compares every one."""
        length = min(self.size - offset, len(keys) - at)
        ours = self.packed[offset * KEY_BYTES : (offset + length) * KEY_BYTES]
        theirs = pack(keys[at : at + length])
        if ours == theirs:
            return length
        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            if ours[: middle * KEY_BYTES] == theirs[: middle * KEY_BYTES]:
                low = middle
            else:
                high = middle - 1
        return low

    def shared(self, offset: int, keys: Sequence[int], at: int, end: int) -> int:
        """The same as `common` for `keys` up to `end` that are one chain: looks at a few of them only."""
        length = min(self.size - offset, end - at)
        last = self.last if offset + length == self.size else self._key(offset + length - 1)
        if keys[at + length - 1] == last:
            return length
        low, high = 0, length - 1
        while low < high:
            middle = (low + high + 1) // 2
            if keys[at + middle - 1] == self._key(offset + middle - 1):
                low = middle
            else:
                high = middle - 1
        return low

    def bits(self, holder: int) -> int:
        """The blocks of this run that `holder` has."""
        return ONES[self.size] if self.full >> holder & 1 else self.partial.get(holder, 0)

    def held(self) -> int:
        """The blocks of this run that anybody has."""
        if self.full:
            return ONES[self.size]
        held = 0
        for bits in self.partial.values():
            held |= bits
        return held

    def holders(self) -> Iterator[int]:
        yield from numbers_of(self.full)
        yield from self.partial

    def extend(self, keys: Sequence[int]) -> None:
        """Append `keys`; whoever holds all of the run holds them as well."""
        self.packed += pack(keys)
        self.size += len(keys)
        self.last = keys[-1]

    def cut(self, start: int, stop: int) -> None:
        """Keep only the blocks from `start` to before `stop`."""
        assert not self.full, "a run that somebody has all of has no dead blocks to cut off"
        kept = self.listed(start, stop)
        self.packed = pack(kept)
        self.size, self.first, self.last, self.dead = len(kept), kept[0], kept[-1], 0
        before, self.partial = self.partial, {}
        for holder, bits in before.items():
            self.put(holder, bits >> start & ONES[self.size])

    def put(self, holder: int, bits: int) -> None:
        """Write down that `holder` has exactly `bits` of this run."""
        if bits == ONES[self.size]:
            self.full |= 1 << holder
            self.partial.pop(holder, None)
            return
        self.full &= ~(1 << holder)
        if bits:
            self.partial[holder] = bits
        else:
            self.partial.pop(holder, None)

    def _key(self, offset: int) -> int:
        return int.from_bytes(self.packed[offset * KEY_BYTES : (offset + 1) * KEY_BYTES], sys.byteorder)


def pack(keys: Sequence[int]) -> bytes:
    return keys.tobytes() if isinstance(keys, array) else array("Q", keys).tobytes()


def leading(bits: int) -> int:
    """How many of the lowest bits are set before the first that is not."""
    return (~bits & (bits + 1)).bit_length() - 1


def numbers_of(bits: int) -> Iterator[int]:
    """The positions of the set bits."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def stretches(bits: int) -> Iterator[tuple[int, int]]:
    """Start and end of each run of set bits, lowest first."""
    start = 0
    while bits:
        gap = (bits & -bits).bit_length() - 1
        start += gap
        bits >>= gap
        length = leading(bits)
        yield start, start + length
        start += length
        bits >>= length
