"""Blocks that a target was just sent to compute: credit before the events, so that a burst of siblings meets.

Nothing here is proven. Every placement ends by itself after a while; by then events have said what is held.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

# A prefill of 100,000 tokens takes a few seconds; its events come chunk by chunk meanwhile.
TTL_S: Final = 10.0
# Newest placements kept of each target: an extension looks at all of them, 1 us each.
PER_TARGET: Final = 32

_Placement = tuple[float, Sequence[int], bool]


class Placements:
    """Time is passed in, in seconds of any clock that does not go back."""

    def __init__(self, ttl_s: float = TTL_S, per_target: int = PER_TARGET) -> None:
        self._ttl = ttl_s
        self._per_target = per_target
        self._placed: dict[str, deque[_Placement]] = {}

    def place(self, target: str, keys: Sequence[int], now: float, *, whole: bool = False) -> None:
        """`target` is going to hold the blocks of `keys`, a chain from the root. Keeps a reference to it.

        whole: only a chain that has all of `keys` will find anything.
        """
        placed = self._placed.setdefault(target, deque(maxlen=self._per_target))
        placed.append((now + self._ttl, keys, whole))

    def drop(self, target: str) -> None:
        """`target` is gone or restarted."""
        self._placed.pop(target, None)

    def extend(self, keys: Sequence[int], held: Mapping[str, int], now: float) -> dict[str, int]:
        """Leading blocks of `keys` that targets will hold soon, of those that will be more than `held`."""
        extended: dict[str, int] = {}
        for target in list(self._placed):
            placed = self._placed[target]
            while placed and placed[0][0] <= now:
                placed.popleft()
            if not placed:
                del self._placed[target]
                continue
            known = held.get(target, 0)
            blocks = _reached(keys, placed, known)
            if blocks > known:
                extended[target] = blocks
        return extended

    def __len__(self) -> int:
        """Placements that have not been found to have ended."""
        return sum(map(len, self._placed.values()))


def _reached(keys: Sequence[int], placed: Iterable[_Placement], known: int) -> int:
    """Leading blocks of `keys` that are among `known` or placed."""
    blocks, length = known, len(keys)
    # Of most chains this one key says that they do not go on as this one does.
    key = keys[blocks] if blocks < length else None
    for _, other, whole in placed:
        if blocks >= length:
            break
        if blocks < len(other) and other[blocks] == key:
            common = _common(keys, other, blocks + 1)
            if not whole or common == len(other):
                blocks = common
                key = keys[blocks] if blocks < length else None
    return blocks


def _common(keys: Sequence[int], other: Sequence[int], least: int) -> int:
    """How many leading keys both chains share, which are `least` or more."""
    low, high = least, min(len(keys), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
