"""Transfers that share bandwidth: each has an equal share at both of its ends; the smaller one counts.

All that a link holds back goes equally fast, so that one transfer's coming or going changes a figure of that
link and not every transfer over it: thousands may pull from one network card.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final

Finish = Callable[[float], None]


class Link:
    """One direction of one interface.

    share: bytes/s of each flow that it holds back; served: bytes that each got since some time, up to `at`.
    held, passing: flows over it that it holds back, and that their other link does. Dicts for their order, so
    that runs repeat exactly.
    ends: of held flows, what `served` is then; also of some that were held before.
    lowest: no held flow has a smaller share at its other end.
    """

    __slots__ = ("at", "bytes_s", "ends", "held", "lowest", "passing", "served", "share", "version")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s: Final = bytes_s
        self.share = bytes_s
        self.served = self.at = 0.0
        self.held: Final[dict[Flow, None]] = {}
        self.passing: Final[dict[Flow, None]] = {}
        self.ends: Final[list[tuple[float, int, Flow]]] = []
        self.lowest = inf
        self.version = 0

    @property
    def busy(self) -> int:
        """Flows over it."""
        return len(self.held) + len(self.passing)

    def serve(self, now: float) -> None:
        self.served += (now - self.at) * self.share
        self.at = now


class Flow:
    """Bytes on their way over one or two links.

    holder: the link that holds it back; end: what that has `served` then, listed there as `entry`.
    finish: called when they are there; fail: when one end of a link is gone before that.
    """

    __slots__ = ("end", "entry", "fail", "finish", "holder", "links")

    def __init__(self, links: tuple[Link, ...], finish: Finish, fail: Finish | None) -> None:
        self.links: Final = links
        self.finish: Final = finish
        self.fail: Final = fail
        self.holder = links[0]
        self.end = 0.0
        self.entry = 0

    def beyond(self, link: Link) -> Link | None:
        """Its other link than `link`."""
        return next((other for other in self.links if other is not link), None)


class Links:
    """`schedule(when, link, version)` tells when a flow over `link` ends next; call `ended` then."""

    def __init__(self, schedule: Callable[[float, Link, int], None]) -> None:
        self._schedule: Final = schedule
        self._entries = 0

    def start(
        self,
        size: float,
        links: tuple[Link, ...],
        finish: Finish,
        now: float,
        fail: Finish | None = None,
    ) -> None:
        flow = Flow(links, finish, fail)
        for link in links:
            link.passing[flow] = None
        holder = min(links, key=lambda link: link.bytes_s / link.busy)
        holder.serve(now)
        self._hold(flow, holder, size)
        self._share(links, now)

    def ended(self, link: Link, version: int, now: float) -> None:
        """Calls `finish` of the flow that ends now, unless that has moved since."""
        if version == link.version:
            flow = link.ends[0][2]
            self._leave(flow, now)
            flow.finish(now)

    def cut(self, link: Link, now: float) -> None:
        """One end of it is gone: all that was on its way over it fails."""
        for flow in [*link.held, *link.passing]:
            self._leave(flow, now)
            if flow.fail is not None:
                flow.fail(now)

    def _hold(self, flow: Flow, link: Link, left: float) -> None:
        """From now on `link` holds it back, with so many bytes still to come."""
        del link.passing[flow]
        link.held[flow] = None
        self._entries += 1
        flow.holder, flow.end, flow.entry = link, link.served + left, self._entries
        heappush(link.ends, (flow.end, flow.entry, flow))

    def _leave(self, flow: Flow, now: float) -> None:
        flow.entry = 0
        for link in flow.links:
            (link.held if link is flow.holder else link.passing).pop(flow)
        self._share(flow.links, now)

    def _share(self, links: tuple[Link, ...], now: float) -> None:
        """Flows over these came or went: what is still to come goes on at other rates."""
        for link in links:
            link.serve(now)
            link.share = link.bytes_s / max(1, link.busy)
        others: dict[Link, None] = {}
        for link in links:
            for flow in [*link.passing]:
                if link.share < flow.holder.share:
                    others[flow.holder] = None
                    self._move(flow, link, now)
                else:
                    flow.holder.lowest = min(flow.holder.lowest, link.share)
            if link.share > link.lowest:
                link.lowest = inf
                for flow in [*link.held]:
                    beyond = flow.beyond(link)
                    if beyond is None:
                        continue
                    if beyond.share < link.share:
                        others[beyond] = None
                        self._move(flow, beyond, now)
                    else:
                        link.lowest = min(link.lowest, beyond.share)
        for link in dict.fromkeys([*links, *others]):
            self._plan(link, now)

    def _move(self, flow: Flow, to: Link, now: float) -> None:
        """`to` holds it back, no longer another."""
        held = flow.holder
        held.serve(now)
        to.serve(now)
        del held.held[flow]
        held.passing[flow] = None
        to.lowest = min(to.lowest, held.share)
        self._hold(flow, to, max(0.0, flow.end - held.served))

    def _plan(self, link: Link, now: float) -> None:
        """Tell of the next end, in place of what was told before."""
        link.version += 1
        if not link.held:
            link.ends.clear()
            link.served, link.lowest = 0.0, inf
            return
        while link.ends[0][1] != link.ends[0][2].entry:
            heappop(link.ends)
        self._schedule(now + max(0.0, link.ends[0][0] - link.served) / link.share, link, link.version)
