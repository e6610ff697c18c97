"""What is known of the workers' caches, on disk, so that a restarted gateway need not start from nothing.

A snapshot holds the index and, for each target, the last batch applied and what its events have shown. It is
believed of no target before a replay has proven that the publisher is still the same and has brought what
happened since; of all others it is forgotten.
"""

import os
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from store.capture import IndexSnapshot
from store.index import BlockIndex
from store.knowledge import Shown
from store.sequence import Mark
from store.streams import StreamMark

_MAGIC: Final = b"moongate index 3\n"
_SUM_BYTES: Final = 8
_SIZE_BYTES: Final = 8


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


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What comes first. index, certain: bytes of each piece that follows, holders and runs."""

    index: tuple[list[int], list[int]]
    certain: tuple[list[int], list[int]]
    targets: list[_Target]


@dataclass(frozen=True, slots=True)
class Restored:
    """Indexes that credit nothing of what they hold (see `BlockIndex.admit`), and their targets' states."""

    index: BlockIndex
    certain: BlockIndex
    targets: dict[str, TargetState]


def save(path: Path, index: IndexSnapshot, certain: IndexSnapshot, targets: dict[str, TargetState]) -> int:
    """Write what was taken of one instant in place of `path`, at once or not at all. Returns bytes.

    Blocks: use a thread, one at a time. Raises OSError.
    """
    states = [
        _Target(name, state.mark.mark.seq, state.mark.mark.fingerprint, state.mark.complete, state.shown)
        for name, state in targets.items()
    ]
    parts = (index.holders, index.runs, certain.holders, certain.runs)
    sizes = [list(map(len, part)) for part in parts]
    head = msgspec.msgpack.encode(_Head((sizes[0], sizes[1]), (sizes[2], sizes[3]), states))
    pieces = [len(head).to_bytes(_SIZE_BYTES, "big"), head, *chain(*parts)]
    digest = xxhash.xxh3_64()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of one name: what a kill leaves behind, the next life writes over. With names of their own, a gateway
    # that is killed again and again for want of memory would fill the disk.
    beside = path.with_name(f".{path.name}.new")
    try:
        with open(beside, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(_MAGIC)
            # Piece by piece: the event loop must not wait for one long copy.
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return sum(map(len, pieces))


def load(path: Path) -> Restored:
    """What the file holds of targets without a state is left out: nothing could ever prove it.

    Blocks: about half a second a million blocks. Raises OSError (there is no file, or it can't be read),
    BadSnapshot.
    """
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise BadSnapshot("not a snapshot of this version")
    data = memoryview(content)[len(_MAGIC) : -_SUM_BYTES]
    if xxhash.xxh3_64_digest(data) != content[-_SUM_BYTES:]:
        raise BadSnapshot("it was damaged or cut")
    try:
        end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
        file = msgspec.msgpack.decode(data[_SIZE_BYTES:end], type=_Head)
        pieces = _cut(data[end:], [*file.index, *file.certain])
        snapshot = IndexSnapshot(pieces[0], pieces[1])
        index = BlockIndex.restore(snapshot)
        certain = BlockIndex.restore(IndexSnapshot(pieces[2], pieces[3]))
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadSnapshot(str(error)) from error
    targets = {
        t.name: TargetState(StreamMark(Mark(t.seq, t.fingerprint), t.complete), t.shown) for t in file.targets
    }
    for target in {holder[0] for holder in snapshot.each_holder()} - targets.keys():
        index.drop(target)
    return Restored(index, certain, targets)


def _cut(data: memoryview, sizes: list[list[int]]) -> list[list[bytes]]:
    at, found = 0, list[list[bytes]]()
    for part in sizes:
        pieces: list[bytes] = []
        for size in part:
            pieces.append(bytes(data[at : at + size]))
            at += size
        found.append(pieces)
    return found
