"""Who holds a prompt's blocks: the index, the pool, and what their events have yet to say."""

import asyncio
import logging
import time
from collections.abc import Callable

from gateway.prompts.prompts import Understood
from gateway.routing.sight import NO_POOL, NOTHING_HELD, Sight
from store.knowledge import Held, Knowledge
from store.placements import Placements
from store.pool import PoolPrefix, PoolView
from workers.worker import Target

logger = logging.getLogger(__name__)

# vLLM publishes from a thread that competes with its engine and HTTP server: events of a prompt came up to
# 9 ms after its answer, on two overloaded cores up to 170 ms. By then the session's next turn can be here.
_ANNOUNCED_AFTER_S = 0.5
# The blocks that an answer filled are known from events alone, up to 9 ms after its end where a core is idle.
# Only a turn that goes on from an answer so fresh waits, and at most for this long.
_ANSWER_LAG_S = 0.02
_ANSWERS = 256


class Holders:
    """Never raises: a source of knowledge that does costs the turn that knowledge alone."""

    def __init__(self, knowledge: Knowledge, pool: PoolView | None, failed: Callable[[str], None]) -> None:
        """failed: told which source of knowledge raised, `index` or `pool`."""
        self._knowledge = knowledge
        self._pool = pool
        self._failed = failed
        self._computed = Placements(ttl_s=_ANNOUNCED_AFTER_S)
        # When an answer was complete, by the last key of its prompt; the latest last.
        self._ended: dict[int, float] = {}

    async def pool(self, understood: Understood) -> tuple[PoolPrefix, float | None]:
        """What the pool has of the prompt, and how long it took to ask; None: it was not asked."""
        prompt, layout, scheme = understood.prompt, understood.layout, understood.scheme
        if self._pool is None or prompt is None or layout is None or scheme is None:
            return NO_POOL, None
        asked = time.perf_counter()
        limit = (prompt.size - 1) // scheme.block_size
        if not limit:
            return NO_POOL, None
        try:
            found = await self._pool.prefix(prompt.chain, layout, limit=limit)
        except Exception:
            self._unanswered("pool")
            found = NO_POOL
        return found, time.perf_counter() - asked

    def suspect(self, segment: str) -> None:
        """Its worker failed: it may have taken its part of the pool with it."""
        if self._pool is not None and segment:
            self._pool.suspect(segment)

    async def targets(self, understood: Understood, shared_blocks: int = 0) -> Held:
        """Leading blocks of the prompt by target, those that it will announce in a moment with them.

        shared_blocks: of the prompt that it goes on from, 0 for none.
        """
        prompt, scheme = understood.prompt, understood.scheme
        if prompt is None or scheme is None:
            return NOTHING_HELD
        chain = prompt.chain
        if 0 < shared_blocks < len(chain):
            await self._hear_out(chain.keys[shared_blocks - 1])
        limit = (prompt.size - 1) // scheme.block_size
        try:
            held = self._knowledge.match(chain.keys, limit=limit)
            now, keys = time.monotonic(), chain.keys if limit >= len(chain) else chain.keys[:limit]
            for known in (held.blocks,) if held.certain is held.blocks else (held.blocks, held.certain):
                soon = self._computed.extend(keys, known, now).items()
                known |= {name: n for name, n in soon if name not in self._knowledge.contradicted}
        except Exception:
            self._unanswered("index")
            return NOTHING_HELD
        return held

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
        if prompt is not None and prompt.chain.keys:
            last = prompt.chain.keys[-1]
            self._ended.pop(last, None)
            self._ended[last] = time.monotonic()
            if len(self._ended) > _ANSWERS:
                del self._ended[next(iter(self._ended))]

    async def _hear_out(self, last: int) -> None:
        """Give the events of an answer to the prompt that ended with `last` the time they need."""
        left = self._ended.get(last, -_ANSWER_LAG_S) + _ANSWER_LAG_S - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)

    def _unanswered(self, source: str) -> None:
        """Called while what a source of knowledge raised is handled."""
        logger.exception("the %s could not be asked; a turn goes on without it", source)
        self._failed(source)
