"""Blocks of two ranks and two media, followed by a master's events, against a plain model of the pool."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from store.keys import KeyLayout
from store.mooncake_http import Replicas
from store.object_events import BadEvents, ObjectEvent, ObjectEvents, decode
from store.segments import Segments
from store.sightings import Sighting, Sightings
from tests.store.master_publisher import event, payload

LAYOUT = KeyLayout("tiny", tp_ranks=2)
DIGESTS = [bytes(24) + n.to_bytes(8, "big") for n in (1 << 63 | 7, 8)]
CHAIN = [int.from_bytes(digest[-8:], "big") for digest in DIGESTS]
SOMEWHERE = Replicas(frozenset(), elsewhere=True)
RANKS = st.integers(0, 1)
MEDIA = st.sampled_from(["cpu", "disk"])


class Followed(RuleBasedStateMachine):
    """Objects come and go on two media; events arrive in order and late; look-ups are answered late."""

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.media: dict[tuple[int, int], set[str]] = {(n, r): set() for n in (0, 1) for r in (0, 1)}
        self.events: list[ObjectEvent] = []
        self.asked: list[tuple[float, int, bool]] = []
        self.sightings = Sightings(capacity=1000)
        self.sightings.followed_since = 100.0
        self.objects = ObjectEvents(lambda: bool(self.asked))
        self.objects.follow(LAYOUT, self.sightings)

    def whole(self, block: int) -> bool:
        return all(self.media[block, rank] for rank in (0, 1))

    def happened(self, kind: str, block: int, rank: int) -> None:
        name = LAYOUT.keys(DIGESTS[block])[rank]
        self.events.append(ObjectEvent(kind, name, "default"))

    @rule(block=RANKS, rank=RANKS, medium=MEDIA)
    def put(self, block: int, rank: int, medium: str) -> None:
        """Also of what is there: a commit is always announced."""
        self.media[block, rank].add(medium)
        self.happened("stored", block, rank)

    @rule(block=RANKS, rank=RANKS, medium=MEDIA)
    def evict(self, block: int, rank: int, medium: str) -> None:
        if medium in self.media[block, rank]:
            self.media[block, rank].remove(medium)
            self.happened("removed", block, rank)

    @rule(many=st.integers(1, 4))
    def arrive(self, many: int) -> None:
        self.now += 0.001
        self.objects.apply(self.events[:many], self.now)
        del self.events[:many]

    @rule(block=RANKS)
    def ask(self, block: int) -> None:
        """The master's answer of now, to be had later."""
        self.now += 0.001
        self.asked.append((self.now, block, self.whole(block)))

    @rule(which=st.integers(0, 3))
    def answer(self, which: int) -> None:
        if which < len(self.asked):
            at, block, there = self.asked.pop(which)
            self.sightings.saw(CHAIN[block], Sighting(at, (SOMEWHERE, SOMEWHERE) if there else ()))

    @rule()
    def wait(self) -> None:
        self.now += 1000.0

    @invariant()
    def what_is_believed_is_so_once_all_has_arrived(self) -> None:
        if self.events or self.asked:
            return
        for block, state in enumerate(self.sightings.states(CHAIN, Segments(), self.now)):
            assert state == "unknown" or (state == "end") == self.whole(block)


TestFollowed = Followed.TestCase
TestFollowed.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def stored(digest: bytes, layout: KeyLayout = LAYOUT, **more: Any) -> list[ObjectEvent]:
    return [*decode(payload(*(event("stored", key, **more) for key in layout.keys(digest))))]


def states(sightings: Sightings, now: float) -> list[str]:
    return [*sightings.states(CHAIN, Segments(), now)]


def followed(layout: KeyLayout = LAYOUT) -> tuple[ObjectEvents, Sightings]:
    objects, sightings = ObjectEvents(lambda: False), Sightings(100)
    sightings.followed_since = 0.0
    objects.follow(layout, sightings)
    return objects, sightings


def test_b060_a_block_counts_once_every_rank_has_stored_its_object() -> None:
    objects, sightings = followed()
    first, second = stored(DIGESTS[0])
    objects.apply([first], 1.0)
    assert states(sightings, 2.0) == ["unknown", "unknown"]
    objects.apply([second], 1.0)
    assert states(sightings, 10_000.0) == ["end", "unknown"]


def test_b060_a_rank_that_was_evicted_must_come_back_itself() -> None:
    objects, sightings = followed()
    first, second = stored(DIGESTS[0])
    gone = ObjectEvent("removed", first.object_key)
    objects.apply([first, gone, second], 1.0)
    assert states(sightings, 2.0)[0] == "unknown"
    objects.apply([gone, first], 3.0)
    assert states(sightings, 4.0)[0] == "end"


def test_a_block_that_was_missing_is_looked_for_again_once_a_part_of_it_came() -> None:
    """The other rank's object may have been there all the time."""
    objects, sightings = followed()
    sightings.saw(CHAIN[0], Sighting(1.0, ()))
    assert states(sightings, 500.0)[0] == "absent"
    objects.apply(stored(DIGESTS[0])[:1], 501.0)
    assert states(sightings, 502.0)[0] == "unknown"


@pytest.mark.parametrize("asking", [True, False])
def test_an_answer_that_is_older_than_a_removal_is_not_believed(asking: bool) -> None:
    objects, sightings = ObjectEvents(lambda: asking), Sightings(100)
    sightings.followed_since = 0.0
    objects.follow(LAYOUT, sightings)
    objects.apply([ObjectEvent("removed", LAYOUT.keys(DIGESTS[0])[0])], 2.0)
    # With nothing under way, nothing needs to be noted of blocks that nobody asks for.
    assert len(sightings) == asking
    if asking:
        sightings.saw(CHAIN[0], Sighting(1.0, (SOMEWHERE, SOMEWHERE)))
        assert states(sightings, 3.0)[0] == "unknown"


def test_b061_objects_of_others_are_counted_and_nothing_else() -> None:
    objects, sightings = followed()
    strangers = [
        *stored(DIGESTS[0], KeyLayout("tiny", cache_prefix="team")),
        *stored(DIGESTS[0], tenant_id="other"),
        ObjectEvent("stored", "no key of vLLM"),
        ObjectEvent("stored", LAYOUT.prefixes()[0] + "not hex at all!!"),
    ]
    assert not objects.apply(strangers, 1.0)
    assert objects.foreign == len(strangers)
    assert states(sightings, 1.0) == ["unknown", "unknown"]


def test_b013_unknown_events_and_fields_disturb_nothing() -> None:
    objects, sightings = followed()
    events = decode(
        payload(
            event("moved", LAYOUT.keys(DIGESTS[1])[0]),
            *(event("stored", key, colour="red") for key in LAYOUT.keys(DIGESTS[0])),
        )
    )
    objects.apply(events, 1.0)
    assert (objects.unknown, states(sightings, 1.0)) == (1, ["end", "unknown"])


def test_what_is_left_is_not_followed_any_more() -> None:
    one = KeyLayout("tiny")
    objects, sightings = followed(one)
    objects.leave(one)
    objects.apply(stored(DIGESTS[0], one), 1.0)
    assert (objects.foreign, len(sightings)) == (1, 0)


def test_halves_of_blocks_are_bounded() -> None:
    objects, _ = followed()
    for start in range(0, 200_000, 1000):
        digests = [bytes(24) + n.to_bytes(8, "big") for n in range(start, start + 1000)]
        objects.apply([ObjectEvent("stored", LAYOUT.keys(digest)[0]) for digest in digests], 1.0)
    (blocks,) = objects._blocks.values()  # pyright: ignore[reportPrivateUsage]
    assert len(blocks._young) + len(blocks._old) <= 1 << 15  # pyright: ignore[reportPrivateUsage]


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_b014_garbage_is_refused(garbage: bytes) -> None:
    try:
        decode(garbage)
    except BadEvents:
        return
    msgspec.msgpack.decode(garbage)


def test_events_that_name_no_object_are_refused() -> None:
    nameless = event("removed", None)
    with pytest.raises(BadEvents, match="kv_events_emit_object_key"):
        decode(payload(nameless))
    assert decode(payload(event("cleared", None)))
