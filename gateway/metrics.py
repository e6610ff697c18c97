"""What Prometheus sees. Labels take registered names only, and no call here can fail a turn."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.tallies import Distribution, Tally
from store.master_events import MasterEventsStatus

logger = logging.getLogger(__name__)
P = ParamSpec("P")

OTHER = "other"
# A bound for label values that are no configured names but few by construction (reasons, classes of errors):
# the first 64 seen are kept, any further one is "other".
_VOCABULARY = 64

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
# Bucket 0 is the share of exact predictions; the others are powers of 4 from one block upwards.
_ERROR_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One registered worker now.

    trust: how much is believed of what is known of its cache, 0 to 1. breaker: 1 open, 0.5 half-open.
    proof_age_s: since it was certain that nothing of its cache is missing, None if it never was.
    """

    name: str
    up: bool
    inflight: int
    trust: float
    breaker: float = 0.0
    proof_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that gauges mirror, read at every scrape.

    index_blocks: by (target, tier). kv_event_gaps: gaps in the event stream so far, by target.
    shadow_agreement: of the shadow policy with the one in force, None without one or turns.
    index_file_age_s: of what the snapshot of the index holds, None if there is none.
    """

    workers: Sequence[WorkerSample] = ()
    index_blocks: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    kv_event_gaps: Mapping[str, int] = field(default_factory=dict[str, int])
    pool_degraded: bool = False
    pool_removed: int = 0
    pool_events: MasterEventsStatus | None = None
    index_bytes: int = 0
    index_evicted: int = 0
    index_file_age_s: float | None = None
    index_file_failures: int = 0
    shadow_agreement: float | None = None


def _harmless(call: Callable[Concatenate["Metrics", P], None]) -> Callable[Concatenate["Metrics", P], None]:
    """A failed metric is logged, never raised: these calls stand inside streams."""

    @wraps(call)
    def guarded(self: "Metrics", *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(self, *args, **kwargs)
        except Exception:
            logger.exception("metric %s failed", call.__name__)

    return guarded


class Metrics:
    """All series of one gateway, in a registry of their own.

    snapshot: reads the state, once a scrape. serves: whether clients may ask for a model.
    knows_worker: whether a worker or target of that name is registered.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        serves: Callable[[str], bool],
        knows_worker: Callable[[str], bool],
    ) -> None:
        self.registry = CollectorRegistry()
        self._snapshot = snapshot
        self._serves = serves
        self._knows_worker = knows_worker
        self._words: dict[str, set[str]] = {}
        self._workers_seen: set[str] = set()
        self._gaps_seen: dict[str, int] = {}
        self._state = _StateCollector()

        def tally(name: str, text: str, *labels: str) -> Tally:
            return Tally(self.registry, f"moongate_{name}", text, *labels)

        def distribution(name: str, text: str, bounds: tuple[float, ...]) -> Distribution:
            return Distribution(self.registry, f"moongate_{name}", text, bounds)

        self._requests = tally("requests", "Turns that ended.", "api", "model", "outcome")
        self._decisions = tally("decisions", "Decisions made.", "policy", "action", "reason")
        self._decision_seconds = distribution("decision_seconds", "From the body to the decision.", _SECONDS)
        self._prompt_tokens = tally("prompt_tokens", "Prompt tokens by predicted source.", "source")
        self._cached = tally("actual_cached_tokens", "Cached tokens that workers reported.")
        self._prediction_error = distribution(
            "prediction_error_tokens", "Predicted against reported cached tokens, absolute.", _ERROR_TOKENS
        )
        self._mispredicted = tally(
            "mispredicted_tokens",
            "Cached tokens predicted and not found (over), or the reverse (under).",
            *("worker", "model", "tier", "kind"),
        )
        self._excused = tally(
            "excused_predictions", "Predictions not judged, as not all was known that they need.", "reason"
        )
        self._kv_events = tally("kv_events", "KV events applied.", "worker", "kind")
        self._kv_event_gaps = tally("kv_event_gaps", "Gaps seen in the workers' event streams.")
        self._index_probes = tally(
            "index_probes", "Probes of what a worker holds whose events were missed.", "worker", "result"
        )
        self._pool_lookup = distribution("pool_lookup_seconds", "Look-ups of a prefix in the pool.", _SECONDS)
        self._ttft = distribution(
            "ttft_seconds", "From the request to the answer's first byte.", _TTFT_SECONDS
        )
        self._upstream_errors = tally("upstream_errors", "Tries that a worker failed.", "worker", "class")
        self._unrenderable = tally(
            "render_unsupported", "Prompts whose tokens could not be computed.", "model", "reason"
        )
        self._tokens_forwarded = tally("tokens_forwarded", "Turns sent with their token ids.", "api")
        self._parity_checks = tally(
            "parity_checks", "Prompts made here compared with a worker's.", "model", "api", "result"
        )
        self._prefix_breaks = tally(
            "prefix_breaks", "Turns that repeat their session's prompt after a change.", "model", "cause"
        )
        self._prefix_reports_dropped = tally(
            "prefix_reports_dropped", "Departing prompts not looked into: too many at once."
        )
        self._decisions_not_written = tally(
            "decision_log_dropped", "Decisions that are not in the decision log's file."
        )
        self._knowledge_failures = tally(
            "knowledge_failures", "Turns placed without what could not be asked, which raised.", "source"
        )
        self._slow_decisions = tally(
            "slow_decisions", "Decisions that took 20 ms or more, while all turns waited.", "policy"
        )
        self._overloads = tally("overloaded", "Turns turned away for want of room.", "limit")
        self._out_of_descriptors = tally(
            "out_of_descriptors_seconds", "Seconds in which clients were turned away for want of descriptors."
        )
        self._by_worker = (self._kv_events, self._upstream_errors, self._mispredicted, self._index_probes)
        for source in ("local", "pool", "computed"):
            self._prompt_tokens.add(source, by=0)
        for limit in ("requests", "tokens", "worker_requests", "worker_tokens", "descriptors"):
            self._overloads.add(limit, by=0)
        self.registry.register(self._state)
        ProcessCollector(registry=self.registry)

    @_harmless
    def request(self, api: str, model: str, outcome: str, ttft_s: float | None = None) -> None:
        """A turn ended. `model` may be anything a client sent. ttft_s: None if its answer never began."""
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        model = self._model(model)
        if not self._requests.again(api, model, outcome):
            self._requests.add(self._word("api", api), model, self._word("outcome", outcome))

    @_harmless
    def decision(self, policy: str, action: str, reason: str, seconds: float) -> None:
        # What was counted under these words may be.
        if not self._decisions.again(policy, action, reason):
            word = self._word
            named = word("policy", policy)
            # To each policy its own: one whose reasons vary must not use up the others'.
            self._decisions.add(named, word("action", action), word("reason " + named, reason))
        self._decision_seconds.observe(seconds)

    @_harmless
    def decisions_not_written(self, count: int) -> None:
        self._decisions_not_written.add(by=count)

    @_harmless
    def prompt_tokens(self, *, local: int, pool: int, computed: int) -> None:
        """What the decision expects of its target: `pool` counts the tokens beyond `local`."""
        if local > 0:
            self._prompt_tokens.add("local", by=local)
        if pool > 0:
            self._prompt_tokens.add("pool", by=pool)
        if computed > 0:
            self._prompt_tokens.add("computed", by=computed)

    @_harmless
    def cached_tokens(
        self, target: str, model: str, tier: str, *, predicted: int, actual: int, excused: str = ""
    ) -> None:
        """What the worker reported. Reports are not trusted to make sense.

        excused: why the prediction is not to be judged, "" where it is.
        """
        self._cached.add(by=max(0, actual))
        if excused:
            self._excused.add(excused)
            return
        self._prediction_error.observe(abs(predicted - actual))
        if predicted != actual:
            kind = "over" if predicted > actual else "under"
            labels = self._worker(target), self._model(model), self._word("tier", tier), kind
            self._mispredicted.add(*labels, by=abs(predicted - actual))

    @_harmless
    def overloaded(self, limit: str) -> None:
        """limit: of `limits`, or `descriptors`."""
        self._overloads.add(limit)

    @_harmless
    def kv_events(self, worker: str, kind: str, count: int = 1) -> None:
        self._kv_events.add(self._worker(worker), self._word("kind", kind), by=count)

    @_harmless
    def index_probe(self, worker: str, result: str) -> None:
        """confirmed: all that was asked for is there; missing; unsupported; or failed."""
        self._index_probes.add(self._worker(worker), self._word("probe", result))

    @_harmless
    def pool_lookup(self, seconds: float) -> None:
        self._pool_lookup.observe(seconds)

    @_harmless
    def upstream_error(self, worker: str, kind: str) -> None:
        """A try that failed; `kind` is a class such as connect, reset, timeout or status."""
        self._upstream_errors.add(self._worker(worker), self._word("class", kind))

    @_harmless
    def knowledge_failure(self, source: str) -> None:
        self._knowledge_failures.add(source)

    @_harmless
    def slow_decision(self, policy: str) -> None:
        self._slow_decisions.add(self._word("policy", policy))

    @_harmless
    def unrenderable(self, model: str, reason: str) -> None:
        model = self._model(model)
        if not self._unrenderable.again(model, reason):
            self._unrenderable.add(model, self._word("render", reason))

    @_harmless
    def tokens_forwarded(self, api: str) -> None:
        """A worker was sent a turn's token ids, so it neither renders nor tokenizes."""
        self._tokens_forwarded.add(self._word("api", api))

    @_harmless
    def parity_check(self, model: str, api: str, result: str) -> None:
        """A prompt made here was compared with the worker's: equal, differs or unavailable."""
        labels = self._model(model), self._word("api", api), self._word("parity", result)
        self._parity_checks.add(*labels)

    @_harmless
    def prefix_break(self, model: str, cause: str) -> None:
        """A turn lost what its session had cached: by its tools, system, message, or unknown."""
        self._prefix_breaks.add(self._model(model), self._word("cause", cause))

    @_harmless
    def prefix_report_dropped(self) -> None:
        self._prefix_reports_dropped.add()

    @_harmless
    def out_of_descriptors(self) -> None:
        """All open files that are allowed were in use, for one second more."""
        self._out_of_descriptors.add()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page of /metrics and its content type, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        self._read_state()
        self._forget_strangers()
        return encode(self.registry), content_type

    def _model(self, name: str) -> str:
        return name if self._serves(name) else OTHER

    def _worker(self, name: str) -> str:
        if not self._knows_worker(name):
            return OTHER
        self._workers_seen.add(name)
        return name

    def _word(self, label: str, value: str) -> str:
        # What others wrote may have made the word: one that is no text would break every later scrape.
        if not isinstance(value, str) or not value.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
            return OTHER
        words = self._words.setdefault(label, set())
        if value not in words:
            if len(words) >= _VOCABULARY:
                return OTHER
            words.add(value)
        return value

    @_harmless
    def _read_state(self) -> None:
        self._state.snapshot = None
        self._state.snapshot = snapshot = self._snapshot()
        for target, gaps in snapshot.kv_event_gaps.items():
            seen = self._gaps_seen.get(target, 0)
            # A target that was removed and added again counts from 0 once more.
            self._kv_event_gaps.add(by=gaps - seen if gaps >= seen else gaps)
        self._gaps_seen = dict(snapshot.kv_event_gaps)

    @_harmless
    def _forget_strangers(self) -> None:
        """Drop the series of workers that are registered no longer."""
        for name in [name for name in self._workers_seen if not self._knows_worker(name)]:
            for counter in self._by_worker:
                counter.forget("worker", name)
            self._workers_seen.discard(name)


class _StateCollector(Collector):
    """Gauges made from a snapshot at scrape time: they can't go stale, and no event can miss them."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the state."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        if snapshot is None:
            return
        up = GaugeMetricFamily("moongate_worker_up", "1 while the worker may be chosen.", labels=["worker"])
        inflight = GaugeMetricFamily("moongate_worker_inflight", "Turns under way there.", labels=["worker"])
        trust = GaugeMetricFamily(
            "moongate_index_trust",
            "1: the index of the worker's cache is exact; less: so much of it is believed; 0: unknown.",
            labels=["worker"],
        )
        proof = GaugeMetricFamily(
            "moongate_index_proof_age_seconds",
            "Since it was certain that no event of the worker is missing.",
            labels=["worker"],
        )
        breaker = GaugeMetricFamily(
            "moongate_worker_breaker",
            "1: the worker failed too many turns and gets none; 0.5: one is tried; 0: all is well.",
            labels=["worker"],
        )
        for worker in snapshot.workers:
            breaker.add_metric([worker.name], worker.breaker)
            up.add_metric([worker.name], float(worker.up))
            inflight.add_metric([worker.name], worker.inflight)
            trust.add_metric([worker.name], worker.trust)
            if worker.proof_age_s is not None:
                proof.add_metric([worker.name], worker.proof_age_s)
        blocks = GaugeMetricFamily("moongate_index_blocks", "Blocks in the index.", labels=["worker", "tier"])
        for (target, tier), count in snapshot.index_blocks.items():
            blocks.add_metric([target, tier], count)
        degraded = GaugeMetricFamily("moongate_pool_degraded", "1 while the pool can't be asked.")
        degraded.add_metric([], float(snapshot.pool_degraded))
        removed = CounterMetricFamily(
            "moongate_pool_removed_objects", "Objects of dead workers taken out of the pool."
        )
        removed.add_metric([], snapshot.pool_removed)
        yield from _pool_events(snapshot.pool_events)
        size = GaugeMetricFamily("moongate_index_bytes", "Memory of the index, estimated.")
        size.add_metric([], snapshot.index_bytes)
        evicted = CounterMetricFamily(
            "moongate_index_evicted_blocks", "Blocks that the index gave up for want of memory."
        )
        evicted.add_metric([], snapshot.index_evicted)
        yield from (size, evicted)
        age = GaugeMetricFamily("moongate_index_snapshot_age_seconds", "Age of the index's snapshot on disk.")
        if snapshot.index_file_age_s is not None:
            age.add_metric([], snapshot.index_file_age_s)
        failures = CounterMetricFamily(
            "moongate_index_snapshot_failures", "Snapshots of the index that could not be written."
        )
        failures.add_metric([], snapshot.index_file_failures)
        agreement = GaugeMetricFamily(
            "moongate_shadow_agreement_ratio", "Share of turns that the shadow policy would have sent alike."
        )
        if snapshot.shadow_agreement is not None:
            agreement.add_metric([], snapshot.shadow_agreement)
        yield from (up, inflight, breaker, trust, proof, blocks, degraded, removed, age, failures, agreement)


def _pool_events(events: MasterEventsStatus | None) -> Iterator[Metric]:
    """Without samples where they are not followed."""
    following = GaugeMetricFamily(
        "moongate_pool_events_followed", "1 while no event of the Mooncake master is missing."
    )
    gaps = CounterMetricFamily("moongate_pool_event_gaps", "Times that events of the master were missing.")
    counts = CounterMetricFamily("moongate_pool_events", "Events of the master.", labels=["kind"])
    if events is not None:
        following.add_metric([], float(events.state == "following"))
        gaps.add_metric([], events.gaps)
        for kind in ("stored", "removed", "cleared", "foreign", "unknown"):
            counts.add_metric([kind], getattr(events, kind))
    yield from (following, gaps, counts)
