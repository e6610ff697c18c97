"""The ring of decisions and the audit of predictions."""

from gateway.decisions import DecisionLog, DecisionRecord, Outcome
from policies.types import Candidate, Decision


def record(request_id: str, cached: int = 64, unrenderable: str = "") -> DecisionRecord:
    candidate = Candidate("w1", local_tokens=cached)
    decision = Decision("w1", "local", "longest local prefix", "longest_prefix", (candidate,))
    return DecisionRecord(request_id, 1.0, "chat", "m", 100, 16, decision, unrenderable=unrenderable)


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


def test_the_audit_compares_prediction_and_report() -> None:
    log = DecisionLog(capacity=1)
    turns = [record("exact"), record("more"), record("silent"), record("blind", unrenderable="no_template")]
    reports = [64, 48, None, 7]
    for turn in turns:
        log.add(turn)
    for turn, cached in zip(turns, reports, strict=True):
        log.finish(turn, Outcome("ok", 200, cached))
    audit = log.audit
    assert (audit.turns, audit.exact, audit.error_tokens) == (2, 1, 16)
    assert (audit.predicted_tokens, audit.actual_tokens) == (128, 112)
    assert [(m.request_id, m.target, m.predicted, m.actual) for m in audit.mismatches] == [
        ("more", "w1", 64, 48)
    ]
    assert turns[3].outcome is not None
