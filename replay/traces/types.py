"""What every trace is read into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from replay.chains import Pieces

# Keys of one session, of one head, of one recorded block: 2**40 numbers each, so that none meet.
KEY_SPACE: Final = 1 << 40
# What a trace may say of a turn, so that no session comes to more keys than its space has.
Tokens = Annotated[int, Meta(ge=0, le=1 << 32)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e15)]


class BadTrace(ValueError):
    """The file cannot be read as that format; the message names the line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of a session. `chain` has at least the keys of the blocks that prompt and answer fill.

    think_s: seconds between the end of the turn before and this one; of a first turn, unused.
    """

    chain: Pieces
    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0

    def blocks(self, size: int) -> int:
        """Those that prompt and answer fill."""
        return (self.prompt_tokens + self.output_tokens - 1) // size


@dataclass(frozen=True, slots=True)
class Session:
    """Turns one after the other: each waits for the end of the one before.

    arrives_s: when it begins, where the trace has clock times; None: it begins when there is room for it.
    """

    name: str
    turns: Sequence[Asked]
    arrives_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """copies: so many of the sessions are copies of others; as loaded the last ones."""

    block_size: int
    sessions: Sequence[Session]
    copies: int = 0
