"""Transfers share bandwidth at both ends."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@dataclass
class Fluid:
    """A transfer as the rule has it, recomputed at every moment."""

    left: float
    over: tuple[int, ...]
    ended: float = -1.0


def as_ruled(
    widths: list[float], starts: list[tuple[float, float, tuple[int, ...]]], cut: float
) -> list[float]:
    """When each transfer ends; link 0 is cut at `cut`."""
    flows = [Fluid(size, over) for _, size, over in starts]
    waiting = sorted(range(len(starts)), key=lambda number: starts[number][0])
    under_way: list[int] = []
    now = 0.0
    while waiting or under_way:
        busy = Counter(link for number in under_way for link in flows[number].over)
        rates = {n: min(widths[link] / busy[link] for link in flows[n].over) for n in under_way}
        ends = {number: now + flows[number].left / rates[number] for number in under_way}
        next_start = starts[waiting[0]][0] if waiting else inf
        then = min([next_start, *ends.values(), cut if cut > now else inf])
        for number in under_way:
            flows[number].left -= (then - now) * rates[number]
        gone = [n for n in under_way if ends[n] <= then or (then == cut and 0 in flows[n].over)]
        now = then
        for number in gone:
            under_way.remove(number)
            flows[number].ended = now
        if next_start == then:
            under_way.append(waiting.pop(0))
    return [flow.ended for flow in flows]


times = st.integers(0, 40).map(lambda tenth: tenth / 10)
paths = st.one_of(
    st.tuples(st.integers(0, 4)), st.permutations(range(5)).map(lambda order: (order[0], order[1]))
)


@given(
    st.lists(st.sampled_from([1.0, 3.0, 10.0, 100.0]), min_size=5, max_size=5),
    st.lists(st.tuples(times, st.floats(0.5, 50.0), paths), min_size=1, max_size=30),
    st.one_of(st.just(inf), times.map(lambda time: time + 0.05)),  # never as another starts
)
@settings(max_examples=300)
def test_each_transfer_has_an_equal_share_of_its_narrower_end_at_every_moment(
    widths: list[float], starts: list[tuple[float, float, tuple[int, ...]]], cut: float
) -> None:
    clock = Clock()
    links, over = schedule(clock), [Link(width) for width in widths]
    ended: dict[int, float] = {}

    def start(number: int) -> None:
        _, size, path = starts[number]

        def note(now: float) -> None:
            assert number not in ended
            ended[number] = now

        links.start(size, tuple(over[link] for link in path), note, clock.now, note)

    for number, (at, _, _) in enumerate(starts):
        clock.at(at, start, number)
    if cut < inf:
        clock.at(cut, lambda: links.cut(over[0], clock.now))
    clock.run()
    found = [ended[number] for number in range(len(starts))]
    assert found == pytest.approx(as_ruled(widths, starts, cut), rel=1e-6, abs=1e-6)
    assert not any(link.busy for link in over)
