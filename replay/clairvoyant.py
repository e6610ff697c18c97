"""Who knows everything: what could be had at most, beside what policies see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from replay.instance import Blocks, Instance, Job
from replay.pool import Places, PoolModel

# Less is not worth moving a session for.
_EQUAL_S: Final = 0.02


class Clairvoyant:
    """What could be had at most: it knows all caches, queues and transfers, and all turns to come.

    A turn goes where it will be answered first; where that makes no difference, to the holder of the longest
    local prefix; and a session that nobody holds, to where the least work is still to come. It looks no
    further than the turn at hand, so `patience` says what it would rather wait than let an instance pull or
    compute what another one has: so many seconds for each second of that. Which is best differs from run
    to run.
    """

    def __init__(
        self, instances: list[Instance], pool: PoolModel | None, to_come: Sequence[float], patience: float
    ) -> None:
        """to_come: seconds of work in each session that no cache can spare."""
        self._patience: Final = patience
        self._instances: Final = instances
        self._size: Final = instances[0].profile.blocks_of_tokens
        self._pool: Final = pool
        self._down: Final[set[int]] = set()
        self._to_come: Final = to_come
        self._ahead: Final = [0.0] * len(instances)
        self._where: Final[dict[int, int]] = {}

    def choose(self, job: Job, now: float) -> int | None:
        alive = [each for each in self._instances if each.number not in self._down]
        if not alive:
            return None
        limit = (job.asked.prompt_tokens - 1) // self._size
        places = self._pool.places(job.asked.chain, limit) if self._pool is not None else None
        pool = places.blocks if places is not None else 0
        # Of hundreds of instances most are alike to a turn: idle, with the same head.
        alike: dict[tuple[int, int, int], tuple[float, int]] = {}
        costs = {each.number: self._cost(each, job, limit, pool, places, now, alike) for each in alive}
        bound = min(seconds for seconds, _ in costs.values()) + _EQUAL_S
        close = [each for each in alive if costs[each.number][0] <= bound]
        before = self._where.get(job.session)
        if before is None:
            best = min(close, key=lambda each: (self._ahead[each.number], costs[each.number]))
        else:
            best = min(close, key=lambda each: (-costs[each.number][1], self._ahead[each.number]))
        number = best.number
        if before != number:
            if before is not None:
                self._ahead[before] -= self._to_come[job.session]
            self._ahead[number] += self._to_come[job.session]
            self._where[job.session] = number
        return number

    def _cost(
        self,
        instance: Instance,
        job: Job,
        limit: int,
        pool: int,
        places: Places | None,
        now: float,
        alike: dict[tuple[int, int, int], tuple[float, int]],
    ) -> tuple[float, int]:
        """Seconds to the first token, and blocks that are there already."""
        profile = instance.profile
        cache = instance.prefill.engine.cache
        local = cache.hit(job.asked.chain, limit)
        own = places.own(instance.number, local) if places is not None else 0
        if instance.jobs or own or profile.dram_blocks or limit + 1 - local > cache.free:
            return self._seconds(instance, job, local, limit, pool, places, now)
        kind = id(profile), local, len(instance.network.flows)
        cost = alike.get(kind)
        if cost is None:
            cost = alike[kind] = self._seconds(instance, job, local, limit, pool, places, now)
        return cost

    def _seconds(
        self,
        instance: Instance,
        job: Job,
        local: int,
        limit: int,
        pool: int,
        places: Places | None,
        now: float,
    ) -> tuple[float, int]:
        chain, profile, size = job.asked.chain, instance.profile, self._size
        dram = max(local, instance.in_dram(chain, limit))
        cached = max(dram, pool)
        rate, overhead = profile.prefill_tok_s.value, profile.overhead_s.value
        free_at = now
        for other in instance.jobs:
            free_at = max(free_at, other.arrived + overhead) + self._left(instance, other) / rate
        queue = max(0.0, free_at - now - overhead)
        queue = max(queue, self._room_wait(instance, job, local))
        compute = (job.asked.prompt_tokens - cached * size) / rate
        pull, own = 0.0, 0
        if cached > local:
            remote = max(0, pool - dram)
            own = dram - local
            if places is not None and remote:
                near = places.own(instance.number, dram)
                own, remote = own + near, remote - near
            busy = 1 + len(instance.network.flows)
            block = profile.block_bytes.value
            pull = remote * block * busy / profile.network_bytes_s.value
            pull = max(pull, own * block / profile.host_bytes_s.value) + profile.pull_setup_s.value
        work = pull + compute
        return queue + work * (1 + self._patience), local + own

    def _room_wait(self, instance: Instance, job: Job, local: int) -> float:
        """Seconds until enough blocks are free, at the pace at which those who decode give theirs back."""
        engine, size = instance.prefill.engine, self._size
        needed = sum(-(-other.asked.prompt_tokens // size) for other in instance.jobs)
        missing = needed + -(-job.asked.prompt_tokens // size) - local - engine.cache.free
        if missing <= 0:
            return 0.0
        rates = instance.profile.rates()
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
        if job.last:
            self._ahead[self._where.pop(job.session)] -= self._to_come[job.session]

    def died(self, instance: int, now: float) -> None:
        self._down.add(instance)

    def back(self, instance: int, now: float) -> None:
        self._down.discard(instance)

    def stored(self, instance: int, blocks: Blocks, now: float) -> None:
        pass

    def removed(self, instance: int, blocks: Blocks, now: float) -> None:
        pass
