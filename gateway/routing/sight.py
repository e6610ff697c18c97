"""What is known of a turn before it is placed."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gateway.prompts.prompts import Understood
from policies.plan import NO_FACTS, Facts
from policies.sessions import NOBODY, Known
from policies.types import Turn
from store.knowledge import Held
from store.pool import PoolPrefix

NO_POOL = PoolPrefix(blocks=0, known=False)
NOTHING_HELD = Held({}, {})
# What `prefix_hash` goes by: enough to tell agents' system prompts apart.
_HEAD_TOKENS = 1024


class Sight(msgspec.Struct, frozen=True):
    """Made once, used again when the turn must be placed anew.

    prompt_tokens: 0 where the prompt is not known; of one whose beginning is known, the least it can have.
    block_size: 0 where the prompt is not known.
    keys: the prompt's chain, none where the engine would not look for it; whole_keys: none either where only
    the prompt's beginning is known, which says nothing of where a session has got to.
    held: leading blocks per target. pool: leading blocks readable from the pool.
    draw: this turn's number for ties. seconds: how long it took to find all this out; pool_seconds: of these
    for the pool, None if it was not asked.
    only: the one worker that can answer this turn, "" if any can.
    session: the one it belongs to. named: what its client calls it, "" if by nothing. last: its client says
    that no turn of it comes after this one.
    reads_cache: whether the engine looks for cached blocks at all for this request.
    reports: whether it announces what it finds once more. streams: whether tokens come one by one.
    guess: tokens that a prompt which is not known is taken to have. facts: what rules of the policy go by.
    """

    model: str
    understood: Understood
    prompt_tokens: int
    block_size: int
    keys: Sequence[int]
    whole_keys: Sequence[int]
    held: Held
    pool: PoolPrefix
    draw: float
    seconds: float
    pool_seconds: float | None
    only: str = ""
    session: Known = NOBODY
    named: str = ""
    last: bool = False
    reads_cache: bool = True
    reports: bool = False
    streams: bool = False
    guess: int = 0
    facts: Facts = NO_FACTS

    def turn(self, number: int) -> Turn:
        """As policies see it."""
        keys, size = self.keys, self.block_size
        last = min(len(keys), _HEAD_TOKENS // size) if size else 0
        head = keys[last - 1] if last else 0
        new = self.session.new and len(keys) > 0
        return Turn(self.prompt_tokens, self.draw, number, size, self.session.name, head, new)

    def without_pool(self) -> "Sight":
        """For a turn that failed where it was to pull from the pool: placed anew without that credit."""
        return replace(self, pool=NO_POOL)


class Client(msgspec.Struct, frozen=True):
    """headers: the first of each name, in lower case. alias: what the model was called, where that is another
    name than its own.

    key, tenant: what its key is called and whose it is, as `auth.ClientKey`.
    earlier: the session of the stored response that it goes on from, "" if from none.
    """

    headers: Mapping[bytes, bytes] = {}
    alias: str = ""
    key: str = ""
    tenant: str = ""
    earlier: str = ""


ANYBODY = Client()
