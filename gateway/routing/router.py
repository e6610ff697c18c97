"""Where a turn goes: what is known of its prompt, then decision and lease with no await between."""

import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from gateway.api.parse import ParsedTurn
from gateway.errors import Overloaded
from gateway.knowledge.trust import Trusts
from gateway.prompts.prompts import ModelPrompts
from gateway.routing.eligibility import (
    LAST_RESORTS,
    Lack,
    Room,
    can_take,
    eased,
    lack,
    uncached,
    why_nobody,
    why_not,
    within,
)
from gateway.routing.holders import Holders
from gateway.routing.roster import Roster
from gateway.routing.sight import ANYBODY, NO_POOL, NOTHING_HELD, Client, Sight
from gateway.routing.watch import DecisionWatch
from gateway.seldom import Seldom
from gateway.sessions.sessions import hint, says_it_ends
from policies.candidates import without
from policies.document import Document
from policies.ledger import Ledger
from policies.page import Lease
from policies.plan import Facts, Plan
from policies.sessions import NOBODY, Known, Sessions
from policies.shadow import Shadow, Shadowed
from policies.types import Candidate, Decision, Turn
from store.hashing import usable_tokens
from store.knowledge import Knowledge
from store.pool import DISK
from workers.fleet import Fleet
from workers.worker import Target, Worker

logger = logging.getLogger(__name__)

_ENDLESS = Room()
_NO_HEADERS: Final[Mapping[str, str]] = {}
# Bytes of JSON to a token, where no more is known: 3.6 of agents' bodies were text.
_BYTES_PER_TOKEN = 4


class Placement(msgspec.Struct, frozen=True):
    """A decision with its lease taken."""

    decision: Decision
    target: Target
    chosen: Candidate
    lease: Lease
    turn: Turn
    plan: Plan
    shadowed: Shadowed | None = None


class Unplaced(Exception):
    """A decision for nobody; the message says why, by kinds and without names: clients are told it."""

    def __init__(self, why: str, decision: Decision, turn: Turn, plan: Plan) -> None:
        super().__init__(why)
        self.decision = decision
        self.turn = turn
        self.plan = plan


class Draws(Protocol):
    def random(self) -> float: ...


class Router:
    """The plan is swapped whole; everything else belongs to the rooms it asks."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        prompts: ModelPrompts,
        holders: Holders,
        knowledge: Knowledge,
        trusts: Trusts,
        ledger: Ledger,
        room: Room = _ENDLESS,
        room_each: Room = _ENDLESS,
        draws: Draws | None = None,
        failed: Callable[[str], None] = lambda source: None,
        slow: Callable[[str], None] = lambda policy: None,
        refused: Callable[[str], None] = lambda limit: None,
    ) -> None:
        """failed: told which source of knowledge raised, `sessions`.

        slow: told which policy took long to decide. refused: told by which of `limits` a turn was refused.
        """
        self.plan = Plan(Document())
        self.shadow: Shadow | None = None
        self._room, self._room_each = room, room_each
        self._fleet = fleet
        self._prompts = prompts
        self._holders = holders
        self._knowledge = knowledge
        self._trusts = trusts
        self._ledger = ledger
        self.sessions: Final = Sessions()
        self._roster = Roster(fleet, ledger, knowledge, self.sessions)
        self._number = 0
        self._draws = draws or random.Random()
        self._failed = failed
        self._refused = refused
        self._watch = DecisionWatch(slow, Seldom())

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
        prompt, scheme = understood.prompt, understood.scheme
        pool, pool_seconds, held = NO_POOL, None, NOTHING_HELD
        keys: Sequence[int] = ()
        if prompt is not None and parsed.reads_cache:
            keys = prompt.chain.keys
        named = hint(client.headers, parsed.session)
        whole = () if prompt is None or prompt.partial else keys
        session = self._session(named or client.earlier, parsed.model, whole, bool(client.earlier))
        if prompt is not None:
            pool, pool_seconds = await self._holders.pool(understood)
            held = await self._holders.targets(understood, session.shared_blocks)
        seconds = time.perf_counter() - started
        own_headers = self._named_headers(client.headers)
        return Sight(
            parsed.model,
            understood,
            0 if prompt is None else prompt.size,
            0 if scheme is None else scheme.block_size,
            keys,
            whole,
            held,
            pool,
            self._draws.random(),
            seconds,
            pool_seconds,
            only,
            session,
            named,
            says_it_ends(client.headers),
            parsed.reads_cache,
            parsed.reports,
            parsed.stream,
            len(body) // _BYTES_PER_TOKEN,
            Facts(parsed.model, client.alias, parsed.api, own_headers, client.tenant, client.key),
        )

    def _session(self, named: str, model: str, keys: Sequence[int], goes_on: bool) -> Known:
        """goes_on: from a stored response, so that it can't be new."""
        try:
            known = self.sessions.find(named, model, keys)
        except Exception:
            logger.exception("the sessions could not be asked; a turn goes on without them")
            self._failed("sessions")
            return NOBODY
        return replace(known, new=False) if goes_on and known.new else known

    def _named_headers(self, headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
        """Those that a rule of the policy goes by."""
        names = self.plan.headers | self.shadow.plan.headers if self.shadow else self.plan.headers
        if not names:
            return _NO_HEADERS
        found = ((name, headers.get(name.encode("latin-1"))) for name in names)
        return {name: value.decode("latin-1") for name, value in found if value is not None}

    async def again(self, sight: Sight, failed: Worker) -> Sight:
        """After a try failed: the worker that did may have taken its part of the pool with it."""
        if not sight.pool.known:
            return sight
        self._holders.suspect(failed.segment)
        pool, pool_seconds = await self._holders.pool(sight.understood)
        return replace(sight, pool=pool, pool_seconds=pool_seconds)

    def decide(self, sight: Sight, failed: Collection[str] = ()) -> Decision:
        """The policy's choice now. `failed`: names of workers that failed this turn."""
        return self.plan.decide(sight.turn(self._number), self.candidates(sight, failed), sight.facts)

    def place(self, sight: Sight, failed: Collection[str] = ()) -> Placement:
        """Decide and charge, with no await between. Raises Unplaced, Overloaded.

        The one place where a turn is turned away for want of room: a queue would wait around this call.
        """
        turn, total = sight.turn(self._number), self._ledger.total
        size = turn.prompt_tokens
        if not self._room.endless and (
            limit := self._room.lacks(0, inflight=total.inflight, queued_tokens=total.queued_tokens)
        ):
            raise self._overloaded(limit, limit, size)
        candidates = self.candidates(sight, failed)
        plan, begun = self.plan, time.perf_counter()
        decision = plan.decide(turn, candidates, sight.facts)
        self._watch.decided(decision.policy, time.perf_counter() - begun, decision.fault)
        chosen = decision.chosen
        if decision.target is None or chosen is None:
            if full := [candidate for candidate in decision.candidates if candidate.excluded == "full"]:
                nearest = min(full, key=lambda c: uncached(c, size))
                limit = lack(self._room_each, nearest, size)
                raise self._overloaded(limit, f"worker_{limit}", uncached(nearest, size))
            raise Unplaced(why_nobody(decision.candidates, sight.model), decision, turn, plan)
        target = self._fleet.target(decision.target)
        self._fleet.sent(target.worker)
        if sight.reports:
            self._knowledge.reports.asked(target.name, sight.keys)
        now = time.monotonic()
        stay = self.sessions.placed(
            sight.session,
            sight.model,
            sight.whole_keys,
            decision.target,
            now,
            tokens=size,
            uncached=uncached(chosen, size),
            block_size=turn.block_size,
            last=sight.last,
        )
        lease = self._ledger.sent(
            turn,
            chosen,
            now,
            group=sight.model,
            streams=sight.streams,
            guess=sight.guess,
            keys=sight.keys,
            stay=stay,
        )
        self._number += 1
        shadow, shadowed = self.shadow, None
        if shadow:
            begun = time.perf_counter()
            shadowed = shadow.observe(turn, candidates, sight.facts, decision)
            self._watch.decided("shadow", time.perf_counter() - begun)
        return Placement(decision, target, chosen, lease, turn, plan, shadowed)

    def _overloaded(self, lacks: Lack, limit: str, tokens: int) -> Overloaded:
        """lacks: what has to go before there is room for the turn. tokens: what it has to compute."""
        self._refused(limit)
        total, now = self._ledger.total, time.monotonic()
        wait_s = total.wait_s(now, turns=1) if lacks == "requests" else total.wait_s(now, tokens=tokens)
        said = f"too many turns are under way (limits.{limit}); try again later"
        return Overloaded(said, retry_after_s=wait_s)

    def can_place(self, sight: Sight, failed: Collection[str]) -> bool:
        if not self._room_each.endless:
            return can_take(self.candidates(sight, failed))
        return any(
            why_not(self._fleet, target.worker, sight.model, failed, sight.only) in LAST_RESORTS
            for target in self._fleet.targets()
        )

    def candidates(self, sight: Sight, failed: Collection[str] = ()) -> Sequence[Candidate]:
        """Every registered target as the policy is to see it."""
        now, fleet, roster = time.monotonic(), self._fleet, self._roster
        bounded, ramping = not self._room_each.endless, fleet.ramping
        loads = self.plan.weighs or bounded or ramping or self.shadow is not None
        shown: Sequence[Candidate] = roster.shown(sight.model, now, loads=loads)
        if sight.session.work or (sight.block_size and sight.prompt_tokens and sight.reads_cache):
            shown = self._for_turn(shown, sight, now)
        if failed or sight.only:
            shown = [
                replace(c, excluded=why_not(fleet, target.worker, sight.model, failed, sight.only))
                for c, target in zip(shown, roster.targets, strict=True)
            ]
        if bounded:
            shown = within(self._room_each, shown, sight.prompt_tokens)
        return eased(shown, fleet.ramps(t.worker for t in roster.targets) if ramping else ())

    def _for_turn(self, shown: Sequence[Candidate], sight: Sight, now: float) -> Sequence[Candidate]:
        """With what each holds of the prompt, and without what its session made its last target do lately."""
        found, roster, ledger, session = list(shown), self._roster, self._ledger, sight.session
        size, block_size, keys = sight.prompt_tokens, sight.block_size, sight.keys
        pool = usable_tokens(sight.pool.blocks, block_size, size) if sight.pool.blocks else 0
        computing = ledger.computing() if keys else ()
        concerned: Collection[int] = range(len(found))
        if not pool:
            names = {*sight.held.blocks, *computing, session.home}
            concerned = [roster.places[name] for name in names if name in roster.places]
        for place in concerned:
            shown_as = found[place]
            name = shown_as.target
            held = self._trusts.credit(name, sight.held)
            local = usable_tokens(held, block_size, size) if held else 0
            own = disk = coming = 0
            if pool > local:
                segment = roster.targets[place].worker.segment
                own = sight.pool.held(segment, held) * block_size if segment else 0
                disk = sight.pool.held(DISK, held) * block_size
            if name in computing and not self._knowledge.index.is_hybrid(name):
                coming = usable_tokens(ledger.coming(name, keys), block_size, size)
            recent, recent_s = shown_as.recent_tokens, shown_as.recent_s
            if name == session.home and recent:
                recent, recent_s = without(session.own(name, now), recent, recent_s)
            found[place] = replace(
                shown_as,
                local_tokens=local,
                pool_tokens=pool,
                own_segment_tokens=min(own, pool - local) if own else 0,
                disk_tokens=disk,
                coming_tokens=coming,
                recent_tokens=recent,
                recent_s=recent_s,
            )
        return found
