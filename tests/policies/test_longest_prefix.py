"""Tables of situations for longest_prefix, and what must hold for every policy whatever it is shown."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import registry
from policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from policies.types import Candidate, Turn

policy = LongestPrefix(LongestPrefixOptions(pull_cost=0.1, margin_tokens=1000))


def turn(prompt: int = 10_000, draw: float = 0.0) -> Turn:
    return Turn(prompt, draw)


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
    assert terms["a"] == {"queued": 5000.0, "pull": 0.0, "compute": 400.0}
    assert terms["b"] == {"queued": 0.0, "pull": 960.0, "compute": 400.0}


@pytest.mark.parametrize("name", registry.names())
def test_b021_equal_candidates_share_evenly(name: str) -> None:
    decide = registry.make(name)
    fleet = [Candidate(t, local_tokens=64) for t in "abcd"]
    counts = Counter(decide(turn(100, i / 400), fleet).target for i in range(400))
    assert counts == {"a": 100, "b": 100, "c": 100, "d": 100}


@pytest.mark.parametrize("name", registry.names())
def test_b041_a_dead_idle_worker_does_not_distort_the_choice(name: str) -> None:
    fleet = [
        Candidate("busy1", local_tokens=9600, queued_tokens=700, inflight=5),
        Candidate("busy2", queued_tokens=700, inflight=5),
        Candidate("dead", excluded="down"),
    ]
    with_dead = registry.make(name)(turn(), fleet)
    assert with_dead.target == registry.make(name)(turn(), fleet[:2]).target


def candidates() -> st.SearchStrategy[list[Candidate]]:
    tokens = st.integers(0, 20_000)
    one = st.builds(
        Candidate,
        target=st.uuids().map(str),
        excluded=st.sampled_from(["", "", "", "down", "cordoned", "model"]),
        local_tokens=tokens,
        pool_tokens=tokens,
        queued_tokens=tokens,
        inflight=st.integers(0, 20),
        waiting=st.floats(0, 50),
    )
    return st.lists(one, max_size=8, unique_by=lambda c: c.target)


draws = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize("name", registry.names())
@given(fleet=candidates(), draw=draws, data=st.data())
def test_every_policy_chooses_an_eligible_target_whatever_the_order(
    name: str, fleet: list[Candidate], draw: float, data: st.DataObject
) -> None:
    decide = registry.make(name)
    decision = decide(turn(20_000, draw), fleet)
    able = {c.target for c in fleet if not c.excluded}
    assert decision.target in able if able else decision.target is None
    shuffled = data.draw(st.permutations(fleet))
    assert decide(turn(20_000, draw), shuffled).target == decision.target


@given(fleet=candidates(), draw=draws, more=st.integers(1, 5000))
def test_more_local_prefix_never_makes_a_target_lose(fleet: list[Candidate], draw: float, more: int) -> None:
    before = policy(turn(40_000, draw), fleet)
    if before.target is None:
        return
    grown = [
        replace(c, local_tokens=c.local_tokens + more) if c.target == before.target else c for c in fleet
    ]
    assert policy(turn(40_000, draw), grown).target == before.target


def test_unknown_names_and_options_say_what_exists() -> None:
    with pytest.raises(registry.UnknownPolicy, match="least_loaded, longest_prefix, random"):
        registry.make("fastest")
    with pytest.raises(registry.BadPolicyOptions, match="margin_tokens"):
        registry.make("longest_prefix", {"margin": 3})
    with pytest.raises(registry.BadPolicyOptions, match="margin_tokens"):
        registry.make("longest_prefix", {"margin_tokens": "many"})
