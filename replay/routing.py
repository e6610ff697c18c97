"""Who chooses the instance: a policy that sees what the gateway would."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final, Protocol

from policies.candidates import EVERY_S, Prefix, Standing, candidate, pressure
from policies.columns import Shortlists
from policies.ledger import Ledger
from policies.page import Lease
from policies.sessions import Known, Sessions
from policies.types import Candidate, Policy, Rates
from policies.types import Turn as Question
from replay.board import MANY, Board
from replay.chains import Pieces
from replay.instance import Instance, Job
from replay.pool import PoolModel
from replay.profile import Profile
from store.index import BlockIndex


class Chooser(Protocol):
    """Places turns, and hears of what it is told by workers' events and answers."""

    def choose(self, job: Job, now: float) -> int | None: ...
    def stored(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None: ...
    def removed(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None: ...
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


class Blind:
    """A policy that goes by nothing but who may be chosen: it needs no index and no ledger."""

    def __init__(self, policy: Policy, instances: int, seed: int) -> None:
        self._policy: Final = policy
        self._random: Final = Random(seed)
        self._candidates: Final = [Candidate(_name(number)) for number in range(instances)]
        self._number = 0

    def choose(self, job: Job, now: float) -> int | None:
        turn = Question(job.asked.prompt_tokens, self._random.random(), self._number)
        target = self._policy(turn, self._candidates).target
        if target is None:
            return None
        self._number += 1
        return _number(target)

    def died(self, instance: int, now: float) -> None:
        self._candidates[instance] = Candidate(_name(instance), "down")

    def back(self, instance: int, now: float) -> None:
        self._candidates[instance] = Candidate(_name(instance))

    def stored(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        pass

    def removed(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        pass

    def prefilled(self, job: Job, now: float) -> None:
        pass

    def ended(self, job: Job, now: float) -> None:
        pass


def _name(instance: int) -> str:
    """As policies know it. They go by the order of names where nothing else tells."""
    return f"i{instance:04d}"


def _number(name: str) -> int:
    return int(name[1:])


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
        timed: bool = True,
    ) -> None:
        """at_once: it hears of everything when it happens. timed: it goes by rates and by how full caches
        are, not only by tokens."""
        self._policy: Final = policy
        self._timed: Final = timed
        self._size: Final = profile.blocks_of_tokens
        self._delay: Final = 0.0 if at_once else profile.events_s.value
        self._every_s: Final = 0.0 if at_once else EVERY_S
        # With P/D the cache of prefill is given back at the first token, long before the turn ends.
        self._decodes: Final = profile.decode is None
        self._pool: Final = pool
        self._index: Final = BlockIndex()
        self._ledger: Final = Ledger(_prior(profile), learns=timed)
        self._sessions: Final = Sessions()
        self._leases: Final[dict[Job, Lease]] = {}
        self._random: Final = Random(seed)
        self._instances: Final = instances
        self._capacities: Final = [int(each.profile.hbm_tokens.value) // self._size for each in instances]
        self._down: Final[set[int]] = set()
        self._names: Final = [_name(each.number) for each in instances]
        self._number = 0
        # Looked at once: to ask whether it has a shortlist takes as long as ten candidates.
        self._shortlists: Final = policy if isinstance(policy, Shortlists) else None
        many = len(instances) >= MANY and self._shortlists is not None
        self._board: Final = Board(self._names, self._ledger, self._size, timed) if many else None
        self._events: Final[deque[tuple[float, str, Pieces, int, int, bool]]] = deque()
        self._reported_at = -EVERY_S
        self._standings: list[Standing] = []

    def choose(self, job: Job, now: float) -> int | None:
        self._hear(now)
        if now - self._reported_at >= self._every_s:
            self._reported_at, self._standings = now, self._report(now)
            if self._board is not None:
                self._board.stand(self._standings)
        chain, prompt = job.asked.chain, job.asked.prompt_tokens
        limit = (prompt - 1) // self._size
        head = min(_HEAD_TOKENS // self._size, prompt // self._size)
        keys = chain[: limit + 1]
        full = keys[: prompt // self._size]
        known = self._sessions.find(f"s{job.session}", "", full)
        turn = Question(
            prompt,
            self._random.random(),
            self._number,
            self._size,
            known.name,
            chain[head - 1] if head else 0,
            known.new,
        )
        decision = self._policy(turn, self._candidates(turn, chain, keys, limit, known, now))
        chosen = decision.chosen
        if chosen is None:
            return None
        self._number += 1
        stay = self._sessions.placed(
            known,
            "",
            full,
            chosen.target,
            now,
            tokens=prompt,
            uncached=max(0, prompt - chosen.cached_tokens),
            block_size=self._size,
        )
        self._leases[job] = self._ledger.sent(turn, chosen, now, keys=keys, stay=stay)
        return _number(chosen.target)

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
            pressed = 0.0
            if self._timed:
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

    def _candidates(
        self, turn: Question, chain: Pieces, keys: Sequence[int], limit: int, known: Known, now: float
    ) -> list[Candidate]:
        size, ledger = self._size, self._ledger
        local = self._index.match(keys, limit=limit)
        places = self._pool.places(chain, limit) if self._pool is not None else None
        pool = places.blocks if places is not None else 0
        shown: Iterable[int] = range(len(self._names))
        if self._board is not None and isinstance(self._policy, Shortlists):
            # The board does not know whose work a target did lately.
            home = {_number(known.home)} if known.home else set[int]()
            shown = home.union(self._board.shortlist(self._policy, turn, keys, local, places, limit, now))
        found: list[Candidate] = []
        for number in shown:
            name = self._names[number]
            held = local.get(name, 0)
            prefix = Prefix(
                local=held * size,
                pool=pool * size,
                own_segment=places.own_or_spread(number, held) * size if places and pool > held else 0,
                coming=min(limit, ledger.coming(name, keys)) * size,
            )
            load, rates = ledger.load(name, now), ledger.rates(name, now)
            down = "down" if number in self._down else ""
            own = known.own(name, now)
            found.append(candidate(name, load, rates, self._standings[number], prefix, down, own))
        return found

    def prefilled(self, job: Job, now: float) -> None:
        """With P/D the gateway sees the first token of decode; that of prefill ends its leg."""
        self._leases[job].first_token(now)

    def ended(self, job: Job, now: float) -> None:
        self._leases.pop(job).ended(now)

    def died(self, instance: int, now: float) -> None:
        name = self._names[instance]
        self._down.add(instance)
        if self._board is not None:
            self._board.exclude(instance, True)
        self._index.drop(name)
        self._ledger.forget(name)
        self._sessions.forget(name)
        coming = [event for event in self._events if event[1] != name]
        self._events.clear()
        self._events.extend(coming)

    def back(self, instance: int, now: float) -> None:
        self._down.discard(instance)
        self._ledger.back(self._names[instance], now)
        if self._board is not None:
            self._board.exclude(instance, False)

    def stored(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        self._events.append((now + self._delay, self._names[instance], chain, start, end, True))

    def removed(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None:
        self._events.append((now + self._delay, self._names[instance], chain, start, end, False))

    def _hear(self, now: float) -> None:
        events, index = self._events, self._index
        while events and events[0][0] <= now:
            _, name, chain, start, end, stored = events.popleft()
            if stored:
                index.stored(name, chain[start:end], chain[start - 1] if start else None)
            else:
                index.removed(name, chain[start:end])
