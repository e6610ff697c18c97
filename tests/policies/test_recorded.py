"""Decisions written down: read back, they are made again bit for bit."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleets import candidates, turns
from policies.compare import Placed
from policies.document import read
from policies.plan import Facts, Plan
from policies.recorded import Decided, Recorded, recorded
from policies.registry import names
from policies.types import Candidate, Turn

GUARDS = {
    "max_queue_tokens": 9000,
    "max_imbalance": 1.2,
    "imbalance_slack_tokens": 0,
    "min_prefix_tokens": 64,
}
RULES = [{"match": {"min_prompt_tokens": 20_000}, "policy": "least_loaded", "workers": ["*a*", "*3*"]}]


@pytest.mark.parametrize("policy", names())
@given(turn=turns, fleet=candidates(), prefill=st.booleans())
def test_a_line_read_back_is_decided_the_same(
    policy: str, turn: Turn, fleet: list[Candidate], prefill: bool
) -> None:
    if prefill:
        roles = ("prefill", "decode")
        fleet = [msgspec.structs.replace(c, role=roles[i % 2]) for i, c in enumerate(fleet)]
    plan = Plan(read({"policy": policy, "guards": GUARDS, "rules": RULES}))
    facts = Facts("m", "alias", "chat", {"x-tenant": "t\xe9"})
    decision = plan.decide(turn, fleet, facts)
    written = msgspec.json.encode(recorded("r", 1.5, Placed(turn, facts, decision), plan.as_plain))
    line = msgspec.json.decode(written, type=Recorded)
    assert b"\n" not in written
    assert (line.turn, line.facts, list(line.candidates)) == (turn, facts, fleet)
    again = Plan(read(msgspec.json.decode(line.document)))
    decided = again.decide(line.turn, line.candidates, line.facts)
    assert Decided.of(decided) == line.decided == Decided.of(decision)
    assert [s.terms for s in decided.scored] == [s.terms for s in decision.scored]
