"""The sequencer against every misfortune of a stream, without sockets."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from store.sequence import MAX_FRUITLESS, Action, Ask, Deliver, Mark, Reset, Sequencer


def payload(life: int, seq: int) -> bytes:
    return f"{life}:{seq}".encode()


@dataclass
class Wire:
    """A publisher with several lives and a lossy connection to one sequencer."""

    buffer: int
    can_replay: bool
    sequencer: Sequencer = field(init=False)
    life: int = 0
    seq: int = 0
    kept: deque[tuple[int, bytes]] = field(init=False)
    request: int | None = None
    connected: bool = False
    known: list[bytes] = field(default_factory=list)  # delivered since the last reset
    everything: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequencer = Sequencer(can_replay=self.can_replay)
        self.kept = deque(maxlen=self.buffer)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.everything.append(action)
            if isinstance(action, Ask):
                self.request = action.start
            elif isinstance(action, Reset):
                self.known.clear()
            else:
                self.known.append(action.payload)

    def connect(self) -> None:
        if not self.connected:
            self.connected = True
            self.do(self.sequencer.connected())

    def disconnect(self) -> None:
        if self.connected:
            self.connected = False
            self.request = None
            self.sequencer.disconnected()

    def publish(self, arrives: bool) -> None:
        seq, self.seq = self.seq, self.seq + 1
        self.kept.append((seq, payload(self.life, seq)))
        if arrives and self.connected:
            self.do(self.sequencer.live(seq, payload(self.life, seq)))

    def restart(self) -> None:
        """Every restart breaks the connection."""
        self.disconnect()
        self.life, self.seq = self.life + 1, 0
        self.kept = deque(maxlen=self.buffer)

    def answer(self, losing: frozenset[int] = frozenset(), breaks_after: int | None = None) -> None:
        """Serves the open request; the sequencer may ask again meanwhile, which ends this one."""
        if self.request is None:
            return
        start, self.request = self.request, None
        replies = [item for item in self.kept if item[0] >= start][:breaks_after]
        for number, (seq, content) in enumerate(replies):
            if number not in losing:
                self.do(self.sequencer.replayed(seq, content))
                if self.request is not None:
                    return
        self.do(self.sequencer.replay_ended() if breaks_after is None else self.sequencer.replay_failed())

    def no_answer(self) -> None:
        """Every request runs into its deadline."""
        while self.request is not None:
            self.request = None
            self.do(self.sequencer.replay_failed())
            self.check()

    def settle(self) -> None:
        self.connect()
        for _ in range(3):
            while self.request is not None:
                self.answer()
            self.do(self.sequencer.prove())
        while self.request is not None:
            self.answer()

    def check(self) -> None:
        """What is believed is a run without gap of one life: else a removal might be missing."""
        told = [tuple(map(int, p.decode().split(":"))) for p in self.known]
        assert all(b == (a[0], a[1] + 1) for a, b in pairwise(told)), told


steps = st.one_of(
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("publish"), st.just(True)),
    st.tuples(st.just("connect"), st.none()),
    st.tuples(st.just("disconnect"), st.none()),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("answer"), st.frozensets(st.integers(0, 6), max_size=2)),
    st.tuples(st.just("break"), st.integers(0, 4)),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("prove"), st.none()),
    st.tuples(st.just("lost"), st.none()),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(steps, max_size=60), st.integers(1, 12), st.booleans())
def test_nothing_is_believed_across_a_gap_or_a_restart(
    script: list[tuple[str, object]], buffer: int, can_replay: bool
) -> None:
    wire = Wire(buffer, can_replay)
    for name, argument in script:
        match name, argument:
            case "publish", bool():
                wire.publish(argument)
            case "connect", _:
                wire.connect()
            case "disconnect", _:
                wire.disconnect()
            case "restart", _:
                wire.restart()
            case "answer", frozenset():
                wire.answer(losing=argument)
            case "break", int():
                wire.answer(breaks_after=argument)
            case "fail", _:
                if wire.request is not None:
                    wire.request = None
                    wire.do(wire.sequencer.replay_failed())
            case "prove", _:
                if wire.request is None:
                    wire.do(wire.sequencer.prove())
            case _:
                if wire.connected:
                    wire.do(wire.sequencer.lost())
        wire.check()
        if wire.sequencer.state == "exact" and wire.sequencer.mark is not None:
            assert wire.known[0] == payload(int(wire.known[0].split(b":")[0]), 0)
    wire.settle()
    wire.check()
    assert all(told.startswith(f"{wire.life}:".encode()) for told in wire.known)
    if can_replay and wire.seq:
        assert wire.known, "the end of the publisher's life is always known after a quiet moment"
        assert wire.known[-1] == payload(wire.life, wire.seq - 1)
        if wire.seq <= buffer and wire.sequencer.state == "exact":
            assert len(wire.known) == wire.seq


@given(st.integers(0, 8), st.integers(1, 8))
def test_a_stream_without_losses_is_exact_and_asks_no_more_than_it_must(before: int, after: int) -> None:
    wire = Wire(100, True)
    for _ in range(before):
        wire.publish(True)
    wire.connect()
    wire.answer()
    for _ in range(after):
        wire.publish(True)
    assert wire.sequencer.state == "exact"
    assert wire.sequencer.gaps == wire.sequencer.missed == 0
    assert len(wire.known) == before + after
    assert sum(isinstance(action, Ask) for action in wire.everything) == 1


def test_b011_a_first_reply_lost_on_our_side_is_not_taken_for_one_the_publisher_lacks() -> None:
    wire = Wire(100, True)
    wire.connect()
    wire.answer()
    for arrives in (True, True, True, False, True):
        wire.publish(arrives)
    assert wire.request == 2
    wire.do(wire.sequencer.lost())
    wire.answer(losing=frozenset((0, 1)))
    while wire.request is not None:
        wire.answer()
    assert len(wire.known) == 5
    assert wire.sequencer.state == "exact"
    assert not any(isinstance(action, Reset) for action in wire.everything)


def test_b009_going_on_from_a_snapshot_needs_the_same_publisher() -> None:
    for same in (True, False):
        sequencer = Sequencer(can_replay=True, mark=Mark.of(4, payload(0, 4)), complete=True)
        assert sequencer.state == "catching-up"
        assert list(sequencer.connected()) == [Ask(4, 0)]
        answers = list(sequencer.replayed(4, payload(0 if same else 1, 4)))
        if not same:
            assert isinstance(answers[0], Reset)
            assert answers[1:] == [Ask(0, 0)]
            continue
        assert answers == []
        assert list(sequencer.replayed(5, payload(0, 5))) == [Deliver(5, payload(0, 5))]
        assert list(sequencer.replay_ended()) == []
        assert sequencer.state == "exact"


def test_b009_a_sequence_that_goes_back_on_one_connection_is_another_life() -> None:
    wire = Wire(100, True)
    wire.connect()
    wire.answer()
    for _ in range(3):
        wire.publish(True)
    wire.life, wire.seq = 1, 0
    wire.kept.clear()
    wire.publish(True)
    assert wire.known == []
    wire.answer()
    wire.publish(True)
    assert wire.known == [payload(1, 0), payload(1, 1)]
    assert wire.sequencer.state == "exact"


def test_b009_what_a_new_connection_brings_is_not_spliced_on_before_it_is_proven() -> None:
    wire = Wire(100, True)
    wire.connect()
    wire.answer()
    wire.publish(True)
    wire.restart()
    wire.publish(False)
    wire.connect()
    wire.publish(True)  # batch 1 of the new life, just the number that would come next in the old one
    wire.no_answer()
    wire.check()
    assert wire.known == [payload(1, 1)]
    assert wire.sequencer.state == "degraded"


def test_b009_what_is_in_doubt_does_not_outlive_a_connection_that_could_be_anothers() -> None:
    sequencer = Sequencer(can_replay=True)
    list(sequencer.connected())
    list(sequencer.replay_ended())
    list(sequencer.live(0, payload(0, 0)))
    list(sequencer.live(5, payload(0, 5)))
    list(sequencer.lost())  # and batch 5 as well
    sequencer._let_go()
    for _ in range(MAX_FRUITLESS):
        actions = list(sequencer.replay_failed())
    assert [action for action in actions if isinstance(action, Reset)] == [
        Reset("no replay to be had", same=True)
    ]
    assert sequencer.mark is None
    sequencer.disconnected()
    (reset, ask) = sequencer.connected()
    assert isinstance(reset, Reset)
    assert not reset.same
    assert ask == Ask(0, 0)


def test_b010_a_hole_among_batches_kept_back_is_a_gap_of_its_own() -> None:
    wire = Wire(100, True)
    wire.connect()
    for arrives in (True, False, True, False, True):
        wire.publish(arrives)
    wire.no_answer()
    assert wire.known == [payload(0, 4)]
    assert wire.sequencer.missed == 2
    assert wire.sequencer.state == "degraded"
    wire.settle()
    assert len(wire.known) == 5  # rebuilt, once replays are answered
    assert wire.sequencer.state == "exact"
