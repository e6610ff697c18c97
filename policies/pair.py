"""Placing prefill and decode apart: a policy chooses where the prompt is computed, load who decodes it."""

from collections.abc import Sequence
from operator import attrgetter

from msgspec.structs import replace as with_fields

from policies.load import pick_least_loaded
from policies.types import Candidate, Decision, Policy, Turn

_WHOLE = frozenset(("both",))
_role = attrgetter("role")


def placed(policy: Policy, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
    """`policy`'s choice among targets that may compute prompts, with a `decode` target if it only does that.

    A target for prefill alone is out while nobody can decode; one for decode alone takes whole turns only
    where nobody else can.
    """
    if _WHOLE.issuperset(map(_role, candidates)):
        return policy(turn, candidates)
    able = [c for c in candidates if not c.excluded]
    decoders = [c for c in able if c.role != "prefill"]
    computers = [c for c in able if c.role == "both" or (c.role == "prefill" and decoders)]
    kept = {c.target for c in computers or decoders}
    shown = [c if c.excluded or c.target in kept else with_fields(c, excluded="role") for c in candidates]
    decision = policy(turn, shown)
    chosen = decision.chosen
    if chosen is None or chosen.role != "prefill":
        return decision
    longest = max(c.local_tokens for c in decoders)
    lightest = min(c.inflight / c.weight for c in decoders)
    # What a decoder holds it need not be sent; a turn more or less under way there is no reason to leave it.
    near = [c for c in decoders if c.local_tokens == longest and c.inflight / c.weight <= lightest + 1]
    return with_fields(decision, decode=pick_least_loaded(near or decoders, turn.draw).target)
