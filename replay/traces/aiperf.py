"""AIPerf's form of Mooncake traces: rows with a `session_id` are the turns of one conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from replay.traces.codex_like import growing
from replay.traces.mooncake import NATIVE, prompt_of_ids
from replay.traces.types import Asked, BadTrace, Milliseconds, Session, Tokens

# Heads and sessions of prompts without ids have numbers beyond those of blocks with ids.
_FIRST: Final = 1 << 22


class _Row(msgspec.Struct):
    input_length: Tokens
    output_length: Tokens = 1
    session_id: str | int | None = None
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None  # after the end of the turn before
    hash_ids: list[int] | None = None


def read(rows: Iterable[tuple[int, Any]], block_size: int, head: int | None = None) -> Iterator[Session]:
    """With `hash_ids` a row names its whole prompt; without, it adds `input_length` tokens to its session.
    `head` changes nothing: what is shared shows in the ids.

    A row without session_id is a session. Of a session's rows, timestamps say when the first one begins;
    the others come `delay` after the end of the one before. Rows that come again are copies: of sessions
    without ids, as one with the same ids would share all of its prompts.
    """
    sessions: dict[tuple[int, str], list[tuple[int, _Row]]] = {}
    copy = before = 0
    for line, row in rows:
        copy += line <= before
        before = line
        try:
            parsed = msgspec.convert(row, _Row)
        except msgspec.ValidationError as wrong:
            raise BadTrace(f"line {line}: not an AIPerf request: {wrong}") from None
        if parsed.input_length < 1:
            raise BadTrace(f"line {line}: input_length is {parsed.input_length}, not at least 1")
        name = f"line {line}" if parsed.session_id is None else str(parsed.session_id)
        if not copy or parsed.hash_ids is None:
            sessions.setdefault((copy, name), []).append((line, parsed))
    numbers: dict[int, int] = {}
    timed: bool | None = None
    for number, ((_, name), listed) in enumerate(sessions.items()):
        line, first = listed[0]
        stamp = first.timestamp
        timed = stamp is not None if timed is None else timed
        if timed != (stamp is not None):
            raise BadTrace(f"line {line}: some sessions have a timestamp and others have none")
        arrives = None if stamp is None else stamp / 1000
        yield Session(name, _turns(name, number, listed, numbers, block_size), arrives)


def _turns(
    name: str, number: int, listed: list[tuple[int, _Row]], numbers: dict[int, int], block_size: int
) -> list[Asked]:
    thinks = [(row.delay or 0.0) / 1000 for _, row in listed]
    with_ids = [row.hash_ids is not None for _, row in listed]
    if not any(with_ids):
        steps = [(row.input_length, max(1, row.output_length)) for _, row in listed]
        return list(growing(name, _FIRST + number, 0, steps, thinks, block_size).turns)
    if not all(with_ids):
        raise BadTrace(f"line {listed[with_ids.index(False)][0]}: the session has turns with hash_ids")
    if NATIVE % block_size:
        raise BadTrace(f"blocks of {NATIVE} tokens cannot be cut in blocks of {block_size}")
    turns: list[Asked] = []
    for (line, row), think in zip(listed, thinks, strict=True):
        ids = row.hash_ids or []
        asked = prompt_of_ids(ids, numbers, row.input_length, row.output_length, line, block_size)
        turns.append(Asked(asked.chain, asked.prompt_tokens, asked.output_tokens, think))
    return turns
