"""Tables of situations for the policies that go by load, by turns or by name."""

from collections import Counter

import pytest

from fleets import turn
from policies import registry
from policies.sticky import Sticky, StickyOptions
from policies.types import Candidate

SITUATIONS = [
    ("least_loaded", [Candidate("a", queued_tokens=5), Candidate("b", inflight=9)], "b"),
    ("least_loaded", [Candidate("a", inflight=2), Candidate("b", inflight=1, waiting=7)], "b"),
    ("least_loaded", [Candidate("a", waiting=2), Candidate("b", waiting=1)], "b"),
    ("least_loaded", [Candidate("a", recent_tokens=9.0), Candidate("b", recent_tokens=8.0)], "b"),
    ("least_loaded", [Candidate("a", queued_tokens=10, weight=4), Candidate("b", queued_tokens=3)], "a"),
    ("power_of_two", [Candidate("a", queued_tokens=5), Candidate("b")], "b"),
    ("power_of_two", [Candidate("a", queued_tokens=5)], "a"),
    ("random", [Candidate("a", excluded="down"), Candidate("b", queued_tokens=9)], "b"),
]


@pytest.mark.parametrize(("name", "fleet", "expected"), SITUATIONS)
def test_situations(name: str, fleet: list[Candidate], expected: str) -> None:
    assert registry.make(name)(turn(draw=0.7), fleet).target == expected


def test_power_of_two_never_takes_the_most_loaded() -> None:
    fleet = [Candidate(t, queued_tokens=i) for i, t in enumerate("abcd")]
    counts = Counter(registry.make("power_of_two")(turn(draw=i / 1200), fleet).target for i in range(1200))
    assert counts == pytest.approx({"a": 600, "b": 400, "c": 200}, abs=3)


def test_round_robin_goes_round() -> None:
    fleet = [Candidate("c"), Candidate("a"), Candidate("x", excluded="down"), Candidate("b")]
    decide = registry.make("round_robin")
    assert [decide(turn(number=n), fleet).target for n in range(4)] == ["a", "b", "c", "a"]


def test_a_session_keeps_its_target_and_few_move_when_one_leaves() -> None:
    decide = registry.make("session")
    fleet = [Candidate(f"w{i}") for i in range(8)]
    before = {s: decide(turn(draw=0.1, session=f"s{s}"), fleet).target for s in range(400)}
    assert before == {s: decide(turn(draw=0.9, session=f"s{s}"), fleet).target for s in range(400)}
    after = {s: decide(turn(session=f"s{s}"), fleet[1:]).target for s in range(400)}
    assert all(after[s] == before[s] for s in before if before[s] != "w0")
    assert min(Counter(before.values()).values()) > 30


def test_a_target_above_its_bound_passes_sessions_on_to_the_next_in_their_order() -> None:
    decide = Sticky("session", StickyOptions(factor=1.25, slack_tokens=1000))
    fleet = [Candidate(t) for t in "abc"]
    home = decide(turn(session="s"), fleet).target
    busy = [Candidate(t, queued_tokens=9000 if t == home else 0) for t in "abc"]
    away = decide(turn(session="s"), busy)
    assert away.target != home
    assert away.reason == "own target above its bound"
    assert decide(turn(session="s"), [c for c in fleet if c.target != home]).target == away.target


def test_prompts_that_begin_alike_meet_until_their_target_has_its_share() -> None:
    decide = registry.make("prefix_hash")
    work = dict.fromkeys("abcd", 0.0)
    for i in range(100):
        fleet = [Candidate(t, recent_tokens=work[t]) for t in "abcd"]
        work[decide(turn(2000, i / 100, head=77), fleet).target or ""] += 2000
    assert max(work.values()) <= 1.25 * sum(work.values()) / 4 + 16_384 + 2000


@pytest.mark.parametrize("name", ["session", "prefix_hash"])
def test_without_a_name_to_go_by_load_decides(name: str) -> None:
    decision = registry.make(name)(turn(), [Candidate("a", queued_tokens=3), Candidate("b")])
    assert (decision.target, decision.reason) == ("b", "nothing to go by, least loaded")
