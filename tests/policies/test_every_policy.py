"""What must hold for every policy, whatever it is shown."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fleets import FIELDS, RATES, candidates, draws, turn, turns
from policies import registry
from policies.candidates import NOTHING, Prefix, Standing, candidate
from policies.document import read
from policies.ledger import Ledger
from policies.page import Lease
from policies.plan import Plan
from policies.sessions import Sessions
from policies.types import Candidate, Rates, Turn

NAMES = registry.names()
# What a token of a prompt takes as long as nothing was measured.
TOKEN_S = Rates().prefill_s
# Those that put work where there is less of it; the others ignore load on purpose.
EVEN = ["longest_prefix", "expected_ttft", "session", "least_loaded", "power_of_two", "prefix_hash"]
PREFIX_AWARE = ["longest_prefix", "expected_ttft"]


def test_fleets_differ_in_everything_that_a_policy_can_read() -> None:
    assert {*FIELDS} == {*Candidate.__struct_fields__}
    assert {*RATES} == {*Rates.__struct_fields__} - {"confidence"}  # which nothing goes by


@pytest.mark.parametrize("name", NAMES)
@given(fleet=candidates(), asked=turns, data=st.data())
def test_the_choice_is_eligible_and_does_not_depend_on_the_order(
    name: str, fleet: list[Candidate], asked: Turn, data: st.DataObject
) -> None:
    decide = registry.make(name)
    decision = decide(asked, fleet)
    able = {c.target for c in fleet if not c.excluded}
    assert decision.target in able if able else decision.target is None
    assert decision.policy == name
    assert len(decision.scored) == len(fleet)
    shuffled = data.draw(st.permutations(fleet))
    assert decide(asked, shuffled).target == decision.target


# What a policy does not read a replay leaves out: see `registry.Kind`.
TIMES = ("rates", "pressure", "turn_s", "ahead_s", "capacity_tokens", "held_tokens", "decoding_tokens")


@pytest.mark.parametrize("name", NAMES)
@given(fleet=candidates(), asked=turns)
def test_a_policy_reads_no_more_than_its_kind_says(name: str, fleet: list[Candidate], asked: Turn) -> None:
    reads = registry.reads(name)
    plain = Candidate("")
    kept = {
        "nothing": ("target", "excluded", "weight"),
        "tokens": [field for field in Candidate.__struct_fields__ if field not in TIMES],
        "all": Candidate.__struct_fields__,
    }[reads]
    told = [replace(plain, **{field: getattr(c, field) for field in kept}) for c in fleet]
    assert registry.make(name)(asked, told).target == registry.make(name)(asked, fleet).target


@pytest.mark.parametrize("name", PREFIX_AWARE)
@given(fleet=candidates(), asked=turns, more=st.integers(1, 5000))
def test_more_local_prefix_never_makes_a_target_lose(
    name: str, fleet: list[Candidate], asked: Turn, more: int
) -> None:
    decide = registry.make(name)
    before = decide(asked, fleet)
    if before.target is None:
        return
    grown = [
        replace(c, local_tokens=c.local_tokens + more) if c.target == before.target else c for c in fleet
    ]
    assert decide(asked, grown).target == before.target


@pytest.mark.parametrize("name", ["least_loaded", "power_of_two", "expected_ttft"])
@given(fleet=candidates(), asked=turns, more=st.integers(1, 5000))
def test_more_load_never_makes_a_target_win(
    name: str, fleet: list[Candidate], asked: Turn, more: int
) -> None:
    decide = registry.make(name)
    before = decide(asked, fleet).target
    for c in fleet:
        if c.target != before and not c.excluded:
            loaded = [
                replace(o, queued_tokens=o.queued_tokens + more) if o.target == c.target else o for o in fleet
            ]
            assert decide(asked, loaded).target != c.target


@pytest.mark.parametrize("name", NAMES)
def test_b021_equal_candidates_share_evenly(name: str) -> None:
    decide = registry.make(name)
    fleet = [Candidate(t, local_tokens=64) for t in "abcd"]
    counts = Counter(
        decide(turn(100, i / 400, number=i, session=str(i), head=i * 2**50 + 1), fleet).target
        for i in range(400)
    )
    assert set(counts) == {*"abcd"}
    assert min(counts.values()) > 70


@pytest.mark.parametrize("name", NAMES)
def test_b021_b106_prompts_that_are_not_known_share_evenly(name: str) -> None:
    decide = registry.make(name)
    fleet = [Candidate(t) for t in "abcd"]
    counts = Counter(decide(turn(0, (i * 0.618) % 1, number=i), fleet).target for i in range(40))
    assert len(counts) == 4
    assert max(counts.values()) <= 20


@pytest.mark.parametrize("excluded", ["down", "starting", "cordoned", "model", "failed", "breaker", "ramp"])
@pytest.mark.parametrize("name", NAMES)
def test_b041_who_may_not_be_chosen_does_not_distort_the_choice(name: str, excluded: str) -> None:
    """Dead, draining, asleep, of another model: idle all of them, and nothing to compare with."""
    fleet = [
        Candidate("busy1", local_tokens=9600, queued_tokens=700, inflight=5),
        Candidate("busy2", queued_tokens=700, inflight=5),
        *(Candidate(f"{excluded}{i}", excluded=excluded, local_tokens=9900) for i in range(3)),
    ]
    asked = turn(session="s", head=3)
    with_them = registry.make(name)(asked, fleet)
    assert with_them.target == registry.make(name)(asked, fleet[:2]).target
    # Nor do they make those look overloaded that may be chosen.
    guards = {"max_imbalance": 1.5, "imbalance_slack_tokens": 0}
    guarded = Plan(read({"policy": name, "guards": guards})).decide(asked, fleet)
    assert (guarded.target, guarded.guards) == (with_them.target, ())


@pytest.mark.parametrize("name", PREFIX_AWARE)
def test_b047_an_idle_holder_gets_every_repeat_and_without_weight_none_of_that(name: str) -> None:
    fleet = [Candidate(f"w{i}", local_tokens=320 if i == 3 else 0) for i in range(4)]
    turns_ = [turn(330, i / 20, number=i) for i in range(20)]
    assert {registry.make(name)(asked, fleet).target for asked in turns_} == {"w3"}
    blind = Plan(read({"policy": name, "guards": {"min_prefix_tokens": 321}}))
    counts = Counter(blind.decide(asked, fleet).target for asked in turns_)
    assert len(counts) == 4
    assert max(counts.values()) <= 10
    terms = {s.candidate.target: s.terms for s in registry.make(name)(turns_[0], fleet).scored}
    assert sum(terms["w3"].values()) < sum(terms["w0"].values())


@pytest.mark.parametrize("name", EVEN)
@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 60_000), min_size=40, max_size=80),
    seed=draws,
    targets=st.integers(2, 6),
)
def test_b022_a_burst_of_cold_prompts_is_bounded_by_the_largest(
    name: str, sizes: list[int], seed: float, targets: int
) -> None:
    """All at one instant, before any event or report: what was sent is the only load there is."""
    decide, ledger = registry.make(name), Ledger()
    for i, size in enumerate(sizes):
        fleet = [
            candidate(f"w{t}", ledger.load(f"w{t}", 0.0), ledger.rates(f"w{t}", 0.0), Standing())
            for t in range(targets)
        ]
        asked = turn(size, (seed + i * 0.618) % 1, number=i, session=f"s{i}", head=i + 1)
        chosen = decide(asked, fleet).chosen
        assert chosen is not None
        ledger.sent(asked, chosen, 0.0)
    queued = [ledger.load(f"w{t}", 0.0).queued_tokens for t in range(targets)]
    mean = sum(queued) / targets
    if name == "power_of_two":
        return
    # `session` and `prefix_hash` may have a quarter and 16,384 tokens more than the mean before they pass.
    assert max(queued) <= 1.25 * mean + 16_384 + max(sizes)


@pytest.mark.parametrize("name", EVEN)
@given(seed=draws, sizes=st.lists(st.integers(100, 4000), min_size=60, max_size=120))
def test_imbalance_is_bounded_when_turns_come_one_at_a_time(name: str, seed: float, sizes: list[int]) -> None:
    """All sessions share one head; nothing is ever in flight when a turn is placed."""
    decide = registry.make(name)
    recent: dict[str, float] = defaultdict(float)
    held: dict[str, int] = defaultdict(int)
    for i, size in enumerate(sizes):
        fleet = [
            Candidate(t, local_tokens=held[t], recent_tokens=recent[t], recent_s=recent[t] * TOKEN_S)
            for t in "abcd"
        ]
        asked = turn(8000 + size, (seed + i * 0.618) % 1, number=i, session=f"s{i}", head=1)
        chosen = decide(asked, fleet).chosen
        assert chosen is not None
        recent[chosen.target] += asked.prompt_tokens - chosen.cached_tokens
        held[chosen.target] = 8000
    spread = max(recent.values()) - min(recent.get(t, 0.0) for t in "abcd")
    # A head's worth of work over what margins, slack and a share of recent work allow.
    assert spread <= 170_000 + 12_000


@pytest.mark.parametrize("answer_s", [0.0, 20.0], ids=["one at a time", "many under way"])
@pytest.mark.parametrize("tail", [20, 200, 2000])
@pytest.mark.parametrize("head", [1024, 8192])
@pytest.mark.parametrize("name", PREFIX_AWARE)
def test_b021_new_sessions_that_share_a_head_do_not_all_go_to_who_has_it(
    name: str, head: int, tail: int, answer_s: float
) -> None:
    """138 in a minute: what all of them went to one worker by, and the other had none."""
    decide, ledger, held = registry.make(name), Ledger(), set[str]()
    counts: Counter[str] = Counter()
    under_way: list[tuple[float, Lease]] = []
    for i in range(138):
        now = i * 60 / 138
        while under_way and under_way[0][0] <= now:
            under_way.pop(0)[1].ended(now)
        fleet = [
            candidate(
                t,
                ledger.load(t, now),
                ledger.rates(t, now),
                Standing(),
                Prefix(local=head) if t in held else NOTHING,
            )
            for t in "ab"
        ]
        asked = turn(head + tail, (i * 0.618) % 1, number=i, session=f"s{i}", head=1, new=True)
        chosen = decide(asked, fleet).chosen
        assert chosen is not None
        counts[chosen.target] += 1
        held.add(chosen.target)
        lease = ledger.sent(asked, chosen, now)
        lease.first_token(now + 0.1, answered=False)
        under_way.append((now + max(0.2, answer_s), lease))
    if tail * 138 < head and (name == "expected_ttft" or not answer_s):
        return  # All of it is less than computing the head again, and no first token waits.
    # The other one was as much ahead as the head takes.
    assert max(counts.values()) <= 1.15 * 69 + min(15, head / tail)


@pytest.mark.parametrize("name", PREFIX_AWARE)
def test_a_session_alone_does_not_flee_from_its_own_work(name: str) -> None:
    """Slow engines and a quick pool: what it made its worker do lately is dearer than to leave."""
    slow = Rates(0.005, own_s=1e-6, remote_s=1e-5, first_s=0.02)
    decide, ledger, sessions = registry.make(name), Ledger(slow), Sessions()
    where: list[str] = []
    for i in range(12):
        now, keys = 20.0 * i, list(range(1, 32 * (i + 1)))
        known = sessions.find("", "m", keys)
        size, held = 16 * len(keys), 16 * 32 * i
        fleet = [
            candidate(
                t,
                ledger.load(t, now),
                slow,
                Standing(),
                Prefix(local=held if where and where[-1] == t else 0, pool=held),
                own=known.own(t, now),
            )
            for t in "ab"
        ]
        asked = turn(size, (i * 0.618) % 1, number=i, session=known.name, new=known.new)
        chosen = decide(asked, fleet).chosen
        assert chosen is not None
        where.append(chosen.target)
        uncached = size - chosen.cached_tokens
        sessions.placed(known, "m", keys, chosen.target, now, tokens=size, uncached=uncached, block_size=16)
        ledger.sent(asked, chosen, now).ended(now + 5)
    assert len(set(where)) == 1


@pytest.mark.parametrize("name", ["longest_prefix", "expected_ttft", "session", "prefix_hash"])
def test_b022_many_turns_under_way_of_which_all_is_cached_are_no_hot_spot(name: str) -> None:
    """138 of one session and head, nothing to compute: all that tells of load is that they run."""
    guards = {"max_imbalance": 1.25} if name in PREFIX_AWARE else {}
    plan, counts = Plan(read({"policy": name, "guards": guards})), Counter[str]()
    for i in range(138):
        fleet = [
            Candidate(t, local_tokens=8192 if t == "a" else 0, pool_tokens=8192, inflight=counts[t])
            for t in "ab"
        ]
        asked = turn(8200, (i * 0.618) % 1, number=i, session="one", head=1)
        counts[plan.decide(asked, fleet).target or ""] += 1
    # 1.25 times the mean, and 16,384 tokens of slack.
    assert max(counts.values()) <= 1.25 * 69 + 16


@pytest.mark.parametrize("name", ["least_loaded", "random", "expected_ttft", "session"])
def test_a_target_of_twice_the_weight_gets_about_twice_as_much(name: str) -> None:
    decide = registry.make(name)
    work = {"a": 0.0, "b": 0.0}
    for i in range(300):
        fleet = [
            Candidate("a", recent_tokens=work["a"], recent_s=work["a"] * TOKEN_S, weight=2.0),
            Candidate("b", recent_tokens=work["b"], recent_s=work["b"] * TOKEN_S),
        ]
        asked = turn(1000, (i * 0.618) % 1, number=i, session=f"s{i}", head=i)
        work[decide(asked, fleet).target or ""] += 1000
    assert 1.4 < work["a"] / work["b"] < 2.8
