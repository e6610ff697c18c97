"""Codex-like sessions: a shared head, a first prompt, then what each turn adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from replay.chains import Pieces
from replay.traces.types import KEY_SPACE, Asked, BadTrace, Session, Tokens

# Gaps are from start to start and contain the time the recorded provider took: about a second to the first
# token and 70 tokens a second after it, which is taken off to get the time the agent itself took.
_PROVIDER_TTFT_S: Final = 1.0
_PROVIDER_TOK_S: Final = 70.0


class _Row(msgspec.Struct):
    sid: str
    shared: Tokens
    first: Tokens
    turns: list[
        tuple[Tokens, Tokens, float]
    ]  # new prompt tokens, answer's tokens, seconds from start to start


def read(rows: Iterable[tuple[int, Any]], block_size: int, head: int | None = None) -> Iterator[Session]:
    for number, (line, row) in enumerate(rows):
        try:
            parsed = msgspec.convert(row, _Row)
        except msgspec.ValidationError as wrong:
            raise BadTrace(f"line {line}: not a Codex-like session: {wrong}") from None
        if not parsed.turns:
            raise BadTrace(f"line {line}: a session without turns")
        gaps = [
            max(0.0, gap - _PROVIDER_TTFT_S - answered / _PROVIDER_TOK_S)
            for (_, answered, _), (_, _, gap) in zip(parsed.turns, parsed.turns[1:], strict=False)
        ]
        shared = min(parsed.shared, parsed.first, parsed.shared if head is None else head)
        steps = [(new, out) for new, out, _ in parsed.turns]
        yield growing(parsed.sid, number, shared, steps, [0.0, *gaps], block_size)


def growing(
    name: str, number: int, shared: int, steps: list[tuple[int, int]], thinks: list[float], block_size: int
) -> Session:
    """A session whose prompts each hold everything before: prompts, answers, then new tokens.

    number: makes its keys its own. shared: leading tokens common to all such sessions of one trace.
    """
    total = sum(new + out for new, out in steps)
    blocks, head = total // block_size + 1, shared // block_size
    own = (number + 1) * KEY_SPACE
    chain = Pieces([range(1, head + 1), range(own, own + blocks - head)])
    turns: list[Asked] = []
    context = 0
    for (new, out), think in zip(steps, thinks, strict=True):
        context += new
        turns.append(Asked(chain, max(1, context), max(1, out), think))
        context += out
    return Session(name, turns)
