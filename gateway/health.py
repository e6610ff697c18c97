"""Whether the gateway can serve, and what it does without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.knowledge.drains import STAYS_CLOSED
from store.pool import PoolView
from workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Readiness:
    """ready: at least one worker takes turns. reasons: why not, or what is degraded meanwhile."""

    ready: bool
    reasons: list[str] = field(default_factory=list[str])


def readiness(
    fleet: Fleet,
    pool: PoolView | None,
    doubts: list[str],
    *,
    drains: Mapping[str, str] = MappingProxyType({}),
    refusals: Sequence[str] = (),
    ending: bool = False,
) -> Readiness:
    """A worker is enough: the pool and exact knowledge cost cache hits, never readiness.

    doubts: knowledge that was found not to hold, in words for operators. drains: how far the running ones
    are, by worker. refusals: why turns were refused of late. ending: the gateway shuts down.
    """
    workers = fleet.workers()
    ready = not ending and any(w.state == "up" and not w.cordoned for w in workers)
    reasons = ["the gateway is shutting down"] if ending else []
    reasons += [] if workers else ["no worker is registered"]
    reasons += [f"worker {w.name} is {w.state}: {w.reason}" for w in workers if w.state != "up"]
    reasons += [
        f"worker {w.name} is cordoned" + (f" and drains: {drains[w.name]}" if w.name in drains else "")
        for w in workers
        if w.cordoned
    ]
    reasons += [f"worker {w.name} {why}" for w in workers if w.state == "up" and (why := fleet.failing(w))]
    closed = [each for each in pool.segments() if each.status == "DRAINED"] if pool else []
    reasons += [
        f"the pool segment of worker {w.name} {STAYS_CLOSED}"
        for w in workers
        if not w.cordoned and any(w.segment in (each.name, each.host) for each in closed)
    ]
    if pool is not None and pool.degraded:
        places = ", ".join(pool.places)
        reasons.append(
            f"the pool can't be asked ({pool.reason}): the master's admin HTTP was tried at {places} "
            "(mooncake.master, mooncake.http_port)"
        )
    # Where it is not ready the rest has said already why turns are refused.
    return Readiness(ready, [*reasons, *(refusals if ready else ()), *doubts])
