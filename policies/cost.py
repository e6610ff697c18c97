"""What a turn would cost on a target, term by term, in seconds.

The terms of PREDICTED are the expected time to first token. The others are what placing the turn there costs
others: they weigh in the choice, and are no part of the prediction.
"""

from policies.types import Candidate, Turn

PREDICTED = (*("queue", "room", "pull_own", "pull_remote", "pull_disk", "prefill", "first_step", "decode"),)
PRICES = ("eviction", "delay", "balance")
TERMS = PREDICTED + PRICES

# What a request is taken to have ahead that the worker reports and nobody here sent: an agent's turn computes
# 1,000 to 3,000 tokens.
FOREIGN_TOKENS = 1024
# vLLM's default --max-num-batched-tokens: a prompt is computed in so many steps, each shared with decodes.
STEP_TOKENS = 8192
# Where turns wait for room, those that decode soon hold that share of the cache. Taken for as few as did so
# far, 15 tokens that a report was off by made 2,600 that lacked last 35 s, and all fled to where none did.
SOON_DECODING = 0.25
# How much a second of work that a target did lately counts, as a share of one that is still ahead.
RECENT_WEIGHT = 0.1
# What work done a second time takes from others at the least, as a share of its time. With all of it sessions
# gathered at the holder of their head until it had 16 of them, where two had room.
TWICE = 0.1
# Recent work fades by half in this time: an agent's turns come every 10 to 60 s, so what a target did within
# some turns is a guess at what is to come.
HALF_LIFE_S = 60.0
# Seconds of recent work to seconds of work in each second.
BUSY = 0.6931 / HALF_LIFE_S
# A target is never taken for busier: what is waiting there says the rest.
MOST_BUSY = 0.8

Costs = tuple[float, float, float, float, float, float, float, float, float, float, float]


def costs(turn: Turn, candidate: Candidate, recent_weight: float = RECENT_WEIGHT) -> Costs:
    """The terms of TERMS in their order, in seconds."""
    c, rates = candidate, candidate.rates
    prefill_s, growth_s = rates.prefill_s, rates.growth_s
    local, prompt = c.local_tokens, turn.prompt_tokens
    if c.coming_tokens > local:
        local = c.coming_tokens
    pulled = c.pool_tokens - local
    pull_own = pull_remote = pull_disk = 0.0
    if pulled > 0:
        own, disk = c.own_segment_tokens, c.disk_tokens
        if own > pulled:
            own = pulled
        if disk > pulled - own:
            disk = pulled - own
        pull_own, pull_disk = own * rates.own_s, disk * rates.disk_s
        pull_remote = (pulled - own - disk) * rates.remote_s
        computed = prompt - c.pool_tokens
    else:
        computed = prompt - local
    if computed < 0:
        computed = 0
    prefill = computed * (prefill_s + growth_s * (prompt - computed * 0.5))
    # Those that wait now will decode by the time this one is computed. What the worker said it runs is a
    # little old: turns of ours that have ended since made a session flee from where it had just been.
    decoding = c.inflight + c.foreign
    decode = decoding * rates.decode_s * (1 + computed / STEP_TOKENS)
    eviction = 0.0
    if c.pressure > 0 and prompt > c.local_tokens:
        # What is displaced is brought back from the pool if there is one, else computed again.
        eviction = c.pressure * (prompt - c.local_tokens) * (rates.remote_s if c.pool_tokens else prefill_s)
    # A session stays where it begins. If what waits there were not held against it, all that come while a
    # head is being computed would follow it: 16 to an instance with room for three, 190 of 250 idle.
    given = c.recent_s + c.queued_s if turn.new else c.recent_s
    delay = prefill * _waiting(c.recent_s)
    if pulled > 0:
        delay += (pull_own + pull_remote + pull_disk) * _waiting(c.recent_pull_s)
    return (
        waiting_seconds(c) / c.weight,
        room_seconds(turn, c),
        pull_own,
        pull_remote,
        pull_disk,
        prefill,
        rates.first_s,
        decode,
        eviction,
        delay,
        given * recent_weight / c.weight,
    )


def _waiting(recent_s: float) -> float:
    """Seconds that others wait for each second of work more, where so much was done lately.

    Of a queue that is busy for a share b of the time: b / (1 - b), but TWICE at the least.
    """
    busy = recent_s * BUSY
    if busy > MOST_BUSY:
        busy = MOST_BUSY
    waiting = busy / (1 - busy)
    return waiting if waiting > TWICE else TWICE


def waiting_seconds(c: Candidate) -> float:
    """Seconds of work ahead: own leases, and what others sent there."""
    # Our own that the worker had waiting when it was last asked may have ended since.
    foreign = min(c.waiting - c.queued_turns, c.foreign)
    return c.ahead_s + foreign * FOREIGN_TOKENS * c.rates.prefill_s if foreign > 0 else c.ahead_s


def room_seconds(turn: Turn, c: Candidate) -> float:
    """Seconds until turns that decode there have given back what this one's context lacks of the cache.

    They end one after another, so all they hold comes back within the time that one of them takes.
    """
    missing = c.held_tokens + turn.prompt_tokens - c.capacity_tokens
    if missing <= 0 or not c.capacity_tokens:
        return 0.0
    return missing / max(c.decoding_tokens, c.capacity_tokens * SOON_DECODING) * c.turn_s


def predicted_ttft(terms: Costs) -> float:
    """Expected seconds to the first token."""
    return sum(terms[: len(PREDICTED)])
