"""Which blocks each target holds, and how long a prefix of a chain that makes."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from store.events import Tier


class BlockIndex:
    """Copies of blocks by target, tier and KV group.

    A key names a block together with everything before it, so a target's prefix of a chain is the number of
    leading keys it holds; blocks whose parents are unknown lie here uncredited until the parents arrive:

        stored("w1", [k2, k3], parent=k1)    match([k0, k1, k2, k3]) == {}
        stored("w1", [k0, k1], parent=None)  match([k0, k1, k2, k3]) == {"w1": 4}

    An engine announces every physical copy of a block, and its end, separately: a block counts as held until
    as many copies were removed as were stored.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, Tier, int], dict[int, int]] = {}

    def stored(
        self, target: str, keys: Sequence[int], parent: int | None, *, tier: Tier = "gpu", group: int = 0
    ) -> None:
        """One more copy of each of `keys`, consecutive blocks after `parent` (None: from the root)."""
        copies = self._copies.setdefault((target, tier, group), {})
        for key in keys:
            copies[key] = copies.get(key, 0) + 1

    def removed(self, target: str, keys: Sequence[int], *, tier: Tier = "gpu", group: int = 0) -> None:
        """One copy less of each of `keys`; those not held are ignored."""
        copies = self._copies.get((target, tier, group), {})
        for key in keys:
            left = copies.get(key, 0) - 1
            if left > 0:
                copies[key] = left
            else:
                copies.pop(key, None)

    def cleared(self, target: str, *, tier: Tier | None = "gpu") -> None:
        """Forget all blocks of `target` in `tier`; None: in every tier."""
        for holder in [h for h in self._copies if h[0] == target and tier in (None, h[1])]:
            del self._copies[holder]

    def drop(self, target: str) -> None:
        """Forget `target`: it is gone, or not believed any more."""
        self.cleared(target, tier=None)

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading blocks of `keys` each target holds in tier gpu; targets with none are left out."""
        lengths = ((holder[0], self._leading(c, keys)) for holder, c in self._gpu())
        return {target: length for target, length in lengths if length}

    def sizes(self) -> dict[tuple[str, Tier], int]:
        """Distinct blocks by (target, tier), orphans included; several groups add up."""
        sizes: dict[tuple[str, Tier], int] = {}
        for (target, tier, _), copies in self._copies.items():
            if copies:
                sizes[target, tier] = sizes.get((target, tier), 0) + len(copies)
        return sizes

    def _gpu(self) -> Iterator[tuple[tuple[str, Tier, int], dict[int, int]]]:
        return ((h, c) for h, c in self._copies.items() if h[1] == "gpu" and h[2] == 0)

    @staticmethod
    def _leading(copies: dict[int, int], keys: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(copies.__contains__, keys))
