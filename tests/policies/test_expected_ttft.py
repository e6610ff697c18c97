"""Tables of situations for expected_ttft, with rates that make the sums easy: 1 ms a computed token."""

import pytest
from msgspec.structs import replace

from fleets import turn
from policies.cost import TERMS, costs, predicted_ttft
from policies.expected_ttft import ExpectedTtft, ExpectedTtftOptions
from policies.types import Candidate, Rates

RATES = Rates(1e-3, growth_s=0.0, own_s=2e-5, remote_s=1e-4, disk_s=4e-4, first_s=0.01, decode_s=0.0)
decide = ExpectedTtft(ExpectedTtftOptions(recent_weight=0.1))


def candidate(target: str, **more: float | str) -> Candidate:
    return replace(Candidate(target, rates=RATES), **more)


SITUATIONS = [
    (
        "an idle holder",
        [candidate("a", local_tokens=9600, pool_tokens=9600), candidate("b", pool_tokens=9600)],
        ("a", "local", "longest local prefix is soonest"),
    ),
    (
        "a holder with more ahead of it than the pull takes",
        [
            candidate("a", local_tokens=9600, pool_tokens=9600, queued_turns=1, ahead_s=1.3),
            candidate("b", pool_tokens=9600),
        ],
        ("b", "pull", "sooner than the holder"),
    ),
    (
        "a holder with less ahead of it than the pull takes",
        [
            candidate("a", local_tokens=9600, pool_tokens=9600, queued_turns=1, ahead_s=0.9),
            candidate("b", pool_tokens=9600),
        ],
        ("a", "local", "longest local prefix is soonest"),
    ),
    (
        "of two that pull, the one with the blocks in its own segment",
        [
            candidate("a", pool_tokens=9600),
            candidate("b", pool_tokens=9600, own_segment_tokens=9600),
        ],
        ("b", "pull", "soonest"),
    ),
    (
        "of equals, the one with more in its own segment",
        [
            candidate("a", pool_tokens=100, own_segment_tokens=20, recent_tokens=0.0),
            candidate("b", pool_tokens=100, own_segment_tokens=90, recent_tokens=9.0),
        ],
        ("b", "pull", "soonest"),
    ),
    (
        "what waits there counts by its time, not by its tokens",
        [
            candidate("a", queued_tokens=5000, queued_turns=1, ahead_s=0.1),
            candidate("b", queued_tokens=500, queued_turns=1, ahead_s=3.0),
        ],
        ("a", "recompute", "soonest"),
    ),
    (
        "a slow worker's prefix is worth no more than computing it elsewhere",
        [
            replace(candidate("a"), local_tokens=5000, rates=replace(RATES, prefill_s=3e-3)),
            candidate("b"),
        ],
        ("b", "recompute", "sooner than the holder"),
    ),
    (
        "requests that others sent and the worker reports",
        [
            candidate("a", waiting=3.0, foreign=3.0),
            candidate("b", queued_tokens=1500, queued_turns=1, ahead_s=1.5, inflight=1),
        ],
        ("b", "recompute", "soonest"),
    ),
    (
        "but not those that were waiting when it reported and have ended since",
        [candidate("a", local_tokens=9600, waiting=3.0, running=2.0), candidate("b")],
        ("a", "local", "longest local prefix is soonest"),
    ),
    (
        "siblings meet behind the first of them",
        [
            candidate("a", coming_tokens=9600, queued_turns=1, ahead_s=8.0, inflight=1),
            candidate("b"),
        ],
        ("a", "recompute", "soonest behind a turn with the same head"),
    ),
    (
        "until computing it again is sooner",
        [
            candidate("a", coming_tokens=9600, queued_turns=6, ahead_s=12.0, inflight=6),
            candidate("b"),
        ],
        ("b", "recompute", "soonest"),
    ),
    (
        "making room where blocks will be needed again has a price",
        [candidate("a", pressure=0.5), candidate("b", queued_turns=1, ahead_s=3.0)],
        ("b", "recompute", "soonest"),
    ),
    (
        "work it did lately sends a session's first turn elsewhere, though the head is there",
        [candidate("a", local_tokens=2000, recent_s=40.0), candidate("b", recent_s=10.0)],
        ("b", "recompute", "sooner than the holder"),
    ),
    (
        "blocks that only a disk has are worth less than a wait",
        [
            candidate("a", pool_tokens=9600, disk_tokens=9600),
            candidate("b", pool_tokens=9600, queued_turns=1, ahead_s=2.0),
        ],
        ("b", "pull", "soonest"),
    ),
    (
        "a holder without room for the context, though nothing waits there",
        [
            candidate(
                "a",
                local_tokens=9600,
                pool_tokens=9600,
                held_tokens=95_000,
                decoding_tokens=95_000,
                capacity_tokens=100_000,
                turn_s=30.0,
            ),
            candidate("b", pool_tokens=9600, capacity_tokens=100_000),
        ],
        ("b", "pull", "sooner than the holder"),
    ),
    (
        "pulls over a link that is busy keep others waiting",
        [
            candidate("a", local_tokens=9600, pool_tokens=9600, queued_turns=1, ahead_s=1.2),
            candidate("b", pool_tokens=9600, recent_pull_s=50.0),
        ],
        ("a", "local", "longest local prefix is soonest"),
    ),
    ("nobody may be chosen", [candidate("a", excluded="down")], (None, "none", "no eligible target")),
]


@pytest.mark.parametrize(
    ("candidates", "expected"), [s[1:] for s in SITUATIONS], ids=[s[0] for s in SITUATIONS]
)
def test_situations(candidates: list[Candidate], expected: tuple[str | None, str, str]) -> None:
    decision = decide(turn(10_000), candidates)
    assert (decision.target, decision.action, decision.reason) == expected


def test_every_term_is_what_it_says() -> None:
    rates = Rates(1e-3, growth_s=1e-7, own_s=2e-5, remote_s=1e-4, first_s=0.01, decode_s=0.002, disk_s=5e-4)
    one = Candidate(
        "a",
        local_tokens=1000,
        pool_tokens=4000,
        own_segment_tokens=1000,
        disk_tokens=500,
        queued_tokens=500,
        queued_turns=1,
        ahead_s=0.8,
        waiting=3.0,
        foreign=2.0,
        inflight=4,
        queued_s=0.5,
        recent_s=10.0,
        recent_pull_s=10.0,
        held_tokens=90_000,
        decoding_tokens=60_000,
        capacity_tokens=93_000,
        turn_s=4.0,
        pressure=0.5,
        rates=rates,
    )
    asked = turn(6000)
    # 10 s of each kind of work within a fading minute.
    busy = 10 * 0.6931 / 60
    terms = dict(zip(TERMS, costs(asked, one), strict=True))
    assert terms == pytest.approx(
        {
            "queue": 0.8 + 2 * 1.024,
            "room": 3000 / 60_000 * 4.0,
            "pull_own": 0.02,
            "pull_remote": 0.15,
            "pull_disk": 500 * 5e-4,
            "prefill": 2.0 + 1e-7 * 2000 * 5000,
            "first_step": 0.01,
            "decode": 6 * 0.002 * (1 + 2000 / 8192),
            "eviction": 0.5 * 5000 * 1e-4,
            "delay": (2.0 + 1e-7 * 2000 * 5000 + 0.02 + 0.15 + 0.25) * busy / (1 - busy),
            "balance": 10 * 0.1,
        }
    )
    prices = terms["eviction"] + terms["delay"] + terms["balance"]
    assert predicted_ttft(costs(asked, one)) == pytest.approx(sum(terms.values()) - prices)
    assert decide(asked, [one]).scored[0].terms == terms


def test_a_rate_that_is_a_little_better_does_not_take_everything() -> None:
    fleet = [
        replace(candidate(t), rates=replace(RATES, prefill_s=1e-3 + i * 1e-6)) for i, t in enumerate("abc")
    ]
    chosen = {decide(turn(1000, i / 50), fleet).target for i in range(50)}
    assert chosen == {"a", "b", "c"}


def test_a_session_is_not_moved_for_a_tenth_of_what_is_expected_anyway() -> None:
    """What its next turn finds on the other target is less, and predictions are seldom that exact."""
    other = candidate("other", pool_tokens=9000)
    for ahead_s, chosen in ((1.1, "holder"), (1.3, "other")):
        holder = candidate("holder", local_tokens=9000, pool_tokens=9000, queued_turns=1, ahead_s=ahead_s)
        assert decide(turn(10_000), [holder, other]).target == chosen


def test_a_session_begins_behind_its_siblings_only_where_their_work_is_no_more_than_the_head() -> None:
    """What waits there is there for good: all who follow would wait, and run out of room, on one target."""
    behind = candidate("a", coming_tokens=8000, queued_tokens=8400, queued_turns=2, queued_s=8.4, ahead_s=0.4)
    idle = candidate("b")
    decide = ExpectedTtft()
    assert decide(turn(8200), [behind, idle]).target == "a"
    assert decide(turn(8200, new=True), [behind, idle]).target == "b"
