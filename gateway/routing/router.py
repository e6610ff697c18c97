"""Where a turn goes: what is known of its prompt, then decision and lease with no await between."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from gateway.api.parse import ParsedTurn
from gateway.errors import NoWorker, Overloaded
from gateway.knowledge.trust import Trusts
from gateway.prompts.prompts import ModelPrompts, Understood
from gateway.routing.charge import Charge
from gateway.routing.eligibility import LAST_RESORTS, Room, can_take, eased, why_nobody, why_not, within
from gateway.routing.watch import DecisionWatch
from gateway.sessions.sessions import hint, says_it_ends
from policies.candidates import EVERY_S, NOTHING, Prefix, Standing, candidate, pressure
from policies.document import Document
from policies.ledger import Ledger
from policies.plan import NO_FACTS, Facts, Plan
from policies.sessions import NOBODY, Known, Sessions
from policies.shadow import Shadow, Shadowed
from policies.types import Candidate, Decision, Turn
from store.hashing import usable_tokens
from store.knowledge import Held, Knowledge
from store.placements import Placements
from store.pool import DISK, PoolPrefix, PoolView
from workers.fleet import Fleet
from workers.worker import Target, Worker

logger = logging.getLogger(__name__)

_ENDLESS = Room()
_NO_POOL = PoolPrefix(blocks=0, known=False)
_NOTHING_HELD = Held({}, {})
# Workers are probed every second or so: by then one may have come up.
_RETRY_AFTER_S = 2.0
# vLLM publishes from a thread that competes with its engine and HTTP server: events of a prompt came up to
# 9 ms after its answer, on two overloaded cores up to 170 ms. By then the session's next turn can be here.
_ANNOUNCED_AFTER_S = 0.5
# The blocks that an answer filled are known from events alone, up to 9 ms after its end where a core is idle.
# Only a turn that goes on from an answer so fresh waits, and at most for this long.
_ANSWER_LAG_S = 0.02
_ANSWERS = 256
# Bytes of JSON to a token, where no more is known: 3.6 of agents' bodies were text.
_BYTES_PER_TOKEN = 4
# What `prefix_hash` goes by: enough to tell agents' system prompts apart.
_HEAD_TOKENS = 1024


class Sight(msgspec.Struct, frozen=True):
    """What is known of a turn before it is placed; made once, used again when it must be placed anew.

    only: the one worker that can answer this turn, "" if any can.
    reads_cache: whether the engine looks for cached blocks at all for this request.
    reports: whether it announces what it finds once more.
    held: leading blocks per target. pool: leading blocks readable from the pool.
    session: the one it belongs to. named: what its client calls it, "" if by nothing. last: its client says
    that no turn of it comes after this one.
    streams: whether tokens come one by one.
    guess: tokens that a prompt which is not known is taken to have. facts: what rules of the policy go by.
    draw: this turn's number for ties. seconds: how long it took to find all this out; pool_seconds: of these
    for the pool, None if it was not asked.
    """

    model: str
    reads_cache: bool
    understood: Understood
    held: Held
    pool: PoolPrefix
    draw: float
    seconds: float
    pool_seconds: float | None
    only: str = ""
    session: Known = NOBODY
    last: bool = False
    streams: bool = False
    guess: int = 0
    facts: Facts = NO_FACTS
    reports: bool = False
    named: str = ""

    @property
    def prompt_tokens(self) -> int:
        """0 where the prompt is not known; of one whose beginning is known, the least it can have."""
        return 0 if self.understood.prompt is None else self.understood.prompt.size

    @property
    def block_size(self) -> int:
        """0 where the prompt is not known."""
        return 0 if self.understood.scheme is None else self.understood.scheme.block_size

    @property
    def keys(self) -> Sequence[int]:
        """The prompt's chain, none where the engine would not look for it."""
        prompt = self.understood.prompt
        return () if prompt is None or not self.reads_cache else prompt.chain.keys

    def turn(self, number: int) -> Turn:
        """As policies see it."""
        keys, size = self.keys, self.block_size
        last = min(len(keys), _HEAD_TOKENS // size) if size else 0
        head = keys[last - 1] if last else 0
        new = self.session.new and len(keys) > 0
        return Turn(self.prompt_tokens, self.draw, number, size, self.session.name, head, new)


class Client(msgspec.Struct, frozen=True):
    """headers: of the request. alias: what the model was called, where that is another name than its own.

    key, tenant: what its key is called and whose it is, as `auth.ClientKey`.
    earlier: the session of the stored response that it goes on from, "" if from none.
    """

    headers: Sequence[tuple[bytes, bytes]] = ()
    alias: str = ""
    key: str = ""
    tenant: str = ""
    earlier: str = ""


ANYBODY = Client()


class Placement(msgspec.Struct, frozen=True):
    """A decision with its lease taken."""

    decision: Decision
    target: Target
    chosen: Candidate
    lease: Charge
    turn: Turn
    plan: Plan
    shadowed: Shadowed | None = None


class Draws(Protocol):
    def random(self) -> float: ...


class Router:
    """The plan is swapped whole; everything else belongs to the rooms it asks."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        prompts: ModelPrompts,
        knowledge: Knowledge,
        trusts: Trusts,
        pool: PoolView | None,
        ledger: Ledger,
        room: Room = _ENDLESS,
        room_each: Room = _ENDLESS,
        draws: Draws | None = None,
        failed: Callable[[str], None] = lambda source: None,
        slow: Callable[[str], None] = lambda policy: None,
    ) -> None:
        """failed: told which source of knowledge raised, `index`, `pool` or `sessions`.

        slow: told which policy took long to decide.
        """
        self.plan = Plan(Document())
        self.shadow: Shadow | None = None
        self._room, self._room_each = room, room_each
        self._fleet = fleet
        self._prompts = prompts
        self._knowledge = knowledge
        self._trusts = trusts
        self._pool = pool
        self._ledger = ledger
        self.sessions: Final = Sessions()
        self._number = 0
        # By target: tokens that its cache holds at most, and what making room there costs others.
        self._full: dict[str, tuple[int, float]] = {}
        self._full_at = 0.0
        self._draws = draws or random.Random()
        self._failed = failed
        self._watch = DecisionWatch(slow)
        self._computed = Placements(ttl_s=_ANNOUNCED_AFTER_S)
        self._ended: deque[tuple[float, int, int]] = deque(maxlen=_ANSWERS)

    def use(self, plan: Plan) -> None:
        """Turns that are placed from now on go by `plan`."""
        self.plan = plan

    @property
    def looks_at_prompts(self) -> bool:
        return self._prompts.looked_at

    async def look(
        self, parsed: ParsedTurn, path: str, body: bytes, only: str = "", client: Client = ANYBODY
    ) -> Sight:
        """Find out what is known of the turn's prompt. Never raises: what can't be known is left out.

        only: the worker that holds what the turn goes on from, if there is such. client: what is known
        of the turn besides its body.
        """
        started = time.perf_counter()
        understood = await self._prompts.understand(parsed, path, body)
        pool, pool_seconds, held = _NO_POOL, None, _NOTHING_HELD
        if understood.prompt is not None:
            pool, pool_seconds = await self._in_pool(understood)
            held = await self._held(understood)
        seconds = time.perf_counter() - started
        draw = self._draws.random()
        named = hint(client.headers, parsed.session)
        # A prompt of which only the beginning is known says nothing of where a session has got to.
        whole = understood.prompt is not None and not understood.prompt.partial and parsed.reads_cache
        keys = understood.prompt.chain.keys if whole and understood.prompt is not None else ()
        return Sight(
            parsed.model,
            parsed.reads_cache,
            understood,
            held,
            pool,
            draw,
            seconds,
            pool_seconds,
            only,
            self._session(named or client.earlier, parsed.model, keys, bool(client.earlier)),
            says_it_ends(client.headers),
            parsed.stream,
            len(body) // _BYTES_PER_TOKEN,
            Facts(
                parsed.model,
                client.alias,
                parsed.api,
                self._named_headers(client.headers),
                client.tenant,
                client.key,
            ),
            parsed.reports,
            named,
        )

    async def _held(self, understood: Understood) -> Held:
        """Leading blocks of the prompt by target, those that it will announce in a moment with them."""
        prompt, scheme = understood.prompt, understood.scheme
        if prompt is None or scheme is None:
            return _NOTHING_HELD
        chain = prompt.chain
        await self._hear_out(chain.keys)
        limit = (prompt.size - 1) // scheme.block_size
        try:
            held = self._knowledge.match(chain.keys, limit=limit)
            now, keys = time.monotonic(), chain.keys if limit >= len(chain) else chain.keys[:limit]
            for known in (held.blocks,) if held.certain is held.blocks else (held.blocks, held.certain):
                soon = self._computed.extend(keys, known, now).items()
                known |= {name: n for name, n in soon if name not in self._knowledge.contradicted}
        except Exception:
            self._unanswered("index")
            return _NOTHING_HELD
        return held

    def _unanswered(self, source: str) -> None:
        """Called while what a source of knowledge raised is handled: costs the turn that knowledge alone."""
        logger.exception("the %s could not be asked; a turn goes on without it", source)
        self._failed(source)

    def _session(self, named: str, model: str, keys: Sequence[int], goes_on: bool) -> Known:
        """goes_on: from a stored response, so that it can't be new."""
        try:
            known = self.sessions.find(named, model, keys)
        except Exception:
            self._unanswered("sessions")
            return NOBODY
        return replace(known, new=False) if goes_on and known.new else known

    def _named_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
        """Those that a rule of the policy goes by."""
        named = self.plan.headers | self.shadow.plan.headers if self.shadow else self.plan.headers
        if not named:
            return {}
        found = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
        return {name: value for name, value in found if name in named}

    async def again(self, sight: Sight, failed: Worker) -> Sight:
        """After a try failed: the worker that did may have taken its part of the pool with it."""
        if self._pool is None or not sight.pool.known:
            return sight
        if failed.segment:
            self._pool.suspect(failed.segment)
        pool, pool_seconds = await self._in_pool(sight.understood)
        return replace(sight, pool=pool, pool_seconds=pool_seconds)

    async def _in_pool(self, understood: Understood) -> tuple[PoolPrefix, float | None]:
        prompt, layout, scheme = understood.prompt, understood.layout, understood.scheme
        if self._pool is None or prompt is None or layout is None or scheme is None:
            return _NO_POOL, None
        asked = time.perf_counter()
        limit = (prompt.size - 1) // scheme.block_size
        if not limit:
            return _NO_POOL, None
        try:
            found = await self._pool.prefix(prompt.chain, layout, limit=limit)
        except Exception:
            self._unanswered("pool")
            found = _NO_POOL
        return found, time.perf_counter() - asked

    def computed(self, sight: Sight, target: Target) -> None:
        """`target` answers this turn, so it holds the prompt's blocks, also before its events say so.

        Not true of a target that never announced a block: it may keep none.
        """
        prompt, size = sight.understood.prompt, sight.block_size
        if prompt is None or target.name not in self._knowledge.block_sizes:
            return
        keys, now = prompt.chain.keys, time.monotonic()
        if self._knowledge.index.is_hybrid(target.name):
            # What it retains of a sliding window serves prompts that go on from this one's end, no others.
            self._computed.place(target.name, keys[: (prompt.size - 1) // size], now, whole=True)
        else:
            self._computed.place(target.name, keys, now)

    def ended(self, sight: Sight) -> None:
        """This turn's answer is complete; the events of its last blocks may still be on their way."""
        prompt = sight.understood.prompt
        if prompt is not None and len(prompt.chain):
            blocks = len(prompt.chain)
            self._ended.append((time.monotonic(), blocks, prompt.chain.keys[blocks - 1]))

    async def _hear_out(self, keys: Sequence[int]) -> None:
        """Give the events of an answer that `keys` go on from the time they need."""
        now = time.monotonic()
        for at, blocks, last in reversed(self._ended):
            if now - at >= _ANSWER_LAG_S:
                return
            if blocks < len(keys) and keys[blocks - 1] == last:
                await asyncio.sleep(at + _ANSWER_LAG_S - now)
                return

    def decide(self, sight: Sight, failed: Collection[str] = ()) -> Decision:
        """The policy's choice now. `failed`: names of workers that failed this turn."""
        return self.plan.decide(sight.turn(self._number), self.candidates(sight, failed), sight.facts)

    def place(self, sight: Sight, failed: Collection[str] = ()) -> Placement:
        """Decide and charge, with no await between. Raises NoWorker, Overloaded.

        The one place where a turn is turned away for want of room: a queue would wait around this call.
        """
        turn, leases = sight.turn(self._number), self._fleet.leases
        size = turn.prompt_tokens
        if not self._room.endless and not self._room.has(
            0, inflight=leases.total.inflight, queued_tokens=leases.total.queued_tokens
        ):
            raise self._overloaded(size)
        candidates = self.candidates(sight, failed)
        plan, begun = self.plan, time.perf_counter()
        decision = plan.decide(turn, candidates, sight.facts)
        self._watch.decided(decision.policy, time.perf_counter() - begun, decision.fault)
        chosen = decision.chosen
        if decision.target is None or chosen is None:
            if any(candidate.excluded == "full" for candidate in decision.candidates):
                raise self._overloaded(size)
            raise NoWorker(why_nobody(decision.candidates, sight.model), retry_after_s=_RETRY_AFTER_S)
        target = self._fleet.target(decision.target)
        self._fleet.sent(target.worker)
        uncached = max(0, size - chosen.cached_tokens)
        lease = leases.take(decision.target, uncached)
        now, keys, prompt = time.monotonic(), sight.keys, sight.understood.prompt
        ticket = self._ledger.sent(
            turn,
            chosen,
            now,
            group=sight.model,
            streams=sight.streams,
            guess=sight.guess,
            keys=keys,
        )
        if sight.reports:
            self._knowledge.asked_to_report(target.name, keys)
        stay = self.sessions.placed(
            sight.session,
            sight.model,
            keys if prompt is not None and not prompt.partial else (),
            decision.target,
            now,
            tokens=size,
            uncached=uncached,
            block_size=turn.block_size,
            last=sight.last,
        )
        self._number += 1
        shadow, shadowed = self.shadow, None
        if shadow:
            begun = time.perf_counter()
            shadowed = shadow.observe(turn, candidates, sight.facts, decision)
            self._watch.decided("shadow", time.perf_counter() - begun)
        return Placement(decision, target, chosen, Charge(lease, ticket, stay), turn, plan, shadowed)

    def _overloaded(self, prompt_tokens: int) -> Overloaded:
        wait_s = self._fleet.leases.wait_s(turns=1, tokens=prompt_tokens)
        return Overloaded("too many turns are under way; try again later", retry_after_s=wait_s)

    def without_pool(self, sight: Sight) -> Sight:
        """For a turn that failed where it was to pull from the pool: placed anew without that credit."""
        return replace(sight, pool=_NO_POOL)

    def can_place(self, sight: Sight, failed: Collection[str]) -> bool:
        if not self._room_each.endless:
            return can_take(self.candidates(sight, failed))
        return any(
            why_not(self._fleet, target.worker, sight.model, failed, sight.only) in LAST_RESORTS
            for target in self._fleet.targets()
        )

    def candidates(self, sight: Sight, failed: Collection[str] = ()) -> list[Candidate]:
        """Every registered target as the policy is to see it."""
        now = time.monotonic()
        if now - self._full_at >= EVERY_S:
            self._full_at, self._full = now, self._fullness(now)
        targets = self._fleet.targets()
        known = sight.reads_cache and sight.prompt_tokens > 0 and sight.block_size > 0
        candidates = [self._candidate(target, sight, failed, now, known) for target in targets]
        candidates = within(self._room_each, candidates, sight.prompt_tokens)
        return eased(candidates, self._fleet.ramps([target.worker for target in targets]))

    def _fullness(self, now: float) -> dict[str, tuple[int, float]]:
        sizes = self._knowledge.index.sizes()
        found: dict[str, tuple[int, float]] = {}
        for target in self._fleet.targets():
            name, report = target.name, target.worker.report
            capacity = report.blocks * report.block_size
            ranks = len(target.worker.targets)
            requests = (report.running + report.waiting) / ranks
            self._ledger.reported(name, int(report.kv_usage * capacity), requests)
            if not capacity:
                continue
            found[name] = (
                capacity,
                pressure(
                    name,
                    self._ledger.load(name, now),
                    self.sessions,
                    now,
                    capacity_tokens=capacity,
                    held_tokens=sizes.get((name, "gpu"), 0) * report.block_size,
                ),
            )
        return found

    def _candidate(
        self, target: Target, sight: Sight, failed: Collection[str], now: float, known: bool
    ) -> Candidate:
        """known: something is, of what targets hold of the prompt."""
        worker, name, session = target.worker, target.name, sight.session
        report = worker.report
        capacity, pressed = self._full.get(name, (0, 0.0))
        return candidate(
            name,
            self._ledger.load(name, now),
            self._ledger.rates(name, now, sight.model),
            Standing(
                report.waiting,
                report.running,
                capacity,
                pressed,
                worker.role,
                target.rank,
                worker.weight,
            ),
            self._prefix(target, sight) if known else NOTHING,
            why_not(self._fleet, worker, sight.model, failed, sight.only),
            session.own(name, now) if session.work else 0.0,
        )

    def _prefix(self, target: Target, sight: Sight) -> Prefix:
        size, block_size = sight.prompt_tokens, sight.block_size
        held = self._trusts.credit(target.name, sight.held)
        local = usable_tokens(held, block_size, size)
        pool = usable_tokens(sight.pool.blocks, block_size, size)
        own = disk = 0
        if pool > local:
            own = sight.pool.held(target.worker.segment, held) * block_size if target.worker.segment else 0
            disk = sight.pool.held(DISK, held) * block_size
        coming = 0
        if not self._knowledge.index.is_hybrid(target.name):
            coming = usable_tokens(self._ledger.coming(target.name, sight.keys), block_size, size)
        return Prefix(local, pool, min(own, pool - local) if own else 0, disk, coming)
