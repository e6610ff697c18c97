"""What the admin API answers with: documented models, and how they are read off the gateway's own values."""

import time
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from gateway.routing.decisions import DecisionRecord
from gateway.sessions.divergence import Divergence
from policies.compare import runner_up
from policies.cost import TERMS, costs, predicted_ttft
from policies.ledger import Load
from policies.rates import InUnits
from policies.recorded import Outcome
from policies.sessions import Known
from policies.types import Rates, Scored, Turn
from store.mooncake_http import DrainJob
from workers.worker import Target, Worker


class Answer(BaseModel):
    """Base of all answers: no field beyond those documented."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    code: str
    param: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


class ServedModel(Answer):
    id: str
    root: str = Field(description="Path or name the worker loaded it from.")
    parent: str = Field(description="The base model of an adapter.")
    max_model_len: int = Field(description="Tokens; 0 if the worker does not say.")


class Measured(Answer):
    value: float
    confidence: float = Field(description="How much it rests on measurement: 0 not at all, 1 entirely.")


def _measured(rates: Rates) -> dict[str, Measured]:
    values = msgspec.structs.asdict(InUnits.of(rates))
    return {
        name: Measured(value=float(f"{value:.4g}"), confidence=confidence)
        for (name, value), confidence in zip(values.items(), rates.confidence, strict=True)
    }


class TargetView(Answer):
    name: str
    inflight: int = Field(description="Turns sent there that have not ended.")
    queued_tokens: int = Field(description="Uncached tokens of turns that still wait for their first token.")
    recent_tokens: float = Field(description="Uncached tokens sent there, half as much each minute since.")
    rates: dict[str, Measured] = Field(description="What work takes there, as learned from turns.")
    samples: int = Field(description="How many measurements they were learned from.")

    @classmethod
    def of(cls, target: Target, model: str, loads: "Loads") -> "TargetView":
        now = time.monotonic()
        load, rates = loads.load(target.name, now), loads.rates(target.name, now, model)
        return cls(
            name=target.name,
            inflight=load.inflight,
            queued_tokens=load.queued_tokens,
            recent_tokens=round(load.recent_tokens, 1),
            rates=_measured(rates),
            samples=loads.samples(target.name),
        )


class DrainView(Answer):
    """How far the move of a worker's share of the pool into the others' is, in objects."""

    job: str
    status: str = Field(description="CREATED, PLANNING, RUNNING, SUCCEEDED, FAILED or CANCELED.")
    moved: int
    failed: int
    blocked: int = Field(
        description="What can't be moved just now, though it may be soon: read or looked up within the "
        "master's lease (default_kv_lease_ttl), still being written, or no other segment can take it."
    )
    active: int
    moved_bytes: int
    message: str

    @classmethod
    def of(cls, drain: DrainJob) -> "DrainView":
        return cls(**msgspec.structs.asdict(drain))


class WorkerView(Answer):
    name: str
    url: str
    state: str = Field(description="starting, up or down.")
    reason: str = Field(description="Why it is not up.")
    cordoned: bool = Field(description="A cordoned worker gets no new turns.")
    drain: DrainView | None = Field(description="Null: its share of the pool stays where it is.")
    breaker: str = Field(description="closed; open: it failed too many turns and gets none; half-open.")
    failures: int = Field(description="Turns failed since the last that ended well.")
    failing: str = Field(description="How it failed turns of late, and until when it gets none; else empty.")
    weight: float = Field(description="Its share of the load compared with others'.")
    role: str = Field(description="What it is for: both, prefill or decode.")
    models: list[ServedModel]
    targets: list[TargetView] = Field(description="The worker, or one entry per data-parallel rank.")
    running: float = Field(description="Requests the engine runs, as it last said.")
    waiting: float = Field(description="Requests the engine has queued, as it last said.")
    kv_usage: float = Field(description="Share of the KV cache in use by running requests, 0 to 1.")
    block_size: int = Field(description="Tokens in a KV block; 0 if the worker does not say.")
    retention: int | None = Field(
        description="Tokens between the sliding windows that it keeps in its prefix cache; 0: only where "
        "prompts end; null: all of them, or the worker does not say."
    )
    segment: str = Field(
        description="Its share of the pool: a segment (IP:PORT), or all segments of a host (IP); "
        "empty: not known."
    )
    hash_algo: str

    @classmethod
    def of(cls, worker: Worker, loads: "Loads", drain: DrainJob | None, failing: str) -> "WorkerView":
        report = worker.report
        model = worker.models[0].id if worker.models else ""
        targets = [TargetView.of(target, model, loads) for target in worker.targets]
        return cls(
            name=worker.name,
            url=worker.url,
            state=worker.state,
            reason=worker.reason,
            cordoned=worker.cordoned,
            drain=DrainView.of(drain) if drain else None,
            breaker=worker.breaker.state(time.monotonic()),
            failures=worker.breaker.failures,
            failing=failing,
            weight=worker.weight,
            role=worker.role,
            models=[
                ServedModel(id=c.id, root=c.root, parent=c.parent, max_model_len=c.max_model_len)
                for c in worker.models
            ],
            targets=targets,
            running=report.running,
            waiting=report.waiting,
            kv_usage=report.kv_usage,
            block_size=report.block_size,
            retention=report.retention,
            segment=worker.segment,
            hash_algo=report.hash_algo,
        )


class Loads(Protocol):
    """Where load and rates of a target are read: the ledger."""

    def load(self, target: str, now: float) -> Load: ...
    def rates(self, target: str, now: float, group: str = "") -> Rates: ...
    def samples(self, target: str) -> int: ...


class WorkersAnswer(Answer):
    workers: list[WorkerView]
    refusals: list[str] = Field(description="Why turns were refused within the last minute or two.")


class CandidateView(Answer):
    target: str
    excluded: str = Field(
        description="Why it may not be chosen: down, starting, missed, cordoned, model, failed, full, "
        "breaker, ramp."
    )
    local_tokens: int = Field(description="Leading tokens in its own cache.")
    pool_tokens: int = Field(description="Leading tokens readable from the pool.")
    own_segment_tokens: int = Field(
        description="Those of the pool's beyond its own cache that lie in its own memory: no network."
    )
    disk_tokens: int = Field(description="Those of them that only a disk has.")
    role: str
    queued_tokens: int
    recent_tokens: float = Field(description="Uncached tokens of turns before, half as much each minute.")
    inflight: int
    foreign: float = Field(description="Turns that others sent there, as the worker's reports say.")
    waiting: float
    held_tokens: int = Field(description="Context of turns under way there.")
    capacity_tokens: int = Field(description="What its cache holds; 0 if not known.")
    pressure: float = Field(
        description="How likely what must make room there is wanted back soon, 0 to 1: by how full the cache "
        "is, and when the sessions that own its oldest blocks are expected back."
    )
    terms: dict[str, float] = Field(
        description="The cost terms that were weighed, as the policy counts them."
    )
    cost: float = Field(description="Their sum.")
    expected_ms: dict[str, float] = Field(
        description="Expected cost in milliseconds, term by term, whatever the policy weighs; empty for a "
        "prompt that is not known."
    )
    expected_ttft_ms: float | None = Field(description="The terms of them that make the time to first token.")
    rates: dict[str, Measured] = Field(description="The rates that these rest on.")

    @classmethod
    def of(cls, scored: Scored, turn: Turn | None) -> "CandidateView":
        candidate = scored.candidate
        terms = costs(turn, candidate) if turn is not None and turn.prompt_tokens else None
        return cls(
            target=candidate.target,
            excluded=candidate.excluded,
            local_tokens=candidate.local_tokens,
            pool_tokens=candidate.pool_tokens,
            own_segment_tokens=candidate.own_segment_tokens,
            disk_tokens=candidate.disk_tokens,
            role=candidate.role,
            queued_tokens=candidate.queued_tokens,
            recent_tokens=round(candidate.recent_tokens, 1),
            inflight=candidate.inflight,
            foreign=round(candidate.foreign, 1),
            waiting=candidate.waiting,
            held_tokens=candidate.held_tokens,
            capacity_tokens=candidate.capacity_tokens,
            pressure=round(candidate.pressure, 4),
            terms=dict(scored.terms),
            cost=scored.cost,
            expected_ms={n: round(s * 1e3, 3) for n, s in zip(TERMS, terms, strict=True)} if terms else {},
            expected_ttft_ms=round(predicted_ttft(terms) * 1e3, 3) if terms else None,
            rates=_measured(candidate.rates),
        )


class OutcomeView(Answer):
    kind: str = Field(
        description="ok, error, refused (by the gateway, with a 4xx), cancelled, or moved: placed anew after "
        "its worker failed."
    )
    status: int
    cached_tokens: int | None = Field(description="What the worker reported; null if it did not.")
    ttft_s: float | None
    total_s: float

    @classmethod
    def of(cls, outcome: Outcome) -> "OutcomeView":
        return cls(
            kind=outcome.kind,
            status=outcome.status,
            cached_tokens=outcome.cached_tokens,
            ttft_s=outcome.ttft_s,
            total_s=outcome.total_s,
        )


class DivergenceView(Answer):
    previous_request_id: str = Field(description="The turn whose prompt this one departs from.")
    inferred: bool = Field(description="The session was recognised by its prompts, not named by the client.")
    cause: str = Field(description="What differs first: a tool, a message, system, cache_salt, or unknown.")
    token: int = Field(description="The first token that differs.")
    block: int = Field(description="Its block.")
    lost_tokens: int = Field(
        description="Tokens in blocks of the previous prompt that could have been used again."
    )
    before: str = Field(description="Text before that token, the same in both prompts.")
    previously: str = Field(description="Text from there on in the previous prompt.")
    now: str = Field(description="Text from there on in this one.")

    @classmethod
    def of(cls, found: Divergence) -> "DivergenceView":
        return cls(
            previous_request_id=found.previous_request_id,
            inferred=found.inferred,
            cause=found.cause,
            token=found.token,
            block=found.block,
            lost_tokens=found.lost_tokens,
            before=found.before,
            previously=found.previously,
            now=found.now,
        )


class SessionView(Answer):
    name: str = Field(description="As its client calls it, or made of its first prompt; empty: not known.")
    inferred: bool = Field(description="Recognised by its prompts, not named by the client.")
    new: bool = Field(description="Nothing of it was seen before.")
    branch: bool = Field(description="The prompt parts from what the session asked before: a sub-agent, say.")
    shared_tokens: int = Field(description="Leading tokens in common with prompts seen before, at least.")

    @classmethod
    def of(cls, known: Known, block_size: int) -> "SessionView":
        return cls(
            name=known.name,
            inferred=known.inferred,
            new=known.new,
            branch=known.branch,
            shared_tokens=known.shared_blocks * block_size,
        )


class DecisionView(Answer):
    request_id: str
    time: float = Field(description="Unix seconds.")
    api: str
    model: str
    prompt_tokens: int = Field(description="0 if they could not be computed; see unrenderable.")
    blocks: int = Field(description="Full KV blocks of the prompt.")
    block_size: int
    unrenderable: str = Field(description="Why the prompt's tokens could not be computed.")
    policy: str
    action: str = Field(description="local, pull, recompute or none.")
    target: str | None
    decode: str | None = Field(description="Who would decode, where prefill and decode are placed apart.")
    session: SessionView
    reason: str
    fault: str = Field(description="How the policy failed, where the fallback decided.")
    rule: str = Field(description="The policy document's rule that chose the policy; empty: its default.")
    guards: list[str] = Field(description="Guards that kept targets out.")
    unit: str = Field(description="Of the candidates' terms: tokens or s.")
    runner_up: str | None = Field(description="The next best by those terms.")
    margin: float | None = Field(description="How much more it would have cost; below 0: it was cheaper.")
    predicted_cached_tokens: int
    candidates: list[CandidateView]
    timings_ms: dict[str, float]
    divergence: DivergenceView | None = Field(
        description="Where the prompt leaves its session's previous one; null if it only goes on from it."
    )
    outcome: OutcomeView | None = Field(description="null while the turn runs, and for explanations.")

    @classmethod
    def of(cls, record: DecisionRecord) -> "DecisionView":
        decision = record.decision
        behind = runner_up(decision)
        divergence = record.prefix.divergence if record.prefix else None
        return cls(
            request_id=record.request_id,
            time=record.time,
            api=record.api,
            model=record.model,
            prompt_tokens=record.prompt_tokens,
            blocks=record.prompt_tokens // record.block_size if record.block_size else 0,
            block_size=record.block_size,
            unrenderable=record.unrenderable,
            policy=decision.policy,
            action=decision.action,
            target=decision.target,
            decode=decision.decode,
            session=SessionView.of(record.session, record.block_size),
            reason=decision.reason,
            fault=decision.fault,
            rule=decision.rule,
            guards=list(decision.guards),
            unit=decision.unit,
            runner_up=behind[0] if behind else None,
            margin=behind[1] if behind else None,
            predicted_cached_tokens=record.predicted_cached_tokens,
            candidates=[CandidateView.of(scored, record.turn) for scored in decision.scored],
            timings_ms=record.timings,
            divergence=DivergenceView.of(divergence) if divergence else None,
            outcome=OutcomeView.of(record.outcome) if record.outcome else None,
        )


class DecisionsAnswer(Answer):
    decisions: list[DecisionView] = Field(description="The newest first.")


class PoolAnswer(Answer):
    configured: bool
    master: str
    degraded: bool = Field(description="The pool can't be asked; turns go without it meanwhile.")
    details: dict[str, Any] = Field(description="The pool view's own state.")


class ConfigAnswer(Answer):
    settings: dict[str, Any] = Field(description="The effective settings, secrets masked.")
