"""What targets did lately counts as it was booked, whatever their rates seem to be since."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleets import turn
from policies.candidates import Prefix, Standing, candidate
from policies.cost import HALF_LIFE_S
from policies.expected_ttft import ExpectedTtft
from policies.ledger import Ledger
from policies.page import Lease
from policies.rates import Work
from policies.recent import Booked, Recent
from policies.sessions import Sessions
from policies.types import Candidate, Rates

RATES = Rates(1e-3, growth_s=1e-7, own_s=2e-5, remote_s=1e-4, first_s=0.5, decode_s=0.0)


@given(
    turns=st.lists(
        st.tuples(st.integers(1, 5000), st.sampled_from([1 / 3, 1.0, 3.0])), min_size=1, max_size=30
    )
)
def test_a_rate_that_swings_by_three_changes_nothing_of_the_past(turns: list[tuple[int, float]]) -> None:
    ledger, now, expected = Ledger(RATES), 100.0, 0.0
    for tokens, slower in turns:
        rates = ledger.rates("w", now)
        booked = tokens * rates.prefill_s + tokens * tokens / 2 * rates.growth_s
        lease = ledger.sent(turn(tokens), Candidate("w"), now)
        lease.first_token(now + slower * (0.5 + tokens * 1e-3))
        lease.ended(now + 20.0)
        now += 20.0
        expected = (expected + booked) * 0.5 ** (20.0 / HALF_LIFE_S)
        assert ledger.load("w", now).recent_s == pytest.approx(expected)


def test_what_waits_is_not_recent_yet_but_will_be() -> None:
    ledger = Ledger(RATES)
    lease = ledger.sent(turn(1000), Candidate("w", pool_tokens=600, own_segment_tokens=200), 0.0)
    load = ledger.load("w", 0.0)
    computing_s = 0.4 + 400 * 800 * 1e-7
    assert (load.queued_s, load.recent_s) == (pytest.approx(computing_s), 0.0)
    # As if its own segment were as far away as the others.
    assert load.recent_pull_s == pytest.approx(0.06)
    lease.first_token(60.0)
    load = ledger.load("w", 60.0)
    assert (load.queued_s, load.recent_s) == (0.0, pytest.approx(computing_s / 2))


def test_work_is_taken_back_as_far_as_it_has_not_faded() -> None:
    recent, booked = Recent(), Booked.of(Work(tokens=1000, context=5e5, own=50, remote=50, turns=1), RATES)
    recent.add(booked, 0.0)
    recent.add(booked, HALF_LIFE_S)
    recent.take_back(booked, 0.5, 0.0)
    left, whole = recent.now(HALF_LIFE_S), booked
    for name in ("tokens", "pulled", "seconds", "pull_s"):
        assert getattr(left, name) == pytest.approx(1.25 * getattr(whole, name))
    recent.take_back(booked, 1.0, 86_400.0)
    assert recent.now(HALF_LIFE_S) == left


class Pair:
    """Two workers that compute 8,000 tokens a second, after a minute of bursts of tiny turns on both.

    For some turns one or the other has less of its processor, which others use, too.
    """

    def __init__(self, seed: int) -> None:
        self.ledger, self.sessions, self.random, self.now = Ledger(), Sessions(), Random(seed), 100.0
        self.held: dict[tuple[int, str], int] = {}
        self.slower = {"a": 1.0, "b": 1.0}
        self.number = 0
        self.policy = ExpectedTtft()
        for burst in range(12):
            for talk in range(30):
                self.turn(30 * burst + talk, 400 + talk, 0.05)
            self.now += 4.0

    def turn(self, session: int, size: int, pause_s: float) -> str:
        self.now += pause_s
        now, ledger = self.now, self.ledger
        keys = range(1000 * session, 1000 * session + size // 16)
        known = self.sessions.find(f"s{session}", "m", keys)
        fleet: list[Candidate] = []
        for target in ("a", "b"):
            prefix = Prefix(local=self.held.get((session, target), 0))
            own = known.own(target, now)
            load, rates = ledger.load(target, now), ledger.rates(target, now, "m")
            fleet.append(candidate(target, load, rates, Standing(), prefix, own=own))
        asked = turn(size, self.random.random(), number=self.number, session=known.name, new=known.new)
        self.number += 1
        chosen = self.policy(asked, fleet).chosen
        assert chosen is not None
        uncached = size - chosen.cached_tokens
        self.sessions.placed(
            known, "m", keys, chosen.target, now, tokens=size, uncached=uncached, block_size=16
        ).ended(now)
        lease: Lease = ledger.sent(asked, chosen, now, group="m")
        if self.random.random() < 0.15:
            self.slower[chosen.target] = self.random.choice((0.5, 1.0, 1.0, 3.0))
        self.now += (0.02 + uncached / 8000) * self.slower[chosen.target] * self.random.uniform(0.8, 1.25)
        lease.first_token(self.now)
        lease.ended(self.now)
        self.held[session, chosen.target] = size
        return chosen.target


def test_an_idle_holder_keeps_its_session_after_bursts_of_tiny_turns() -> None:
    left = 0
    for seed in range(12):
        pair = Pair(seed)
        left += len({pair.turn(999, 600 + 230 * n, 1.0) for n in range(8)}) > 1
    # With all recent work valued at the rates of the moment 3 of them left.
    assert left == 0


def test_a_holder_that_seems_slower_for_once_does_not_seem_busier() -> None:
    ledger = Ledger(RATES)
    for target in ("holder", "other"):
        for _ in range(50):
            ledger.sent(turn(500), Candidate(target), 0.0).first_token(0.0)
    slower = replace(RATES, prefill_s=3 * RATES.prefill_s)
    fleet = [
        candidate("holder", ledger.load("holder", 1.0), slower, Standing(), Prefix(local=900)),
        candidate("other", ledger.load("other", 1.0), RATES, Standing()),
    ]
    assert ExpectedTtft()(turn(1000), fleet).target == "holder"
