"""What is known of the workers' caches, on disk, so that a restarted gateway need not start from nothing.

A snapshot holds the index and, for each stream, the last batch applied. It is believed of no target before a
replay has shown that the publisher is still the same and brought what happened since; of all others it is
forgotten.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from store.index import IndexSnapshot
from store.sequence import Mark
from store.streams import StreamMark

_VERSION = 1


class BadSnapshot(Exception):
    """The file is no snapshot of this version."""


class _Stream(msgspec.Struct, frozen=True, array_like=True):
    target: str
    seq: int
    fingerprint: int
    complete: bool


class _File(msgspec.Struct, frozen=True, array_like=True):
    version: int
    index: IndexSnapshot
    streams: list[_Stream]


def save(path: Path, index: IndexSnapshot, marks: dict[str, StreamMark]) -> None:
    """Write both, captured at the same instant, in place of `path`, at once or not at all.

    Blocks: use a thread. Raises OSError.
    """
    streams = [_Stream(t, m.mark.seq, m.mark.fingerprint, m.complete) for t, m in marks.items()]
    data = msgspec.msgpack.encode(_File(_VERSION, index, streams))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path) -> tuple[IndexSnapshot, dict[str, StreamMark]]:
    """Raises OSError, BadSnapshot."""
    try:
        file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadSnapshot(str(error)) from error
    if file.version != _VERSION:
        raise BadSnapshot(f"version {file.version}, not {_VERSION}")
    return file.index, {s.target: StreamMark(Mark(s.seq, s.fingerprint), s.complete) for s in file.streams}
