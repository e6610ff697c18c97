"""Trace files: JSON lines, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from replay.traces import aiperf, claude_code, codex_like, mooncake, scaling
from replay.traces.types import BadTrace, Session, Trace

Reader = Callable[[Iterable[tuple[int, Any]], int, int | None], Iterator[Session]]

FORMATS: Final[dict[str, Reader]] = {
    "claude_code": claude_code.read,
    "codex_like": codex_like.read,
    "mooncake": mooncake.read,
    "aiperf": aiperf.read,
}
# A FILE of this name is not read but generated.
GENERATED: Final = "scaling"


def load(path: str, name: str, block_size: int, *, sessions: int = 0, head: int | None = None) -> Trace:
    """The trace in `path`. Raises BadTrace, also for a file that does not exist.

    sessions: at least so many, if its sessions have neither times nor blocks named for all of them; those
    that are missing are copies, which share the heads of the originals and nothing else. head: tokens that
    sessions share at most.
    """
    if path == GENERATED:
        return scaling.generate(max(1, sessions), block_size, head=head)
    rows = list(_rows(Path(path)))
    if not rows:
        raise BadTrace(f"{path}: no lines")
    try:
        found = list(FORMATS[name](rows, block_size, head))
        recorded = len(found)
        if found and found[0].arrives_s is None and len(found) < sessions:
            copies = -(-sessions // len(found))
            found = _named(list(FORMATS[name](rows * copies, block_size, head))[:sessions])
    except BadTrace as wrong:
        raise BadTrace(f"{path}, read as {name} (--format): {wrong}") from None
    if not found:
        raise BadTrace(f"{path}: no turns")
    return Trace(block_size, found, len(found) - recorded)


def _named(sessions: list[Session]) -> list[Session]:
    seen: dict[str, int] = {}
    named: list[Session] = []
    for each in sessions:
        copy = seen[each.name] = seen.get(each.name, 0) + 1
        named.append(each if copy == 1 else replace(each, name=f"{each.name} ({copy})"))
    return named


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    decoder = msgspec.json.Decoder()
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield number, decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as wrong:
                    raise BadTrace(f"{path}: line {number}: not JSON: {wrong}") from None
    except (OSError, EOFError, zlib.error) as wrong:
        raise BadTrace(f"{path}: {getattr(wrong, 'strerror', None) or wrong}") from None
