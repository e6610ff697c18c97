"""What is said of decisions that went wrong or took long."""

import pytest

from gateway.routing.watch import DecisionWatch


def test_slow_and_failed_decisions_are_said_once_a_minute_and_slow_ones_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow: list[str] = []
    now = [0.0]
    watch = DecisionWatch(slow.append, lambda: now[0])
    watch.decided("quick", 0.019)
    assert not caplog.messages
    for _ in range(3):
        watch.decided("dawdler", 0.5)
        watch.decided("least_loaded", 0.0, "RuntimeError: boom")
    assert slow == ["dawdler"] * 3
    assert caplog.messages == [
        "the policy dawdler took 500 ms, all turns waited",
        "the policy failed and least_loaded decided: RuntimeError: boom",
    ]
    now[0] = 60.0
    watch.decided("dawdler", 0.5)
    assert len(caplog.messages) == 3
