"""Who knows everything: what could be had at most, beside what policies see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from replay.chains import Pieces
from replay.hits import Counts, Hits
from replay.instance import Instance, Job
from replay.pool import Places, PoolModel
from replay.profile import Figure
from replay.traces.types import Session

Seconds = npt.NDArray[np.float64]

# Less is not worth moving a session for.
_EQUAL_S: Final = 0.02


class _Awaited(NamedTuple):
    """A turn without a first token. left: prompt tokens to come; pulls: fewer where the pool has more."""

    job: Job
    left: int
    pulls: bool


class Clairvoyant:
    """What could be had at most: it knows all caches, queues and transfers, and all turns to come.

    A turn goes where it will be answered first; where that makes no difference, to the holder of the longest
    local prefix; and a session that nobody holds, to where the least work is still to come. It looks no
    further than the turn at hand, so `patience` says what it would rather wait than let an instance pull or
    compute what another one has: so many seconds for each second of that. Which is best differs from run
    to run.

    Of a thousand instances few change from one turn to the next, so what it knows of them is kept in arrays.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        pool: PoolModel | None,
        sessions: Sequence[Session],
        to_come: Sequence[float],
        patience: float,
        changed: set[int],
    ) -> None:
        """to_come: seconds of work in each session that no cache can spare. changed: see Instance; emptied
        here."""
        profiles = [each.profile for each in instances]

        def figure(name: str) -> Seconds:
            figures: list[Figure] = [getattr(each, name) for each in profiles]
            return np.array([each.value for each in figures])

        self._patience: Final = patience
        self._instances: Final = instances
        self._size: Final = profiles[0].blocks_of_tokens
        self._block_bytes: Final = profiles[0].block_bytes.value
        self._pool: Final = pool
        self._to_come: Final = to_come
        self._where: Final[dict[int, int]] = {}
        self._hits: Final = Hits(instances, sessions)
        # Of each instance, what is fixed.
        self._tok_s: Final = figure("prefill_tok_s")
        self._overhead_s: Final = figure("overhead_s")
        self._network_bytes_s: Final = figure("network_bytes_s")
        self._host_bytes_s: Final = figure("host_bytes_s")
        self._setup_s: Final = figure("pull_setup_s")
        self._step_s: Final = figure("step_s")
        self._seq_s: Final = figure("decode_seq_s")
        self._capacity: Final = np.array([each.prefill.engine.cache.capacity for each in instances])
        self._with_dram: Final = [each for each in instances if each.profile.dram_blocks]
        # What changes: seconds still to come, free blocks, turns that run, pulls, blocks that those need
        # whose first token is awaited, and who these are.
        count = len(instances)
        self._ahead: Final = np.zeros(count)
        self._down: Final[set[int]] = set()
        self._free, self._running, self._pulls, self._needed = np.zeros((4, count), dtype=np.int64)
        self._awaited: Final[dict[int, list[_Awaited]]] = {}
        self._changed: Final = changed
        changed.update(range(count))

    def choose(self, job: Job, now: float) -> int | None:
        if len(self._down) == len(self._instances):
            return None
        self._look()
        seconds, there = self._costs(job, now)
        if self._down:
            seconds[list(self._down)] = np.inf
        close = np.flatnonzero(seconds <= seconds.min() + _EQUAL_S)
        before = self._where.get(job.session)
        if before is None:
            order = np.lexsort((there[close], seconds[close], self._ahead[close]))
        else:
            order = np.lexsort((self._ahead[close], -there[close]))
        number = int(close[order[0]])
        if before != number:
            if before is not None:
                self._ahead[before] -= self._to_come[job.session]
            self._ahead[number] += self._to_come[job.session]
            self._where[job.session] = number
        self._hits.sent(job.session, number)
        return number

    def _look(self) -> None:
        """At those in which something happened."""
        changed = list(self._changed)
        self._changed.clear()
        self._hits.changed(changed)
        for number in changed:
            instance = self._instances[number]
            engine = instance.prefill.engine
            self._free[number] = engine.cache.free
            self._running[number] = engine.running
            self._pulls[number] = instance.network.busy
            self._needed[number] = sum(-(-each.asked.prompt_tokens // self._size) for each in instance.jobs)
            if instance.jobs:
                self._awaited[number] = [self._await(instance, each) for each in instance.jobs]
            else:
                self._awaited.pop(number, None)

    def _costs(self, job: Job, now: float) -> tuple[Seconds, Counts]:
        """Of each instance: seconds to the first token, and blocks that are there already."""
        asked, size = job.asked, self._size
        limit = (asked.prompt_tokens - 1) // size
        places = self._pool.places(asked.chain, limit) if self._pool is not None else Places((), 1)
        local = self._hits.of(job, limit)
        dram = local.copy()
        for each in self._with_dram:
            dram[each.number] = max(local[each.number], each.in_dram(asked.chain, limit))
        cached = np.maximum(dram, places.blocks)
        compute = (asked.prompt_tokens - cached * size) / self._tok_s
        near = places.each_own(dram)
        own = dram - local + near
        remote = np.maximum(0, places.blocks - dram) - near
        pull = remote * self._block_bytes * (1 + self._pulls) / self._network_bytes_s
        pull = np.maximum(pull, own * self._block_bytes / self._host_bytes_s) + self._setup_s
        work = np.where(cached > local, pull, 0.0) + compute
        queue = np.maximum(self._queues(now), self._room_waits(job, local))
        return queue + work * (1 + self._patience), local + own

    def _queues(self, now: float) -> Seconds:
        """Seconds until those have their first token who wait for it."""
        free_at = np.full(len(self._instances), now)
        for number, jobs in self._awaited.items():
            instance, at = self._instances[number], now
            rate, overhead = instance.profile.prefill_tok_s.value, instance.profile.overhead_s.value
            for each in jobs:
                at = max(at, each.job.arrived + overhead) + self._left(each) / rate
            free_at[number] = at
        return np.maximum(0.0, free_at - now - self._overhead_s)

    def _room_waits(self, job: Job, local: Counts) -> Seconds:
        """Seconds until enough blocks are free, at the pace at which those who decode give theirs back."""
        missing = self._needed + -(-job.asked.prompt_tokens // self._size) - local - self._free
        service = (self._step_s + self._running * self._seq_s) * job.asked.output_tokens
        return np.where(missing > 0, missing / np.maximum(1, self._capacity - self._free) * service, 0.0)

    def _await(self, instance: Instance, job: Job) -> _Awaited:
        turn = job.prefill
        if turn is not None and turn.local_tokens is not None:
            return _Awaited(job, turn.target - turn.computed, False)
        limit = (job.asked.prompt_tokens - 1) // self._size
        hit = instance.prefill.engine.cache.hit(job.asked.chain, limit)
        return _Awaited(job, job.asked.prompt_tokens - hit * self._size, self._pool is not None)

    def _left(self, awaited: _Awaited) -> int:
        """Prompt tokens that are still to be computed."""
        if self._pool is None or not awaited.pulls:
            return awaited.left
        asked = awaited.job.asked
        pool = self._pool.prefix(asked.chain, (asked.prompt_tokens - 1) // self._size)
        return min(awaited.left, asked.prompt_tokens - pool * self._size)

    def prefilled(self, job: Job, now: float) -> None:
        pass

    def ended(self, job: Job, now: float) -> None:
        if job.last:
            self._ahead[self._where.pop(job.session)] -= self._to_come[job.session]

    def died(self, instance: int, now: float) -> None:
        self._down.add(instance)

    def back(self, instance: int, now: float) -> None:
        self._down.discard(instance)

    def stored(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        pass

    def removed(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        pass
