"""A recorded decision log decided again."""

from pathlib import Path

import msgspec
import pytest

from policies.compare import Placed
from policies.document import read
from policies.plan import NO_FACTS, Plan
from policies.recorded import recorded
from policies.types import Candidate, Turn
from replay.command import ReplayError, replay_decisions
from replay.decisions import BadDecisions, as_text, decide_again

FLEET = [Candidate("a", local_tokens=9000, queued_tokens=100), Candidate("b")]


def line(name: str, policy: str = "longest_prefix") -> bytes:
    plan, turn = Plan(read({"policy": policy})), Turn(10_000, 0.5)
    placed = Placed(turn, NO_FACTS, plan.decide(turn, FLEET))
    return msgspec.json.encode(recorded(name, 1.0, placed, plan.as_plain)) + b"\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(line("one") + line("two", "least_loaded"))
    return path


def test_each_is_decided_by_the_document_of_its_time_and_compared_with_others(log: Path) -> None:
    found = decide_again(log, {"least_loaded": Plan(read({"policy": "least_loaded"}))})
    assert (found.decisions, found.equal, found.first, found.cut) == (2, 2, None, None)
    other = found.others["least_loaded"]
    assert (other.turns, other.changed) == (2, 1)
    assert (other.uncached_before, other.uncached_after) == (11_000, 20_000)
    assert other.ttft_after > other.ttft_before
    shown = as_text(found).splitlines()
    assert shown[0] == "2 of 2 decisions are equal"
    assert shown[1].startswith("least_loaded: 1 of 2 turns would go elsewhere: expected time to first token ")
    assert shown[1].endswith("tokens to compute 11000 -> 20000")


def test_one_that_comes_out_otherwise_is_shown(log: Path) -> None:
    log.write_bytes(
        line("one") + line("two").replace(b'"target":"a","action":"local"', b'"target":"b","action":"none"')
    )
    found = decide_again(log, {})
    assert (found.decisions, found.equal) == (2, 1)
    shown = as_text(found)
    assert "line 2, of request two" in shown
    assert "then: b (none)" in shown
    assert "now: a (local)" in shown


def test_a_cut_last_line_is_left_out_and_said(log: Path) -> None:
    log.write_bytes(log.read_bytes() + line("three")[:-20])
    found = decide_again(log, {})
    assert (found.decisions, found.equal, found.cut) == (2, 2, 3)
    assert "line 3, the last one, is cut off" in as_text(found)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (b"{\n", "line 3: Input data was truncated"),
        (b"\n", "line 3: "),
        (b'{"id": "x"}\n', "line 3: Object missing required field"),
        (
            line("x").replace(b'"longest_prefix"}', b'"fastest"}'),
            "line 3: policy: no policy is called 'fastest'",
        ),
        (b'"\xff"\n', "line 3: "),
    ],
)
def test_a_broken_line_is_named(log: Path, broken: bytes, says: str) -> None:
    log.write_bytes(log.read_bytes() + broken + line("four"))
    with pytest.raises(BadDecisions, match="log: ") as wrong:
        decide_again(log, {})
    assert says in str(wrong.value)


def test_what_can_not_be_used_is_said(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="none: No such file"):
        replay_decisions(tmp_path / "none")
    with pytest.raises(ReplayError, match="no policy is called 'fastest'"):
        replay_decisions(log, policies=["fastest"])
    with pytest.raises(ReplayError, match="pull_cost"):
        replay_decisions(log, policies=["longest_prefix"], options=["longest_prefix.pull_cost=much"])
    with pytest.raises(ReplayError, match="--option takes"):
        replay_decisions(log, options=["longest_prefix.pull_cost=1"])
    log.write_bytes(b"")
    with pytest.raises(ReplayError, match="no decisions"):
        replay_decisions(log)
