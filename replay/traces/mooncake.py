"""Mooncake's FAST'25 traces: requests with a time and prefix-chained ids of 512-token blocks, no sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from replay.chains import Pieces
from replay.traces.types import KEY_SPACE, Asked, BadTrace, Milliseconds, Session, Tokens

NATIVE: Final = 512


class _Row(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]


def read(rows: Iterable[tuple[int, Any]], block_size: int, head: int | None = None) -> Iterator[Session]:
    """Each request is a session of its own: what goes on from what shows in the ids alone, so that `head`
    changes nothing.

    Requests of one timestamp were collected over the time since the one before (about 3 s), so they are
    spread over that time.
    """
    if NATIVE % block_size:
        raise BadTrace(f"blocks of {NATIVE} tokens cannot be cut in blocks of {block_size}")
    batch: list[tuple[int, _Row]] = []
    numbers: dict[int, int] = {}
    before: float | None = None
    for line, row in rows:
        try:
            parsed = msgspec.convert(row, _Row)
        except msgspec.ValidationError as wrong:
            raise BadTrace(f"line {line}: not a Mooncake request: {wrong}") from None
        if batch and parsed.timestamp != batch[0][1].timestamp:
            yield from _spread(batch, before, numbers, block_size)
            before, batch = batch[0][1].timestamp, []
        batch.append((line, parsed))
    if batch:
        yield from _spread(batch, before, numbers, block_size)


def _spread(
    batch: Sequence[tuple[int, _Row]], before: float | None, numbers: dict[int, int], block_size: int
) -> Iterator[Session]:
    at = batch[0][1].timestamp
    before = at if before is None else before
    if at < before:
        raise BadTrace(f"line {batch[0][0]}: timestamps go back from {before:g} to {at:g}")
    for place, (line, row) in enumerate(batch):
        arrives = (before + (at - before) * (place + 1) / len(batch)) / 1000
        turn = prompt_of_ids(row.hash_ids, numbers, row.input_length, row.output_length, line, block_size)
        yield Session(f"line {line}", [turn], arrives)


def prompt_of_ids(
    ids: Sequence[int], numbers: dict[int, int], tokens: int, answer: int, line: int, block_size: int
) -> Asked:
    """A prompt of which every 512-token block has an id, the last, partial one included.

    numbers: those of this trace's ids so far, in the order in which they came, so that an id may be anything;
    new ones are entered.
    """
    if tokens < 1 or len(ids) != -(-tokens // NATIVE):
        raise BadTrace(f"line {line}: {tokens} tokens do not have {len(ids)} blocks of {NATIVE}")
    per = NATIVE // block_size
    ranges: list[range] = []
    for each in ids:
        start = (numbers.setdefault(each, len(numbers)) + 1) * per
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, start + per)
        else:
            ranges.append(range(start, start + per))
    answer = max(1, answer)
    unseen = (line + 1) * KEY_SPACE  # nobody goes on from an answer: its blocks have no ids
    full, last = tokens // block_size, ranges[-1]
    ranges[-1] = range(last.start, last.stop - (len(ids) * per - full))
    return Asked(
        Pieces([*ranges, range(unseen, unseen + (tokens + answer) // block_size - full + 1)]), tokens, answer
    )
