"""One run: sessions ask, a chooser places, instances answer, all in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from policies.registry import Reads
from policies.types import Policy
from replay.chains import Pieces
from replay.clairvoyant import Clairvoyant
from replay.clock import Clock
from replay.instance import Instance, Job, schedule
from replay.pool import Placement, PoolModel
from replay.profile import Profile
from replay.routing import Blind, Chooser, PolicyChooser
from replay.traces.types import Trace


@dataclass(frozen=True, slots=True)
class Fleet:
    """instances of one profile, but for the last ones, which have those of `unlike`, one each; `placement`
    None: without a pool."""

    profile: Profile
    instances: int
    placement: Placement | None
    unlike: Sequence[Profile] = ()

    @property
    def profiles(self) -> list[Profile]:
        return [self.profile] * (self.instances - len(self.unlike)) + list(self.unlike)


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies `at_s` seconds after the start and is back, empty, `down_s` later. Which: by seed."""

    at_s: float
    down_s: float


# How long an agent waits before it asks again for an answer that broke off, and the gateway while it has
# nobody to send to.
AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """How sessions come, where the trace has no times.

    active: sessions under way at a time; when one ends the next begins. ramp_s: the time over which the first
    ones begin. rate: sessions a second at random times (Poisson) instead. think: share of the trace's
    thinking time that passes between turns.
    """

    active: int
    ramp_s: float = 30.0
    rate: float | None = None
    think: float = 1.0


@dataclass(slots=True)
class Finished:
    """All jobs of a run in the order in which they came, and what the run says of itself."""

    jobs: list[Job] = field(default_factory=list[Job])
    pool_evicted_blocks: int = 0
    pool_refused_blocks: int = 0
    preemptions: int = 0
    failures: int = 0
    events: int = 0


Progress = Callable[[int], None]


class Run:
    """policy None: the clairvoyant, of such `patience`. at_once: the policy hears of everything when it
    happens. reads: what the policy goes by. `progress` is told how many turns have ended."""

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        load: Load,
        policy: Policy | None,
        seed: int,
        to_come: Sequence[float],
        progress: Progress | None = None,
        failures: Sequence[Failure] = (),
        patience: float = 0.0,
        at_once: bool = False,
        reads: Reads = "all",
    ) -> None:
        profiles = fleet.profiles
        self._sessions: Final = trace.sessions
        self._load: Final = load
        self._clock: Final = Clock()
        self._random: Final = Random(seed)
        self._progress: Final = progress
        self._ended = 0
        self._next = 0
        self._total: Final = sum(len(each.turns) for each in trace.sessions)
        self._result: Final = Finished()
        self._pool = (
            PoolModel(
                [each.segment_blocks for each in profiles],
                fleet.placement,
            )
            if fleet.placement is not None
            else None
        )
        links = schedule(self._clock)
        changed: set[int] = set()
        self._instances: Final = [
            Instance(number, profile, self._clock, links, self._pool, self, changed)
            for number, profile in enumerate(profiles)
        ]
        for each in self._instances:
            each.know(self._instances)
        self._chooser: Chooser
        if policy is None:
            self._chooser = Clairvoyant(
                self._instances, self._pool, trace.sessions, to_come, patience, changed
            )
        elif reads == "nothing":
            self._chooser = Blind(policy, fleet.instances, seed)
        else:
            self._chooser = PolicyChooser(
                policy,
                self._instances,
                fleet.profile,
                self._pool,
                seed,
                at_once=at_once,
                timed=reads == "all",
            )
        # Its own source of numbers, so that the sessions come as they do without failures.
        self._fate: Final = Random(f"failures {seed}")
        self._down: Final[set[int]] = set()
        for failure in failures:
            self._clock.at(failure.at_s, self._die, failure)

    def run(self) -> Finished:
        self._begin()
        self._clock.run()
        result = self._result
        if self._pool is not None:
            result.pool_evicted_blocks = self._pool.evicted_blocks
            result.pool_refused_blocks = self._pool.refused_blocks
        result.preemptions = sum(
            each.preemptions + each.prefill.engine.counters.preemptions for each in self._instances
        )
        result.events = self._clock.entries
        return result

    def _begin(self) -> None:
        load, clock = self._load, self._clock
        if self._sessions[0].arrives_s is not None:
            times = [session.arrives_s or 0.0 for session in self._sessions]
            start = min(times)  # which may be a date
            for number, at in enumerate(times):
                clock.at(at - start, self._ask, number, 0)
            return
        if load.rate is not None:
            at = 0.0
            for number in range(len(self._sessions)):
                clock.at(at, self._ask, number, 0)
                at += self._random.expovariate(load.rate)
            return
        first = min(load.active, len(self._sessions))
        for number in range(first):
            clock.at(load.ramp_s * number / first, self._ask, number, 0)
        self._next = first

    def _ask(self, session: int, place: int, again: bool = False) -> None:
        now = self._clock.now
        jobs = self._result.jobs
        turns = self._sessions[session].turns
        job = Job(session, place, len(jobs), turns[place], now, place + 1 == len(turns), again=again)
        jobs.append(job)
        self._place(job)

    def _place(self, job: Job) -> None:
        now = self._clock.now
        number = self._chooser.choose(job, now)
        if number is None:
            self._clock.at(now + AGAIN_S, self._place, job)
        else:
            self._instances[number].take(job)

    # ------------------------------------------------------------------ failures

    def _die(self, failure: Failure) -> None:
        if self._ended == self._total:
            return
        now = self._clock.now
        number = self._fate.randrange(len(self._instances))
        if number in self._down:
            return
        self._down.add(number)
        self._result.failures += 1
        lost = self._instances[number].die()
        if self._pool is not None:
            self._pool.lose(number, self._fate)
        self._chooser.died(number, now)
        self._clock.at(now + failure.down_s, self._back, number)
        for job in lost:
            self._chooser.ended(job, now)
            if job.started <= now:
                # The client has had a part of the answer, so that nobody but the agent can ask again.
                job.failed = True
                self._clock.at(now + AGAIN_S, self._ask, job.session, job.place, True)
            else:
                job.retried += 1
                job.prefill, job.unpulled = None, False
                job.own_tokens, job.dram_tokens = 0.0, 0
                self._place(job)

    def _back(self, number: int) -> None:
        self._down.discard(number)
        if self._pool is not None:
            self._pool.back(number)
        self._chooser.back(number, self._clock.now)

    # ------------------------------------------------------------------ what instances tell

    def stored(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        self._chooser.stored(instance, chain, start, end, now)

    def removed(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        self._chooser.removed(instance, chain, start, end, now)

    def prefilled(self, job: Job, now: float) -> None:
        self._chooser.prefilled(job, now)

    def started(self, job: Job, now: float) -> None:
        job.started = now

    def ended(self, job: Job, now: float) -> None:
        job.ended = now
        self._chooser.ended(job, now)
        self._ended += 1
        if self._progress is not None and self._ended % 256 == 0:
            self._progress(self._ended)
        turns = self._sessions[job.session].turns
        if job.place + 1 < len(turns):
            think = turns[job.place + 1].think_s * self._load.think
            self._clock.at(now + think, self._ask, job.session, job.place + 1)
        elif self._load.rate is None and self._next < len(self._sessions) and self._next:
            self._next += 1
            self._clock.at(now, self._ask, self._next - 1, 0)
