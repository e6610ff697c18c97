"""Who chooses the instance: a policy that sees what the gateway would, or one that sees everything."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from policies.types import Candidate, Policy, Rates
from policies.types import Turn as Question
from replay.chains import Pieces
from replay.instance import Instance, Job
from replay.pool import SPREAD, PoolModel
from replay.profile import Profile
from store.index import BlockIndex


class Chooser(Protocol):
    """Places turns, and hears of what it is told by workers' events and answers."""

    def choose(self, job: Job, now: float) -> int: ...
    def stored(self, instance: int, keys: Sequence[int], parent: int | None, now: float) -> None: ...
    def removed(self, instance: int, keys: Sequence[int], now: float) -> None: ...
    def prefilled(self, job: Job, now: float) -> None: ...
    def ended(self, job: Job, now: float) -> None: ...


# Recent work counts for so long: its weight falls to 1/e in this time.
_RECENT_S: Final = 60.0


@dataclass(slots=True)
class _Charge:
    """What one turn was expected to have done before its first token, in tokens."""

    computed: int
    context: float
    own: int
    remote: int


@dataclass(slots=True)
class _Ledger:
    """The leases of one instance. queued: turns before their first token, oldest first."""

    queued: dict[Job, _Charge] = field(default_factory=dict[Job, _Charge])
    first_since: float = 0.0
    inflight: int = 0
    recent: float = 0.0
    recent_at: float = 0.0

    def take(self, job: Job, charge: _Charge, now: float) -> None:
        if not self.queued:
            self.first_since = now
        self.queued[job] = charge
        self.inflight += 1
        self.recent = self.recent_now(now) + charge.computed
        self.recent_at = now

    def first_token(self, job: Job, now: float) -> None:
        if next(iter(self.queued)) is job:
            self.first_since = now
        del self.queued[job]

    def recent_now(self, now: float) -> float:
        return self.recent * math.exp((self.recent_at - now) / _RECENT_S) if self.recent else 0.0


class PolicyChooser:
    """A policy on the gateway's own index, fed by KV events that come `events_s` late.

    It is shown the rates of the profile: those that a gateway has after some turns.
    """

    def __init__(
        self, policy: Policy, instances: list[Instance], profile: Profile, pool: PoolModel | None, seed: int
    ) -> None:
        size = profile.blocks_of_tokens
        token_bytes = profile.block_bytes.value / size
        self._policy: Final = policy
        self._size: Final = size
        self._delay: Final = profile.events_s.value
        self._pool: Final = pool
        self._index: Final = BlockIndex()
        self._random: Final = Random(seed)
        self._instances: Final = instances
        self._names: Final = [f"i{each.number:04d}" for each in instances]
        self._ledgers: Final = [_Ledger() for _ in instances]
        self._number = 0
        self._events: Final[deque[tuple[float, str, Sequence[int], int | None, bool]]] = deque()
        self._rates: Final = Rates(
            prefill_s=1 / profile.prefill_tok_s.value,
            growth_s=0.0,
            own_s=token_bytes / profile.host_bytes_s.value,
            remote_s=token_bytes / profile.network_bytes_s.value,
            first_s=profile.step_s.value + profile.overhead_s.value,
            decode_s=0.0 if profile.decode is not None else profile.decode_seq_s.value,
            confidence=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        )

    def choose(self, job: Job, now: float) -> int:
        self._hear(now)
        candidates = self._candidates(job, now)
        turn = Question(
            job.asked.prompt_tokens,
            self._random.random(),
            self._number,
            self._size,
            f"s{job.session}",
            job.asked.chain[0] if len(job.asked.chain) else 0,
        )
        self._number += 1
        decision = self._policy(turn, candidates)
        assert decision.target is not None
        number = int(decision.target[1:])
        chosen = candidates[number]
        computed = max(0, turn.prompt_tokens - chosen.cached_tokens)
        own = chosen.own_segment_tokens
        remote = max(0, chosen.pool_tokens - chosen.local_tokens) - own
        context = computed * (turn.prompt_tokens - computed / 2)
        self._ledgers[number].take(job, _Charge(computed, context, own, remote), now)
        return number

    def _candidates(self, job: Job, now: float) -> list[Candidate]:
        chain, size, prompt = job.asked.chain, self._size, job.asked.prompt_tokens
        limit = (prompt - 1) // size
        local = self._index.match(chain, limit=limit)
        pool = self._pool.prefix(chain, limit) if self._pool is not None else 0
        owned = self._owned(chain, pool)
        found: list[Candidate] = []
        for number, (name, ledger) in enumerate(zip(self._names, self._ledgers, strict=True)):
            held = local.get(name, 0)
            own = owned(number, held) if owned is not None and pool > held else 0
            queued = ledger.queued
            charges = queued.values()
            first = next(iter(charges), None)
            found.append(
                Candidate(
                    name,
                    "",
                    held * size,
                    pool * size,
                    own * size,
                    0,
                    sum([each.computed for each in charges]),
                    sum([each.context for each in charges]),
                    sum([each.own for each in charges]),
                    sum([each.remote for each in charges]),
                    len(queued),
                    first.computed if first is not None else 0,
                    now - ledger.first_since if first is not None else 0.0,
                    ledger.inflight,
                    recent_tokens=ledger.recent_now(now),
                    rates=self._rates,
                )
            )
        return found

    def _owned(self, chain: Pieces, pool: int) -> Callable[[int, int], int] | None:
        """How many of the pool's blocks beyond those held lie in an instance's own segment."""
        if not pool or self._pool is None:
            return None
        parts = self._pool.parts(chain, 0, pool)
        segments = len(self._names)

        def owned(number: int, held: int) -> int:
            at, count = 0, 0.0
            for owner, blocks in parts:
                beyond = min(blocks, at + blocks - held)
                at += blocks
                if beyond > 0 and owner in (number, SPREAD):
                    count += beyond if owner == number else beyond / segments
            return int(count)

        return owned

    def prefilled(self, job: Job, now: float) -> None:
        self._ledgers[job.instance].first_token(job, now)

    def ended(self, job: Job, now: float) -> None:
        self._ledgers[job.instance].inflight -= 1

    def stored(self, instance: int, keys: Sequence[int], parent: int | None, now: float) -> None:
        self._events.append((now + self._delay, self._names[instance], keys, parent, True))

    def removed(self, instance: int, keys: Sequence[int], now: float) -> None:
        self._events.append((now + self._delay, self._names[instance], keys, None, False))

    def _hear(self, now: float) -> None:
        events, index = self._events, self._index
        while events and events[0][0] <= now:
            _, name, keys, parent, stored = events.popleft()
            if stored:
                index.stored(name, keys, parent)
            else:
                index.removed(name, keys)


# Less is not worth moving a session for.
_EQUAL_S: Final = 0.02


class Clairvoyant:
    """What could be had at most: it knows all caches, queues and transfers, and all turns to come.

    A turn goes where it will be answered first; where that makes no difference, to the holder of the longest
    local prefix; and a session that nobody holds, to where the least work is still to come.
    """

    def __init__(
        self, instances: list[Instance], profile: Profile, pool: PoolModel | None, to_come: Sequence[float]
    ) -> None:
        """to_come: the prefill work of each session, in tokens that no cache can spare."""
        self._instances: Final = instances
        self._profile: Final = profile
        self._size: Final = profile.blocks_of_tokens
        self._pool: Final = pool
        self._to_come: Final = to_come
        self._ahead: Final = [0.0] * len(instances)
        self._where: Final[dict[int, int]] = {}

    def choose(self, job: Job, now: float) -> int:
        limit = (job.asked.prompt_tokens - 1) // self._size
        pool = self._pool.prefix(job.asked.chain, limit) if self._pool is not None else 0
        costs = [self._cost(each, job, limit, pool, now) for each in self._instances]
        bound = min(seconds for seconds, _ in costs) + _EQUAL_S
        best = min(
            (each for each, (seconds, _) in zip(self._instances, costs, strict=True) if seconds <= bound),
            key=lambda each: (-costs[each.number][1], self._ahead[each.number], costs[each.number][0]),
        )
        number = best.number
        before = self._where.get(job.session)
        if before != number:
            if before is not None:
                self._ahead[before] -= self._to_come[job.session]
            self._ahead[number] += self._to_come[job.session]
            self._where[job.session] = number
        return number

    def _cost(self, instance: Instance, job: Job, limit: int, pool: int, now: float) -> tuple[float, int]:
        """Seconds to the first token, and blocks that are there already."""
        chain, profile, size = job.asked.chain, self._profile, self._size
        local = instance.prefill.engine.cache.hit(chain, limit)
        cached = max(local, pool)
        rate, overhead = profile.prefill_tok_s.value, profile.overhead_s.value
        free_at = now
        for other in instance.jobs:
            free_at = max(free_at, other.arrived + overhead) + self._left(instance, other) / rate
        queue = max(0.0, free_at - now - overhead)
        queue = max(queue, self._room_wait(instance, job, local))
        compute = queue + (job.asked.prompt_tokens - cached * size) / rate
        pull, own = 0.0, 0
        if pool > local:
            assert self._pool is not None
            parts = self._pool.parts(chain, local, pool)
            own = sum(part.blocks for part in parts if part.owner == instance.number)
            busy = 1 + len(instance.network.flows)
            block = profile.block_bytes.value
            pull = (pool - local - own) * block * busy / profile.network_bytes_s.value
            pull = max(pull, own * block / profile.host_bytes_s.value) + profile.pull_setup_s.value
        return pull + compute, local + own

    def _room_wait(self, instance: Instance, job: Job, local: int) -> float:
        """Seconds until enough blocks are free, at the pace at which those who decode give theirs back."""
        engine, size = instance.prefill.engine, self._size
        needed = sum(-(-other.asked.prompt_tokens // size) for other in instance.jobs)
        missing = needed + -(-job.asked.prompt_tokens // size) - local - engine.cache.free
        if missing <= 0:
            return 0.0
        rates = self._profile.rates()
        step = rates.step_s + engine.running * rates.decode_seq_s
        service = step * job.asked.output_tokens
        return missing / max(1, engine.cache.capacity - engine.cache.free) * service

    def _left(self, instance: Instance, job: Job) -> int:
        """Prompt tokens that are still to be computed."""
        turn = job.prefill
        if turn is not None and turn.local_tokens is not None:
            return turn.target - turn.computed
        limit = (job.asked.prompt_tokens - 1) // self._size
        known = instance.prefill.engine.cache.hit(job.asked.chain, limit)
        if self._pool is not None:
            known = max(known, self._pool.prefix(job.asked.chain, limit))
        return job.asked.prompt_tokens - known * self._size

    def prefilled(self, job: Job, now: float) -> None:
        pass

    def ended(self, job: Job, now: float) -> None:
        pass

    def stored(self, instance: int, keys: Sequence[int], parent: int | None, now: float) -> None:
        pass

    def removed(self, instance: int, keys: Sequence[int], now: float) -> None:
        pass
