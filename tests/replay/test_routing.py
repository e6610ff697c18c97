"""Who chooses: what a policy is shown of one that was dead, and where one that knows all sends turns."""

from collections.abc import Sequence
from statistics import mean

from nobody import Nobody

from policies import registry
from policies.types import Candidate, Decision, Turn
from replay import profile as profiles
from replay.clairvoyant import Clairvoyant
from replay.clock import Clock
from replay.driver import Failure, Fleet, Load, Run
from replay.instance import Instance, Job, schedule
from replay.traces.codex_like import growing
from replay.traces.types import Session, Trace

PROFILE = profiles.load("qwen3-32b-2xh100")
SIZE = PROFILE.blocks_of_tokens


def test_an_instance_that_is_back_is_known_for_nothing_that_it_did_before_it_died() -> None:
    """Neither work nor speed: it is another process, which holds nothing."""
    choose = registry.make("least_loaded")
    shown: list[dict[str, Candidate]] = []

    def watching(turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        shown.append({each.target: each for each in candidates})
        return choose(turn, candidates)

    sessions = [
        growing(f"s{n}", n, 1024, [(4096, 40), *[(900, 40)] * 11], [1.0] * 12, SIZE) for n in range(6)
    ]
    fleet, load = Fleet(PROFILE, 3, "owner"), Load(6, ramp_s=2.0)
    Run(Trace(SIZE, sessions), fleet, load, watching, 0, [0.0], None, [Failure(8.0, 0.5)]).run()
    (dead,) = {each.target for seen in shown for each in seen.values() if each.excluded == "down"}
    last = max(n for n, seen in enumerate(shown) if seen[dead].excluded)
    before, back = shown[0][dead], shown[last + 1][dead]
    assert max(seen[dead].recent_tokens for seen in shown[:last]) > 2_000
    assert (back.inflight, back.queued_tokens, back.local_tokens) == (0, 0, 0)
    others = [each for target, each in shown[last + 1].items() if target != dead]
    assert all(each.recent_tokens > 0 and each.turn_s > 0 for each in others)
    # It was not there to do as much as others, so that it is the first to be taken; but they did little more.
    assert 0 < back.recent_tokens < 0.1 * min(each.recent_tokens for each in others)
    # Turns are taken to last there as long as elsewhere.
    assert before.turn_s == 0.0 < back.turn_s


# As in bench/peers.py: a prompt token is computed in 50 us, and half of the sessions' contexts fit into HBM.
PEERS = profiles.load(
    "llama-3.1-8b-h100",
    {
        "block_size": 32,
        "block_bytes": 4_194_304,
        "hbm_tokens": 15_968,
        "max_model_len": 15_968,
        "prefill_tok_s": 20_480,
        "step_s": 0.007,
        "decode_seq_s": 0.0007,
        "network_bytes_s": 4e10,
        "host_bytes_s": 4e10,
        "overhead_s": 0.0,
    },
)


def test_short_turns_do_not_all_go_to_an_instance_that_is_back() -> None:
    """It did nothing lately, but nobody waits there longer than elsewhere for that."""
    size = PEERS.blocks_of_tokens
    there, elsewhere = list[float](), list[float]()
    steps = [(2410, 16), *[(510, 16)] * 7]
    sessions = [growing(f"s{n}", n, 1600, steps, [1.2] * 8, size) for n in range(72)]
    for seed in range(2):
        run = Run(
            Trace(size, sessions),
            Fleet(PEERS, 4, "owner"),
            Load(24, ramp_s=0.15),
            registry.make("expected_ttft"),
            seed,
            [0.0] * 72,
            None,
            [Failure(18.0, 1.0)],
        )
        jobs = run.run().jobs
        (dead,) = set(range(4)) - {job.instance for job in jobs if 18.1 < job.arrived < 19.0}
        for job in jobs:
            if 19.0 <= job.arrived < 23.0:
                (there if job.instance == dead else elsewhere).append(job.started - job.arrived)
    assert 0.15 < len(there) / len(there + elsewhere) < 0.45
    assert mean(there) < 1.5 * mean(elsewhere)


class Rig:
    """Three instances, and a clairvoyant who sends them turns of these sessions."""

    def __init__(self, to_come: Sequence[float]) -> None:
        self.clock = Clock()
        links, self.changed = schedule(self.clock), set[int]()
        self.instances = [
            Instance(n, PROFILE, self.clock, links, None, Nobody(), self.changed) for n in range(3)
        ]
        for each in self.instances:
            each.know(self.instances)
        steps, thinks = [(6_400, 64), (640, 64), (640, 64)], [1.0] * 3
        self.sessions: list[Session] = [
            growing(f"s{n}", n, 0, steps, thinks, SIZE) for n in range(len(to_come))
        ]
        self.chooser = Clairvoyant(self.instances, None, self.sessions, to_come, 0.0, self.changed)
        self.asked = 0

    def turn(self, session: int, place: int, *, begins: bool = True) -> tuple[Job, int | None]:
        """Where it is sent; with `begins` it is taken there, and answered before anything else happens."""
        turns = self.sessions[session].turns
        job = Job(session, place, self.asked, turns[place], self.clock.now, place + 1 == len(turns))
        self.asked += 1
        chosen = self.chooser.choose(job, self.clock.now)
        if begins and chosen is not None:
            self.instances[chosen].take(job)
            self.clock.run()
            self.chooser.ended(job, self.clock.now)
        return job, chosen


def test_new_sessions_go_where_least_is_to_come_and_stay_where_they_are_held() -> None:
    rig = Rig([9.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    where = [rig.turn(session, 0)[1] for session in range(5)]
    assert sorted(where[:3], key=str) == [0, 1, 2]
    # The longest one is alone; the others share the two that are left.
    assert where[0] not in where[3:]
    assert where[3] != where[4]
    assert [rig.turn(session, 1)[1] for session in range(5)] == where
    # What has ended is no longer to come: its place is where the next one goes.
    rig.turn(0, 2)
    assert rig.turn(5, 0)[1] == where[0]


def test_a_session_whose_instance_is_dead_goes_elsewhere_and_comes_back_to_what_is_held_longest() -> None:
    rig = Rig([5.0, 5.0, 5.0])
    where = [rig.turn(session, 0)[1] for session in range(3)]
    dead = where[0]
    assert dead is not None
    rig.instances[dead].die()
    rig.chooser.died(dead, rig.clock.now)
    _, other = rig.turn(0, 1)
    assert other in where[1:]
    rig.chooser.back(dead, rig.clock.now)
    assert rig.turn(0, 2)[1] == other
    for each in range(3):
        rig.chooser.died(each, rig.clock.now)
    assert rig.turn(1, 1)[1] is None


def test_a_turn_leaves_its_holder_only_for_an_earlier_answer() -> None:
    rig = Rig([1.0, 1.0])
    _, holder = rig.turn(0, 0)
    assert holder is not None
    waiting = Job(1, 0, 50, growing("x", 9, 0, [(200_000, 4)], [0.0], SIZE).turns[0], rig.clock.now)
    rig.instances[holder].jobs[waiting] = None
    rig.changed.add(holder)
    # Ten seconds of work are ahead there; its own prompt takes a third of a second anywhere.
    _, chosen = rig.turn(0, 1, begins=False)
    assert chosen != holder
    del rig.instances[holder].jobs[waiting]
    rig.changed.add(holder)
    _, chosen = rig.turn(0, 1, begins=False)
    assert chosen == holder


def test_where_it_makes_no_difference_a_session_stays_with_what_is_held() -> None:
    """To compute 320 tokens takes 16 ms: not worth moving for, nor worth staying for, but blocks would."""
    rig = Rig([1.0])
    rig.sessions[0] = growing("short", 0, 0, [(256, 64), (64, 64)], [0.0, 0.0], SIZE)
    _, holder = rig.turn(0, 0)
    assert holder is not None
    assert rig.turn(0, 1)[1] == holder
