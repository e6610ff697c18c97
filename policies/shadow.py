"""A second plan that decides on every turn without acting, and how it compares."""

from collections.abc import Callable, Sequence
from typing import Final

from policies.compare import Comparison, size_class
from policies.plan import Facts, Plan
from policies.types import Candidate, Decision, Turn

# Models told apart; the rest count as one.
_MODELS: Final = 64


class Shadow:
    """Sums for all turns, and by model and size of the prompt."""

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        self.plan: Final = plan
        self.total: Final = Comparison()
        self.parts: Final[dict[tuple[str, str], Comparison]] = {}
        self.seconds = 0.0
        self.seen = 0
        self._clock = clock

    def observe(self, turn: Turn, candidates: Sequence[Candidate], facts: Facts, decision: Decision) -> None:
        """`decision` was made for `turn` on `candidates`."""
        begun = self._clock()
        again = self.plan.decide(turn, candidates, facts)
        known = len({model for model, _ in self.parts}) < _MODELS
        model = facts.model if known or any(m == facts.model for m, _ in self.parts) else "other"
        self.total.add(turn, decision, again)
        part = self.parts.setdefault((model, size_class(turn.prompt_tokens)), Comparison())
        part.add(turn, decision, again)
        self.seen += 1
        self.seconds += self._clock() - begun
