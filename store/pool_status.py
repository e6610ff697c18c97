"""What the pool view says of itself."""

from dataclasses import dataclass

from store.master_events import MasterEventsStatus


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """lost: its worker was reported dead. failing: pulls from it failed lately. Both: no credit.

    used: bytes; None for a segment that takes no more, of which the master says 0 whatever it holds.
    """

    name: str
    status: str
    size: int
    used: int | None
    lost: bool
    failing: bool


@dataclass(frozen=True, slots=True)
class LayoutStatus:
    """How the blocks of one model lie in the pool.

    name: what its keys begin with. The ranks are those of stored blocks once `found`, until then one is
    assumed. missed: workers announced blocks, but under this name there is none.
    """

    name: str
    groups: tuple[int, ...]
    tp_ranks: int
    pp_ranks: int
    pcp_ranks: int
    dcp_ranks: int
    found: bool
    missed: bool


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """reason: why it is degraded, "" when it is not. Counts are since the start of the gateway.

    places: HOST:PORT of the master's admin HTTP, all where it is looked for until it has answered.

    asked: turns that needed the master; late: those it did not answer in time; restarts: lives of the master
    that ended; keys: objects in the pool; remembered: blocks; checked_s: age of the last good look, or None.
    announced: blocks that workers said they stored; announced_s: how long ago the last. While the pool is in
    use and nothing is announced, every turn must ask. master_events: whether the master has some of its own;
    events: how far they are followed, None when they are not. removed: objects that only dead workers held,
    taken out of the pool.
    """

    master: str
    degraded: bool
    reason: str
    places: tuple[str, ...]
    keys: int
    segments: tuple[SegmentStatus, ...]
    layouts: tuple[LayoutStatus, ...]
    remembered: int
    turns: int
    asked: int
    late: int
    outages: int
    restarts: int
    pulls_failing: bool
    announced: int
    announced_s: float | None
    master_events: bool | None
    events: MasterEventsStatus | None
    removed: int
    checked_s: float | None
