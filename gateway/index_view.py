"""What the admin API says of the index: each target's blocks and how far they are to be trusted."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import Field

from gateway.admin_views import Answer


class IndexEntry(Answer):
    target: str
    blocks: dict[str, int] = Field(description="Blocks in the index by tier.")
    stream: str = Field(description="exact, catching-up, degraded, or none: no KV events from there.")
    last_seq: int | None = Field(description="Sequence number of the last batch of events applied.")
    batches: int
    gaps: int
    garbage: int = Field(description="Messages that could not be decoded.")
    last_event_age_s: float | None = Field(description="Seconds since the last batch.")
    hash_mismatch: str = Field(description="How this target's block hashes differ from what was expected.")


class SnapshotView(Answer):
    """The file in which the index outlives a restart of the gateway."""

    path: str = Field(description="Empty: nothing is written.")
    age_s: float | None = Field(description="Seconds since what it holds was true; null if there is none.")
    bytes: int
    failures: int = Field(description="Times that it could not be written.")
    unclaimed: int = Field(description="Targets of the last run's snapshot that did not come back yet.")


class IndexAnswer(Answer):
    targets: list[IndexEntry]
    snapshot: SnapshotView


class StreamState(Protocol):
    """What is read of a stream's status."""

    @property
    def state(self) -> str: ...
    @property
    def last_seq(self) -> int | None: ...
    @property
    def batches(self) -> int: ...
    @property
    def gaps(self) -> int: ...
    @property
    def garbage(self) -> int: ...
    @property
    def last_event_age_s(self) -> float | None: ...


def index_entries(
    targets: list[str],
    streams: Mapping[str, StreamState],
    sizes: Mapping[tuple[str, str], int],
    mismatches: Mapping[str, str],
) -> list[IndexEntry]:
    """One entry for each registered target, and for any other that the index still holds blocks of."""
    names = [*targets, *sorted({target for target, _ in sizes} - set(targets))]
    return [
        IndexEntry(
            target=name,
            blocks={tier: count for (target, tier), count in sizes.items() if target == name},
            stream=stream.state if stream else "none",
            last_seq=stream.last_seq if stream else None,
            batches=stream.batches if stream else 0,
            gaps=stream.gaps if stream else 0,
            garbage=stream.garbage if stream else 0,
            last_event_age_s=stream.last_event_age_s if stream else None,
            hash_mismatch=mismatches.get(name, ""),
        )
        for name in names
        for stream in [streams.get(name)]
    ]
