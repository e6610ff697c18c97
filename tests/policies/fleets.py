"""Strategies for the fleets that policies are shown."""

from hypothesis import strategies as st

from policies.types import Candidate, Rates, Turn


def turn(prompt: int = 10_000, draw: float = 0.0, **more: int | str | bool) -> Turn:
    return Turn(prompt, draw, **more)  # type: ignore[arg-type]


draws = st.floats(0, 1, exclude_max=True)
tokens = st.integers(0, 20_000)

RATES = {
    "prefill_s": st.floats(1e-6, 1e-3),
    "growth_s": st.floats(0, 1e-8),
    "own_s": st.floats(0, 1e-3),
    "remote_s": st.floats(0, 1e-3),
    "first_s": st.floats(0, 1),
    "decode_s": st.floats(0, 1e-2),
    "disk_s": st.floats(0, 1e-3),
}


FIELDS = {
    "target": st.uuids().map(str),
    "excluded": st.sampled_from(["", "", "", "down", "cordoned", "model"]),
    "local_tokens": tokens,
    "pool_tokens": tokens,
    "own_segment_tokens": tokens,
    "disk_tokens": st.one_of(st.just(0), tokens),
    "coming_tokens": st.one_of(st.just(0), tokens),
    "queued_tokens": tokens,
    "queued_turns": st.integers(0, 5),
    "ahead_s": st.one_of(st.just(0.0), st.floats(0, 100)),
    "inflight": st.integers(0, 20),
    "foreign": st.floats(0, 3),
    "waiting": st.floats(0, 50),
    "running": st.integers(0, 30),
    "recent_tokens": st.floats(0, 1e6),
    "queued_s": st.floats(0, 20),
    "recent_s": st.floats(0, 100),
    "recent_pull_s": st.floats(0, 100),
    "held_tokens": st.integers(0, 50_000),
    "decoding_tokens": st.integers(0, 50_000),
    "capacity_tokens": st.sampled_from([0, 20_000, 60_000]),
    "turn_s": st.floats(0, 20),
    "pressure": st.floats(0, 1),
    "role": st.sampled_from(["both", "both", "prefill", "decode"]),
    "rank": st.sampled_from([None, 0, 1]),
    "weight": st.sampled_from([1.0, 1.0, 0.5, 3.0]),
    "rates": st.builds(Rates, **RATES),
}


def candidates(max_size: int = 8) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(Candidate, **FIELDS)
    return st.lists(one, max_size=max_size, unique_by=lambda c: c.target)


turns = st.builds(
    Turn,
    prompt_tokens=st.integers(0, 40_000),
    draw=draws,
    number=st.integers(0, 1000),
    session=st.sampled_from(["", "one", "another"]),
    head=st.integers(0, 2**64 - 1),
    new=st.booleans(),
)
