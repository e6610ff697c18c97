"""The prompts of recent turns, as far as their tokens are worth keeping: what is likely to be asked again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.api.parse import ParsedTurn
from gateway.prompts.prompts import Understood
from store.hashing import HashScheme
from store.prompt.request import Ids

_MOST: Final = 64
# 4 bytes each, and half of one for its keys where blocks have 16 tokens.
_MOST_TOKENS: Final = 4 << 20


class HotChain(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """A prompt. tokens: shape (n,); keys: of its full blocks."""

    model: str
    scheme: HashScheme
    salt: str | None
    tokens: Ids
    keys: Sequence[int]


class HotChains:
    """The latest prompt of each of the latest sessions: at most 64, and 4 million tokens."""

    def __init__(self) -> None:
        self._chains: Final[OrderedDict[str, HotChain]] = OrderedDict()
        self._tokens = 0

    def saw(self, session: str, parsed: ParsedTurn, understood: Understood) -> None:
        """A worker answers this turn of `session`. Passed over where ids alone could not ask for it again."""
        prompt, scheme = understood.prompt, understood.scheme
        if prompt is None or scheme is None or prompt.partial or prompt.source == "remote":
            return
        keys, chains = prompt.chain.keys, self._chains
        if not keys:
            return
        before = chains.pop(session, None)
        if before is not None:
            self._tokens -= len(before.tokens)
        salt = parsed.prompt.cache_salt if parsed.prompt is not None else None
        chains[session] = HotChain(parsed.model, scheme, salt, prompt.tokens, keys)
        self._tokens += len(prompt.tokens)
        while len(chains) > _MOST or self._tokens > _MOST_TOKENS:
            self._tokens -= len(chains.popitem(last=False)[1].tokens)

    def latest(self) -> list[HotChain]:
        """The latest first."""
        return [*reversed(self._chains.values())]
