"""One instance: its engine, or with P/D its two engines, and the links over which KV blocks reach it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from replay.chains import Pieces
from replay.clock import Clock
from replay.links import Link, Links
from replay.pool import SPREAD, PoolModel
from replay.profile import Profile
from replay.traces.types import Asked
from workers.sim.engine import Engine, Limits, Rates
from workers.sim.turn import Effect, Finished, Load, Removed, Save, Started, Stored, Turn

# Blocks a decoding turn takes at once; exact enough at 16 x 64 tokens of a context of 50,000.
STRIDE: Final = 16


@dataclass(slots=True, eq=False)
class Job:
    """A turn on its way through an instance. Lengths in tokens.

    session, place: which turn of which session; number: the how-manieth of the run; last: no turn comes
    after it in its session. own_tokens: of the turn's pool tokens, those that lay in the instance's own
    segment; dram_tokens: in its private DRAM; both at its first admission. pulled_bytes, put_bytes: over the
    network, also for a turn that was preempted and pulls once more.
    retried: how often it was sent again because its instance died before its first token; failed: it died
    after that, in the middle of the answer; unpulled: an instance from which it pulled died before the blocks
    were there, so that they were computed; again: the same turn was asked before, and its answer broke off.
    submitted, prefilled: when its last try came to the engine, and when that had its first token. Of the
    seconds in between: pull_s in which cached blocks came; computed_s of the others in which prompts were
    computed, its own or those before it; steps_s: what two steps take, the one under way and its own.
    source: the instance from which it pulled most; -1: from many, or none.
    """

    session: int
    place: int
    number: int
    asked: Asked
    arrived: float
    last: bool = False
    instance: int = -1
    prefill: Turn | None = None
    started: float = math.nan
    ended: float = math.nan
    own_tokens: float = 0.0
    dram_tokens: int = 0
    pulled_bytes: float = 0.0
    put_bytes: float = 0.0
    retried: int = 0
    failed: bool = False
    unpulled: bool = False
    again: bool = False
    submitted: float = math.nan
    prefilled: float = math.nan
    pull_s: float = 0.0
    computed_s: float = 0.0
    computed_tokens: int = 0
    steps_s: float = 0.0
    source: int = -1


class Watcher(Protocol):
    """Who hears what happens on instances: that blocks `start` to `end - 1` of a chain can be hit, say."""

    def stored(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None: ...
    def removed(self, instance: int, chain: Pieces, start: int, end: int, now: float) -> None: ...
    def prefilled(self, job: Job, now: float) -> None: ...
    def started(self, job: Job, now: float) -> None: ...
    def ended(self, job: Job, now: float) -> None: ...


class Station:
    """An engine that is woken when something happens in it."""

    __slots__ = ("_clock", "_gone", "_handle", "_touch", "_wake", "engine")

    def __init__(
        self,
        clock: Clock,
        limits: Limits,
        rates: Rates,
        lookup: Callable[[Turn], int] | None,
        handle: Callable[[Effect, float], None],
        touch: Callable[[], None],
    ) -> None:
        """touch: called before anything happens in it."""
        self.engine: Final = Engine(limits, rates, lookup=lookup)
        self._clock: Final = clock
        self._handle: Final = handle
        self._touch: Final = touch
        self._wake = math.inf
        self._gone = False

    def stop(self) -> None:
        """It is gone: nothing happens in it any more, whoever calls."""
        self._gone = True

    def submit(self, turn: Turn) -> None:
        self._advance()
        self.engine.submit(turn, self._clock.now)
        self._settle()

    def loaded(self, turn: Turn, *, ok: bool = True) -> None:
        if not self._gone:
            self._advance()
            self.engine.loaded(turn, self._clock.now, ok=ok)
            self._settle()

    def _advance(self) -> None:
        self._touch()
        now = self._clock.now
        for effect in self.engine.advance(now):
            self._handle(effect, now)

    def _settle(self) -> None:
        engine, now = self.engine, self._clock.now
        while (following := engine.next_at()) <= now:
            self._advance()
        if following != self._wake and following < math.inf:
            self._clock.at(following, self._woken, following)
        self._wake = following

    def _woken(self, when: float) -> None:
        if when == self._wake and not self._gone:
            self._wake = math.inf
            self._advance()
            self._settle()


class Instance:
    """Takes turns and tells `watcher` what becomes of them.

    pool None: only its own HBM caches. changed: its number is put there whenever something happens in it.
    """

    def __init__(
        self,
        number: int,
        profile: Profile,
        clock: Clock,
        links: Links,
        pool: PoolModel | None,
        watcher: Watcher,
        changed: set[int],
    ) -> None:
        self.number: Final = number
        self.profile: Final = profile
        self.jobs: Final[dict[Job, None]] = {}  # before their first token
        self.preemptions = 0  # of those of its engines that are gone
        self._under_way: Final[dict[Job, None]] = {}
        self._computed_s = 0.0  # in which its engine has computed prompts
        self.network: Final = Link(profile.network_bytes_s.value)
        self._sources: list[Instance] = []
        self._outgoing: Final = Link(profile.network_bytes_s.value)
        self._host: Final = Link(profile.host_bytes_s.value)
        self._size: Final = profile.blocks_of_tokens
        self._block_bytes: Final = profile.block_bytes.value
        self._clock: Final = clock
        self._links: Final = links
        self._pool: Final = pool
        self._dram = self._memory()
        self._watcher: Final = watcher
        self._touch: Final = partial(changed.add, number)
        if profile.decode is not None:
            self._handoff: Final = Link(profile.decode.network_bytes_s.value)
        self.prefill, self._decode = self._stations()

    def _memory(self) -> PoolModel | None:
        """Private DRAM is kept as a pool of one: saved to as computed, the longest unused goes first."""
        blocks = self.profile.dram_blocks
        return PoolModel([blocks], "owner") if blocks else None

    def in_dram(self, chain: Pieces, limit: int) -> int:
        """Leading blocks of `chain` in its private DRAM."""
        return self._dram.prefix(chain, limit) if self._dram is not None else 0

    def _stations(self) -> tuple[Station, Station | None]:
        """Empty engines."""
        clock, profile = self._clock, self.profile
        lookup = self._lookup if self._pool is not None or self._dram is not None else None
        prefill = Station(clock, profile.limits(STRIDE), profile.rates(), lookup, self._handle, self._touch)
        if profile.decode is None:
            return prefill, None
        limits, rates = profile.decode_limits(STRIDE), profile.decode_rates()
        return prefill, Station(clock, limits, rates, self._all, self._handle_decode, self._touch)

    def die(self) -> list[Job]:
        """Everything in it is lost, and the transfers from and to it. Returns the turns that were under way.

        It is there again, empty, as soon as turns are sent to it.
        """
        now = self._clock.now
        for station in (self.prefill, self._decode):
            if station is not None:
                station.stop()
        self.preemptions += self.prefill.engine.counters.preemptions
        self.prefill, self._decode = self._stations()
        self._dram = self._memory()
        lost = list(self._under_way)
        self._under_way.clear()
        self.jobs.clear()
        self._touch()
        for link in (self.network, self._outgoing, self._host):
            self._links.cut(link, now)
        if self.profile.decode is not None:
            self._links.cut(self._handoff, now)
        return lost

    def know(self, instances: list[Instance]) -> None:
        """All instances, this one included: blocks are pulled from their segments."""
        self._sources = instances

    def take(self, job: Job) -> None:
        job.instance = self.number
        self.jobs[job] = self._under_way[job] = None
        self._touch()
        self._clock.at(self._clock.now + self.profile.overhead_s.value, self._submit, job, job.retried)

    def _submit(self, job: Job, tries: int) -> None:
        if job.retried != tries or job not in self._under_way:
            return  # died since
        asked = job.asked
        answer = asked.output_tokens if self._decode is None else 1
        job.prefill = Turn(asked.chain, asked.prompt_tokens, answer, owner=job)
        engine, profile = self.prefill.engine, self.profile
        job.submitted, job.pull_s, job.source, job.computed_tokens = self._clock.now, 0.0, -1, 0
        job.computed_s = -self._computed_s
        job.steps_s = 2 * (profile.step_s.value + engine.running * profile.decode_seq_s.value)
        self.prefill.submit(job.prefill)

    def _lookup(self, turn: Turn) -> int:
        chain, limit, now = _job(turn).asked.chain, (turn.target - 1) // self._size, self._clock.now
        pools = (pool for pool in (self._pool, self._dram) if pool is not None)
        return max(pool.lookup(chain, limit, now) for pool in pools)

    def _all(self, turn: Turn) -> int:
        return turn.prompt_tokens // self._size

    def _handle(self, effect: Effect, now: float) -> None:
        if isinstance(effect, Stored):
            chain: Pieces = effect.turn.chain  # pyright: ignore[reportAssignmentType]
            self._watcher.stored(self.number, chain, effect.start, effect.end, now)
        elif isinstance(effect, Removed):
            gone: Pieces = effect.chain  # pyright: ignore[reportAssignmentType]
            self._watcher.removed(self.number, gone, effect.start, effect.end, now)
        elif isinstance(effect, Save):
            self._computed(effect)
            self._save(_job(effect.turn), effect.end, now)
        elif isinstance(effect, Load):
            self._load(effect, now)
        elif isinstance(effect, Started):
            job = _job(effect.turn)
            self.jobs.pop(job, None)
            job.prefilled = now
            job.computed_s += self._computed_s
            self._watcher.prefilled(job, now)
            if self._decode is None:
                self._watcher.started(job, now)
        else:
            self._prefill_ended(_job(effect.turn), now)

    def _computed(self, save: Save) -> None:
        """A chunk of a prompt was. What is computed once more after a preemption is the price of too little
        room and not counted."""
        job, end = _job(save.turn), save.end * self._size
        before = max(job.computed_tokens, save.turn.cached_tokens)
        if (tokens := end - before) > 0:
            profile = self.profile
            context = before + tokens / 2
            self._computed_s += tokens / profile.prefill_tok_s.value
            self._computed_s += tokens * context * profile.prefill_growth_s
            job.computed_tokens = end

    def _prefill_ended(self, job: Job, now: float) -> None:
        if self._decode is None:
            self._end(job, now)
            return
        asked = job.asked
        self._decode.submit(Turn(asked.chain, asked.prompt_tokens, asked.output_tokens, owner=job))

    def _handle_decode(self, effect: Effect, now: float) -> None:
        assert self._decode is not None
        if isinstance(effect, Load):
            size = (effect.end - effect.start) * self._block_bytes
            turn, decode = effect.turn, self._decode
            self._links.start(size, (self._handoff,), lambda _: decode.loaded(turn), now)
        elif isinstance(effect, Started):
            self._watcher.started(_job(effect.turn), now)
        elif isinstance(effect, Finished):
            self._end(_job(effect.turn), now)

    def _end(self, job: Job, now: float) -> None:
        del self._under_way[job]
        asked = job.asked
        if self.profile.saves_decode.value:
            self._save(job, asked.blocks(self._size), now)
        self._watcher.ended(job, now)

    def _save(self, job: Job, end: int, now: float) -> None:
        if self._pool is not None:
            _, moved = self._pool.put(job.asked.chain, end, self.number, now)
            job.put_bytes += moved * self._block_bytes
        if self._dram is not None:
            self._dram.put(job.asked.chain, end, 0, now)

    def _load(self, load: Load, now: float) -> None:
        """Asks the master, then copies from private DRAM and own segment and pulls from others, at once."""
        job = _job(load.turn)
        dram = max(load.start, self.in_dram(job.asked.chain, load.end))
        own = 0.0
        remote: dict[int, float] = {}
        parts = self._pool.parts(job.asked.chain, dram, load.end) if self._pool is not None else ()
        for part in parts:
            if part.owner == SPREAD:
                own += part.blocks / len(self._sources)
                remote[SPREAD] = remote.get(SPREAD, 0.0) + part.blocks * (1 - 1 / len(self._sources))
            elif part.owner == self.number:
                own += part.blocks
            else:
                remote[part.owner] = remote.get(part.owner, 0.0) + part.blocks
        if not load.turn.life:  # vLLM's counters of hits leave out preempted requests that come again, too
            job.own_tokens = own * self._size
            job.dram_tokens = (dram - load.start) * self._size
        own += dram - load.start
        pulled = sum(remote.values()) * self._block_bytes
        job.pulled_bytes += pulled
        profile = self.profile
        wait = profile.lookup_s.value + profile.lookup_block_s.value * load.end + profile.pull_setup_s.value
        began = now, self._computed_s
        transfers: list[tuple[float, tuple[Link, ...]]] = []
        if own:
            transfers.append((own * self._block_bytes, (self._host,)))
        if pulled:
            source = max(remote, key=lambda owner: remote[owner])
            # From one instance it cannot be faster than that one sends; from many each sends a small part.
            single = source != SPREAD and remote[source] * self._block_bytes * 2 > pulled
            ends = (self.network, self._sources[source]._outgoing) if single else (self.network,)
            transfers.append((pulled, ends))
            job.source = source if single else -1
        self._clock.at(now + wait, self._transfer, load.turn, transfers, began)

    def _transfer(
        self, turn: Turn, transfers: list[tuple[float, tuple[Link, ...]]], began: tuple[float, float]
    ) -> None:
        """began: when the engine asked for the blocks, and what it had computed until then."""
        left, ok, station = len(transfers), True, self.prefill
        if _job(turn).prefill is not turn:
            return  # died since
        self._touch()

        def ended(at: float) -> None:
            nonlocal left
            left -= 1
            self._touch()
            if left == 0:
                if (job := _job(turn)) in self.jobs:
                    job.pull_s += at - began[0]
                    job.computed_s -= self._computed_s - began[1]
                station.loaded(turn, ok=ok)

        def failed(now: float) -> None:
            """Its source died. What does not come is computed."""
            nonlocal ok
            ok = False
            job = _job(turn)
            job.unpulled, job.own_tokens, job.dram_tokens = True, 0.0, 0
            ended(now)

        for size, links in transfers:
            self._links.start(size, links, ended, self._clock.now, failed)


def schedule(clock: Clock) -> Links:
    """Links whose flows end by this clock."""
    links: Links

    def later(when: float, link: Link, version: int) -> None:
        clock.at(when, _flow_ends, links, link, version, clock)

    links = Links(later)
    return links


def _flow_ends(links: Links, link: Link, version: int, clock: Clock) -> None:
    links.ended(link, version, clock.now)


def _job(turn: Turn) -> Job:
    assert isinstance(turn.owner, Job)
    return turn.owner
