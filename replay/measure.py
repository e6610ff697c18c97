"""What a run was worth: hit rates by source, times, traffic, balance; and what no run could exceed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from replay.bounds import Bounds
from replay.driver import Finished
from replay.instance import Job
from replay.seen import Seen
from replay.spent import Spent, spent
from replay.traces.types import Trace

# Of every series of points in a report so many are kept.
_POINTS = 100


class Measures(msgspec.Struct, frozen=True):
    """Shares are of prompt tokens unless named otherwise; times in seconds; all of measured turns only.

    Hits are what a turn's first admission found; what it finds again after a preemption is left out, so that
    local, dram, own_segment, remote_pool and computed sum to 1.
    hit_rate: found cached, of which `local` in the instance's own HBM, `dram` in its private DRAM,
    `own_segment` in its own part of the pool and `remote_pool` in others'. local_share: of hit tokens, those
    that needed no network; own_segment_share: of hit tokens, those in the own segment. pool_network_bytes:
    pulled and put.
    throughput_tok_s: prompt and answer tokens. imbalance: turns under way on the instance that has most, over
    the mean. retried_turns: sent again because their instance died before their first token; their times
    begin with the first try. failed_turns: their instance died in the middle of the answer; they are in no
    other figure, but that the agent asks again. failed_pulls: turns whose pull's source died, so
    that they computed. policy_failures: turns for which an installed policy failed, warm-up included, so that
    the fallback decided; policy_fault: how, at first. ttft_s, e2e_s and their bounds: percentiles 1 to 100.
    bound_...: what nobody could be below with these turns (throughput: above), see replay/bounds.py.
    """

    turns: int
    hit_rate: float
    ideal_hit_rate: float
    local: float
    dram: float
    own_segment: float
    remote_pool: float
    computed: float
    local_share: float
    own_segment_share: float
    pool_network_bytes: float
    pool_put_bytes: float
    pool_evicted_blocks: int
    pool_refused_blocks: int
    preemptions: int
    failures: int
    retried_turns: int
    failed_turns: int
    failed_pulls: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    throughput_tok_s: float
    duration_s: float
    imbalance: float
    moved_share: float
    bound_ttft_p50_s: float
    bound_ttft_p90_s: float
    bound_ttft_p99_s: float
    bound_e2e_p50_s: float
    bound_e2e_p99_s: float
    bound_throughput_tok_s: float
    ttft_s: list[float]
    e2e_s: list[float]
    bound_ttft_s: list[float]
    bound_e2e_s: list[float]
    spent: Spent
    policy_failures: int = 0
    policy_fault: str = ""


def ideal_hits(trace: Trace) -> list[list[int]]:
    """Tokens of each turn that an endless cache common to all would hold, answers included.

    Sessions are taken in step, or in order of time where they have times; that matters for heads alone.
    """
    size, seen = trace.block_size, Seen()
    hits: list[list[int]] = [[0] * len(session.turns) for session in trace.sessions]
    for place in range(max(len(session.turns) for session in trace.sessions)):
        for number, session in enumerate(trace.sessions):
            if place < len(session.turns):
                asked = session.turns[place]
                hits[number][place] = size * seen.prefix(asked.chain, (asked.prompt_tokens - 1) // size)
                seen.add(asked.chain, asked.blocks(size), number)
    return hits


def measure(
    run: Finished,
    ideal: Sequence[Sequence[int]],
    bounds: Bounds,
    block_size: int,
    instances: int,
    warmup: float,
    think: float = 1.0,
) -> Measures:
    """warmup: the share of turns, by order of arrival, that is left out. think: of the thinking time, the
    share that passed."""
    asked = run.jobs[int(len(run.jobs) * warmup) :]
    jobs = [job for job in asked if not job.failed]
    prompt = sum(job.asked.prompt_tokens for job in jobs)
    local = sum(_local(job) for job in jobs)
    pool = sum(_pool(job) for job in jobs)
    own = sum(job.own_tokens for job in jobs)
    dram = sum(job.dram_tokens for job in jobs)
    hit = local + pool
    ttft = np.array([job.started - job.arrived for job in jobs])
    e2e = np.array([job.ended - job.arrived for job in jobs])
    least = [bounds.least(job) for job in jobs]
    least_ttft, least_e2e = (np.array(each) for each in ([x.ttft_s for x in least], [x.e2e_s for x in least]))
    load = np.zeros(instances)
    np.add.at(load, [job.instance for job in jobs], e2e)
    duration = max(job.ended for job in jobs) - jobs[0].arrived
    answers = sum(job.asked.output_tokens for job in jobs)
    put = sum(job.put_bytes for job in jobs)
    return Measures(
        turns=len(jobs),
        hit_rate=hit / prompt,
        ideal_hit_rate=sum(_ideal(job, ideal, block_size) for job in jobs) / prompt,
        local=local / prompt,
        dram=dram / prompt,
        own_segment=own / prompt,
        remote_pool=max(0.0, pool - own - dram) / prompt,
        computed=1 - hit / prompt,
        local_share=(local + dram + own) / hit if hit else 0.0,
        own_segment_share=own / hit if hit else 0.0,
        pool_network_bytes=sum(job.pulled_bytes for job in jobs) + put,
        pool_put_bytes=put,
        pool_evicted_blocks=run.pool_evicted_blocks,
        pool_refused_blocks=run.pool_refused_blocks,
        preemptions=run.preemptions,
        failures=run.failures,
        retried_turns=sum(job.retried > 0 for job in jobs),
        failed_turns=len(asked) - len(jobs),
        failed_pulls=sum(job.unpulled for job in jobs),
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p90_s=_percentile(ttft, 90),
        ttft_p99_s=_percentile(ttft, 99),
        e2e_p50_s=_percentile(e2e, 50),
        e2e_p90_s=_percentile(e2e, 90),
        e2e_p99_s=_percentile(e2e, 99),
        throughput_tok_s=(prompt + answers) / duration,
        duration_s=duration,
        imbalance=float(load.max() / load.mean()),
        moved_share=_moved(jobs),
        bound_ttft_p50_s=_percentile(least_ttft, 50),
        bound_ttft_p90_s=_percentile(least_ttft, 90),
        bound_ttft_p99_s=_percentile(least_ttft, 99),
        bound_e2e_p50_s=_percentile(least_e2e, 50),
        bound_e2e_p99_s=_percentile(least_e2e, 99),
        bound_throughput_tok_s=(prompt + answers) / bounds.duration_s(jobs, think),
        ttft_s=_series(ttft),
        e2e_s=_series(e2e),
        bound_ttft_s=_series(least_ttft),
        bound_e2e_s=_series(least_e2e),
        spent=spent(jobs, think),
    )


def _ideal(job: Job, ideal: Sequence[Sequence[int]], block_size: int) -> int:
    """A turn that is asked again can find all of its own prompt but the last token."""
    if job.again:
        return (job.asked.prompt_tokens - 1) // block_size * block_size
    return ideal[job.session][job.place]


def _local(job: Job) -> int:
    return 0 if job.prefill is None else job.prefill.local_tokens or 0


def _pool(job: Job) -> int:
    return 0 if job.prefill is None or job.unpulled else job.prefill.pool_tokens


def _percentile(values: npt.NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent))


def _series(values: npt.NDArray[np.float64]) -> list[float]:
    return [round(float(each), 5) for each in np.percentile(values, np.arange(1, _POINTS + 1))]


def _moved(jobs: Sequence[Job]) -> float:
    """Share of later turns that went to another instance than the turn before."""
    where: dict[int, int] = {}
    later = moved = 0
    for job in jobs:
        before = where.get(job.session)
        if before is not None:
            later += 1
            moved += before != job.instance
        where[job.session] = job.instance
    return moved / later if later else 0.0
