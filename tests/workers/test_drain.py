"""How long a client that is turned away is told to wait."""

from workers.drain import DrainRate
from workers.leases import LeaseBook


def test_the_wait_follows_the_measured_rate() -> None:
    rate = DrainRate(0.0)
    assert rate.wait_s(0.0, turns=1) == 5.0
    for second in range(1, 301):
        rate.ended(float(second), turns=2, tokens=1000)
    assert 0.45 < rate.wait_s(300.0, turns=1) < 0.55
    assert 9 < rate.wait_s(300.0, tokens=10_000) < 11
    assert 9 < rate.wait_s(300.0, turns=1, tokens=10_000) < 11
    assert rate.wait_s(420.0, turns=1) > 10  # nothing ended for two minutes
    assert rate.wait_s(4000.0, turns=1) == 60.0


def test_a_young_measurement_counts_for_the_time_it_covers() -> None:
    rate = DrainRate(0.0)
    for second in (1.0, 2.0, 3.0):
        rate.ended(second, turns=1, tokens=0)
    assert 0.8 < rate.wait_s(3.0, turns=1) < 1.2


def test_the_book_measures_what_goes_and_sums_over_targets() -> None:
    now = 0.0
    book = LeaseBook(lambda: now)
    for step in range(20):
        now = float(step)
        first, second = book.take("a", 100), book.take("b", 50)
        assert (book.total.inflight, book.total.queued_tokens) == (2, 150)
        first.first_token()
        first.release()
        second.release()
    assert (book.total.inflight, book.total.queued_tokens) == (0, 0)
    assert 0.4 < book.wait_s(turns=1) < 0.6
    assert 0.9 < book.wait_s(tokens=150) < 1.1
