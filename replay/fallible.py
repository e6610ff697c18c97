"""An installed policy as the gateway takes it: where it fails, the fallback decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policies.load import least_loaded
from policies.plan import stood_in
from policies.types import Candidate, Decision, Policy, Turn


class Fallible:
    """failed: turns for which it did; fault: how, for the first of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy: Final = policy
        self.failed = 0
        self.fault = ""

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        decision = stood_in(self._policy, least_loaded, turn, candidates)
        if decision.fault:
            self.failed += 1
            self.fault = self.fault or decision.fault
        return decision
