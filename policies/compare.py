"""What another policy would have done with turns: how many it would move, and what that would cost."""

from collections.abc import Iterable
from dataclasses import dataclass

from policies.cost import costs, predicted_ttft
from policies.plan import Facts, Plan, as_given
from policies.types import Candidate, Decision, Turn

# Prompt tokens up to which a turn counts as of that class.
SIZES = ((2_048, "2k"), (16_384, "16k"), (65_536, "64k"))


@dataclass(frozen=True, slots=True)
class Placed:
    """A turn as it was placed."""

    turn: Turn
    facts: Facts
    decision: Decision


@dataclass(slots=True)
class Comparison:
    """Sums over turns, of those that both placed. ttft: predicted seconds; uncached: tokens to compute.

    unplaced: turns that were placed, and would not be. failed: turns for which the policy failed, so that its
    document's fallback decided; fault: how it did the last time.
    """

    turns: int = 0
    changed: int = 0
    ttft_before: float = 0.0
    ttft_after: float = 0.0
    uncached_before: int = 0
    uncached_after: int = 0
    unplaced: int = 0
    failed: int = 0
    fault: str = ""

    @property
    def agreement(self) -> float | None:
        return 1 - self.changed / self.turns if self.turns else None

    def add(self, turn: Turn, before: Decision, after: Decision) -> None:
        old, new = before.chosen, after.chosen
        if after.fault:
            self.failed += 1
            self.fault = after.fault
        if old is None or new is None:
            self.unplaced += old is not None
            return
        self.turns += 1
        self.changed += old.target != new.target
        self.ttft_before += predicted_ttft(costs(turn, old))
        self.ttft_after += predicted_ttft(costs(turn, new))
        self.uncached_before += uncached(turn, old)
        self.uncached_after += uncached(turn, new)


def uncached(turn: Turn, candidate: Candidate) -> int:
    return max(0, turn.prompt_tokens - candidate.cached_tokens)


def compare(placed: Iterable[Placed], plan: Plan) -> Comparison:
    """What `plan` would have changed."""
    found = Comparison()
    for each in placed:
        again = plan.decide(each.turn, as_given(each.decision.candidates), each.facts)
        found.add(each.turn, each.decision, again)
    return found


def size_class(prompt_tokens: int) -> str:
    if not prompt_tokens:
        return "unknown"
    return next((name for most, name in SIZES if prompt_tokens <= most), "more")


def runner_up(decision: Decision) -> tuple[str, float] | None:
    """The runner-up by the decision's own terms and how far it was behind; None where none are weighed."""
    chosen = decision.chosen
    weigh = decision.weigh
    if weigh is None or chosen is None:
        return None
    others = [
        (sum(weigh(c).values()), c.target) for c in decision.candidates if not c.excluded and c is not chosen
    ]
    if not others:
        return None
    cost, target = min(others)
    return target, cost - sum(weigh(chosen).values())
