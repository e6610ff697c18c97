"""Where a turn goes: what is known of its prompt, then decision and lease with no await between."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.api import ParsedTurn
from gateway.eligibility import eased, why_nobody, why_not
from gateway.errors import NoWorker
from gateway.prompts import ModelPrompts, Understood
from policies.types import Candidate, Decision, Policy, Turn
from store.hashing import usable_tokens
from store.knowledge import Knowledge
from store.placements import Placements
from store.pool import PoolPrefix, PoolView
from workers.fleet import Fleet
from workers.leases import Lease
from workers.worker import Target

_NO_POOL = PoolPrefix(blocks=0, known=False)
# Workers are probed every second or so: by then one may have come up.
_RETRY_AFTER_S = 2.0
# vLLM publishes from a thread that competes with its engine and HTTP server: events of a prompt came up to
# 9 ms after its answer, on two overloaded cores up to 170 ms. By then the session's next turn can be here.
_ANNOUNCED_AFTER_S = 0.5
# The blocks that an answer filled are known from events alone, up to 9 ms after its end where a core is idle.
# Only a turn that goes on from an answer so fresh waits, and at most for this long.
_ANSWER_LAG_S = 0.02
_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of a turn before it is placed; made once, used again when it must be placed anew.

    only: the one worker that can answer this turn, "" if any can.
    reads_cache: whether the engine looks for cached blocks at all for this request.
    local_blocks: leading blocks held per target. pool: leading blocks readable from the pool.
    draw: this turn's number for ties. seconds: how long it took to find all this out; pool_seconds: of these
    for the pool, None if it was not asked.
    """

    model: str
    reads_cache: bool
    understood: Understood
    local_blocks: dict[str, int]
    pool: PoolPrefix
    draw: float
    seconds: float
    pool_seconds: float | None
    only: str = ""

    @property
    def prompt_tokens(self) -> int:
        """0 where the prompt is not known; of one whose beginning is known, the least it can have."""
        return 0 if self.understood.prompt is None else self.understood.prompt.size

    @property
    def block_size(self) -> int:
        """0 where the prompt is not known."""
        return 0 if self.understood.scheme is None else self.understood.scheme.block_size


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision with its lease taken."""

    decision: Decision
    target: Target
    chosen: Candidate
    lease: Lease


class Draws(Protocol):
    def random(self) -> float: ...


class Router:
    """The policy is swapped whole; everything else belongs to the rooms it asks."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        prompts: ModelPrompts,
        knowledge: Knowledge,
        pool: PoolView | None,
        policy: Policy,
        draws: Draws | None = None,
    ) -> None:
        self.policy = policy
        self._fleet = fleet
        self._prompts = prompts
        self._knowledge = knowledge
        self._pool = pool
        self._number = 0
        self._draws = draws or random.SystemRandom()
        self._computed = Placements(ttl_s=_ANNOUNCED_AFTER_S)
        self._ended: deque[tuple[float, int, int]] = deque(maxlen=_ANSWERS)

    async def look(self, parsed: ParsedTurn, path: str, body: bytes, only: str = "") -> Sight:
        """Find out what is known of the turn's prompt. Never raises: what can't be known is left out.

        only: the worker that holds what the turn goes on from, if there is such.
        """
        started = time.perf_counter()
        understood = await self._prompts.understand(parsed, path, body)
        local: dict[str, int] = {}
        pool, pool_seconds = _NO_POOL, None
        if understood.prompt is not None and understood.scheme is not None:
            chain = understood.prompt.chain
            if self._pool is not None and understood.layout is not None and len(chain):
                asked = time.perf_counter()
                pool = await self._pool.prefix(chain, understood.layout)
                pool_seconds = time.perf_counter() - asked
            await self._hear_out(chain.keys)
            limit = (understood.prompt.size - 1) // understood.scheme.block_size
            local = self._knowledge.index.match(chain.keys, limit=limit)
            local |= self._computed.extend(chain.keys, local, time.monotonic())
        seconds = time.perf_counter() - started
        draw = self._draws.random()
        return Sight(
            parsed.model, parsed.reads_cache, understood, local, pool, draw, seconds, pool_seconds, only
        )

    def computed(self, sight: Sight, target: Target) -> None:
        """`target` answers this turn, so it holds the prompt's blocks, also before its events say so.

        Not true of a target that never announced a block: it may keep none.
        """
        prompt = sight.understood.prompt
        if prompt is not None and target.name in self._knowledge.block_sizes:
            self._computed.place(target.name, prompt.chain.keys, time.monotonic())

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
        turn = Turn(sight.prompt_tokens, sight.draw, self._number, sight.block_size)
        return self.policy(turn, self.candidates(sight, failed))

    def place(self, sight: Sight, failed: Collection[str] = ()) -> Placement:
        """Decide and charge, with no await between. Raises NoWorker."""
        decision = self.decide(sight, failed)
        chosen = decision.chosen
        if decision.target is None or chosen is None:
            raise NoWorker(why_nobody(decision.candidates, sight.model), retry_after_s=_RETRY_AFTER_S)
        self._number += 1
        target = next(t for t in self._fleet.targets() if t.name == decision.target)
        self._fleet.sent(target.worker)
        lease = self._fleet.leases.take(target.name, max(0, sight.prompt_tokens - chosen.cached_tokens))
        return Placement(decision, target, chosen, lease)

    def without_pool(self, sight: Sight) -> Sight:
        """For a turn that failed where it was to pull from the pool: placed anew without that credit."""
        return replace(sight, pool=_NO_POOL)

    def can_place(self, sight: Sight, failed: Collection[str]) -> bool:
        return any(not c.excluded for c in self.candidates(sight, failed))

    def candidates(self, sight: Sight, failed: Collection[str] = ()) -> list[Candidate]:
        """Every registered target as the policy is to see it."""
        targets = self._fleet.targets()
        candidates = [self._candidate(target, sight, failed) for target in targets]
        return eased(candidates, [self._fleet.ramp(target.worker) for target in targets])

    def _candidate(self, target: Target, sight: Sight, failed: Collection[str]) -> Candidate:
        worker = target.worker
        load = self._fleet.leases.load(target.name)
        local = pool = own = 0
        size, block_size = sight.prompt_tokens, sight.block_size
        if sight.reads_cache and size and block_size:
            held = sight.local_blocks.get(target.name, 0)
            local = usable_tokens(held, block_size, size)
            pool = usable_tokens(sight.pool.blocks, block_size, size)
            if pool > local and worker.segment:
                own = min(pool - local, sight.pool.held(worker.segment, held) * block_size)
        return Candidate(
            target.name,
            why_not(self._fleet, worker, sight.model, failed, sight.only),
            local_tokens=local,
            pool_tokens=pool,
            own_segment_tokens=own,
            queued_tokens=load.queued_tokens,
            inflight=load.inflight,
            waiting=worker.report.waiting,
        )
