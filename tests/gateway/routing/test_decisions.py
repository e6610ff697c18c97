"""The ring of decisions."""

from gateway.routing.decisions import DecisionLog, DecisionRecord
from policies.types import Candidate, Decision


def record(request_id: str) -> DecisionRecord:
    candidate = Candidate("w1", local_tokens=64)
    decision = Decision("w1", "local", "longest local prefix", "longest_prefix", (candidate,))
    return DecisionRecord(request_id, 1.0, "chat", "m", 100, 16, decision)


def test_the_ring_is_bounded_and_the_newest_come_first() -> None:
    log = DecisionLog(capacity=3)
    for i in range(10):
        log.add(record(f"r{i}"))
    assert len(log) == 3
    assert [r.request_id for r in log.recent(2)] == ["r9", "r8"]
    assert [r.request_id for r in log.recent(99)] == ["r9", "r8", "r7"]
    assert log.get("r6") is None


def test_a_repeated_request_id_replaces_the_older_record() -> None:
    log = DecisionLog(capacity=3)
    log.add(record("a"))
    log.add(record("b"))
    newer = record("a")
    log.add(newer)
    assert log.get("a") is newer
    assert [r.request_id for r in log.recent(9)] == ["a", "b"]
