"""KV event streams against publishers on real sockets."""

import asyncio
import socket
from typing import Any

import pytest

from store.streams import EventSource
from tests.store.following import Rig, seqs
from tests.store.kv_publisher import Publisher, cleared, free_port, removed, stored


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


async def test_b008_a_cleared_cache_is_empty_and_known_completely(rig: Rig) -> None:
    publisher = rig.publisher(buffer=1)
    publisher.publish(stored([7]))
    publisher.publish(stored([1]))
    rig.follow()
    await rig.following("degraded")
    publisher.publish(cleared())
    await rig.following("exact")
    assert rig.sink.match(1) == 0


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
    rank0, other = rig.publisher(), (free_port(), free_port())
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
    await rig.followed()
    rig.follow()
    assert rig.status.batches == 1
    rig.port, rig.replay_port = free_port(), free_port()
    second = rig.publisher()
    second.publish(stored([2]))
    rig.follow()
    assert rig.sink.match(1) == 0
    await rig.until(lambda: rig.sink.match(2) == 1)
    rig.streams.unsubscribe("w")
    assert rig.sink.match(2) == 0
    assert not rig.streams.status()


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
    await rig.until(lambda: rig.status.state == "exact")
    assert rig.streams.marks()["w"].mark.seq == 2


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


async def test_closing_leaves_no_thread(rig: Rig) -> None:
    rig.follow()
    drain = rig.streams._drain
    assert drain is not None
    await rig.streams.close()
    assert not drain._thread.is_alive()


async def test_an_address_that_cannot_be_used_does_not_touch_other_targets(rig: Rig) -> None:
    rig.streams.subscribe(EventSource("bad", "nonsense", "tcp://no.such.host.invalid:1"))
    rig.streams.subscribe(EventSource("far", "tcp://127.0.0.1:1", "more nonsense"))
    publisher = await rig.followed()
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
