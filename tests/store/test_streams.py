"""KV event streams against publishers on real sockets."""

import asyncio
import importlib.util
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from store.events import EventBatch
from store.index import BlockIndex
from store.knowledge import Knowledge
from store.streams import EventSource, EventStreams, StreamStatus

# Test directories are no packages; the peer is loaded from its file.
_spec = importlib.util.spec_from_file_location("kv_publisher", Path(__file__).with_name("kv_publisher.py"))
assert _spec is not None
assert _spec.loader is not None
kv = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("kv_publisher", kv)
_spec.loader.exec_module(kv)
stored, removed, cleared, Publisher = kv.stored, kv.removed, kv.cleared, kv.Publisher


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
        async with asyncio.timeout(20):
            while not condition():
                self.sink.changed.clear()
                try:
                    async with asyncio.timeout(0.02):
                        await self.sink.changed.wait()
                except TimeoutError:
                    continue

    async def following(self, state: str = "exact") -> None:
        await self.until(lambda: self.status.state == state)
        for publisher in self.alive:
            await asyncio.to_thread(publisher.wait_joined)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    sink = Watched()
    streams = EventStreams(sink, proof_interval_s=0.2, replay_silence_s=0.5)
    await streams.start()
    rig = Rig(sink, streams, kv.free_port(), kv.free_port())
    yield rig
    await streams.close()
    for publisher in rig.alive:
        publisher.close()


def seqs(log: list[tuple[str, Any]]) -> Iterator[float]:
    return (what for kind, what in log if kind == "batch")


async def test_live_batches_are_applied_in_order(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    for key in range(1, 101):
        publisher.publish(stored([key], parent=key - 1 or None))
    await rig.until(lambda: rig.sink.match(*range(1, 101)) == 100)
    assert list(seqs(rig.sink.log)) == [float(n) for n in range(1, 101)]
    assert rig.status.last_seq == 99
    assert rig.status.gaps == 0
    assert not rig.sink.resets


async def test_b015_a_late_joiner_replays_from_the_start(rig: Rig) -> None:
    publisher = rig.publisher()
    for key in range(1, 6):
        publisher.publish(stored([key], parent=key - 1 or None))
    rig.follow()
    await rig.until(lambda: rig.sink.match(1, 2, 3, 4, 5) == 5)
    await rig.following()
    assert publisher.requests[0] == 0


async def test_b015_a_replay_that_begins_late_is_used_but_not_called_exact(rig: Rig) -> None:
    publisher = rig.publisher(buffer=2)
    for key in range(1, 6):
        publisher.publish(stored([key], parent=key - 1 or None))
    rig.follow()
    await rig.following("degraded")
    assert rig.sink.match(1, 2, 3, 4, 5) == 0
    assert rig.sink.match(4, 5) == 2  # kept as orphans
    assert rig.status.missed == 3
    publisher.publish(stored([1, 2, 3]))
    await rig.until(lambda: rig.sink.match(1, 2, 3, 4, 5) == 5)


async def test_b008_a_cleared_cache_is_empty_and_known_completely(rig: Rig) -> None:
    publisher = rig.publisher(buffer=1)
    publisher.publish(stored([7]))
    publisher.publish(stored([1]))
    rig.follow()
    await rig.following("degraded")
    publisher.publish(cleared())
    await rig.following("exact")
    assert rig.sink.match(1) == 0


async def test_b010_a_gap_is_closed_by_a_replay_from_the_last_batch_known(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.status.last_seq == 0)
    publisher.publish(stored([2], parent=1), lost=True)
    publisher.publish(removed([2]), lost=True)
    publisher.publish(stored([3], parent=2))
    await rig.until(lambda: rig.status.last_seq == 3 and rig.status.state == "exact")
    assert rig.sink.match(1, 2, 3) == 1
    assert rig.status.gaps == 1
    assert not rig.sink.resets


async def test_b010_a_gap_before_the_first_message_is_closed(rig: Rig) -> None:
    rig.follow()
    publisher = rig.publisher()
    for key in range(1, 6):
        publisher.publish(stored([key], parent=key - 1 or None), lost=True)
    publisher.publish(stored([6], parent=5))
    await rig.until(lambda: rig.sink.match(1, 2, 3, 4, 5, 6) == 6)
    await rig.following()


async def test_b010_a_lost_last_batch_is_found_without_a_next_one(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    publisher.publish(removed([1]), lost=True)
    await rig.until(lambda: rig.sink.match(1) == 0)
    assert not rig.sink.resets


async def test_b010_a_gap_that_no_replay_closes_forgets_and_degrades(rig: Rig) -> None:
    publisher = rig.publisher(buffer=2)
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    for _ in range(3):
        publisher.publish(removed([1]), lost=True)
    publisher.publish(stored([2], parent=1))
    await rig.until(lambda: rig.status.last_seq == 4)
    await rig.following("degraded")
    assert rig.sink.match(1, 2) == 0
    assert len(rig.sink.resets) == 1
    assert rig.status.missed == 2


async def test_b010_without_replay_a_gap_forgets_and_degrades(rig: Rig) -> None:
    publisher = rig.publisher(replay=False)
    rig.follow(replay=False)
    await asyncio.to_thread(publisher.wait_joined)
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    publisher.publish(removed([1]), lost=True)
    publisher.publish(stored([2], parent=1))
    await rig.until(lambda: rig.sink.match(2) == 1)
    assert rig.sink.match(1, 2) == 0
    assert rig.status.state == "degraded"


async def test_b011_a_replay_that_comes_too_late_brings_nothing_back(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([9]))
    await rig.until(lambda: rig.sink.match(9) == 1)
    publisher.answering.clear()
    publisher.publish(stored([1]), lost=True)
    publisher.publish(removed([1]))
    await rig.until(lambda: bool(rig.sink.resets))  # every attempt ran into its deadline
    assert rig.status.state == "degraded"
    assert rig.sink.match(1) == 0
    publisher.answering.set()
    await rig.following()  # rebuilt from the start, now that replays are answered
    assert rig.sink.match(1) == 0
    assert rig.sink.match(9) == 1


async def test_b011_live_batches_during_a_replay_are_applied_once_and_after_it(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    publisher.answering.clear()
    publisher.asked.clear()
    publisher.publish(stored([2], parent=1), lost=True)
    publisher.publish(stored([3], parent=2))
    await asyncio.to_thread(publisher.asked.wait)
    publisher.publish(removed([2]))  # live now, and in the replay as well
    publisher.answering.set()
    await rig.until(lambda: rig.status.last_seq == 3)
    await rig.following()
    assert rig.sink.match(1, 2, 3) == 1
    assert list(seqs(rig.sink.log)) == [1.0, 2.0, 3.0, 4.0]
    publisher.publish(stored([2], parent=1))
    await rig.until(lambda: rig.sink.match(1, 2, 3) == 3)  # one copy of 3, one of 2: nothing counted twice
    publisher.publish(removed([3]), removed([2]))
    await rig.until(lambda: rig.sink.match(1, 2, 3) == 1)


async def test_b011_a_replay_that_breaks_off_is_asked_again_from_where_it_stopped(rig: Rig) -> None:
    publisher = rig.publisher()
    for key in range(1, 9):
        publisher.publish(stored([key], parent=key - 1 or None))
    publisher.dies_after = 3
    rig.follow()
    await rig.until(lambda: rig.status.last_seq == 7)
    assert rig.sink.match(*range(1, 9)) == 8
    assert list(seqs(rig.sink.log)) == [float(n) for n in range(1, 9)]


async def test_b009_a_restart_on_the_same_port_is_not_believed_for_its_predecessor(rig: Rig) -> None:
    first = rig.publisher()
    rig.follow()
    await rig.following()
    for key in range(1, 51):
        first.publish(stored([key], parent=key - 1 or None))
    await rig.until(lambda: rig.sink.match(*range(1, 51)) == 50)
    rig.kill(first)
    second = rig.publisher(start=1000.0)
    second.publish(stored([77]))
    await rig.until(lambda: rig.sink.match(77) == 1)
    assert rig.sink.match(*range(1, 51)) == 0
    assert [kind for kind, _ in rig.sink.log].index("reset") == 50  # before anything of the new life
    await rig.following()


async def test_b009_a_restart_that_has_come_further_than_its_predecessor_is_noticed(rig: Rig) -> None:
    first = rig.publisher()
    rig.follow()
    await rig.following()
    for key in range(1, 4):
        first.publish(stored([key], parent=key - 1 or None))
    await rig.until(lambda: rig.sink.match(1, 2, 3) == 3)
    rig.kill(first)
    second = rig.publisher(start=1000.0)
    for key in range(101, 161):
        second.publish(stored([key], parent=key - 1 if key > 101 else None))
    await rig.until(lambda: rig.sink.match(*range(101, 161)) == 60)
    assert rig.sink.match(1, 2, 3) == 0


async def test_b009_a_broken_connection_to_the_same_publisher_costs_nothing(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    drain = rig.streams._drain
    assert drain is not None
    asked = len(publisher.requests)
    drain.reconnect("w")
    await rig.until(lambda: len(publisher.requests) > asked)
    publisher.publish(stored([2], parent=1))
    await rig.until(lambda: rig.sink.match(1, 2) == 2)
    assert not rig.sink.resets


async def test_b009_without_replay_a_reconnection_forgets(rig: Rig) -> None:
    first = rig.publisher(replay=False)
    rig.follow(replay=False)
    await asyncio.to_thread(first.wait_joined)
    first.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    rig.kill(first)
    rig.publisher(replay=False)
    await rig.until(lambda: bool(rig.sink.resets))
    assert rig.sink.match(1) == 0


async def test_b009_a_restart_known_from_outside_replays_from_the_start(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    rig.streams.restarted("w")
    assert rig.sink.resets == ["restarted"]
    assert rig.sink.match(1) == 0
    await rig.until(lambda: rig.sink.match(1) == 1)
    await rig.following()


async def test_b014_garbage_is_counted_and_what_follows_applied(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.send(b"")
    publisher.send(b"", b"short", b"x")
    publisher.publish(payload=b"\xc1 not msgpack")
    publisher.publish(stored([1]), {"type": "BlockRemoved"}, {"type": "Novelty"})
    publisher.publish(stored([2], parent=1))
    await rig.until(lambda: rig.sink.match(1, 2) == 2)
    assert rig.status.garbage == 4
    assert rig.status.unknown == 1
    # An unreadable batch may have removed blocks: what was known is forgotten, and openly incomplete.
    assert rig.status.state == "degraded"


async def test_b050_ranks_are_told_apart_by_their_endpoint(rig: Rig) -> None:
    rank0, other = rig.publisher(), (kv.free_port(), kv.free_port())
    rank1 = Publisher(*other)
    rig.alive.append(rank1)
    rig.follow()
    endpoints = [f"tcp://127.0.0.1:{port}" for port in other]
    rig.streams.subscribe(EventSource("w@1", endpoints[0], endpoints[1]))
    rank0.publish(stored([1]))
    rank1.publish(stored([1]))
    await rig.until(lambda: rig.sink.knowledge.index.match([1]) == {"w": 1, "w@1": 1})
    rank1.publish(cleared())
    await rig.until(lambda: rig.sink.knowledge.index.match([1]) == {"w": 1})


async def test_a_topic_selects(rig: Rig) -> None:
    publisher = rig.publisher(topic="kv@w")
    rig.follow(topic="kv@")
    await rig.following()
    publisher.send(b"other", (9).to_bytes(8, "big"), b"")
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    assert rig.status.garbage == 0


async def test_subscribing_again_changes_nothing_and_elsewhere_starts_anew(rig: Rig) -> None:
    first = rig.publisher()
    rig.follow()
    await rig.following()
    first.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    rig.follow()
    assert rig.status.batches == 1
    rig.port, rig.replay_port = kv.free_port(), kv.free_port()
    second = rig.publisher()
    second.publish(stored([2]))
    rig.follow()
    assert rig.sink.match(1) == 0
    await rig.until(lambda: rig.sink.match(2) == 1)
    rig.streams.unsubscribe("w")
    assert rig.sink.match(2) == 0
    assert not rig.streams.status()


async def test_a_busy_event_loop_does_not_keep_the_sockets_from_being_emptied(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    inbox = rig.streams._streams["w"].inbox

    def publish_and_wait() -> int:
        """Blocks the event loop, as a decoder or a long step would."""
        for key in range(1, 3001):
            publisher.publish(stored([key], parent=key - 1 or None))
        for _ in range(200):
            if len(inbox._messages) >= 3000:
                break
            publisher._stop.wait(0.05)
        return len(inbox._messages)

    assert publish_and_wait() == 3000
    await rig.until(lambda: rig.status.last_seq == 2999)
    assert rig.sink.match(*range(1, 3001)) == 3000
    assert not rig.sink.resets
    assert rig.status.gaps == 0


async def test_what_overflows_the_inbox_is_replayed(rig: Rig) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    rig.streams._streams["w"].inbox._limits = (10, 1 << 20)
    for key in range(1, 501):
        publisher.publish(stored([key], parent=key - 1 or None))
    await rig.until(lambda: rig.status.gaps > 0)
    rig.streams._streams["w"].inbox._limits = (10_000, 1 << 20)
    await rig.until(lambda: rig.sink.match(*range(1, 501)) == 500)
    assert rig.status.gaps > 0


async def test_b010_a_gap_for_good_leaves_doubt_that_a_restart_ends(rig: Rig) -> None:
    publisher = rig.publisher(buffer=1)
    rig.follow()
    await rig.following()
    publisher.publish(stored([1, 2]))
    await rig.until(lambda: rig.sink.match(1, 2) == 2)
    publisher.publish(removed([2]), lost=True)
    publisher.publish(stored([7]), lost=True)
    publisher.publish(stored([3], parent=2))
    await rig.until(lambda: rig.status.state == "degraded" and rig.sink.doubted(1, 2, 3) == 3)
    assert rig.sink.match(1, 2, 3) == 0
    rig.kill(publisher)
    new = rig.publisher(start=1000.0)
    new.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1, 2) == 1)
    assert rig.sink.doubted(1, 2, 3) == 0
    await rig.until(lambda: rig.status.state == "exact")


async def test_a_huge_batch_is_applied_over_many_steps_and_never_half_in_a_snapshot(rig: Rig) -> None:
    """One event of 200,000 blocks, the second half of which is removed again in the same batch."""
    keys = list(range(1, 200_001))
    steps, paused_in, credits_, marks = 0, set[int](), list[int](), list[Any]()

    def count() -> None:
        nonlocal steps
        steps += 1
        loop.call_soon(count)

    def pause() -> None:
        if steps not in paused_in:
            paused_in.add(steps)
            credits_.append(rig.sink.match(*keys))
            marks.append(rig.streams.marks())

    loop = asyncio.get_running_loop()
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([300_000]))
    await rig.until(lambda: rig.status.last_seq == 0)
    assert set(rig.streams.marks()) == {"w"}
    rig.sink.pause = pause
    count()
    publisher.publish(stored(keys), removed(keys[100_000:]))
    publisher.publish(stored([0]))
    await rig.until(lambda: rig.status.last_seq == 2)
    assert len(paused_in) > 10
    assert not any(marks), "the next life would take half a batch for all of it"
    most = credits_.index(max(credits_))
    assert credits_ == [*sorted(credits_[:most]), *sorted(credits_[most:], reverse=True)]
    assert rig.sink.match(*keys) == 100_000
    assert rig.sink.match(0) == 1
    assert (rig.status.state, rig.streams.marks()["w"].mark.seq) == ("exact", 2)


async def test_events_of_countless_kv_groups_count_as_garbage_and_end_the_credit_of_their_target(
    rig: Rig,
) -> None:
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(*(stored([key], group_idx=key) for key in range(1, 20_001)), stored([1]))
    await rig.until(lambda: rig.status.garbage == 1)
    assert rig.status.state == "degraded"
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.status.last_seq == 1)
    assert rig.sink.knowledge.match([1]).blocks.get("w", 0) == 0


async def test_b009_a_restart_amid_a_batch_forgets_the_rest_of_it(rig: Rig) -> None:
    def restart() -> None:
        rig.sink.pause = lambda: None
        asyncio.get_running_loop().call_soon(rig.streams.restarted, "w")

    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    rig.sink.pause = restart
    publisher.publish(stored(list(range(1, 100_001))))
    await rig.until(lambda: bool(rig.sink.resets))
    rig.kill(publisher)
    rig.publisher(start=1000.0).publish(stored([200_000]))
    await rig.until(lambda: rig.sink.match(200_000) == 1)
    assert rig.sink.knowledge.index.sizes() == {("w", "gpu"): 1}


async def test_closing_leaves_no_thread(rig: Rig) -> None:
    rig.follow()
    drain = rig.streams._drain
    assert drain is not None
    await rig.streams.close()
    assert not drain._thread.is_alive()


async def continued(rig: Rig, after_snapshot: Callable[[], None]) -> tuple[Watched, EventStreams]:
    """A second gateway that starts from a snapshot of the first one's knowledge."""
    snapshot, marks = rig.sink.knowledge.index.capture().whole(), rig.streams.marks()
    await rig.streams.close()
    after_snapshot()
    index = BlockIndex.restore(snapshot)
    sink = Watched(Knowledge(index=index))
    streams = EventStreams(sink, proof_interval_s=0.2, replay_silence_s=0.5)
    await streams.start()
    source = EventSource("w", f"tcp://127.0.0.1:{rig.port}", f"tcp://127.0.0.1:{rig.replay_port}")
    assert sink.match(1) == 0, "nothing is believed before it is proven"
    streams.subscribe(source, marks["w"], lambda: index.admit("w"))
    rig.sink, rig.streams = sink, streams
    return sink, streams


async def test_a_snapshot_counts_once_the_same_publisher_has_told_the_rest(rig: Rig) -> None:
    publisher = rig.publisher(buffer=5)
    rig.follow()
    await rig.following()
    for key in range(1, 11):
        publisher.publish(stored([key], parent=key - 1 or None))
    await rig.until(lambda: rig.sink.match(*range(1, 11)) == 10)

    def meanwhile() -> None:
        publisher.publish(removed([10]))
        publisher.publish(stored([21], parent=9))

    sink, _ = await continued(rig, meanwhile)
    await rig.following()
    assert sink.match(*range(1, 10), 21) == 10  # although the replay begins long after batch 0
    assert sink.match(*range(1, 11)) == 9
    assert not sink.resets


@pytest.mark.parametrize("how", ["restarted", "moved on"])
async def test_b009_a_snapshot_of_another_life_or_with_a_gap_is_forgotten(rig: Rig, how: str) -> None:
    publisher = rig.publisher(buffer=3)
    rig.follow()
    await rig.following()
    for key in range(1, 4):
        publisher.publish(stored([key], parent=key - 1 or None))
    await rig.until(lambda: rig.sink.match(1, 2, 3) == 3)

    def meanwhile() -> None:
        if how == "restarted":
            rig.kill(publisher)
            new = rig.publisher(start=1000.0)
            for key in range(11, 16):
                new.publish(stored([key], parent=key - 1 if key > 11 else None))
        else:
            for key in range(11, 16):
                publisher.publish(removed([1]) if key == 11 else stored([key]))

    sink, _ = await continued(rig, meanwhile)
    await rig.until(lambda: rig.status.last_seq is not None and bool(sink.resets) and sink.match(15) >= 0)
    await rig.until(lambda: rig.status.state != "catching-up")
    assert sink.match(1, 2, 3) == 0
    assert rig.status.state == ("exact" if how == "restarted" else "degraded")


async def test_an_address_that_cannot_be_used_does_not_touch_other_targets(rig: Rig) -> None:
    rig.streams.subscribe(EventSource("bad", "nonsense", "tcp://no.such.host.invalid:1"))
    rig.streams.subscribe(EventSource("far", "tcp://127.0.0.1:1", "more nonsense"))
    publisher = rig.publisher()
    rig.follow()
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
    rig.streams.restarted("bad")
    rig.streams.unsubscribe("far")
    publisher.publish(stored([2], parent=1))
    await rig.until(lambda: rig.sink.match(1, 2) == 2)
    assert rig.streams.status()["bad"].state == "catching-up"


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address")
async def test_a_publisher_on_ipv6_is_reached(rig: Rig) -> None:
    publisher = rig.publisher(host="[::1]")
    rig.streams.subscribe(EventSource("w", f"tcp://[::1]:{rig.port}", f"tcp://[::1]:{rig.replay_port}"))
    await rig.following()
    publisher.publish(stored([1]))
    await rig.until(lambda: rig.sink.match(1) == 1)
