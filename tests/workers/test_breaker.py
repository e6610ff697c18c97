"""The breaker of one worker, in time that tests make."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.breaker import Breaker, BreakerOptions
from workers.fleet import Fleet
from workers.worker import EngineReport

OPTIONS = BreakerOptions(failures=3, share=0, open_s=10.0)
BY_SHARE = BreakerOptions(failures=0, share=0.5, open_s=10.0)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    assert [breaker.failed(at) for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(5):
        breaker.failed(0)
        breaker.failed(0)
        breaker.succeeded()
    assert breaker.state(0) == "closed"
    assert opened().state(0) == "open"
    never = Breaker(BreakerOptions(failures=0, share=0))
    for _ in range(100):
        never.failed(0)
    assert never.closed


def ended(breaker: Breaker, turns: str, now: float = 0.0) -> None:
    """What became of its turns, in order: x failed, anything else went well."""
    for turn in turns:
        if turn == "x":
            breaker.failed(now, "500")
        else:
            breaker.succeeded()


def test_half_of_the_recent_turns_failed_open_it_whatever_went_well_between() -> None:
    breaker = Breaker(BY_SHARE)
    ended(breaker, "x." * 4 + "x")
    assert breaker.closed  # of 9 turns nothing is concluded
    ended(breaker, ".x")
    assert breaker.state(0) == "open"
    assert breaker.said(0) == "failed 6 of its last 11 turns (the last: 500)"
    breaker.sent(10.0)
    assert breaker.answered()
    ended(breaker, "." + "x" * 8)
    assert breaker.closed  # the turns before its rest count no more
    ended(breaker, "x")
    assert not breaker.closed


def test_turns_long_ago_and_few_failures_open_nothing() -> None:
    breaker = Breaker(BY_SHARE)
    ended(breaker, "x" * 9)
    ended(breaker, "." * 20 + ".x" * 9)
    assert breaker.closed  # 9 of the last 20: those before are forgotten
    ended(breaker, "." + "x", now=300.0)
    assert breaker.closed  # for as long none failed
    ended(breaker, ("." * 3 + "x") * 30, now=300.0)
    assert breaker.closed
    assert breaker.said(300.0) == "failed 5 of its last 20 turns (the last: 500)"
    assert breaker.said(600.0) == ""


def test_another_process_is_not_blamed_for_what_the_last_one_failed() -> None:
    breaker = Breaker(BY_SHARE)
    ended(breaker, "x" * 9)
    breaker.renewed(0)
    assert breaker.said(0) == ""
    ended(breaker, "x")
    assert breaker.closed


def test_a_worker_that_fails_some_turns_is_said_once_a_minute_while_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    fleet = Fleet(breaker=BY_SHARE, clock=lambda: now)
    worker = fleet.add("http://h:1", "w")
    fleet.mark_up(worker, EngineReport(started=1.0), (), ())
    for _ in range(45):
        for _ in range(3):
            worker.breaker.succeeded()
        fleet.failed(worker, "500")
        now += 2.0
    assert fleet.failing(worker) == "failed 5 of its last 20 turns (the last: 500)"
    assert caplog.messages == [
        "worker w failed 3 of its last 12 turns (the last: 500)",
        "worker w failed 5 of its last 20 turns (the last: 500)",
    ]


def test_one_trial_at_a_time_closes_it_or_makes_the_next_one_wait_longer() -> None:
    breaker = opened()
    assert not breaker.allows(9.9)
    assert breaker.state(10.0) == "half-open"
    breaker.sent(10.0)
    assert not breaker.allows(10.1)
    assert breaker.failed(11.0)
    assert not breaker.allows(30.9)
    assert breaker.rest_s(30.0) == 1.0
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
    assert not breaker.failed(1.0)
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


def test_each_rest_of_a_failing_worker_is_said_and_a_new_process_is_tried_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    fleet = Fleet(breaker=OPTIONS, clock=lambda: now)
    worker = fleet.add("http://h:1", "w")
    fleet.mark_up(worker, EngineReport(started=1.0), (), ())
    for _ in range(5):
        fleet.sent(worker)
        fleet.failed(worker, "500")
    assert fleet.failing(worker) == "failed 5 turns in a row (the last: 500): gets none for 10 s"
    now = 111.0
    assert fleet.failing(worker) == "failed 5 turns in a row (the last: 500): the next one is its trial"
    fleet.sent(worker)
    fleet.failed(worker, "reset")
    assert caplog.messages == [
        "worker w failed 3 turns in a row (the last: 500): gets none for 10 s",
        "worker w failed 6 turns in a row (the last: reset): gets none for 20 s",
    ]
    fleet.mark_up(worker, EngineReport(started=1.0), (), ())
    assert fleet.breaker_state(worker) == "open"
    fleet.mark_up(worker, EngineReport(started=2.0), (), ())
    assert fleet.breaker_state(worker) == "half-open"
    fleet.sent(worker)
    fleet.answered(worker)
    assert fleet.failing(worker) == ""


def test_a_worker_ramps_up_after_it_came_back() -> None:
    now = 100.0
    fleet = Fleet(ramp_s=10.0, clock=lambda: now)
    worker = fleet.add("http://h:1", "w")
    fleet.mark_up(worker, worker.report, (), ())
    assert fleet.ramps([worker]) == [0]
    now = 105.0
    assert fleet.ramps([worker]) == [0.5]
    now = 120.0
    assert not fleet.ramps([worker])
    fleet.cordon("w", True)
    fleet.cordon("w", False)
    assert fleet.ramps([worker]) == [0]
    assert not Fleet(ramp_s=0.0).ramps([worker])


def test_a_second_missed_probe_says_that_the_worker_is_silent_once() -> None:
    fleet = Fleet()
    worker = fleet.add("http://h:1", "w")
    told: list[str] = []
    fleet.listen(lambda event, _: told.append(event))
    for _ in range(2):
        fleet.mark_up(worker, worker.report, (), ())
        for _ in range(4):
            fleet.mark_down(worker, "/health timed out")
    assert told == ["up", "back", "lost", "silent"] * 2
