"""Whether the gateway can serve, and what it does without."""

from dataclasses import dataclass, field

from store.pool import PoolView
from workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Readiness:
    """ready: at least one worker takes turns. reasons: why not, or what is degraded meanwhile."""

    ready: bool
    reasons: list[str] = field(default_factory=list[str])


def readiness(fleet: Fleet, pool: PoolView | None, doubts: list[str], *, ending: bool = False) -> Readiness:
    """A worker is enough: the pool and exact knowledge cost cache hits, never readiness.

    doubts: knowledge that was found not to hold, in words for operators. ending: the gateway shuts down.
    """
    workers = fleet.workers()
    ready = not ending and any(w.state == "up" and not w.cordoned for w in workers)
    reasons = ["the gateway is shutting down"] if ending else []
    reasons += [] if workers else ["no worker is registered"]
    reasons += [f"worker {w.name} is {w.state}: {w.reason}" for w in workers if w.state != "up"]
    reasons += [f"worker {w.name} is cordoned" for w in workers if w.cordoned]
    if pool is not None and pool.degraded:
        places = ", ".join(pool.places)
        reasons.append(
            f"the pool can't be asked ({pool.reason}): the master's admin HTTP was tried at {places} "
            "(mooncake.master, mooncake.http_port)"
        )
    return Readiness(ready, reasons + doubts)
