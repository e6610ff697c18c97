"""A second plan that decides on every turn without acting, and how it compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from policies.compare import Comparison, size_class, uncached
from policies.cost import costs, predicted_ttft
from policies.installed import said
from policies.plan import Facts, Plan
from policies.recorded import Outcome
from policies.types import Candidate, Decision, Turn

# Models told apart; the rest count as one.
_MODELS: Final = 64
# Turns that both send alike, measured, before they say how far predictions are off.
_ENOUGH: Final = 10


@dataclass(slots=True)
class Measured:
    """Sums over turns whose end was measured. Seconds to the first token, and tokens to compute.

    same_ttft, same_expected: of turns that the shadow sends alike: measured, and expected. The others are of
    turns that it sends elsewhere: measured where they went, expected there, and expected where it sends them.
    """

    same: int = 0
    same_ttft: float = 0.0
    same_expected: float = 0.0
    moved: int = 0
    ttft: float = 0.0
    expected_before: float = 0.0
    expected_after: float = 0.0
    uncached: int = 0
    uncached_after: int = 0

    @property
    def off(self) -> float | None:
        """How many times longer than expected turns took; None as long as too few were measured."""
        return self.same_ttft / self.same_expected if self.same >= _ENOUGH and self.same_expected else None

    @property
    def difference_s(self) -> float | None:
        """What the shadow would add to the time of a turn that it moves.

        Its expectation, as far off as that of turns which both send alike, against what was measured.
        """
        off = self.off
        if off is None or not self.moved:
            return None
        return (self.expected_after * off - self.ttft) / self.moved


@dataclass(frozen=True, slots=True)
class Shadowed:
    """One turn, until it is known how it ended."""

    sums: tuple[Measured, Measured]
    turn: Turn
    before: Candidate
    after: Candidate

    def ended(self, outcome: Outcome) -> None:
        """Counts where its first token was timed and its worker said what it found cached."""
        ttft_s, cached_tokens = outcome.ttft_s, outcome.cached_tokens
        if outcome.kind != "ok" or not outcome.streams or not self.turn.prompt_tokens:
            return
        if ttft_s is None or cached_tokens is None:
            return
        before, after = (predicted_ttft(costs(self.turn, c)) for c in (self.before, self.after))
        for sums in self.sums:
            if self.before.target == self.after.target:
                sums.same += 1
                sums.same_ttft += ttft_s
                sums.same_expected += before
            else:
                sums.moved += 1
                sums.ttft += ttft_s
                sums.expected_before += before
                sums.expected_after += after
                sums.uncached += max(0, self.turn.prompt_tokens - cached_tokens)
                sums.uncached_after += uncached(self.turn, self.after)


class Shadow:
    """Sums for all turns, and by model and size of the prompt. They end with the process."""

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        self.plan: Final = plan
        self.total: Final = Comparison()
        self.measured: Final = Measured()
        self.parts: Final[dict[tuple[str, str], tuple[Comparison, Measured]]] = {}
        self.seconds = 0.0
        self.seen = 0
        self._clock = clock

    def observe(
        self, turn: Turn, candidates: Sequence[Candidate], facts: Facts, decision: Decision
    ) -> Shadowed | None:
        """`decision` was made for `turn` on `candidates`. None: it could not be placed by both.

        Never raises: what goes wrong here is counted, and is not the turn's.
        """
        try:
            return self._observed(turn, candidates, facts, decision)
        except Exception as error:
            self.total.failed += 1
            self.total.fault = said(error)
            return None

    def _observed(
        self, turn: Turn, candidates: Sequence[Candidate], facts: Facts, decision: Decision
    ) -> Shadowed | None:
        begun = self._clock()
        again = self.plan.decide(turn, candidates, facts)
        known = len({model for model, _ in self.parts}) < _MODELS
        model = facts.model if known or any(m == facts.model for m, _ in self.parts) else "other"
        self.total.add(turn, decision, again)
        key = model, size_class(turn.prompt_tokens)
        part, measured = self.parts.setdefault(key, (Comparison(), Measured()))
        part.add(turn, decision, again)
        self.seen += 1
        before, after = decision.chosen, again.chosen
        self.seconds += self._clock() - begun
        if before is None or after is None:
            return None
        return Shadowed((self.measured, measured), turn, before, after)
