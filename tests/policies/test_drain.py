"""How long a client that is turned away is told to wait."""

from fleets import turn
from policies.drain import UnderWay
from policies.ledger import Ledger
from policies.types import Candidate


def rate_of(*seconds: float, tokens: int = 0, begun: float = 0.0) -> UnderWay:
    """From `begun` on a turn and `tokens` went in each of `seconds`, and another turn is under way."""
    load = UnderWay(0.0)
    load.sent(0, begun)
    for second in seconds:
        load.sent(tokens, second)
        load.went(second, 1, tokens)
    return load


def test_the_wait_follows_the_measured_rate() -> None:
    assert UnderWay(0.0).wait_s(0.0, turns=1) == 5.0
    rate = rate_of(*(half / 2 for half in range(2, 601)), tokens=500)
    assert 0.45 < rate.wait_s(300.0, turns=1) < 0.55
    assert 9 < rate.wait_s(300.0, tokens=10_000) < 11
    assert 9 < rate.wait_s(300.0, turns=1, tokens=10_000) < 11
    assert rate.wait_s(420.0, turns=1) > 10  # nothing ended for two minutes
    assert rate.wait_s(4000.0, turns=1) == 60.0


def test_a_young_measurement_counts_for_the_time_it_covers() -> None:
    assert 0.8 < rate_of(1.0, 2.0, 3.0).wait_s(3.0, turns=1) < 1.2


def test_time_in_which_nothing_is_under_way_does_not_make_those_who_come_then_wait() -> None:
    load = rate_of(102.0, begun=100.0)
    assert 1.9 < load.wait_s(102.0, turns=1) < 2.1
    load.went(102.0, 1, 0)
    load.sent(0, 4000.0)
    assert 1 < load.wait_s(4001.0, turns=1) < 2
    assert load.wait_s(4200.0, turns=1) == 60.0


def test_short_turns_with_pauses_between_them_count_for_the_time_that_they_take() -> None:
    load = UnderWay(0.0)
    for second in map(float, range(20)):
        load.sent(0, second)
        load.went(second + 0.4, 1, 0)
    assert 0.3 < load.wait_s(20.0, turns=1) < 0.5


def test_many_that_end_at_once_count_as_much() -> None:
    rate = rate_of(*(hundredth / 100 for hundredth in range(1000)))
    assert 0.009 < rate.wait_s(10.0, turns=1) < 0.011


def test_the_ledger_measures_what_goes_and_sums_over_targets() -> None:
    ledger = Ledger()
    total = ledger.total
    for now in map(float, range(20)):
        first, second = (
            ledger.sent(turn(size), Candidate(name), now) for name, size in (("a", 100), ("b", 50))
        )
        assert (total.inflight, total.queued_tokens) == (2, 150)
        first.first_token(now + 1)
        first.ended(now + 1)
        second.ended(now + 1)
    assert (total.inflight, total.queued_tokens) == (0, 0)
    assert 0.4 < total.wait_s(19.0, turns=1) < 0.6
    assert 0.9 < total.wait_s(19.0, tokens=150) < 1.1
