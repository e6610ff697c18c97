"""No schedule can be below the bounds: random traces, fleets and policies, turn by turn."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.registry import make, names
from replay import profile as profiles
from replay.bounds import bounds
from replay.chains import Pieces
from replay.driver import Failure, Fleet, Load, Run
from replay.measure import ideal_hits, measure
from replay.pool import Placement
from replay.seen import Seen
from replay.traces.codex_like import growing
from replay.traces.types import Asked, Session, Trace

SIZE = 64
FIGURES = {
    "hbm_tokens": 9_600,
    "segment_bytes": 16_777_216 * 300,
    "step_tokens": 1024,
    "max_model_len": 9_600,
}
PROFILES = [
    profiles.load("qwen3-32b-2xh100", FIGURES),
    profiles.load(
        "qwen3-32b-2xh100", {**FIGURES, "saves_decode": 1, "overhead_s": 0, "network_bytes_s": 1e9}
    ),
    profiles.load("kimi-k2.5-gb200", {**FIGURES, "decode.hbm_tokens": 20_000}),
    profiles.load("qwen3-32b-2xh100", {**FIGURES, "dram_bytes": 16_777_216 * 90}),
]
FASTER = profiles.load("qwen3-32b-2xh100", {**FIGURES, "prefill_tok_s": 40_000, "step_s": 0.01})
TOKENS = st.integers(1, 900)
TURNS = st.lists(
    st.tuples(TOKENS, st.integers(1, 90), st.sampled_from([0.0, 0.0, 0.5])), min_size=1, max_size=6
)


def closed(sessions: list[list[tuple[int, int, float]]], head: int) -> Trace:
    return Trace(
        SIZE,
        [
            growing(
                f"s{number}",
                number,
                head,
                [(new + (head if place == 0 else 0), out) for place, (new, out, _) in enumerate(turns)],
                [think for _, _, think in turns],
                SIZE,
            )
            for number, turns in enumerate(sessions)
        ],
    )


def timed(requests: list[tuple[list[int], int, float]]) -> Trace:
    """Requests at their own times; each entry of a branch names the next five blocks."""
    sessions: list[Session] = []
    for number, (branch, rest, at) in enumerate(sorted(requests, key=lambda each: each[2])):
        ranges, node = [], 1
        for choice in branch:
            node = node * 3 + choice
            ranges.append(range(node * 1000, node * 1000 + 5))
        own = (1 << 40) + number * 10_000
        chain = Pieces([*ranges, range(own, own + 20)])
        sessions.append(Session(f"r{number}", [Asked(chain, 5 * SIZE * len(branch) + rest, 30)], at))
    return Trace(SIZE, sessions)


TRACES = st.one_of(
    st.builds(closed, st.lists(TURNS, min_size=1, max_size=8), st.sampled_from([0, 200, 1500])),
    st.builds(
        timed,
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 2), max_size=6),
                st.integers(1, 600),
                st.sampled_from([0.0, 0.01, 0.1, 0.15, 1.0]),
            ),
            min_size=1,
            max_size=14,
        ),
    ),
)


@settings(max_examples=120, deadline=None)
@given(
    TRACES,
    st.sampled_from(PROFILES),
    st.integers(1, 3),
    st.sampled_from([None, "random", "owner"]),
    st.sampled_from([*names(), None]),
    st.sampled_from([(), (0.3,), (0.05, 0.2, 0.9)]),
    st.integers(0, 1),
)
def test_no_turn_and_no_run_is_below_its_bound(
    trace: Trace,
    profile: profiles.Profile,
    instances: int,
    placement: Placement | None,
    policy: str | None,
    deaths: tuple[float, ...],
    faster: int,
) -> None:
    unlike = [FASTER] * faster if profile is PROFILES[0] else []
    fleet = Fleet(profile, instances, placement, unlike)
    least = bounds(trace, fleet.profiles, 3 if trace.sessions[0].arrives_s is None else None)
    chooser = None if policy is None else make(policy)
    load = Load(3, ramp_s=0.2)
    failures = [Failure(at, 0.3) for at in deaths]
    to_come = [0.0] * len(trace.sessions)
    finished = Run(trace, fleet, load, chooser, 0, to_come, None, failures).run()
    jobs = finished.jobs
    answered = [job for job in jobs if not job.failed]
    # Every turn of every session is answered once, whatever died, and none before the one before it.
    asked = [
        (number, place) for number, each in enumerate(trace.sessions) for place in range(len(each.turns))
    ]
    assert sorted((job.session, job.place) for job in answered) == asked
    ends = {(job.session, job.place): job.ended for job in answered}
    for job in jobs:
        assert job.arrived >= ends.get((job.session, job.place - 1), 0.0) + (
            job.asked.think_s if job.place and not job.again else 0.0
        )
    measured = measure(finished, ideal_hits(trace), least, SIZE, instances, 0.0)
    shares = (measured.local, measured.dram, measured.own_segment, measured.remote_pool, measured.computed)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1.0, abs=1e-9)
    assert measured.turns == len(asked)
    assert measured.bound_ttft_p99_s <= measured.ttft_p99_s + 1e-9
    for job in answered:
        assert job.started - job.arrived >= least.least(job).ttft_s - 1e-9
        assert job.ended - job.arrived >= least.least(job).e2e_s - 1e-9
    for skipped in (0, len(answered) // 2):
        window = answered[skipped:]
        lasted = max(job.ended for job in window) - window[0].arrived
        assert lasted >= least.duration_s(window, 1.0) - 1e-9


def test_the_bound_of_a_lone_turn_is_what_it_takes() -> None:
    profile = PROFILES[0]
    trace = closed([[(1000, 50, 0.0), (500, 1, 2.0)]], 0)
    fleet = Fleet(profile, 1, None)
    least = bounds(trace, fleet.profiles, 1)
    jobs = Run(trace, fleet, Load(1), make("round_robin"), 0, [0.0]).run().jobs
    for job in jobs:
        assert job.started - job.arrived == pytest.approx(least.least(job).ttft_s)
        assert job.ended - job.arrived == pytest.approx(least.least(job).e2e_s)
    assert jobs[-1].ended == pytest.approx(least.duration_s(jobs, 1.0))


def test_the_bound_of_a_run_does_not_end_before_those_who_come_last_can() -> None:
    trace = timed([([], 100, 0.0), ([], 100, 50.0)])
    least = bounds(trace, PROFILES[:1], None)
    jobs = Run(trace, Fleet(PROFILES[0], 1, None), Load(1), make("round_robin"), 0, [0.0, 0.0]).run().jobs
    assert jobs[-1].ended == pytest.approx(least.duration_s(jobs, 1.0))
    assert jobs[-1].ended > 50.0


def test_what_others_may_have_computed_need_not_be_computed() -> None:
    trace = closed([[(1000, 50, 0.0)], [(700, 50, 0.0)]], 640)
    assert [least[0].unseen for least in bounds(trace, PROFILES[:1], 2).turns] == [1000, 700]
    # In order of time the first comes too early to find it.
    both = [([0, 1], 1, 0.0), ([0, 1], 1, 1.0), ([0, 2], 1, 1.0)]
    assert [least[0].unseen for least in bounds(timed(both), PROFILES[:1], None).turns] == [641, 1, 321]


CHAINS = [Pieces([range(1, 5), range(100 * branch, 100 * branch + 8)]) for branch in range(1, 4)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, 2)), max_size=20))
@example([(1, 4, 0), (0, 5, 0), (1, 5, 0)])  # one goes on from where the other parts from it
def test_seen_knows_of_every_block_who_saw_it(steps: list[tuple[int, int, int]]) -> None:
    seen = Seen()
    plain: dict[int, set[int]] = {}
    for branch, end, who in steps:
        seen.add(CHAINS[branch], end, who)
        for key in CHAINS[branch][:end]:
            plain.setdefault(key, set()).add(who)
        for chain in CHAINS:
            for but in (0, 1, 2, None):
                count = 0
                while count < 12 and plain.get(chain[count], {but}) not in ({but}, {None}):
                    count += 1
                assert seen.prefix(chain, 12, but) == count
