"""What every API's way to write an answer has in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workers.sim.calls import ToolCall
from workers.sim.vocabulary import Answer


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a request so far. cached: of the last prompt only, as vLLM counts; created: newly cached."""

    prompt: int
    output: int
    cached: int
    created: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete answer. text: with the prompt in front where that was asked for."""

    answer: Answer
    text: str
    prompt_logprobs: Sequence[dict[str, Any] | None] | None = None


class Form(Protocol):
    """The answer to one request, written as its API has it. Every piece of bytes is one write to the client.

    call: the tool call that every choice consists of, None for text.
    """

    @property
    def call(self) -> ToolCall | None: ...

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        """The response that is not streamed."""
        ...

    def begin(self, counts: Counts) -> Iterable[bytes]:
        """What a stream starts with, before any token is there."""
        ...

    def piece(self, index: int, answer: Answer, start: int, end: int, counts: Counts) -> Iterable[bytes]:
        """What tokens `start` to `end - 1` of choice `index` add. `counts` is of that choice alone."""
        ...

    def close(self, counts: Counts) -> Iterable[bytes]:
        """What a stream ends with."""
        ...


def added_text(answer: Answer, start: int, end: int) -> str:
    return "".join(answer.pieces[start:end])


def span(answer: Answer, start: int, end: int) -> tuple[int, int]:
    """Tokens `start` to `end - 1` as a range of characters."""
    before = sum(map(len, answer.pieces[:start]))
    return before, before + len(added_text(answer, start, end))
