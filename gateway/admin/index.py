"""What the admin API says of the index: each target's blocks and how far they are to be trusted."""

from collections.abc import Callable, Mapping
from typing import Protocol

from pydantic import Field

from gateway.admin.views import Answer
from gateway.knowledge.trust import Trust
from store.groups import NEVER


class IndexEntry(Answer):
    target: str
    blocks: dict[str, int] = Field(description="Blocks in the index by tier.")
    windows: dict[str, int] = Field(
        description="By KV group with a sliding window: the blocks it must hold before the end of a prefix."
    )
    unproven_groups: list[int] = Field(
        description="KV groups of a kind whose hits are not established: with one, nothing is credited. "
        "-1 stands for groups beyond the 64 of a target that are followed."
    )
    stream: str = Field(description="exact, catching-up, degraded, or none: no KV events from there.")
    last_seq: int | None = Field(description="Sequence number of the last batch of events applied.")
    batches: int
    gaps: int
    garbage: int = Field(description="Messages that could not be decoded or used.")
    last_event_age_s: float | None = Field(description="Seconds since the last batch.")
    last_proof_age_s: float | None = Field(
        description="Seconds since it was certain that no event was missing: a replay, or an answer that "
        "found what was predicted. null if it never was."
    )
    trust: str = Field(description="exact, catching-up, degraded, or none: no KV events from there.")
    why: str = Field(description="Why it is degraded: events missing for good, or answers that contradict.")
    believed: float = Field(description="The share that is believed of what is not proven, 0 to 1.")
    hash_mismatch: str = Field(description="How this target's block hashes differ from what was expected.")


class SnapshotView(Answer):
    """The file in which the index outlives a restart of the gateway."""

    path: str = Field(description="Empty: nothing is written.")
    age_s: float | None = Field(description="Seconds since what it holds was true; null if there is none.")
    bytes: int
    failures: int = Field(description="Times that it could not be written.")
    unclaimed: int = Field(description="Targets of the last run's snapshot that did not come back yet.")
    unclaimed_blocks: int = Field(
        description="What is held of these; credited to nobody, given up after 10 minutes."
    )


class IndexAnswer(Answer):
    targets: list[IndexEntry]
    memory_bytes: int = Field(description="What the index takes, estimated.")
    memory_limit_bytes: int = Field(description="0: no limit.")
    evicted_blocks: int = Field(description="Given up for want of memory since the start.")
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
    @property
    def last_proof_age_s(self) -> float | None: ...


def index_entries(
    targets: list[str],
    streams: Mapping[str, StreamState],
    sizes: Mapping[tuple[str, str], int],
    mismatches: Mapping[str, str],
    trust: Callable[[str], Trust],
    groups: Callable[[str], Mapping[int, int | None]],
) -> list[IndexEntry]:
    """One entry for each registered target, and for any other that the index still holds blocks of."""
    names = [*targets, *sorted({target for target, _ in sizes} - set(targets))]
    return [
        IndexEntry(
            target=name,
            blocks={tier: count for (target, tier), count in sizes.items() if target == name},
            windows={str(group): need for group, need in known.items() if need and need < NEVER},
            unproven_groups=[group for group, need in known.items() if need == NEVER],
            stream=stream.state if stream else "none",
            last_seq=stream.last_seq if stream else None,
            batches=stream.batches if stream else 0,
            gaps=stream.gaps if stream else 0,
            garbage=stream.garbage if stream else 0,
            last_event_age_s=stream.last_event_age_s if stream else None,
            last_proof_age_s=stream.last_proof_age_s if stream else None,
            trust=judged.state,
            why=judged.why,
            believed=judged.believed,
            hash_mismatch=mismatches.get(name, ""),
        )
        for name in names
        for stream, judged, known in [(streams.get(name), trust(name), groups(name))]
    ]
