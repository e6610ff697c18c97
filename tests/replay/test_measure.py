"""What a run is said to have been worth."""

from replay import profile as profiles
from replay.bounds import bounds
from replay.driver import Finished
from replay.instance import Job
from replay.measure import ideal_hits, measure
from replay.traces.codex_like import growing
from replay.traces.types import Trace
from workers.sim.turn import Turn


def test_a_turn_that_is_asked_again_could_find_all_of_its_prompt() -> None:
    profile = profiles.load("qwen3-32b-2xh100")
    size = profile.blocks_of_tokens
    trace = Trace(size, [growing("s", 0, 0, [(10 * size, 10)], [0.0], size)])
    asked = trace.sessions[0].turns[0]
    jobs = [Job(0, 0, n, asked, n * 10.0, True, again=n == 1) for n in range(2)]
    for job in jobs:
        job.instance, job.started, job.ended = 0, job.arrived + 1.0, job.arrived + 2.0
        job.failed = not job.again
        job.prefill = Turn(asked.chain, asked.prompt_tokens, asked.output_tokens, owner=job)
        job.prefill.local_tokens = 9 * size if job.again else 0
    found = measure(Finished(jobs), ideal_hits(trace), bounds(trace, [profile], 1), size, 1, 0.0)
    assert (found.turns, found.failed_turns) == (1, 1)
    assert found.hit_rate == found.ideal_hit_rate == 0.9
