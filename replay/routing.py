"""Who chooses the instance: a policy that sees what the gateway would, or one that sees everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

from policies.candidates import EVERY_S, Prefix, Standing, candidate, pressure
from policies.ledger import Ledger, Ticket
from policies.sessions import Sessions, Stay
from policies.types import Candidate, Policy, Rates
from policies.types import Turn as Question
from replay.chains import Pieces
from replay.instance import Instance, Job
from replay.pool import Places, PoolModel
from replay.profile import Profile
from store.index import BlockIndex


class Chooser(Protocol):
    """Places turns, and hears of what it is told by workers' events and answers."""

    def choose(self, job: Job, now: float) -> int | None: ...
    def stored(self, instance: int, keys: Sequence[int], parent: int | None, now: float) -> None: ...
    def removed(self, instance: int, keys: Sequence[int], now: float) -> None: ...
    def prefilled(self, job: Job, now: float) -> None: ...
    def ended(self, job: Job, now: float) -> None: ...
    def died(self, instance: int, now: float) -> None: ...
    def back(self, instance: int, now: float) -> None: ...


# A prompt's head, as `prefix_hash` goes by it.
_HEAD_TOKENS: Final = 1024


def _prior(profile: Profile) -> Rates:
    token_bytes = profile.block_bytes.value / profile.blocks_of_tokens
    return Rates(
        prefill_s=1 / profile.prefill_tok_s.value,
        growth_s=profile.prefill_growth_s,
        own_s=token_bytes / profile.host_bytes_s.value,
        remote_s=token_bytes / profile.network_bytes_s.value,
        first_s=profile.step_s.value + profile.overhead_s.value,
        decode_s=0.0 if profile.decode is not None else profile.decode_seq_s.value,
    )


class PolicyChooser:
    """A policy on the gateway's own index, fed by KV events that come `events_s` late.

    Loads and rates come from the gateway's own ledger: it begins with the profile's rates, as if they were
    configured, and learns from the turns of this run. What workers report of themselves is up to 1 s old.
    """

    def __init__(
        self,
        policy: Policy,
        instances: list[Instance],
        profile: Profile,
        pool: PoolModel | None,
        seed: int,
        *,
        at_once: bool = False,
    ) -> None:
        """at_once: it hears of everything when it happens."""
        self._policy: Final = policy
        self._size: Final = profile.blocks_of_tokens
        self._delay: Final = 0.0 if at_once else profile.events_s.value
        self._every_s: Final = 0.0 if at_once else EVERY_S
        # With P/D the cache of prefill is given back at the first token, long before the turn ends.
        self._decodes: Final = profile.decode is None
        self._pool: Final = pool
        self._index: Final = BlockIndex()
        self._ledger: Final = Ledger(_prior(profile))
        self._sessions: Final = Sessions()
        self._tickets: Final[dict[Job, tuple[Ticket, Stay]]] = {}
        self._random: Final = Random(seed)
        self._instances: Final = instances
        self._capacities: Final = [int(each.profile.hbm_tokens.value) // self._size for each in instances]
        self._down: Final[set[int]] = set()
        self._names: Final = [f"i{each.number:04d}" for each in instances]
        self._number = 0
        self._events: Final[deque[tuple[float, str, Sequence[int], int | None, bool]]] = deque()
        self._reported_at = -EVERY_S
        self._standings: list[Standing] = []

    def choose(self, job: Job, now: float) -> int | None:
        self._hear(now)
        if now - self._reported_at >= self._every_s:
            self._reported_at, self._standings = now, self._report(now)
        chain, prompt = job.asked.chain, job.asked.prompt_tokens
        limit = (prompt - 1) // self._size
        head = min(_HEAD_TOKENS // self._size, prompt // self._size)
        turn = Question(
            prompt,
            self._random.random(),
            self._number,
            self._size,
            f"s{job.session}",
            chain[head - 1] if head else 0,
        )
        keys = chain[: limit + 1]
        decision = self._policy(turn, self._candidates(chain, keys, limit, now))
        chosen = decision.chosen
        if chosen is None:
            return None
        self._number += 1
        ticket = self._ledger.sent(turn, chosen, now, keys=keys)
        full = keys[: prompt // self._size]
        known = self._sessions.find(turn.session, "", full)
        stay = self._sessions.placed(
            known, "", full, chosen.target, now, tokens=prompt, block_size=self._size
        )
        self._tickets[job] = ticket, stay
        return int(chosen.target[1:])

    def _report(self, now: float) -> list[Standing]:
        sizes = self._index.sizes()
        found: list[Standing] = []
        for name, each, blocks in zip(self._names, self._instances, self._capacities, strict=True):
            engine, capacity = each.prefill.engine, blocks * self._size
            if self._decodes:
                self._ledger.reported(
                    name,
                    (engine.cache.capacity - engine.cache.free) * self._size,
                    engine.waiting + engine.running,
                )
            pressed = pressure(
                name,
                self._ledger.load(name, now),
                self._sessions,
                now,
                capacity_tokens=capacity,
                held_tokens=sizes.get((name, "gpu"), 0) * self._size,
            )
            room = capacity if self._decodes else 0
            found.append(Standing(engine.waiting, engine.running, room, pressed))
        return found

    def _candidates(self, chain: Pieces, keys: Sequence[int], limit: int, now: float) -> list[Candidate]:
        size, ledger = self._size, self._ledger
        local = self._index.match(keys, limit=limit)
        pool = self._pool.prefix(chain, limit) if self._pool is not None else 0
        places = self._pool.places(chain, pool) if self._pool is not None and pool else None
        found: list[Candidate] = []
        for number, (name, standing) in enumerate(zip(self._names, self._standings, strict=True)):
            held = local.get(name, 0)
            prefix = Prefix(
                local=held * size,
                pool=pool * size,
                own_segment=places.own_or_spread(number, held) * size if places and pool > held else 0,
                coming=min(limit, ledger.coming(name, keys)) * size,
            )
            load, rates = ledger.load(name, now), ledger.rates(name, now)
            down = "down" if number in self._down else ""
            found.append(candidate(name, load, rates, standing, prefix, down))
        return found

    def prefilled(self, job: Job, now: float) -> None:
        """With P/D the gateway sees the first token of decode; that of prefill ends its leg."""
        self._tickets[job][0].first_token(now)

    def ended(self, job: Job, now: float) -> None:
        ticket, stay = self._tickets.pop(job)
        ticket.ended(now)
        stay.ended(now)

    def died(self, instance: int, now: float) -> None:
        name = self._names[instance]
        self._down.add(instance)
        self._index.drop(name)
        self._ledger.forget(name)
        self._sessions.forget(name)
        coming = [event for event in self._events if event[1] != name]
        self._events.clear()
        self._events.extend(coming)

    def back(self, instance: int, now: float) -> None:
        self._down.discard(instance)

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
        pool = self._pool.prefix(job.asked.chain, limit) if self._pool is not None else 0
        places = self._pool.places(job.asked.chain, pool) if self._pool is not None and pool else None
        costs = {each.number: self._cost(each, job, limit, pool, places, now) for each in alive}
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
        self, instance: Instance, job: Job, limit: int, pool: int, places: Places | None, now: float
    ) -> tuple[float, int]:
        """Seconds to the first token, and blocks that are there already."""
        chain, profile, size = job.asked.chain, instance.profile, self._size
        local = instance.prefill.engine.cache.hit(chain, limit)
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

    def stored(self, instance: int, keys: Sequence[int], parent: int | None, now: float) -> None:
        pass

    def removed(self, instance: int, keys: Sequence[int], now: float) -> None:
        pass
