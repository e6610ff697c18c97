"""What a turn would cost on a target, term by term, in seconds.

The first six terms are the expected time to first token. The last two are what placing the turn there costs
others: they weigh in the choice, and are no part of the prediction.
"""

from policies.types import Candidate, Turn

PREDICTED = ("queue", "pull_own", "pull_remote", "prefill", "first_step", "decode")
PRICES = ("eviction", "balance")
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

Costs = tuple[float, float, float, float, float, float, float, float]


def costs(turn: Turn, candidate: Candidate, recent_weight: float = RECENT_WEIGHT) -> Costs:
    """The terms of TERMS in their order, in seconds."""
    c, rates = candidate, candidate.rates
    prefill_s, growth_s = rates.prefill_s, rates.growth_s
    local, prompt = c.local_tokens, turn.prompt_tokens
    if c.coming_tokens > local:
        local = c.coming_tokens
    pulled = c.pool_tokens - local
    if pulled > 0:
        own = c.own_segment_tokens
        if own > pulled:
            own = pulled
        pull_own, pull_remote = own * rates.own_s, (pulled - own) * rates.remote_s
        computed = prompt - c.pool_tokens
    else:
        pull_own = pull_remote = 0.0
        computed = prompt - local
    if computed < 0:
        computed = 0
    prefill = computed * (prefill_s + growth_s * (prompt - computed * 0.5))
    queue = queued_seconds(c)
    decoding = c.running if c.running > c.inflight else c.inflight
    # Those that wait now will decode by the time this one is computed.
    decode = decoding * rates.decode_s * (1 + computed / STEP_TOKENS)
    eviction = c.pressure * _again(turn, c, prompt - c.local_tokens)
    # With this turn: what is computed twice, here and where its head is, is taken from others.
    lately = c.recent_tokens * prefill_s + pull_own + pull_remote + prefill
    balance = lately * recent_weight / c.weight
    return (
        queue / c.weight,
        pull_own,
        pull_remote,
        prefill,
        rates.first_s,
        decode,
        eviction,
        balance,
    )


def queued_seconds(c: Candidate) -> float:
    """Seconds of work ahead: own leases, less what the oldest has had, and what others sent there."""
    rates = c.rates
    foreign = c.waiting - c.queued_turns
    seconds = foreign * FOREIGN_TOKENS * rates.prefill_s if foreign > 0 else 0.0
    if not c.queued_turns and not c.queued_tokens:
        return seconds
    seconds += (
        c.queued_tokens * rates.prefill_s
        + c.queued_context * rates.growth_s
        + c.queued_own_tokens * rates.own_s
        + c.queued_remote_tokens * rates.remote_s
    )
    # A turn that takes longer than expected has not had more than all its work. What keeps it (a cache full
    # of decoding turns, a stalled engine) is taken to last as long again.
    done = c.head_tokens * rates.prefill_s
    late = c.head_s - done - rates.first_s
    return seconds + late if late > LATE_S else seconds - (done if done < c.head_s else c.head_s)


def _again(turn: Turn, c: Candidate, added: int) -> float:
    """Seconds to bring back what `added` tokens displace: pulled if there is a pool, else computed."""
    if c.pressure <= 0 or added <= 0:
        return 0.0
    return added * (c.rates.remote_s if c.pool_tokens else c.rates.prefill_s)


def predicted_ttft(terms: Costs) -> float:
    """Expected seconds to the first token."""
    return sum(terms[: len(PREDICTED)])
