"""The prompts of recent turns, as far as their tokens are worth keeping: what is likely to be asked again."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.api.parse import ParsedTurn
from gateway.prompts.prompts import Understood
from store.hashing import HashScheme
from store.prompt.request import Ids

_MOST: Final = 64
# 4 bytes each, and 2 of digests where blocks have 16 tokens.
_MOST_TOKENS: Final = 4 << 20
# A conversation's last turn is looked for among so many of the latest, half a microsecond each.
_NEAR: Final = 16


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HotChain:
    """A prompt. tokens: shape (n,); keys: of its full blocks."""

    model: str
    scheme: HashScheme
    salt: str | None
    tokens: Ids
    keys: Sequence[int]


class HotChains:
    """The latest prompts, each conversation once: at most 64, and 4 million tokens."""

    def __init__(self) -> None:
        self._chains: deque[HotChain] = deque()
        self._tokens = 0

    def saw(self, parsed: ParsedTurn, understood: Understood) -> None:
        """A worker answers this turn. One that ids alone could not ask for again is passed over."""
        prompt, scheme = understood.prompt, understood.scheme
        if prompt is None or scheme is None or prompt.partial or prompt.source == "remote":
            return
        keys = prompt.chain.keys
        if not len(keys):
            return
        for at in range(len(self._chains) - 1, max(-1, len(self._chains) - 1 - _NEAR), -1):
            before = self._chains[at].keys
            if len(before) <= len(keys) and before[len(before) - 1] == keys[len(before) - 1]:
                self._tokens -= len(self._chains[at].tokens)
                del self._chains[at]
                break
        salt = parsed.prompt.cache_salt if parsed.prompt is not None else None
        self._chains.append(HotChain(parsed.model, scheme, salt, prompt.tokens, keys))
        self._tokens += len(prompt.tokens)
        while len(self._chains) > _MOST or self._tokens > _MOST_TOKENS:
            self._tokens -= len(self._chains.popleft().tokens)

    def latest(self) -> list[HotChain]:
        """The latest first."""
        return [*reversed(self._chains)]
