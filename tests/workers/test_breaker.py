"""The breaker of one worker, in time that tests make."""

from hypothesis import given
from hypothesis import strategies as st

from workers.breaker import Breaker, BreakerOptions
from workers.fleet import Fleet

OPTIONS = BreakerOptions(failures=3, open_s=10.0)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    assert [breaker.failed(at) for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(5):
        assert not breaker.failed(0)
        assert not breaker.failed(0)
        breaker.succeeded()
    assert breaker.state(0) == "closed"
    assert opened().state(0) == "open"
    never = Breaker(BreakerOptions(failures=0))
    assert not any(never.failed(0) for _ in range(100))


def test_one_trial_at_a_time_closes_it_or_makes_the_next_one_wait_longer() -> None:
    breaker = opened()
    assert not breaker.allows(9.9)
    assert breaker.state(10.0) == "half-open"
    breaker.sent(10.0)
    assert not breaker.allows(10.1)
    breaker.failed(11.0)
    assert not breaker.allows(30.9)
    breaker.sent(31.0)
    assert breaker.answered()
    assert breaker.state(31.0) == "closed"
    assert breaker.failed(32.0)  # on trust: one more failure is enough


def test_a_trial_that_was_cancelled_blocks_nothing() -> None:
    breaker = opened()
    breaker.sent(10.0)
    assert breaker.allows(20.0)


def test_turns_sent_before_it_opened_neither_close_it_nor_lengthen_it() -> None:
    breaker = opened()
    breaker.failed(1.0)
    breaker.succeeded()
    assert not breaker.answered()
    assert breaker.state(9.0) == "open"
    assert breaker.allows(10.0)


@given(st.lists(st.tuples(st.sampled_from(["failed", "answered", "succeeded", "sent"]), st.floats(0, 50))))
def test_whatever_happens_a_trial_comes_in_bounded_time(steps: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(OPTIONS), 0.0
    for step, pause in steps:
        now += pause
        if step == "failed":
            breaker.failed(now)
        elif step == "sent" and breaker.allows(now):
            breaker.sent(now)
        elif step == "answered":
            breaker.answered()
        elif step == "succeeded":
            breaker.succeeded()
    assert breaker.allows(now + 80.0)


def test_a_worker_ramps_up_after_it_came_back() -> None:
    now = 100.0
    fleet = Fleet(ramp_s=10.0, clock=lambda: now)
    worker = fleet.add("http://h:1", "w")
    fleet.mark_up(worker, worker.report, (), ())
    assert fleet.ramps([worker]) == [0]
    now = 105.0
    assert fleet.ramps([worker]) == [0.5]
    now = 120.0
    assert fleet.ramps([worker]) == [1]
    fleet.cordon("w", True)
    fleet.cordon("w", False)
    assert fleet.ramps([worker]) == [0]
    assert Fleet(ramp_s=0.0).ramps([worker]) == [1]


def test_a_second_missed_probe_says_that_the_worker_is_silent_once() -> None:
    fleet = Fleet()
    worker = fleet.add("http://h:1", "w")
    told: list[str] = []
    fleet.listen(lambda event, _: told.append(event))
    for _ in range(2):
        fleet.mark_up(worker, worker.report, (), ())
        for _ in range(4):
            fleet.mark_down(worker, "/health timed out")
    assert told == ["up", "lost", "silent"] * 2
