"""A routable vLLM server as the gateway knows it: what it serves, how it feels, where its events are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from workers.breaker import Breaker, BreakerOptions

WorkerState = Literal["starting", "up", "down"]
Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of the worker's /v1/models. `root` is the literal model path, `parent` an adapter's base.

    entry: the whole entry as the worker gave it; it holds a time of day, so it does not count in comparisons.
    """

    id: str
    root: str = ""
    parent: str = ""
    max_model_len: int = 0
    entry: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where one data-parallel rank publishes its KV events, with hosts that can be reached from here."""

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the worker's /metrics says, summed over its engines.

    running, waiting: requests; kv_usage: 0..1; started: Unix seconds of the process start, 0 if not exported.
    block_size, hash_algo, blocks: from cache_config_info (0 and "" if not exported); the last of one engine.
    retention: tokens between the sliding windows that it keeps, 0 only where prompts end; None: all of them,
    or not exported.
    """

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    started: float = 0.0
    block_size: int = 0
    hash_algo: str = ""
    blocks: int = 0
    retention: int | None = None


@dataclass(slots=True)
class Worker:
    """The mutable record of one worker. Only the fleet and its probe write it.

    segment: its share of the pool, by the name of a segment (`IP:PORT`) or of a host (`IP`: all segments
    there); "" if that can't be told.
    since: when it last came back (up, or uncordoned), by the fleet's clock. misses: probes failed in a row.
    missed: it was up, and the one probe since then came back without an answer.
    weight: its share of the load compared with others'. role: what it is for.
    """

    name: str
    url: str
    state: WorkerState = "starting"
    reason: str = "not probed yet"
    cordoned: bool = False
    segment: str = ""
    models: tuple[ModelCard, ...] = ()
    kv_endpoints: tuple[KvEndpoint, ...] = ()
    report: EngineReport = field(default_factory=EngineReport)
    breaker: Breaker = field(default_factory=lambda: Breaker(BreakerOptions()))
    since: float = 0.0
    misses: int = 0
    missed: bool = False
    weight: float = 1.0
    role: Role = "both"
    # Asked for several times a turn, and changed by probes only.
    _targets: tuple["Target", ...] = ()
    _targets_of: tuple[KvEndpoint, ...] | None = None

    @property
    def may_answer(self) -> bool:
        """It is up, or was until one probe had no answer: the last resort of turns."""
        return self.state == "up" or self.missed

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def targets(self) -> tuple["Target", ...]:
        """One target, or one per data-parallel rank where the worker publishes for several."""
        if self._targets_of is not self.kv_endpoints:
            ranks = [endpoint.rank for endpoint in self.kv_endpoints]
            self._targets = (
                tuple(Target(self, rank, rank - ranks[0]) for rank in ranks)
                if len(ranks) > 1
                else (Target(self, None, None),)
            )
            self._targets_of = self.kv_endpoints
        return self._targets

    def target_of(self, rank: int) -> str:
        """The target name whose events rank `rank` publishes."""
        return self.name if len(self.kv_endpoints) < 2 else f"{self.name}@{rank}"

    def card(self, model: str) -> ModelCard | None:
        for card in self.models:
            if card.id == model:
                return card
        return None


@dataclass(frozen=True, slots=True)
class Target:
    """What a turn is sent to: a worker, or one data-parallel rank of it.

    rank: as it publishes. place: as X-data-parallel-rank calls it: a server that has the ranks 4 to 7 of a
    deployment over several machines (`--data-parallel-hybrid-lb`) counts them from 0, and refuses 4.
    """

    worker: Worker
    rank: int | None
    place: int | None
    # Asked for a dozen times a turn.
    name: str = field(init=False)

    def __post_init__(self) -> None:
        name = self.worker.name if self.rank is None else f"{self.worker.name}@{self.rank}"
        object.__setattr__(self, "name", name)
