"""Event streams that follow publishers on real sockets, and a sink that lets tests await what they do."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from store.events import EventBatch
from store.knowledge import Knowledge
from store.streams import EventSource, EventStreams, StreamStatus
from tests.store.kv_publisher import Publisher, stored


@dataclass
class Watched:
    """A sink over the real knowledge that lets tests await a condition instead of sleeping."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    log: list[tuple[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    pause: Callable[[], None] = lambda: None

    def apply(self, target: str, batch: EventBatch) -> Iterator[None]:
        for _ in self.knowledge.apply(target, batch):
            self.pause()
            yield
        self.log.append(("batch", batch.ts))
        self.changed.set()

    def reset(self, target: str, why: str) -> None:
        self.knowledge.reset(target, why)
        self.log.append(("reset", why))
        self.changed.set()

    def doubt(self, target: str, why: str) -> None:
        self.knowledge.doubt(target, why)
        self.log.append(("doubt", why))
        self.changed.set()

    @property
    def resets(self) -> list[str]:
        """Whatever ended the belief in what was known."""
        return [what for kind, what in self.log if kind != "batch"]

    def match(self, *keys: int) -> int:
        return self.knowledge.match(keys).certain.get("w", 0)

    def doubted(self, *keys: int) -> int:
        held = self.knowledge.match(keys)
        return held.blocks.get("w", 0) - held.certain.get("w", 0)


@dataclass
class Rig:
    sink: Watched
    streams: EventStreams
    port: int
    replay_port: int
    alive: list[Any] = field(default_factory=list)

    def publisher(self, *, replay: bool = True, **more: Any) -> Any:
        publisher = Publisher(self.port, self.replay_port if replay else None, **more)
        self.alive.append(publisher)
        return publisher

    def kill(self, publisher: Any) -> None:
        self.alive.remove(publisher)
        publisher.close()

    def follow(self, *, replay: bool = True, topic: str = "") -> None:
        endpoint = f"tcp://127.0.0.1:{self.replay_port}" if replay else None
        self.streams.subscribe(EventSource("w", f"tcp://127.0.0.1:{self.port}", endpoint, topic))

    @property
    def status(self) -> StreamStatus:
        return self.streams.status()["w"]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits on the sink; the state of a stream changes without one, so it is looked at now and then."""
        async with asyncio.timeout(60):
            while not condition():
                self.sink.changed.clear()
                try:
                    async with asyncio.timeout(0.02):
                        await self.sink.changed.wait()
                except TimeoutError:
                    continue

    async def followed(self, **more: Any) -> Any:
        """A publisher that is followed, and whose block 1 is known."""
        publisher = self.publisher(**more)
        self.follow()
        await self.following()
        publisher.publish(stored([1]))
        await self.until(lambda: self.sink.match(1) == 1)
        return publisher

    async def following(self, state: str = "exact") -> None:
        await self.until(lambda: self.status.state == state)
        for publisher in self.alive:
            await asyncio.to_thread(publisher.wait_joined)


def seqs(log: list[tuple[str, Any]]) -> Iterator[float]:
    return (what for kind, what in log if kind == "batch")
