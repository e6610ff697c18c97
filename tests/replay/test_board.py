"""A fleet so large that it is looked at as columns first: what comes out is what would without them."""

import pytest

from policies import registry
from policies.types import Candidate, Decision, Policy, Turn
from replay import profile as profiles
from replay.board import MANY
from replay.driver import Failure, Fleet, Load, Run
from replay.instance import Job
from replay.pool import Placement
from replay.traces.codex_like import growing
from replay.traces.types import Trace
from small_runs import SMALL


def jobs(policy: Policy, placement: Placement | None, instances: int = 2 * MANY) -> list[Job]:
    profile = profiles.load("qwen3-32b-2xh100", {**SMALL, "hbm_tokens": 60_000})
    size = profile.blocks_of_tokens
    sessions = [
        growing(f"s{n}", n, 1_024, [(2_048, 90), *[(900 + 31 * (n % 7), 60)] * 3], [2.0] * 4, size)
        for n in range(2 * instances)
    ]
    failures = [Failure(at, 6.0) for at in (4.0, 9.0)]
    fleet, load = Fleet(profile, instances, placement), Load(2 * instances, ramp_s=5.0)
    return Run(Trace(size, sessions), fleet, load, policy, 3, [0.0], None, failures).run().jobs


@pytest.mark.parametrize("placement", [None, "owner", "random"])
@pytest.mark.parametrize("name", ["expected_ttft", "longest_prefix"])
def test_turns_go_where_they_go_without_a_shortlist(name: str, placement: Placement | None) -> None:
    policy = registry.make(name)
    shown: list[int] = []

    class Counting:
        def __call__(self, turn: Turn, candidates: list[Candidate]) -> Decision:
            shown.append(len(candidates))
            return policy(turn, candidates)

        shortlist = policy.shortlist  # type: ignore[attr-defined]

    def all_shown(turn: Turn, candidates: list[Candidate]) -> Decision:
        return policy(turn, candidates)

    short, whole = jobs(Counting(), placement), jobs(all_shown, placement)
    assert [(each.instance, each.started) for each in short] == [
        (each.instance, each.started) for each in whole
    ]
    assert sum(shown) < 0.5 * len(short) * 2 * MANY
