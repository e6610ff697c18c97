"""Transfers share bandwidth at both ends."""

from collections.abc import Callable

import pytest

from replay.clock import Clock
from replay.instance import schedule
from replay.links import Link


def test_two_at_once_take_as_long_as_both_together() -> None:
    clock = Clock()
    links, link = schedule(clock), Link(10.0)
    ended: dict[str, float] = {}

    def start(name: str, size: float, *over: Link) -> None:
        links.start(size, over, lambda now: ended.update({name: now}), clock.now)

    clock.at(0.0, start, "long", 100.0, link)
    clock.at(2.0, start, "short", 20.0, link)
    clock.run()
    assert ended == {"short": pytest.approx(6.0), "long": pytest.approx(12.0)}


def test_the_narrower_end_counts() -> None:
    clock = Clock()
    links = schedule(clock)
    ended: list[float] = []
    source, near, far = Link(10.0), Link(100.0), Link(100.0)
    for receiver in (near, far):
        links.start(50.0, (source, receiver), ended.append, 0.0)
    clock.run()
    assert ended == [pytest.approx(10.0)] * 2


def test_what_is_under_way_over_a_link_that_is_cut_fails_and_leaves_its_share_to_others() -> None:
    clock = Clock()
    links, dead, alive = schedule(clock), Link(10.0), Link(10.0)
    ended: dict[str, float] = {}

    def note(name: str) -> Callable[[float], None]:
        return lambda now: ended.update({name: now})

    links.start(50.0, (dead, alive), note("from the dead"), 0.0, note("failed"))
    links.start(50.0, (alive,), note("other"), 0.0)
    clock.at(2.0, lambda: links.cut(dead, clock.now))
    clock.run()
    assert ended == {"failed": 2.0, "other": pytest.approx(6.0)}
