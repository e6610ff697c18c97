"""Whether targets hash as expected: one that does not publishes keys that no prompt will ever have.

Nothing else would show it. So the first block of a prompt that a target announces is hashed here as well.
"""

from collections.abc import Sequence
from typing import Final, get_args

from store.events import BlockStored
from store.hashing import HashAlgo, HashScheme, chain

# A matching scheme is looked at again after so many root blocks: 12 us each (facts part 1, section 1).
_RECHECK_EVERY: Final = 256
# What operators set PYTHONHASHSEED to.
_COMMON_SEEDS: Final = ("0", "1", "42", "123", "1234")


class HashChecks:
    """How each target hashes, as far as is known. mismatches: in words, of those that differ."""

    def __init__(self) -> None:
        self.mismatches: dict[str, str] = {}
        self._expected: dict[str, HashScheme] = {}
        self._schemes: dict[str, HashScheme] = {}
        self._assumed: set[str] = set()
        self._unchecked: dict[str, int] = {}  # root blocks until the next look

    def expect(self, target: str, scheme: HashScheme, *, fixed: bool) -> bool:
        """How `target` should hash; looked at with its next root block. Whether that is news.

        fixed: False when the seed is only assumed; one that fits the events is then taken over instead.
        """
        if fixed:
            self._assumed.discard(target)
        else:
            self._assumed.add(target)
        if self._expected.get(target) == scheme:
            return False
        self._expected[target] = self._schemes[target] = scheme
        self.mismatches.pop(target, None)
        self.again(target)
        return True

    def learned(self, target: str, scheme: HashScheme) -> None:
        """An earlier life of the gateway saw it of a target whose seed is only assumed."""
        expected = self._expected[target]
        if target in self._assumed and (scheme.algo, scheme.block_size) == (
            expected.algo,
            expected.block_size,
        ):
            self._schemes[target] = scheme

    def scheme(self, target: str) -> HashScheme | None:
        """As its events show, else as expected; None: nobody has said."""
        return self._schemes.get(target)

    def again(self, target: str) -> None:
        """Look at the next root block of `target`: it may be another process."""
        self._unchecked[target] = 0

    def drop(self, target: str) -> None:
        for noted in (self.mismatches, self._expected, self._schemes, self._unchecked):
            noted.pop(target, None)
        self._assumed.discard(target)

    def check(self, target: str, event: BlockStored) -> None:
        """Hash the first block of `event`, a root of `target`, as it should have, and note whether it did."""
        scheme = self._schemes.get(target)
        checkable = event.keys and event.block_size and not event.sparse and len(event.token_ids)
        # Adapters and images enter the hash in a form that events do not carry (facts part 1, section 1).
        plain = event.lora_name is None and not (event.extra_keys and event.extra_keys[0])
        if scheme is None or not checkable or not plain:
            return
        due = self._unchecked.get(target, 0)
        self._unchecked[target] = due - 1 if due else _RECHECK_EVERY
        if due and target not in self.mismatches:
            return
        first = event.token_ids[: event.block_size]
        if event.block_size != scheme.block_size:
            self.mismatches[target] = (
                f"events have blocks of {event.block_size} tokens, expected {scheme.block_size}"
            )
        elif _hashes_to(first, scheme) == event.keys[0]:
            self.mismatches.pop(target, None)
        else:
            fitting = _fitting(first, scheme, event.keys[0])
            if fitting is not None and fitting.algo == scheme.algo and target in self._assumed:
                self._schemes[target] = fitting
                self.mismatches.pop(target, None)
            else:
                self.mismatches[target] = _difference(scheme, fitting)


def _hashes_to(tokens: Sequence[int], scheme: HashScheme) -> int | None:
    try:
        return chain(tokens, scheme).keys[0]
    except ValueError:
        return None


def _fitting(tokens: Sequence[int], expected: HashScheme, key: int) -> HashScheme | None:
    """The scheme that gives `key` to the first block `tokens`, if its seed is a common one."""
    algos: tuple[HashAlgo, ...] = get_args(HashAlgo)
    for algo in (expected.algo, *algos):
        for seed in dict.fromkeys((expected.seed, None, *_COMMON_SEEDS)):
            scheme = HashScheme(algo, expected.block_size, seed)
            if _hashes_to(tokens, scheme) == key:
                return scheme
    return None


def _difference(expected: HashScheme, found: HashScheme | None) -> str:
    wanted = f"expected {_name(expected.algo, expected.seed)}"
    if found is None:
        return f"{wanted}, the worker uses none of the known ways"
    return f"{wanted}, the worker uses {_name(found.algo, found.seed)}"


def _name(algo: HashAlgo, seed: str | None) -> str:
    return f"{algo} with PYTHONHASHSEED {'unset' if seed is None else repr(seed)}"
