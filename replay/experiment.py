"""The command `moongate replay`: one trace, one fleet, several policies, and the clairvoyant beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from msgspec.structs import replace as with_fields

from policies.installed import Installed
from policies.registry import Reads, make, reads
from policies.types import Policy
from replay import profile as profiles
from replay.at_once import Ended, Simulation, simulate
from replay.bounds import bounds
from replay.driver import Failure, Fleet, Load, Run
from replay.fallible import Fallible
from replay.measure import Measures, ideal_hits, measure
from replay.pool import Placement
from replay.profile import Profile
from replay.traces import files
from replay.traces.types import Session, Trace

CLAIRVOYANT = "clairvoyant"
# Sessions under way at a time on each instance, as in the article's experiment with real traces.
_PER_INSTANCE = 50
# The time over which the first ones begin.
_RAMP_S = 30.0
# The clairvoyant is tried with each: 0 is better where nothing is short, 1 where the network or prefill is
# (by a quarter with pulls over 5 GB/s). Neither sees what blocks of decoding turns cost others, as this
# policy does, so it is tried with all that they know. The lowest mean time to first token is shown.
_PATIENCES = (0.0, 1.0)
_INFORMED = "expected_ttft"
# Figures of which nothing depends without a pool, and nothing without private DRAM either.
_OF_POOL = frozenset({"segment_bytes", "network_bytes_s"})
_OF_TRANSFERS = frozenset({"host_bytes_s", "pull_setup_s", "lookup_s", "lookup_block_s", "saves_decode"})


class BadExperiment(ValueError):
    """The settings do not go together; the message says which."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to run. active: sessions under way at a time (default 50 for each instance). ramp_s: the time over
    which the first of them begin (default 30). rate: sessions a second instead. None of the three goes with a
    trace that says when sessions begin. sessions: how many of the trace are run, or with copies how many more
    (default: all, at least `active`). head: tokens of head that sessions share at most. figures: changes to
    the profile. unlike: so many of the instances have another profile (a name; "" for the same), with such
    changes. failures: when instances die, in seconds, each for down_s."""

    file: str
    format: str
    profile: str
    instances: int
    pool: bool
    policies: Sequence[str]
    seed: int = 0
    placement: Placement = "random"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    active: int | None = None
    head: int | None = None
    sessions: int | None = None
    ramp_s: float | None = None
    rate: float | None = None
    think: float = 1.0
    warmup: float = 0.1
    unlike: Sequence[tuple[int, str, Mapping[str, float]]] = ()
    failures: Sequence[float] = ()
    down_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """measures: by policy, in the order asked for. sessions: that were run; copies: of these, copies of
    others; truncated: of these, cut off at the first turn that is longer than the model's limit or HBM.
    dropped: not run, as already their first turn is. active, ramp_s: None where sessions come at times of
    their own. schedule: whose the clairvoyant's was."""

    experiment: Experiment
    profile: Profile
    sessions: int
    copies: int
    active: int | None
    ramp_s: float | None
    truncated: int
    dropped: int
    measures: Mapping[str, Measures]
    clairvoyant: Measures
    schedule: str


Progress = Callable[[str, int, int], None]


def run(experiment: Experiment, progress: Progress | None = None, jobs: int = 1) -> Outcome:
    """Raises BadTrace, BadProfile, BadExperiment, UnknownPolicy, BadPolicyOptions, SimulationFailed.

    progress: told of whom, how many turns of how many have ended. jobs: so many simulations at a time, which
    makes no difference to what comes out.
    """
    _check(experiment)
    made = {name: make(name, experiment.options.get(name)) for name in experiment.policies}
    profile = profiles.load(experiment.profile, experiment.figures)
    fleet = _fleet(experiment, profile)
    _refuse_figures(experiment, fleet)
    active = experiment.active or _PER_INSTANCE * experiment.instances
    trace, truncated, dropped = _trace(experiment, fleet, active)
    closed = experiment.rate is None and trace.sessions[0].arrives_s is None
    ramp_s = _RAMP_S if experiment.ramp_s is None else experiment.ramp_s
    ideal = ideal_hits(trace)
    to_come = _to_come(trace, ideal, profile)
    load = Load(active, ramp_s, experiment.rate, experiment.think)
    total = sum(len(session.turns) for session in trace.sessions)
    failures = [Failure(at, experiment.down_s) for at in experiment.failures]
    least = bounds(trace, fleet.profiles, active if closed else None)

    def simulation(
        policy: Policy | None, *, patience: float = 0.0, at_once: bool = False, by: Reads = "all"
    ) -> Simulation:
        def simulated(ended: Ended) -> Measures:
            seed = experiment.seed
            fallible = Fallible(policy) if isinstance(policy, Installed) else None
            decides = fallible or policy
            finished = Run(
                trace, fleet, load, decides, seed, to_come, ended, failures, patience, at_once, by
            ).run()
            measures = measure(
                finished,
                ideal,
                least,
                trace.block_size,
                experiment.instances,
                experiment.warmup,
                experiment.think,
            )
            if fallible is None:
                return measures
            return with_fields(measures, policy_failures=fallible.failed, policy_fault=fallible.fault)

        return simulated

    def ended(name: str, turns: int) -> None:
        if progress is not None:
            progress(name, turns, total)

    simulations = {name: simulation(policy, by=reads(name)) for name, policy in made.items()}
    for each in _PATIENCES:
        simulations[f"{CLAIRVOYANT}, patience {each:g}"] = simulation(None, patience=each)
    simulations[f"{CLAIRVOYANT}, {_INFORMED}"] = simulation(make(_INFORMED), at_once=True)
    tried = simulate(simulations, jobs, ended)
    measures = {name: tried[name] for name in made}
    # A policy's own schedule could be had, too.
    schedule = min(tried, key=lambda each: tried[each].ttft_mean_s)
    return Outcome(
        experiment,
        profile,
        sessions=len(trace.sessions),
        copies=trace.copies,
        active=active if closed else None,
        ramp_s=ramp_s if closed else None,
        truncated=truncated,
        dropped=dropped,
        measures=measures,
        clairvoyant=tried[schedule],
        schedule=schedule,
    )


def _to_come(trace: Trace, ideal: Sequence[Sequence[int]], profile: Profile) -> list[float]:
    """Seconds of work in each session that no cache can spare."""
    token_s = 1 / profile.prefill_tok_s.value
    answer_s = (profile.decode.decode_seq_s if profile.decode is not None else profile.decode_seq_s).value
    return [
        sum(
            (asked.prompt_tokens - hit) * token_s + asked.output_tokens * answer_s
            for asked, hit in zip(session.turns, hits, strict=True)
        )
        for session, hits in zip(trace.sessions, ideal, strict=True)
    ]


def _check(experiment: Experiment) -> None:
    checks = (
        (bool(experiment.policies), "at least one policy is needed"),
        (len(set(experiment.policies)) == len(experiment.policies), "a policy is named twice"),
        (
            CLAIRVOYANT not in experiment.policies,
            "clairvoyant is no policy: it is beside every run anyway",
        ),
        (experiment.instances >= 1, f"instances must be at least 1, not {experiment.instances}"),
        (experiment.active is None or experiment.active >= 1, "active must be at least 1"),
        (experiment.sessions is None or experiment.sessions >= 1, "sessions must be at least 1"),
        (experiment.head is None or experiment.head >= 0, "head must not be negative"),
        (experiment.rate is None or experiment.rate > 0, "rate must be above 0"),
        (
            experiment.rate is None or experiment.active is experiment.ramp_s is None,
            "with --rate sessions come whatever is under way: --active and --ramp would have no effect",
        ),
        (experiment.think >= 0, "think must not be negative"),
        (experiment.ramp_s is None or experiment.ramp_s >= 0, "ramp must not be negative"),
        (all(at >= 0 for at in experiment.failures), "instances cannot die before the start"),
        (experiment.down_s >= 0, "down must not be negative"),
        (all(count >= 1 for count, _, _ in experiment.unlike), "at least one instance must be unlike"),
        (0 <= experiment.warmup < 1, f"warmup must be from 0 to below 1, not {experiment.warmup:g}"),
    )
    for good, message in checks:
        if not good:
            raise BadExperiment(message)


def _fleet(experiment: Experiment, profile: Profile) -> Fleet:
    unlike: list[Profile] = []
    for count, name, figures in experiment.unlike:
        other = profiles.load(name or experiment.profile, {**experiment.figures, **figures})
        for key in ("block_size", "block_bytes"):
            if getattr(other, key).value != getattr(profile, key).value:
                raise BadExperiment(f"instances of one pool have one model: {key} must be the same")
        if (other.decode is None) != (profile.decode is None):
            raise BadExperiment("instances with decode of their own and others do not go together")
        unlike += [other] * count
    if len(unlike) > experiment.instances:
        raise BadExperiment(f"{len(unlike)} instances are to be unlike, but there are {experiment.instances}")
    return Fleet(profile, experiment.instances, experiment.placement if experiment.pool else None, unlike)


def _trace(experiment: Experiment, fleet: Fleet, active: int) -> tuple[Trace, int, int]:
    """What is run, how many of its sessions are cut off, and how many are left out whole."""
    profile = fleet.profile
    limit, limit_of = min(each.longest_turn for each in fleet.profiles)
    wanted = experiment.sessions or active
    trace = files.load(
        experiment.file, experiment.format, profile.blocks_of_tokens, sessions=wanted, head=experiment.head
    )
    sessions = trace.sessions[: experiment.sessions]
    if sessions[0].arrives_s is not None:
        _refuse_pace(experiment)
    kept: list[Session] = []
    recorded = len(trace.sessions) - trace.copies
    copies = truncated = dropped = 0
    for number, session in enumerate(sessions):
        turns = list(session.turns)
        for place, asked in enumerate(turns):
            tokens = asked.prompt_tokens + asked.output_tokens
            if tokens > limit:
                turns = turns[:place]
                break
        dropped += not turns
        truncated += 0 < len(turns) < len(session.turns)
        if turns:
            copies += number >= recorded
            kept.append(replace(session, turns=turns))
    if experiment.seed and sessions[0].arrives_s is None:
        # Another order is what another seed changes where nothing else is drawn.
        Random(experiment.seed).shuffle(kept)
    if not kept:
        least = min(session.turns[0].prompt_tokens + session.turns[0].output_tokens for session in sessions)
        raise BadExperiment(
            f"no session's first turn is within {limit_of}: the shortest has {least:,} tokens with its answer"
        )
    return Trace(trace.block_size, kept, copies), truncated, dropped


def _refuse_figures(experiment: Experiment, fleet: Fleet) -> None:
    """Those given on the command line of which nothing depends."""
    given = {
        key for changes in (experiment.figures, *(each[2] for each in experiment.unlike)) for key in changes
    }
    idle = set[str]()
    if not experiment.pool:
        idle |= _OF_POOL
        if not any(each.dram_blocks for each in fleet.profiles):
            idle |= _OF_TRANSFERS
            if fleet.profile.decode is None:
                idle.add("block_bytes")
    if without := sorted(given & idle):
        raise BadExperiment(f"without a pool {' and '.join(without)} would have no effect")


def _refuse_pace(experiment: Experiment) -> None:
    paces = (("--active", experiment.active), ("--rate", experiment.rate), ("--ramp", experiment.ramp_s))
    given = [flag for flag, value in paces if value is not None]
    if given:
        raise BadExperiment(
            f"{experiment.file} says when its sessions begin: {' and '.join(given)} would have no effect"
        )
