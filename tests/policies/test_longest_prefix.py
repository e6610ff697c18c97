"""Tables of situations for longest_prefix."""

import pytest

from fleets import turn
from policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from policies.types import Candidate

policy = LongestPrefix(LongestPrefixOptions(pull_cost=0.1, margin_tokens=1000, recent_weight=0.1))


SITUATIONS = [
    (
        "the longest holder wins over a shorter one",
        [Candidate("a", local_tokens=3200), Candidate("b", local_tokens=9600)],
        ("b", "local", "longest local prefix"),
    ),
    (
        "nobody holds anything: least queued tokens",
        [Candidate("a", queued_tokens=500), Candidate("b", queued_tokens=100)],
        ("b", "recompute", "no local prefix, least loaded"),
    ),
    (
        "own leases before what the worker reports",
        [Candidate("a", queued_tokens=0, waiting=9), Candidate("b", queued_tokens=1, waiting=0)],
        ("a", "recompute", "no local prefix, least loaded"),
    ),
    (
        "nobody holds it locally but the pool does: the least loaded pulls",
        [Candidate("a", pool_tokens=9600, inflight=1), Candidate("b", pool_tokens=9600)],
        ("b", "pull", "no local prefix, least loaded"),
    ),
    (
        "a busy holder within the margin keeps the turn",
        [
            Candidate("a", local_tokens=9600, pool_tokens=9600, queued_tokens=1900),
            Candidate("b", pool_tokens=9600),
        ],
        ("a", "local", "longest local prefix"),
    ),
    (
        "a holder behind by more than pulling costs plus the margin loses it",
        [
            Candidate("a", local_tokens=9600, pool_tokens=9600, queued_tokens=2000),
            Candidate("b", pool_tokens=9600),
        ],
        ("b", "pull", "holder busy"),
    ),
    (
        "without a pool leaving costs the whole prefix",
        [Candidate("a", local_tokens=9600, queued_tokens=2000), Candidate("b")],
        ("a", "local", "longest local prefix"),
    ),
    (
        "an idle holder that did far more than others lately loses a turn that has little to lose",
        [Candidate("a", local_tokens=3200, recent_tokens=50_000), Candidate("b", recent_tokens=100)],
        ("b", "recompute", "holder busy"),
    ),
    (
        "the same holder keeps a turn that has much to lose",
        [Candidate("a", local_tokens=9600, recent_tokens=50_000), Candidate("b", recent_tokens=100)],
        ("a", "local", "longest local prefix"),
    ),
    (
        "siblings meet where the first of them is being computed",
        [Candidate("a", coming_tokens=9600, queued_tokens=1000, inflight=1), Candidate("b")],
        ("a", "recompute", "longest local prefix"),
    ),
    (
        "until too much is ahead of them",
        [Candidate("a", coming_tokens=9600, queued_tokens=20_000, inflight=8), Candidate("b")],
        ("b", "recompute", "holder busy"),
    ),
    (
        "a holder that can't be chosen does not count",
        [Candidate("a", local_tokens=9600, excluded="cordoned"), Candidate("b", local_tokens=32)],
        ("b", "local", "longest local prefix"),
    ),
    ("nobody may be chosen", [Candidate("a", excluded="down")], (None, "none", "no eligible target")),
    ("there is nobody", [], (None, "none", "no eligible target")),
]


@pytest.mark.parametrize(
    ("candidates", "expected"), [s[1:] for s in SITUATIONS], ids=[s[0] for s in SITUATIONS]
)
def test_situations(candidates: list[Candidate], expected: tuple[str | None, str, str]) -> None:
    decision = policy(turn(), candidates)
    assert (decision.target, decision.action, decision.reason) == expected
    assert len(decision.scored) == len(candidates)


def test_b047_the_decision_shows_both_terms_and_the_margin_changes_it() -> None:
    busy = [
        Candidate("a", local_tokens=9600, pool_tokens=9600, queued_tokens=5000),
        Candidate("b", pool_tokens=9600),
    ]
    patient = LongestPrefix(LongestPrefixOptions(pull_cost=0.1, margin_tokens=100_000))
    assert policy(turn(), busy).target == "b"
    decision = patient(turn(), busy)
    assert decision.target == "a"
    terms = {s.candidate.target: dict(s.terms) for s in decision.scored}
    assert terms["a"] == {"queued": 5000.0, "inflight": 0.0, "recent": 0.0, "pull": 0.0, "compute": 400.0}
    assert terms["b"] == {"queued": 0.0, "inflight": 0.0, "recent": 0.0, "pull": 960.0, "compute": 400.0}


def shared(target: str, **load: float) -> Candidate:
    return Candidate(target, local_tokens=8000, **load)  # type: ignore[arg-type]


FIRST_TURNS = [
    ("a new session goes where its head is", [shared("a"), Candidate("b")], "a"),
    (
        "a new session leaves its head where more was done lately than the head takes",
        [shared("a", recent_tokens=9000), Candidate("b", recent_tokens=900)],
        "b",
    ),
    (
        "and where answers are under way that are as much",
        [shared("a", inflight=40), Candidate("b", inflight=8)],
        "b",
    ),
    ("a head in both is no reason for either", [shared("a", recent_tokens=10), shared("b")], "b"),
    (
        "with a pool a tenth of that is enough",
        [shared("a", recent_tokens=900, pool_tokens=8000), Candidate("b", pool_tokens=8000)],
        "b",
    ),
    (
        "a few siblings wait for their head where it is being computed",
        [Candidate("a", coming_tokens=8000, queued_tokens=8200, inflight=4), Candidate("b")],
        "a",
    ),
    (
        "many go elsewhere",
        [Candidate("a", coming_tokens=8000, queued_tokens=9800, inflight=9), Candidate("b")],
        "b",
    ),
    (
        "even to where more was done for sessions that were there before",
        [
            Candidate("a", coming_tokens=8000, queued_tokens=9800, inflight=9),
            Candidate("b", recent_tokens=30_000),
        ],
        "b",
    ),
]


@pytest.mark.parametrize(
    ("candidates", "target"), [s[1:] for s in FIRST_TURNS], ids=[s[0] for s in FIRST_TURNS]
)
def test_a_new_session_goes_by_load_sooner_than_one_that_is_there(
    candidates: list[Candidate], target: str
) -> None:
    default = LongestPrefix()
    asked = turn(8200, new=True)
    assert default(asked, candidates).target == target
    # Nothing of that moves a session that is there; a queue may, as far as the margin goes.
    assert LongestPrefix(LongestPrefixOptions(margin_tokens=1e6))(turn(8200), candidates).target == (
        "b" if candidates[1].local_tokens else "a"
    )
