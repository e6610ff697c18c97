"""The remembered view against a plain model: never a false credit, and no question that need not be asked."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from store.breaker import Breaker
from store.mooncake_http import Replicas, Segment
from store.segments import Segments
from store.sightings import ABSENT_S, BUSY_S, DISK, QUIET_S, Sighting, Sightings

CHAIN = [101, 102]
WORKERS = ["10.0.0.1:1", "10.0.0.2:1"]


def segment(name: str, life: int, status: str = "OK") -> Segment:
    return Segment(name, f"{name}/{life}", "client", status, 1 << 20, 0)


def seen(at: float, *endpoints: str, elsewhere: bool = False) -> Sighting:
    return Sighting(at, (Replicas(frozenset(endpoints), elsewhere),))


@dataclass
class Worker:
    life: int = 0
    status: str = "OK"
    blocks: set[int] = field(default_factory=set[int])


class Pool(RuleBasedStateMachine):
    """A pool whose blocks come and go, and a view that looks now and then."""

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.workers = {name: Worker() for name in WORKERS}
        self.segments = Segments()
        self.sightings = Sightings(capacity=1000)
        self.unnoticed: set[int] = set()  # gone since the last look at the master
        # Of what the view knows of: the counters tell that some are gone, not which.
        self.evicted: set[int] = set()
        self.announced: set[int] = set()  # nobody told where
        self.poll()

    def holders(self, key: int) -> list[str]:
        return [f"{name}/{worker.life}" for name, worker in self.workers.items() if key in worker.blocks]

    @rule()
    def poll(self) -> None:
        self.now += 0.001
        self.segments.told(
            [segment(name, worker.life, worker.status) for name, worker in self.workers.items()], self.now
        )
        if self.unnoticed:
            self.sightings.objects_vanished(self.now)
            self.unnoticed.clear()

    @rule(key=st.sampled_from(CHAIN), name=st.sampled_from(WORKERS), announce=st.booleans())
    def put(self, key: int, name: str, announce: bool) -> None:
        self.now += 0.001
        self.workers[name].blocks.add(key)
        self.unnoticed.discard(key)
        if announce:
            self.evicted.discard(key)
            self.announced.add(key)
            self.sightings.announced([key], self.now)

    @rule(key=st.sampled_from(CHAIN))
    def evict(self, key: int) -> None:
        for worker in self.workers.values():
            if key in worker.blocks:
                worker.blocks.discard(key)
                self.unnoticed.add(key)
                self.evicted.add(key)

    @rule(name=st.sampled_from(WORKERS))
    def restart(self, name: str) -> None:
        lost = self.workers[name].blocks
        self.workers[name] = Worker(self.workers[name].life + 1)
        gone = {key for key in lost if not self.holders(key)}
        self.unnoticed |= gone
        self.evicted |= gone & self.announced

    @rule(name=st.sampled_from(WORKERS), status=st.sampled_from(["OK", "OK", "DRAINING"]))
    def drain(self, name: str, status: str) -> None:
        self.workers[name].status = status
        self.poll()

    @rule(start=st.integers(0, 1))
    def look(self, start: int) -> None:
        self.now += 0.001
        for key in self.sightings_unknown()[start:]:
            endpoints = self.holders(key)
            self.announced.discard(key)
            self.evicted.discard(key)
            self.sightings.saw(key, seen(self.now, *endpoints) if endpoints else Sighting(self.now, ()))

    @rule(seconds=st.sampled_from([0.01, ABSENT_S, 1.0, BUSY_S, QUIET_S]))
    def wait(self, seconds: float) -> None:
        """The owner task looks every second."""
        self.now += min(seconds, 1.0)
        self.poll()
        self.now += max(0.0, seconds - 1.0)
        self.poll()

    def sightings_unknown(self) -> list[int]:
        return [
            CHAIN[block]
            for block in self.sightings.unknown(CHAIN, range(len(CHAIN)), self.segments, self.now)
        ]

    @invariant()
    def every_credited_block_is_there_or_vanished_lately(self) -> None:
        walk = self.sightings.walk(CHAIN, self.segments, self.now)
        for key in CHAIN[: walk.blocks]:
            # A ghost lives until the next look at the master; an evicted block up to BUSY_S more.
            assert self.holders(key) or key in self.unnoticed or (key in self.evicted and self.lossy())
        assert sum(stretch.stop - stretch.start for stretch in walk.stretches) == walk.blocks

    def lossy(self) -> bool:
        return self.now - self.sightings._lossy_at < BUSY_S  # pyright: ignore[reportPrivateUsage]

    @invariant()
    def what_is_neither_credited_nor_absent_is_asked_for(self) -> None:
        walk = self.sightings.walk(CHAIN, self.segments, self.now)
        if walk.stop == "unknown":
            assert CHAIN[walk.blocks] in self.sightings_unknown()
        if walk.stop == "end":
            assert walk.blocks == len(CHAIN)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def told(*segments: Segment, at: float = 0.0) -> Segments:
    made = Segments()
    made.told(segments, at)
    return made


def test_a_block_of_two_ranks_lies_on_the_host_that_has_both() -> None:
    segments = told(segment("10.0.0.1:1", 0), segment("10.0.0.1:2", 0), segment("10.0.0.2:1", 0))
    sightings = Sightings(10)
    split = Sighting(
        1.0, (Replicas(frozenset(["10.0.0.1:1/0"]), False), Replicas(frozenset(["10.0.0.1:2/0"]), False))
    )
    apart = Sighting(
        1.0, (Replicas(frozenset(["10.0.0.1:1/0"]), False), Replicas(frozenset(["10.0.0.2:1/0"]), False))
    )
    sightings.saw(1, split)
    sightings.saw(2, apart)
    walk = sightings.walk([1, 2], segments, 1.0)
    assert [stretch.places for stretch in walk.stretches] == [frozenset(["10.0.0.1"]), frozenset()]


def test_b062_a_copy_on_disk_is_readable_when_the_one_in_memory_is_not() -> None:
    segments = told(segment("10.0.0.1:1", 0, "DRAINING"), at=0.5)
    sightings = Sightings(10)
    sightings.saw(1, seen(1.0, "10.0.0.1:1/0", elsewhere=True))
    sightings.saw(2, seen(1.0, "10.0.0.1:1/0"))
    assert sightings.walk([1, 2], segments, 1.0).blocks == 1


def test_a_block_that_no_memory_holds_whole_lies_on_disk() -> None:
    segments = told(segment("10.0.0.1:1", 0))
    sightings = Sightings(10)
    memory, disk = Replicas(frozenset(["10.0.0.1:1/0"]), False), Replicas(frozenset(), True, disk=True)
    both = Replicas(frozenset(["10.0.0.1:1/0"]), True, disk=True)
    for key, parts in enumerate([(memory, memory), (both, memory), (memory, disk), (disk, disk)], 1):
        sightings.saw(key, Sighting(1.0, parts))
    here = {"10.0.0.1:1", "10.0.0.1"}
    walk = sightings.walk([1, 2, 3, 4], segments, 1.0)
    assert [(s.start, s.stop, set(s.places)) for s in walk.stretches] == [(0, 2, here), (2, 4, {DISK})]
    # A copy that nobody can say where it is, is not known to be on a disk.
    sightings.saw(5, seen(1.0, elsewhere=True))
    assert sightings.walk([5], segments, 1.0).stretches[0].places == frozenset()


def test_a_second_copy_counts_when_the_first_is_lost() -> None:
    segments = told(segment("10.0.0.1:1", 0), segment("10.0.0.2:1", 0))
    sightings = Sightings(10)
    sightings.saw(1, seen(1.0, "10.0.0.1:1/0", "10.0.0.2:1/0"))
    segments.lost("10.0.0.1:1", 0.0)
    walk = sightings.walk([1], segments, 1.0)
    assert walk.stretches[0].places == {"10.0.0.2:1", "10.0.0.2"}
    segments.lost("10.0.0.2", 0.0)
    assert sightings.walk([1], segments, 1.0).blocks == 0


def test_a_restarted_worker_is_not_the_lost_one() -> None:
    segments = told(segment("10.0.0.1:1", 0))
    segments.lost("10.0.0.1:1", 0.0)
    segments.told([segment("10.0.0.1:1", 0), segment("10.0.0.1:1", 1)], 1.0)
    assert not segments.readable("10.0.0.1:1/0", 2.0, 2.0)
    assert segments.readable("10.0.0.1:1/1", 2.0, 2.0)


def test_a_late_answer_does_not_undo_an_announcement() -> None:
    sightings, segments = Sightings(10), told()
    sightings.announced([1], 2.0)
    sightings.saw(1, Sighting(1.0, ()))
    assert sightings.walk([1], segments, 2.1).blocks == 1


@given(st.lists(st.integers(0, 500), max_size=2000))
def test_memory_is_bounded_and_the_latest_half_is_kept(keys: list[int]) -> None:
    sightings, segments = Sightings(capacity=64), told()
    sighting = Sighting(1.0, None)
    for key in keys:
        sightings.saw(key, sighting)
    assert len(sightings) <= 64
    latest = list(dict.fromkeys(reversed(keys)))[:16]
    assert sightings.walk(latest, segments, 1.0).blocks == len(latest)


def test_a_breaker_lets_one_trial_through_and_doubles_its_patience() -> None:
    breaker = Breaker()
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert (breaker.allows(1.9), breaker.allows(2.0)) == (False, True)
    breaker.tried(2.0)
    assert (breaker.allows(2.1), breaker.allows(12.0)) == (False, True)  # nobody said how it went
    breaker.tried(12.0)
    breaker.failed(12.5)
    assert (breaker.allows(16.4), breaker.allows(16.5)) == (False, True)
    for _ in range(2000):
        breaker.failed(20.0)
    assert breaker.allows(80.0)
    breaker.worked()
    assert breaker.closed
    assert breaker.allows(20.0)
    breaker.tried(20.0)
    assert breaker.allows(20.0)
