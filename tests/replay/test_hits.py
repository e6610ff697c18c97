"""What many instances hold of a prompt, against a look into each of them."""

from random import Random

from nobody import Nobody

from replay import profile as profiles
from replay.clock import Clock
from replay.hits import Hits
from replay.instance import Instance, Job, schedule
from replay.traces.codex_like import growing

# Room for three or four of the sessions below, so that much is evicted.
PROFILE = profiles.load("qwen3-32b-2xh100", {"hbm_tokens": 8_192})
SIZE = PROFILE.blocks_of_tokens


def test_hits_are_those_of_each_cache_whatever_was_shared_evicted_or_lost() -> None:
    random, clock, changed = Random(5), Clock(), set[int]()
    links = schedule(clock)
    instances = [Instance(n, PROFILE, clock, links, None, Nobody(), changed) for n in range(4)]
    heads = [0, 512, 512, 1024, 1024, 1024] * 15
    sessions = [
        growing(f"s{n}", n, head, [(head + 512, 64), *[(256, 64)] * 5], [0.0] * 6, SIZE)
        for n, head in enumerate(heads)
    ]
    hits = Hits(instances, sessions)
    seen: set[int] = set()

    def ask(number: int) -> None:
        session, place, chosen = random.randrange(len(heads)), random.randrange(6), random.randrange(4)
        job = Job(session, place, number, sessions[session].turns[place], clock.now)
        hits.changed(list(changed))
        changed.clear()
        limit = (job.asked.prompt_tokens - 1) // SIZE
        plain = [each.prefill.engine.cache.hit(job.asked.chain, limit) for each in instances]
        assert hits.of(job, limit).tolist() == plain
        seen.update(plain)
        if number % 40 == 39:
            instances[chosen].die()
        else:
            hits.sent(session, chosen)
            instances[chosen].take(job)

    at = 0.0
    for number in range(400):
        at += random.choice([0.001, 0.3])
        clock.at(at, ask, number)
    clock.run()
    assert {0, 512 // SIZE, 1024 // SIZE} < seen
