"""Tables of situations where prefill and decode are placed apart."""

import pytest
from hypothesis import given
from msgspec.structs import replace

from fleets import candidates, turn, turns
from policies import registry
from policies.pair import placed
from policies.types import Candidate, Turn

P1, P2 = Candidate("p1", role="prefill", local_tokens=64), Candidate("p2", role="prefill")
D1, D2 = Candidate("d1", role="decode", inflight=3), Candidate("d2", role="decode")
BOTH = Candidate("b")

SITUATIONS = [
    ("the holder computes, the lightest decodes", [P1, P2, D1, D2], ("p1", "d2")),
    ("a decoder's own prefix counts", [P1, replace(D1, local_tokens=64, inflight=1), D2], ("p1", "d1")),
    ("but not against load", [P1, replace(D1, local_tokens=64), D2], ("p1", "d2")),
    ("nobody can decode", [P1, replace(D1, excluded="down")], (None, None)),
    ("nobody can decode apart", [P1, BOTH], ("p1", "b")),
    ("a target for both needs no second", [BOTH, D1], ("b", None)),
    ("only decoders are left", [replace(P1, excluded="down"), D2], ("d2", None)),
]


@pytest.mark.parametrize(("fleet", "expected"), [s[1:] for s in SITUATIONS], ids=[s[0] for s in SITUATIONS])
def test_situations(fleet: list[Candidate], expected: tuple[str | None, str | None]) -> None:
    decision = placed(registry.make("longest_prefix"), turn(100), fleet)
    assert (decision.target, decision.decode) == expected


@pytest.mark.parametrize("name", registry.names())
@given(fleet=candidates(), asked=turns)
def test_roles_are_kept_whatever_the_policy(name: str, fleet: list[Candidate], asked: Turn) -> None:
    roles = ("prefill", "decode", "both")
    mixed = [replace(c, role=roles[i % 3]) for i, c in enumerate(fleet)]
    decision = placed(registry.make(name), asked, mixed)
    by_name = {c.target: c for c in mixed}
    if decision.target is not None and by_name[decision.target].role == "prefill":
        assert decision.decode is not None
        assert by_name[decision.decode].role != "prefill"
        assert not by_name[decision.decode].excluded
    else:
        assert decision.decode is None
