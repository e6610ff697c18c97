"""The scaling workload of the article on vLLM and the Mooncake Store (vLLM blog, 2026-05-06)."""

from __future__ import annotations

from replay.traces.codex_like import growing
from replay.traces.types import Session, Trace


def generate(
    sessions: int,
    block_size: int,
    *,
    common: int = 20_000,
    first: int = 10_000,
    new: int = 2_048,
    answer: int = 900,
    turns: int = 30,
    head: int | None = None,
) -> Trace:
    """Every session: `common` tokens that all share, `first` of its own, then `turns - 1` times `new` more;
    answers of fixed length, no thinking between turns. Numbers are the article's.
    head: tokens shared at most.
    """
    shared = common if head is None else min(head, common)
    steps = [(common + first, answer), *[(new, answer)] * (turns - 1)]
    made: list[Session] = [
        growing(f"scaling {number}", number, shared, steps, [0.0] * turns, block_size)
        for number in range(sessions)
    ]
    return Trace(block_size, made)
