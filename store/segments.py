"""Which segments of the pool can be read, and which worker each belongs to. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from store.breaker import Breaker
from store.mooncake_http import Segment


class Segments:
    """What the master last said of its segments, and what is known beyond that.

    A segment is called by its name (`IP:PORT`) or by its host (all segments of that host). Replicas are named
    by endpoint, which changes with every start of a worker: what is believed lost is an endpoint, so that a
    worker restarted under its old name is believed again as soon as the master lists its new one.

    shrunk_at: when something was last found lost; what was seen before that, not known where, may be gone.
    dead: endpoints whose process is gone for certain.
    """

    def __init__(self) -> None:
        self._by_endpoint: dict[str, Segment] = {}
        self._lost: set[str] = set()
        self.dead: set[str] = set()
        self.shrunk_at = float("-inf")
        self._pulls: dict[str, Breaker] = {}
        self._told_at = float("-inf")

    def __len__(self) -> int:
        return len(self._by_endpoint)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_endpoint.values())

    def told(self, segments: Iterable[Segment], asked_at: float) -> None:
        """The master's list, asked for at `asked_at`."""
        before, self._by_endpoint = self._by_endpoint, {each.endpoint: each for each in segments}
        self._told_at = asked_at
        if before.keys() - self._by_endpoint.keys():
            self.shrunk_at = max(self.shrunk_at, asked_at)
        self._lost &= self._by_endpoint.keys()
        self.dead &= self._by_endpoint.keys()
        names = {each.name for each in self._by_endpoint.values()}
        for gone in self._pulls.keys() - names:
            del self._pulls[gone]

    def lost(self, where: str, now: float) -> None:
        """The worker that owns `where` is dead; the master will list it for up to its client_ttl (10 s)."""
        self._lost.update(self.endpoints(where))
        self.shrunk_at = now

    def back(self, where: str) -> None:
        """It was not dead after all; endpoints that were found dead stay so."""
        self._lost.difference_update(self.endpoints(where))

    def died(self, endpoint: str, now: float) -> None:
        """The process behind `endpoint` is gone for certain."""
        self.dead.add(endpoint)
        self.shrunk_at = now

    def endpoints(self, where: str | None = None) -> list[str]:
        """Those in a segment or on a host; all without one."""
        return [each.endpoint for each in (self if where is None else self._of(where))]

    def pull_failed(self, where: str, now: float) -> None:
        for each in self._of(where):
            self._pulls.setdefault(each.name, Breaker()).failed(now)

    def pull_worked(self, where: str) -> None:
        for each in self._of(where):
            self._pulls.pop(each.name, None)

    def pull_tried(self, places: Iterable[str], now: float) -> None:
        """Blocks in these segments were credited: the one trial of those that are being tried again."""
        for place in places:
            if place in self._pulls:
                self._pulls[place].tried(now)

    def failing(self, now: float) -> list[str]:
        """Names of the segments that get no credit because pulls from them failed."""
        return [name for name, pulls in self._pulls.items() if not pulls.allows(now)]

    def readable(self, endpoint: str, seen_at: float, now: float) -> bool:
        """Whether a replica there, reported at `seen_at`, can be counted on."""
        segment = self._by_endpoint.get(endpoint)
        if segment is None:
            # Mounted after the master's last list, or unmounted by then.
            return seen_at >= self._told_at
        if segment.status != "OK" or endpoint in self._lost or endpoint in self.dead:
            return False
        pulls = self._pulls.get(segment.name)
        return pulls is None or pulls.allows(now)

    def name(self, endpoint: str) -> str:
        """Of the segment, as workers are configured with it; the endpoint itself when it is not known."""
        segment = self._by_endpoint.get(endpoint)
        return endpoint if segment is None else segment.name

    def places(self, endpoint: str) -> frozenset[str]:
        """Name and host of the segment, empty when it is not known."""
        segment = self._by_endpoint.get(endpoint)
        return frozenset() if segment is None else frozenset((segment.name, segment.host))

    def is_lost(self, endpoint: str) -> bool:
        return endpoint in self._lost or endpoint in self.dead

    def _of(self, where: str) -> list[Segment]:
        return [each for each in self._by_endpoint.values() if where in (each.name, each.host)]
