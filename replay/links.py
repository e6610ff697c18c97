"""Transfers that share bandwidth: each has an equal share at both of its ends; the smaller one counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Finish = Callable[[float], None]


class Link:
    """One direction of one interface. flows: a dict for its order, so that runs repeat exactly."""

    __slots__ = ("bytes_s", "flows")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s: Final = bytes_s
        self.flows: Final[dict[Flow, None]] = {}


class Flow:
    """Bytes on their way over up to two links. `ends_at` holds while `version` stays the same.

    finish: called when they are there; fail: when one end of a link is gone before that.
    """

    __slots__ = ("at", "ends_at", "fail", "finish", "left", "links", "rate", "version")

    def __init__(
        self, size: float, links: tuple[Link, ...], finish: Finish, fail: Finish | None, now: float
    ) -> None:
        self.left = size
        self.links: Final = links
        self.finish: Final = finish
        self.fail: Final = fail
        self.at = now
        self.rate = 0.0
        self.ends_at = now
        self.version = 0


class Links:
    """`schedule(flow, version)` is called whenever a flow's end has moved; call `ended` when it comes."""

    def __init__(self, schedule: Callable[[Flow, int], None]) -> None:
        self._schedule: Final = schedule

    def start(
        self,
        size: float,
        links: tuple[Link, ...],
        finish: Finish,
        now: float,
        fail: Finish | None = None,
    ) -> Flow:
        flow = Flow(size, links, finish, fail, now)
        for link in links:
            link.flows[flow] = None
        self._share(links, now)
        return flow

    def ended(self, flow: Flow, version: int, now: float) -> None:
        """Calls the flow's `finish` unless its end has moved since."""
        if version != flow.version:
            return
        self._leave(flow, now)
        flow.finish(now)

    def cut(self, link: Link, now: float) -> None:
        """One end of it is gone: all that was on its way over it fails."""
        for flow in list(link.flows):
            self._leave(flow, now)
            if flow.fail is not None:
                flow.fail(now)

    def _leave(self, flow: Flow, now: float) -> None:
        flow.version += 1
        for link in flow.links:
            del link.flows[flow]
        self._share(flow.links, now)

    def _share(self, links: tuple[Link, ...], now: float) -> None:
        """Those who share a link with one that came or went go on at another rate."""
        for flow in dict.fromkeys(flow for link in links for flow in link.flows):
            rate = min(link.bytes_s / len(link.flows) for link in flow.links)
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - (now - flow.at) * flow.rate)
            flow.at, flow.rate = now, rate
            flow.ends_at = now + flow.left / rate
            flow.version += 1
            self._schedule(flow, flow.version)
