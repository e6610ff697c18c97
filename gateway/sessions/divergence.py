"""Where a prompt leaves the one before it in its session, what did that, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from gateway.sessions.blame import Cause, Kind, blame, shared_characters
from gateway.sessions.sessions import Departure, Seen
from store.hashing import HashScheme
from store.prompt.request import Ids, PromptRequest, Unrenderable

# Tokens of text shown before the place, and on either side after it.
_SHOWN: Final = 24
# Text counts as repeated in runs of this many tokens (a power of two): a line of text or so.
_RUN: Final = 16
_MIX: Final = 0x9E3779B97F4A7C15
_PLACES: Final = np.uint64(1 << 20)
# A new conversation, a rewound or a summarised one departs without repeating what it leaves. Where clocks and
# reordered tools break a prefix, most of what was lost comes again.
_REPEATED_SHARE: Final = 0.25


class Texts(Protocol):
    """A model's prompts as text. All of these raise Unrenderable."""

    def render(self, request: PromptRequest) -> str: ...
    def character(self, request: PromptRequest, scheme: HashScheme, token: int) -> int:
        """Where in the rendered text the prompt's token `token` begins."""
        ...

    def decode(self, ids: Ids) -> str: ...


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs, and its block. Texts: `before` it on both sides, then one of each.

    lost_tokens: in blocks of the previous prompt that could have been used again.
    inferred: the session was not named by its client but recognised.
    """

    previous_request_id: str
    inferred: bool
    token: int
    block: int
    lost_tokens: int
    kind: Kind
    cause: str
    before: str
    previously: str
    now: str


@dataclass(slots=True)
class PrefixReport:
    """Filled in once the departure of a turn has been looked into; stays empty if it was none."""

    divergence: Divergence | None = None


def common_prefix(one: Ids, other: Ids) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(one), len(other))
    unequal = one[:shorter] != other[:shorter]
    first = int(unequal.argmax()) if shorter else 0
    return first if shorter and unequal[first] else shorter


def repeated_share(lost: Ids, anew: Ids) -> float:
    """The share of `lost`, cut in runs of 16 tokens, that comes somewhere in `anew`."""
    runs, there = _runs(lost)[::_RUN], _runs(anew)
    if not len(runs):
        return 0.0
    # Only what may be among `runs` is sorted: all 80,000 of a long prompt took 6 ms, this takes 0.5.
    places = np.zeros(_PLACES, dtype=np.bool_)
    places[runs % _PLACES] = True
    return float(np.isin(runs, there[places[there % _PLACES]]).mean())


def _runs(tokens: Ids) -> npt.NDArray[np.uint64]:
    """A hash of the run that begins at each token; none for the last 15."""
    if len(tokens) < _RUN:
        return np.zeros(0, dtype=np.uint64)
    hashes = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    step, factor = 1, _MIX
    while step < _RUN:
        factor = factor * factor % (1 << 64)
        hashes = hashes[:-step] * np.uint64(factor) + hashes[step:]
        hashes ^= hashes >> np.uint64(29)
        step *= 2
    return hashes


def examine(
    departure: Departure, request: PromptRequest, scheme: HashScheme, texts: Texts | None
) -> Divergence | None:
    """What a departure is about; None if it repeats too little of what it leaves to be a loss.

    texts: None where the prompt was not made here; then neither texts nor cause are known.
    Takes milliseconds, tens of them for a long prompt whose tokens are not cached.
    """
    previous, current = departure.previous, departure.current
    start = departure.blocks * scheme.block_size
    if repeated_share(previous.tokens[start:], current.tokens[start:]) < _REPEATED_SHARE:
        return None
    inside = common_prefix(
        previous.tokens[start : start + scheme.block_size], current.tokens[start : start + scheme.block_size]
    )
    keyed = inside == scheme.block_size
    at = start if keyed else start + inside
    before, previously, now = (
        _text(texts, tokens)
        for tokens in (
            current.tokens[max(0, at - _SHOWN) : at],
            previous.tokens[at : at + _SHOWN],
            current.tokens[at : at + _SHOWN],
        )
    )
    if keyed:
        # The same tokens under other hashes: nothing but the salt is part of them besides.
        cause = Cause("unknown", "cache_salt")
    else:
        cause = _cause(texts, request, scheme, at, shared_characters(previously, now), previous)
    return Divergence(
        previous.request_id,
        not current.named,
        at,
        departure.blocks,
        departure.lost_tokens,
        cause.kind,
        cause.label,
        before,
        previously,
        now,
    )


def _text(texts: Texts | None, tokens: Ids) -> str:
    try:
        return texts.decode(tokens) if texts is not None else ""
    except Unrenderable:
        return ""


def _cause(
    texts: Texts | None, request: PromptRequest, scheme: HashScheme, token: int, equal: int, before: Seen
) -> Cause:
    """`equal`: characters that both sides have in common from `token` on."""
    if texts is None:
        return Cause("unknown", "unknown")
    try:
        character = texts.character(request, scheme, token) + equal
        return blame(request, character, texts.render, before.tools, before.system)
    except Unrenderable:
        return Cause("unknown", "unknown")
