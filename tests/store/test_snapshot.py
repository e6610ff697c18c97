"""Snapshots: what comes back, and that none of it is believed before it is proven."""

import os
import resource
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.hashing import HashScheme
from store.index import BlockIndex
from store.knowledge import Shown
from store.sequence import Mark
from store.snapshot import BadSnapshot, TargetState, load, save
from store.streams import StreamMark

KEYS = [n * 0x9E3779B97F4A7C15 % (1 << 64) for n in range(1, 1001)]


def filled() -> BlockIndex:
    index = BlockIndex()
    index.stored("a", KEYS, None)
    index.stored("b", KEYS[:700], None)
    index.stored("b", KEYS[:10], None)
    index.removed("a", KEYS[300:320])
    index.stored("a", KEYS[:50], None, tier="cpu")
    index.describe("h", 0, 2)
    index.stored("h", KEYS[:100], None, group=1)
    index.stored("h", KEYS[98:100], None, group=0)
    return index


NOTHING = BlockIndex().capture().whole()
STATES = {
    "a": TargetState(StreamMark(Mark.of(7, b"batch"), True), Shown(16, HashScheme("xxhash", 16, "0"))),
    "b": TargetState(StreamMark(Mark.of(1, b""), False), Shown(0, None)),
    "h": TargetState(StreamMark(Mark.of(2, b"h"), True), Shown(32, HashScheme("sha256", 32))),
}


def test_what_was_known_comes_back_once_it_is_admitted(tmp_path: Path) -> None:
    before = filled()
    path = tmp_path / "new" / "index"
    assert save(path, before.capture().whole(), NOTHING, STATES) < path.stat().st_size
    restored = load(path)
    after = restored.index
    assert restored.targets == STATES
    assert after.sizes() == before.sizes()
    assert after.match(KEYS) == {}
    after.admit("b")
    assert after.match(KEYS) == {"b": 700}
    after.admit("a")
    after.admit("h")
    assert after.match(KEYS) == before.match(KEYS) == {"a": 300, "b": 700, "h": 100}
    assert after.match(KEYS, tier="cpu") == before.match(KEYS, tier="cpu") == {"a": 50}
    after.removed("b", KEYS[:10])  # the second copies
    assert after.match(KEYS)["b"] == 700
    for target in "abh":
        after.drop(target)
    assert after.sizes() == {}


def test_what_happens_before_admission_is_in_it() -> None:
    after = BlockIndex.restore(filled().capture().whole())
    after.removed("b", KEYS[600:700])
    after.stored("c", KEYS[:5], None)
    assert after.match(KEYS) == {"c": 5}
    after.admit("b")
    assert after.match(KEYS) == {"b": 600, "c": 5}


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 40), st.integers(1, 20))))
def test_any_index_comes_back_as_it_was(script: list[tuple[bool, str, int, int]]) -> None:
    before = BlockIndex()
    for storing, target, start, length in script:
        keys = KEYS[start : start + length]
        if storing:
            before.stored(target, keys, KEYS[start - 1] if start else None)
        else:
            before.removed(target, keys)
    data = msgspec.msgpack.encode(before.capture().whole())
    after = BlockIndex.restore(msgspec.msgpack.decode(data, type=type(before.capture().whole())))
    for target in "ab":
        after.admit(target)
    assert after.sizes() == before.sizes()
    assert after.match(KEYS) == before.match(KEYS)
    for start in (0, 10, 30):
        for index in (before, after):
            index.removed("a", KEYS[start : start + 15])
        assert after.match(KEYS) == before.match(KEYS)


@pytest.mark.parametrize("content", [b"", b"\xc1", msgspec.msgpack.encode([99, [[], []], []])])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index"
    path.write_bytes(content)
    with pytest.raises(BadSnapshot):
        load(path)


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_snapshot_that_was_damaged_or_cut_is_refused(tmp_path: Path, where: float) -> None:
    path = tmp_path / "index"
    save(path, filled().capture().whole(), NOTHING, STATES)
    good = path.read_bytes()
    at = int(len(good) * where)
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(BadSnapshot):
        load(path)
    path.write_bytes(good[:at])
    with pytest.raises(BadSnapshot):
        load(path)


def test_blocks_of_a_target_whose_stream_is_not_known_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save(path, filled().capture().whole(), NOTHING, {"a": STATES["a"]})
    after = load(path).index
    assert {target for target, _ in after.sizes()} == {"a"}


def test_what_a_killed_gateway_was_writing_is_written_over_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    for _ in range(3):
        child = os.fork()
        if not child:
            monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
            save(path, filled().capture().whole(), NOTHING, {})
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    save(path, filled().capture().whole(), NOTHING, STATES)
    assert load(path).targets == STATES
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_snapshot_that_does_not_fit_on_the_disk_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save(path, filled().capture().whole(), NOTHING, STATES)
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
            save(path, filled().capture().whole(), NOTHING, {})
        except OSError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert load(path).targets == STATES
    assert list(tmp_path.iterdir()) == [path]


def test_a_snapshot_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save(path, filled().capture().whole(), NOTHING, {})
    good = path.read_bytes()
    broken = {"a": TargetState(StreamMark(Mark(1, threading.Lock()), True), Shown(0, None))}  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        save(path, filled().capture().whole(), NOTHING, broken)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
