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
# A turn is held up when it is so much later than expected; less is the network, or a rate not yet learned.
LATE_S = 1.0
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
    computing = c.recent_tokens * prefill_s
    # A session stays where it begins. If what waits there were not held against it, all that come while a
    # head is being computed would follow it: 16 to an instance with room for three, 190 of 250 idle.
    given = computing + c.queued_tokens * prefill_s if turn.new else computing
    delay = prefill * _waiting(computing)
    if pulled > 0:
        pulling = c.recent_pulled * rates.remote_s
        delay += (pull_own + pull_remote + pull_disk) * _waiting(pulling)
    return (
        queued_seconds(c) / c.weight,
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


def queued_seconds(c: Candidate) -> float:
    """Seconds of work ahead: own leases, less what the oldest has had, and what others sent there."""
    rates = c.rates
    # Our own that the worker had waiting when it was last asked may have ended since.
    foreign = min(c.waiting - c.queued_turns, c.foreign)
    seconds = foreign * FOREIGN_TOKENS * rates.prefill_s if foreign > 0 else 0.0
    if not c.queued_turns and not c.queued_tokens:
        return seconds
    seconds += (
        c.queued_tokens * rates.prefill_s
        + c.queued_context * rates.growth_s
        + c.queued_own_tokens * rates.own_s
        + c.queued_remote_tokens * rates.remote_s
        + c.queued_disk_tokens * rates.disk_s
    )
    # A turn that takes longer than expected has not had more than all its work. What keeps it (a stalled
    # engine, a load that hangs) is taken to last as long again.
    done = c.head_tokens * rates.prefill_s
    late = c.head_s - done - rates.first_s
    return seconds + late if late > LATE_S else seconds - (done if done < c.head_s else c.head_s)


def room_seconds(turn: Turn, c: Candidate) -> float:
    """Seconds until turns that decode there have given back what this one's context lacks of the cache.

    They end one after another, so all they hold comes back within the time that one of them takes.
    """
    missing = c.held_tokens + turn.prompt_tokens - c.capacity_tokens
    if missing <= 0 or not c.capacity_tokens or c.decoding_tokens <= 0:
        return 0.0
    return missing / c.decoding_tokens * c.turn_s


def predicted_ttft(terms: Costs) -> float:
    """Expected seconds to the first token."""
    return sum(terms[: len(PREDICTED)])
