"""What a KV event stream misses: replays close gaps, and what stays open is not believed."""

import asyncio

import pytest

from tests.store.following import Rig, seqs
from tests.store.kv_publisher import removed, stored


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
    publisher = await rig.followed()
    publisher.publish(removed([1]), lost=True)
    await rig.until(lambda: rig.sink.match(1) == 0)
    assert not rig.sink.resets


async def test_b010_a_gap_that_no_replay_closes_forgets_and_degrades(rig: Rig) -> None:
    publisher = await rig.followed(buffer=2)
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


@pytest.mark.parametrize("silence_s", [0.5])
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
    publisher = await rig.followed()
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


@pytest.mark.parametrize("silence_s", [0.5])
async def test_b011_a_replay_that_breaks_off_is_asked_again_from_where_it_stopped(rig: Rig) -> None:
    publisher = rig.publisher()
    for key in range(1, 9):
        publisher.publish(stored([key], parent=key - 1 or None))
    publisher.dies_after = 3
    rig.follow()
    await rig.until(lambda: rig.status.last_seq == 7)
    assert rig.sink.match(*range(1, 9)) == 8
    assert list(seqs(rig.sink.log)) == [float(n) for n in range(1, 9)]


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
