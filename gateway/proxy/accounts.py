"""What is written down of each turn: its decisions when they are made, and how it ended."""

import time
from collections.abc import Callable

from gateway.api.parse import API_OF
from gateway.api.usage import cached_tokens
from gateway.metrics import Metrics
from gateway.proxy.turn import TurnState
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.learning import Learning
from gateway.routing.router import Placement, Unplaced
from gateway.routing.sight import Sight
from policies.plan import Plan
from policies.recorded import Outcome
from policies.shadow import Shadowed
from policies.types import Decision, Turn


class Accounts:
    """Metrics, the decision log, and what predictions are measured by."""

    def __init__(
        self,
        metrics: Metrics,
        decisions: DecisionLog,
        learning: Learning,
        unplaced: Callable[[str], None],
    ) -> None:
        """unplaced: told why nobody could take a turn."""
        self._unplaced = unplaced
        self._metrics = metrics
        self._decisions = decisions
        self._learning = learning

    def decided(self, turn: TurnState, sight: Sight, placement: Placement) -> None:
        """Put the decision on record; a turn that is placed anew keeps only its last one."""
        p, chosen = placement, placement.chosen
        self._record(turn, sight, p.decision, p.turn, p.plan, p.shadowed)
        if size := p.turn.prompt_tokens:
            local, cached = chosen.local_tokens, chosen.cached_tokens
            self._metrics.prompt_tokens(local=local, pool=cached - local, computed=size - cached)

    def unplaced(self, turn: TurnState, sight: Sight, nobody: Unplaced) -> None:
        """As `decided`, of a decision for nobody."""
        decision = nobody.decision
        self._record(turn, sight, decision, nobody.turn, nobody.plan)
        self._unplaced(f"{nobody} (rule {decision.rule!r})" if decision.rule else str(nobody))

    def _record(
        self,
        turn: TurnState,
        sight: Sight,
        decision: Decision,
        decided_on: Turn,
        plan: Plan,
        shadowed: Shadowed | None = None,
    ) -> None:
        elapsed = time.perf_counter() - turn.started
        if turn.record is not None:
            self._decisions.finish(turn.record, Outcome(kind="moved", status=0, total_s=elapsed))
        facts, unknown = sight.facts, sight.understood.unknown
        turn.record = DecisionRecord(
            turn.exchange.request_id,
            time.time(),
            facts.api,
            facts.model,
            decided_on.prompt_tokens,
            decided_on.block_size,
            decision,
            {"look": sight.seconds * 1e3},
            unknown,
            None,
            turn.prefix,
            sight.session,
            decided_on,
            facts,
            plan,
            shadowed,
        )
        self._decisions.add(turn.record)
        self._metrics.decision(decision.policy, decision.action, decision.reason, elapsed)
        if unknown:
            self._metrics.unrenderable(facts.model, unknown)

    def ended(self, turn: TurnState) -> None:
        """The end of every turn: metrics, and how it turned out for the decision log."""
        parsed, record = turn.parsed, turn.record
        ttft = None if turn.first_byte is None else turn.first_byte - turn.started
        # Whose body could not be read was still meant for an API.
        path = turn.exchange.path
        api, model = (API_OF.get(path, "other"), "") if parsed is None else (parsed.api, parsed.model)
        self._metrics.request(api, model, turn.outcome, ttft)
        if record is None or parsed is None:
            return
        tells = turn.outcome == "ok" and parsed.one_sequence
        cached = cached_tokens(turn.tail.content()) if tells else None
        outcome = Outcome(
            kind=turn.outcome,
            status=turn.status,
            cached_tokens=cached,
            ttft_s=ttft,
            total_s=time.perf_counter() - turn.started,
            streams=parsed.stream,
        )
        self._decisions.finish(record, outcome)
        target = record.decision.target
        if cached is not None and turn.sight is not None and target is not None:
            self._learning.answered(record.request_id, turn.sight, target, cached)
