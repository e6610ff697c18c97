"""What is said of decisions that went wrong or took long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.watch import AnswerWatch, DecisionWatch, say_broken
from gateway.seldom import Gathered, Seldom
from peer import Connection, Received
from policies.recorded import Outcome, OutcomeKind
from policies.types import Decision


class Timers:
    """Time that passes a minute at a time."""

    def __init__(self) -> None:
        self.set: list[Timer] = []

    def later(self, delay_s: float, act: Callable[[str], None], subject: str) -> Timer:
        assert delay_s == 60
        timer = Timer(self, partial(act, subject))
        self.set.append(timer)
        return timer

    def a_minute_passes(self) -> None:
        due, self.set = self.set, []
        for timer in due:
            timer.act()


@dataclass(eq=False)
class Timer:
    of: Timers
    act: Callable[[], None]

    def cancel(self) -> None:
        self.of.set.remove(self)


def test_slow_and_failed_decisions_are_said_once_a_minute_and_slow_ones_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow: list[str] = []
    now = [0.0]
    watch = DecisionWatch(slow.append, Seldom(lambda: now[0]))
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


def test_answers_that_broke_off_are_counted_and_said_once_a_minute_for_each_target(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timers = Timers()
    gathered = Gathered(say_broken, timers.later)
    log = DecisionLog(AnswerWatch(gathered).ended)

    def ended(target: str | None, kind: OutcomeKind, status: int) -> None:
        decision = Decision(target, "none", "", "round_robin", ())
        record = DecisionRecord("SENTINEL", 0.0, "chat", "m", 0, 0, decision)
        log.finish(record, Outcome(kind=kind, status=status, total_s=1.0))

    ended("w1", "ok", 200)
    ended("w1", "cancelled", 200)
    ended("w1", "moved", 0)
    ended("w1", "error", 502)
    ended(None, "error", 503)
    assert caplog.messages == []
    for target in ("w1", "w1", "w2", "w1"):
        ended(target, "error", 200)
    said = [
        "1 answer of worker w1 broke off before the end",
        "1 answer of worker w2 broke off before the end",
    ]
    assert caplog.messages == said
    timers.a_minute_passes()
    said.append("2 more answers of worker w1 broke off before the end in the last minute")
    assert caplog.messages == said
    ended("w2", "error", 200)
    said.append("1 answer of worker w2 broke off before the end")
    ended("w1", "error", 200)
    ended("w1", "error", 200)
    assert caplog.messages == said
    gathered.close()
    said.append("2 more answers of worker w1 broke off before the end in the last minute")
    assert caplog.messages == said
    assert not timers.set


def test_what_came_up_lately_is_known_with_when_it_last_did() -> None:
    timers, now = Timers(), [0.0]
    gathered = Gathered(lambda *_: None, timers.later, lambda: now[0])
    gathered.came("a")
    now[0] = 50.0
    gathered.came("a")
    gathered.came("b")
    now[0] = 58.0
    assert gathered.lately() == {"a": 8.0, "b": 8.0}
    timers.a_minute_passes()
    assert gathered.lately() == {"a": 8.0}
    timers.a_minute_passes()
    assert gathered.lately() == {}


def test_a_thousand_subjects_are_all_said_and_few_of_them_kept() -> None:
    said: Counter[str] = Counter()
    timers = Timers()
    gathered = Gathered(lambda subject, count, _: said.update({subject: count}), timers.later)
    for turn in range(2000):
        gathered.came(str(turn % 1000))
        assert len(timers.set) <= 256
    while timers.set:
        timers.a_minute_passes()
    assert set(said.values()) == {2}
    assert len(said) == 1000


@pytest.mark.parametrize("events", [0, 2])
async def test_a_stream_that_its_worker_cuts_is_in_the_log(
    peers, front, caplog: pytest.LogCaptureFixture, events: int
) -> None:
    async def cut(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        for _ in range(events):
            await connection.chunk(b'data: {"i":0}\n\n')
        connection.reset()

    peer = await peers(cut)
    gate = await front(peer)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "SENTINEL"}]}
    async with gate.client.post(f"{gate.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()
    await gate.idle()
    said = [record for record in caplog.records if "broke off" in record.getMessage()]
    assert [(record.levelname, record.getMessage()) for record in said] == [
        ("WARNING", f"1 answer of worker 127.0.0.1:{peer.port} broke off before the end")
    ]
    assert "SENTINEL" not in caplog.text
