"""The file in which the index outlives a gateway: whatever is wrong with it costs hits, never a start."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from gateway.knowledge.snapshots import Snapshots
from peer import ADMIN
from store.hashing import HashScheme
from store.index import BlockIndex
from store.knowledge import Knowledge, Shown
from store.sequence import Mark
from store.snapshot import TargetState, load, save
from store.streams import EventSource, EventStreams, StreamMark

STATES = {
    name: TargetState(StreamMark(Mark.of(seq, b"batch"), True), Shown(32, HashScheme("sha256", 32, "7")))
    for seq, name in enumerate(("a", "b"))
}


def written(path: Path) -> None:
    index = BlockIndex()
    index.stored("a", [1, 2, 3], None)
    index.stored("b", [1, 2], None)
    save(path, index.capture().whole(), BlockIndex().capture().whole(), STATES)


class Life:
    """As much of a gateway as a snapshot needs."""

    def __init__(self, path: Path | str, interval_s: float = 60.0) -> None:
        self.knowledge = Knowledge()
        self.streams = EventStreams(self.knowledge)
        self.snapshots = Snapshots(str(path), interval_s, self.knowledge, self.streams)

    def follow(self, target: str) -> None:
        source = EventSource(target, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
        self.streams.subscribe(source, self.snapshots.claim(target))


async def test_what_nobody_claimed_yet_is_in_the_next_snapshot_too(tmp_path: Path) -> None:
    path = tmp_path / "index"
    written(path)
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    life = Life(path)
    await life.snapshots.start()
    life.follow("a")
    status = life.snapshots.status()
    assert status.bytes == path.stat().st_size > 0
    assert status.age_s is not None
    assert 3600 <= status.age_s < 3700
    assert (status.unclaimed, status.unclaimed_blocks) == (1, 2)
    assert life.snapshots.claim("new") is None
    life.knowledge.expect("a", HashScheme("sha256", 32), fixed=False)
    assert life.knowledge.hashes.scheme("a") == HashScheme("sha256", 32, "7")
    path.unlink()
    await life.snapshots.close()
    restored = load(path)
    index, states = restored.index, restored.targets
    assert states == STATES
    assert index.sizes() == {("a", "gpu"): 3, ("b", "gpu"): 2}
    assert index.match([1, 2, 3]) == {}


async def test_what_nobody_claimed_is_in_no_list_of_targets(peers, front, tmp_path: Path) -> None:
    path = tmp_path / "index"
    written(path)
    peer = await peers(lambda received, connection: connection.answer(200, b"{}"))
    gate = await front(peer, env={"MOONGATE_INDEX__SNAPSHOT_PATH": str(path)})
    async with gate.client.get(f"{gate.url}/admin/v1/index", headers=ADMIN) as answer:
        page = await answer.json()
    assert [entry["target"] for entry in page["targets"]] == [f"127.0.0.1:{peer.port}"]
    assert (page["snapshot"]["unclaimed"], page["snapshot"]["unclaimed_blocks"]) == (2, 5)
    async with gate.client.get(f"{gate.url}/metrics") as answer:
        metrics = await answer.text()
    assert 'moongate_index_blocks{tier="gpu",worker="other"} 5.0' in metrics
    assert 'worker="a"' not in metrics


async def test_targets_that_are_gone_are_not_in_the_next_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "index"
    written(path)
    life = Life(path)
    await life.snapshots.start()
    life.follow("a")
    life.streams.unsubscribe("a")
    await life.snapshots.close()
    restored = load(path)
    index, states = restored.index, restored.targets
    assert states.keys() == {"b"}
    assert index.sizes() == {("b", "gpu"): 2}


@pytest.mark.parametrize("content", [b"", b"nonsense", b"moongate index 3\n" + bytes(40)])
async def test_a_file_that_is_no_snapshot_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index"
    path.write_bytes(content)
    life = Life(path)
    await life.snapshots.start()
    assert life.snapshots.status().age_s is None
    await life.snapshots.close()
    assert load(path).targets == {}
    assert life.snapshots.status().failures == 0


async def test_a_place_that_cannot_be_written_is_counted_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    life = Life(blocked / "index", interval_s=0.01)
    await life.snapshots.start()
    for _ in range(1000):
        if life.snapshots.status().failures > 1:
            break
        await asyncio.sleep(0.01)
    blocked.unlink()
    await life.snapshots.close()
    assert life.snapshots.status().failures > 1
    assert life.snapshots.status().age_s is not None
    assert (blocked / "index").is_file()
    # Each of the two once, however often it was tried.
    said = [r.message.split(str(blocked / "index"))[1] for r in caplog.records if "written" in r.message]
    assert said == [" can't be written: File exists", " can be written again"]


async def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    life = Life("", interval_s=0.001)
    await life.snapshots.start()
    await asyncio.sleep(0.01)
    await life.snapshots.close()
    assert os.listdir(tmp_path) == []
