"""One publisher's life is not believed for another's: restarts, reconnections, snapshots."""

import asyncio
from collections.abc import Callable

import pytest

from store.index import BlockIndex
from store.knowledge import Knowledge
from store.streams import EventSource, EventStreams
from tests.store.following import Rig, Watched
from tests.store.kv_publisher import removed, stored


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
    publisher = await rig.followed()
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
    await rig.followed()
    rig.streams.restarted("w")
    assert rig.sink.resets == ["restarted"]
    assert rig.sink.match(1) == 0
    await rig.until(lambda: rig.sink.match(1) == 1)
    await rig.following()


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


async def continued(rig: Rig, after_snapshot: Callable[[], None]) -> tuple[Watched, EventStreams]:
    """A second gateway that starts from a snapshot of the first one's knowledge."""
    snapshot, marks = rig.sink.knowledge.index.capture().whole(), rig.streams.marks()
    await rig.streams.close()
    after_snapshot()
    index = BlockIndex.restore(snapshot)
    sink = Watched(Knowledge())
    sink.knowledge.restore(index, BlockIndex(), {})
    streams = EventStreams(sink, proof_interval_s=0.2, replay_silence_s=10.0)
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
