"""/metrics of the simulated worker, with vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.sim.engine import Engine

_TTFT: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_E2E: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Page(Collector):
    """The page of one life of an engine. `config`: labels of vllm:cache_config_info."""

    def __init__(self, engine: Engine, model: str, started: float, config: dict[str, str]) -> None:
        self._engine: Final = engine
        self._model: Final = model
        self._started: Final = started
        self._config: Final = config
        self._ended: Final[dict[str, int]] = {"stop": 0, "length": 0, "abort": 0}
        self._registry: Final = CollectorRegistry()
        self._registry.register(self)
        names = ("engine", "model_name")
        self._ttft: Final = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token.",
            names,
            registry=self._registry,
            buckets=_TTFT,
        ).labels("0", model)
        self._e2e: Final = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Request latency.",
            names,
            registry=self._registry,
            buckets=_E2E,
        ).labels("0", model)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def request_ended(self, reason: str, seconds: float) -> None:
        self._ended["stop" if reason == "tool_calls" else reason] += 1
        self._e2e.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        engine, counters = self._engine, self._engine.counters
        yield self._gauge("num_requests_running", engine.running)
        yield self._gauge("num_requests_waiting", engine.waiting)
        deferred = engine.loading
        reasons = {"capacity": engine.waiting - deferred, "deferred": deferred}
        yield self._by("num_requests_waiting_by_reason", "reason", reasons)
        stages = {"waiting_to_start": 0, "in_progress": deferred, "completed_waiting": 0}
        yield self._by("num_requests_kv_fetch_by_stage", "stage", stages)
        yield self._gauge("kv_cache_usage_perc", engine.usage)
        totals = {
            "prefix_cache_queries": counters.prefix_queries,
            "prefix_cache_hits": counters.prefix_hits,
            "external_prefix_cache_queries": counters.external_queries,
            "external_prefix_cache_hits": counters.external_hits,
            "num_preemptions": counters.preemptions,
            "prompt_tokens": counters.prompt,
            "prompt_tokens_cached": counters.prompt - counters.computed,
            "generation_tokens": counters.generated,
        }
        for name, value in totals.items():
            family = CounterMetricFamily(f"vllm:{name}", name, labels=("engine", "model_name"))
            family.add_metric(("0", self._model), value)
            yield family
        local = counters.prompt - counters.computed - counters.external_hits
        sources = {
            "local_compute": counters.computed,
            "local_cache_hit": local,
            "external_kv_transfer": counters.external_hits,
        }
        yield self._by("prompt_tokens_by_source", "source", sources, counter=True)
        tiers = {
            "device": local,
            "host": 0,
            "p2p": 0,
            "disk": 0,
            "external_unspecified": counters.external_hits,
        }
        yield self._by("prompt_tokens_cached_by_source", "source", tiers, counter=True)
        yield self._by("request_success", "finished_reason", self._ended, counter=True)
        info = GaugeMetricFamily("vllm:cache_config_info", "Cache configuration.", labels=tuple(self._config))
        info.add_metric(tuple(self._config.values()), 1.0)
        yield info
        start = GaugeMetricFamily("process_start_time_seconds", "Start time of the process since unix epoch.")
        start.add_metric((), self._started)
        yield start

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", name, labels=("engine", "model_name"))
        family.add_metric(("0", self._model), value)
        return family

    def _by(self, name: str, label: str, values: dict[str, int], *, counter: bool = False) -> Metric:
        kind = CounterMetricFamily if counter else GaugeMetricFamily
        family = kind(f"vllm:{name}", name, labels=("engine", label, "model_name"))
        for key, value in values.items():
            family.add_metric(("0", key, self._model), value)
        return family
