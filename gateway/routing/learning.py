"""What an answer teaches: how good its prediction was, and what its worker held."""

from gateway.knowledge.audit import Audit, Excuse, Sample, Tier
from gateway.metrics import Metrics
from gateway.routing.sight import Sight
from store.hashing import usable_tokens
from store.knowledge import Knowledge
from store.pool import PoolView
from store.streams import EventStreams


class Learning:
    """Takes every answer that reports its cached tokens."""

    def __init__(
        self,
        audit: Audit,
        knowledge: Knowledge,
        streams: EventStreams,
        metrics: Metrics,
        pool: PoolView | None,
    ) -> None:
        self._audit = audit
        self._knowledge = knowledge
        self._streams = streams
        self._metrics = metrics
        self._pool = pool

    def answered(self, request_id: str, sight: Sight, target: str, cached: int) -> None:
        """`target` found `cached` tokens of the prompt in its own cache or the pool."""
        understood = sight.understood
        prompt, scheme = understood.prompt, understood.scheme
        if prompt is None or scheme is None or understood.unknown:
            return
        size, block = prompt.size, scheme.block_size
        held = sight.held.blocks.get(target, 0) if sight.reads_cache else 0
        pooled = sight.pool.blocks if sight.reads_cache else 0
        local, pool = usable_tokens(held, block, size), usable_tokens(pooled, block, size)
        predicted = max(local, pool)
        tier: Tier = "none" if not predicted else "local" if local >= pool else "pool"
        keys = prompt.chain.keys
        # A prompt without a block that could be cached needs nobody's word.
        excused = self._excuse(target, sight) if size > block else ""
        if not excused and cached > predicted:
            # Known by now: then its events were on their way when the prediction was made.
            now = self._knowledge.index.match(keys, limit=(size - 1) // block).get(target, 0)
            excused = "events_on_their_way" if now * block >= cached else ""
        sample = Sample(request_id, target, sight.model, tier, predicted, cached, block, excused)
        self._audit.add(sample)
        self._metrics.cached_tokens(
            target, sight.model, tier, predicted=predicted, actual=cached, excused=excused
        )
        if tier == "pool":
            self._pulled(sight, held, cached > local, cached >= predicted)
        if sight.reads_cache:
            self._knowledge.answered(target, keys, cached // block, local // block, sight.held.at)
            if not excused and tier == "local" and predicted == cached:
                self._streams.confirmed(target)

    def pull_failed(self, sight: Sight, target: str) -> None:
        """`target` answered 500 where it was to pull from the pool."""
        self._pulled(sight, sight.held.blocks.get(target, 0), False, False)

    def _pulled(self, sight: Sight, held: int, some: bool, all_came: bool) -> None:
        """What came of the pool's blocks beyond `held`. A part may be evicted before it is loaded."""
        if self._pool is None or not sight.pool.blocks > held:
            return
        if all_came:
            self._pool.pull_worked(sight.pool.place(held))
        elif not some:
            self._pool.pull_failed(sight.pool.place(held))

    def _excuse(self, target: str, sight: Sight) -> Excuse:
        if self._pool is not None and not sight.pool.known:
            return "pool_unknown"
        if self._streams.state(target) != "exact":
            return "events_missing"
        return "in_doubt" if target in self._knowledge.doubts else ""
