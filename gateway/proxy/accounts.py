"""What is written down of each turn: its decisions when they are made, and how it ended."""

import time

from gateway.api.usage import cached_tokens
from gateway.metrics import Metrics
from gateway.proxy.turn import TurnState
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.learning import Learning
from gateway.routing.router import Placement, Sight
from policies.recorded import Outcome


class Accounts:
    """Metrics, the decision log, and what predictions are measured by."""

    def __init__(self, metrics: Metrics, decisions: DecisionLog, learning: Learning) -> None:
        self._metrics = metrics
        self._decisions = decisions
        self._learning = learning

    def decided(self, turn: TurnState, sight: Sight, placement: Placement) -> None:
        """Put the decision on record; a turn that is placed anew keeps only its last one."""
        decision, chosen = placement.decision, placement.chosen
        elapsed = time.perf_counter() - turn.started
        if turn.record is not None:
            self._decisions.finish(turn.record, Outcome(kind="moved", status=0, total_s=elapsed))
        size, unknown = placement.turn.prompt_tokens, sight.understood.unknown
        facts = sight.facts
        turn.record = DecisionRecord(
            turn.exchange.request_id,
            time.time(),
            facts.api,
            facts.model,
            size,
            placement.turn.block_size,
            decision,
            {"look": sight.seconds * 1e3},
            unknown,
            None,
            turn.prefix,
            sight.session,
            placement.turn,
            facts,
            placement.plan,
            placement.shadowed,
        )
        self._decisions.add(turn.record)
        self._metrics.decision(decision.policy, decision.action, decision.reason, elapsed)
        if size:
            local, cached = chosen.local_tokens, chosen.cached_tokens
            self._metrics.prompt_tokens(local=local, pool=cached - local, computed=size - cached)
        if unknown:
            self._metrics.unrenderable(facts.model, unknown)

    def ended(self, turn: TurnState) -> None:
        """The end of every turn: metrics, and how it turned out for the decision log."""
        parsed, record = turn.parsed, turn.record
        self._metrics.request(parsed.api if parsed else "other", parsed.model if parsed else "", turn.outcome)
        if record is None or parsed is None:
            return
        ttft = None if turn.first_byte is None else turn.first_byte - turn.started
        if ttft is not None:
            self._metrics.ttft(ttft)
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
