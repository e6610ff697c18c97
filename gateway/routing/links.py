"""What a change in the fleet means for other rooms: event streams to follow, blocks to forget."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from gateway.knowledge.audit import Audit
from gateway.knowledge.snapshots import Snapshots
from gateway.metrics import Metrics
from gateway.prompts.prompts import ModelPrompts
from policies.ledger import Ledger
from policies.sessions import Sessions
from store.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from store.knowledge import Knowledge
from store.pool import PoolView
from store.streams import EventSource, EventStreams
from workers.fleet import FleetEvent
from workers.worker import Worker


@dataclass(frozen=True, slots=True)
class CountedKnowledge:
    """An event sink: the knowledge, with every event counted on its way in."""

    knowledge: Knowledge
    metrics: Metrics

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        for kind, count in Counter(map(type, batch.events)).items():
            self.metrics.kv_events(target, _KINDS[kind], count)
        return self.knowledge.apply(target, batch)

    def reset(self, target: str, why: str) -> None:
        self.knowledge.reset(target, why)

    def doubt(self, target: str, why: str) -> None:
        self.knowledge.doubt(target, why)


_KINDS = {BlockStored: "stored", BlockRemoved: "removed", AllBlocksCleared: "cleared"}


@dataclass(frozen=True, slots=True)
class Links:
    """A fleet listener: subscribes to what came up, forgets what was lost.

    A lost worker's share of the pool counts for nothing from then on; the master would still offer it for up
    to its client_ttl. One that was removed while it was up still has its share.
    """

    streams: EventStreams
    knowledge: Knowledge
    prompts: ModelPrompts
    snapshots: Snapshots
    ledger: Ledger
    pool: PoolView | None
    audit: Audit
    sessions: Sessions

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        if event == "up":
            self._up(worker)
        elif event == "restarted":
            self._restarted(worker)
        elif event == "back":
            self._back(worker)
        elif event == "lost":
            self._lost(worker)
        elif event == "removed":
            for target in worker.targets:
                self._left(target.name)
        if self.pool is not None and worker.segment:
            if event == "lost":
                self.pool.lost(worker.segment)
            elif event in ("up", "restarted", "removed"):
                self.pool.back(worker.segment)

    def _left(self, target: str) -> None:
        self.ledger.left(target)
        self.sessions.forget(target)
        self.audit.forget(target)

    def _up(self, worker: Worker) -> None:
        self.prompts.prepare(worker)
        # An engine may have another number of ranks than a moment ago, and no other life.
        for gone in self.streams.followed(worker.name) - {target.name for target in worker.targets}:
            self.streams.unsubscribe(gone)
            self.knowledge.drop(gone)
            self._left(gone)
        for source in worker.kv_endpoints:
            target = worker.target_of(source.rank)
            scheme = self.prompts.reported(worker, worker.models[0].id) if worker.models else None
            if scheme is not None:
                self.knowledge.expect(target, scheme, fixed=self.prompts.seed_is_set(worker.models[0].id))
            self.streams.subscribe(
                EventSource(target, source.endpoint, source.replay_endpoint, source.topic),
                self.snapshots.claim(target),
                partial(self.knowledge.admit, target),
            )

    def _restarted(self, worker: Worker) -> None:
        for target in worker.targets:
            self.audit.acquit(target.name)
            self.streams.restarted(target.name)
            self.ledger.forget(target.name)
            self.sessions.forget(target.name)
        self._back(worker)

    def _back(self, worker: Worker) -> None:
        # A turn that names no model belongs to none.
        groups = [*(card.id for card in worker.models), ""]
        for target in worker.targets:
            self.ledger.back(target.name, time.monotonic(), groups=groups, weight=worker.weight)

    def _lost(self, worker: Worker) -> None:
        self.prompts.parity.forget(worker.name)
        for target in worker.targets:
            self.audit.acquit(target.name)
            self.streams.unsubscribe(target.name)
            self.knowledge.drop(target.name)
