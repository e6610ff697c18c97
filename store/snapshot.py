"""What is known of the workers' caches, on disk, so that a restarted gateway need not start from nothing.

A snapshot holds the index and, for each target, the last batch applied and what its events have shown. It is
believed of no target before a replay has proven that the publisher is still the same and has brought what
happened since; of all others it is forgotten.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from store.index import BlockIndex, IndexSnapshot
from store.knowledge import Shown
from store.sequence import Mark
from store.streams import StreamMark

_MAGIC: Final = b"moongate index 2\n"
_SUM_BYTES: Final = 8


class BadSnapshot(Exception):
    """The file is no snapshot of this version, or not as it was written."""


@dataclass(frozen=True, slots=True)
class TargetState:
    """Where a target's stream stood, and what its events had shown by then."""

    mark: StreamMark
    shown: Shown


class _Target(msgspec.Struct, frozen=True, array_like=True):
    name: str
    seq: int
    fingerprint: int
    complete: bool
    shown: Shown


class _File(msgspec.Struct, frozen=True, array_like=True):
    index: IndexSnapshot
    certain: IndexSnapshot
    targets: list[_Target]


@dataclass(frozen=True, slots=True)
class Restored:
    """Indexes that credit nothing of what they hold (see `BlockIndex.admit`), and their targets' states."""

    index: BlockIndex
    certain: BlockIndex
    targets: dict[str, TargetState]


def save(path: Path, index: IndexSnapshot, certain: IndexSnapshot, targets: dict[str, TargetState]) -> int:
    """Write what was captured at one instant in place of `path`, at once or not at all. Returns bytes.

    Blocks: use a thread. Raises OSError.
    """
    states = [
        _Target(name, state.mark.mark.seq, state.mark.mark.fingerprint, state.mark.complete, state.shown)
        for name, state in targets.items()
    ]
    data = msgspec.msgpack.encode(_File(index, certain, states))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + xxhash.xxh3_64_digest(data))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return len(data)


def load(path: Path, *, max_bytes: int | None = None) -> Restored:
    """What the file holds of targets without a state is left out: nothing could ever prove it.

    `max_bytes`: the cap of each index. Blocks: about half a second a million blocks. Raises OSError (there is
    no file, or it can't be read), BadSnapshot.
    """
    content = path.read_bytes()
    head = len(_MAGIC) + _SUM_BYTES
    if not content.startswith(_MAGIC):
        raise BadSnapshot("not a snapshot of this version")
    data = memoryview(content)[head:]
    if xxhash.xxh3_64_digest(data) != content[len(_MAGIC) : head]:
        raise BadSnapshot("it was damaged or cut")
    try:
        file = msgspec.msgpack.decode(data, type=_File)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadSnapshot(str(error)) from error
    targets = {
        t.name: TargetState(StreamMark(Mark(t.seq, t.fingerprint), t.complete), t.shown) for t in file.targets
    }
    index = BlockIndex.restore(file.index, max_bytes=max_bytes)
    for target in {target for target, *_ in file.index.holders} - targets.keys():
        index.drop(target)
    return Restored(index, BlockIndex.restore(file.certain, max_bytes=max_bytes), targets)
