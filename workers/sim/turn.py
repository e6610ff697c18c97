"""A request in the engine, and what can happen to it and to the cache."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from workers.sim.blocks import Held, Keys

State: TypeAlias = Literal["new", "waiting", "loading", "prefill", "decode", "done"]


class Turn:
    """One request. `chain` has at least the keys of the blocks that prompt and output will fill.

    output_tokens: how many it will generate, at least 1. reads: whether it may use what is cached.
    local_tokens, pool_tokens: what its first admission found cached; local_tokens is None before that.
    owner: what the driver wants to find again when an effect names the turn.
    """

    __slots__ = (
        "admitted",
        "chain",
        "computed",
        "first_step",
        "held",
        "life",
        "local_tokens",
        "output_tokens",
        "owner",
        "pool_blocks",
        "pool_tokens",
        "produced_before",
        "prompt_tokens",
        "reads",
        "state",
        "target",
    )

    def __init__(
        self,
        chain: Keys,
        prompt_tokens: int,
        output_tokens: int,
        *,
        reads: bool = True,
        owner: object = None,
    ) -> None:
        self.chain: Final = chain
        self.prompt_tokens: Final = prompt_tokens
        self.output_tokens: Final = output_tokens
        self.reads: Final = reads
        self.owner: Final = owner
        self.local_tokens: int | None = None
        self.pool_tokens = 0
        # The engine's own book-keeping.
        self.state: State = "new"
        self.held = Held()
        self.admitted = False
        self.computed = 0  # tokens whose KV is there, or will be at the end of the step in progress
        self.target = prompt_tokens  # tokens to compute before the next one is produced
        self.pool_blocks = 0
        self.produced_before = 0  # tokens produced before the last preemption, or at the end
        self.first_step = 0  # the step that produced the first token after that
        self.life = 0  # changes whenever entries about it become void

    @property
    def cached_tokens(self) -> int:
        return (self.local_tokens or 0) + self.pool_tokens


class Stored(NamedTuple):
    """Blocks `start` to `end - 1` of the turn's chain can be hit now. loaded: they came from the pool."""

    turn: Turn
    start: int
    end: int
    loaded: bool


class Removed(NamedTuple):
    """Blocks `start` to `end - 1` of `chain` were evicted, the last one first."""

    chain: Keys
    start: int
    end: int


class Load(NamedTuple):
    """The driver must get these blocks from the pool and call `Engine.loaded`."""

    turn: Turn
    start: int
    end: int


class Save(NamedTuple):
    """The driver may put those of the turn's leading `end` blocks into the pool that are not there."""

    turn: Turn
    end: int


class Started(NamedTuple):
    """The turn's first token is there."""

    turn: Turn
    at: float


class Finished(NamedTuple):
    """The turn's last token is there."""

    turn: Turn
    at: float


Effect: TypeAlias = Stored | Removed | Load | Save | Started | Finished
