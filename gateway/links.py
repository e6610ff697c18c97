"""What a change in the fleet means for the other rooms: which event streams to follow and which blocks to forget."""

from dataclasses import dataclass

from store.knowledge import Knowledge
from store.streams import EventSource, EventStreams

from gateway.prompts import ModelPrompts
from workers.fleet import FleetEvent
from workers.worker import Worker


@dataclass(slots=True)
class Links:
    """A fleet listener: subscribes to what came up, forgets what was lost."""

    streams: EventStreams
    knowledge: Knowledge
    prompts: ModelPrompts

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        if event == "up":
            self._up(worker)
        elif event == "restarted":
            self._restarted(worker)
        elif event == "lost":
            self._lost(worker)

    def _up(self, worker: Worker) -> None:
        for card in worker.models:
            self.prompts.source(worker, card)
        for source in worker.kv_endpoints:
            target = worker.target_of(source.rank)
            if worker.models:
                self.knowledge.expect(target, self.prompts.scheme(worker, worker.models[0].id))
            self.streams.subscribe(EventSource(target, source.endpoint, source.replay_endpoint, source.topic))

    def _restarted(self, worker: Worker) -> None:
        for target in worker.targets:
            self.streams.restarted(target.name)

    def _lost(self, worker: Worker) -> None:
        for target in worker.targets:
            self.streams.unsubscribe(target.name)
            self.knowledge.drop(target.name)
