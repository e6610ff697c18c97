"""Metrics: names of the design, bounded labels, mirrored state, and no call that can fail a turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics, Snapshot, WorkerSample
from store.master_events import MasterEventsStatus


class Fleet:
    """The registered names a gateway would answer with."""

    def __init__(self) -> None:
        self.workers = {"w1": True, "w2": False}
        self.models = {"m"}
        self.gaps = {"w1": 0}

    def snapshot(self) -> Snapshot:
        return Snapshot(
            [WorkerSample(name, up, 3, 0.5) for name, up in self.workers.items()],
            {(name, "gpu"): 7 for name in self.workers},
            dict(self.gaps),
            pool_degraded=True,
        )


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def metrics(fleet: Fleet) -> Metrics:
    return Metrics(
        fleet.snapshot,
        serves=lambda model: model in fleet.models,
        knows_worker=lambda name: name.split("@")[0] in fleet.workers,
    )


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    text = metrics.exposition()[0].decode()
    return {
        (sample.name, tuple(v for _, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_and_labels_are_those_of_the_design(metrics: Metrics) -> None:
    metrics.request("chat", "m", "ok", 0.5)
    metrics.decision("longest_prefix", "local", "longest local prefix", 0.002)
    metrics.prompt_tokens(local=10, pool=20, computed=30)
    metrics.cached_tokens("w1", "m", "local", predicted=30, actual=28)
    metrics.cached_tokens("w1", "m", "local", predicted=90, actual=0, excused="pool_unknown")
    metrics.kv_events("w1", "stored", 4)
    metrics.pool_lookup(0.001)
    metrics.upstream_error("w1", "connect")
    metrics.unrenderable("m", "no_template")
    got = samples(metrics)
    assert got["moongate_requests_total", ("chat", "m", "ok")] == 1
    assert got["moongate_decisions_total", ("local", "longest_prefix", "longest local prefix")] == 1
    assert got["moongate_decision_seconds_count", ()] == 1
    assert [got["moongate_prompt_tokens_total", (s,)] for s in ("local", "pool", "computed")] == [10, 20, 30]
    assert got["moongate_actual_cached_tokens_total", ()] == 28
    assert got["moongate_prediction_error_tokens_sum", ()] == 2
    assert got["moongate_prediction_error_tokens_count", ()] == 1
    assert got["moongate_excused_predictions_total", ("pool_unknown",)] == 1
    assert got["moongate_kv_events_total", ("stored", "w1")] == 4
    assert got["moongate_pool_lookup_seconds_count", ()] == 1
    assert got["moongate_ttft_seconds_sum", ()] == 0.5
    assert got["moongate_upstream_errors_total", ("connect", "w1")] == 1
    assert got["moongate_render_unsupported_total", ("m", "no_template")] == 1
    assert got["moongate_pool_degraded", ()] == 1
    assert got["moongate_index_blocks", ("gpu", "w1")] == 7
    assert got["moongate_index_trust", ("w1",)] == 0.5
    assert got["moongate_worker_inflight", ("w1",)] == 3
    assert got["process_open_fds", ()] > 0


def test_b066_the_masters_events_are_counted_where_they_are_followed() -> None:
    events = MasterEventsStatus("tcp://m:1", "following", "", 5, 4, 3, 2, 1, 9, None)
    for state, followed in (("following", 1), ("lost", 0)):
        snapshot = Snapshot(pool_events=replace(events, state=state))
        got = samples(Metrics(lambda s=snapshot: s, serves=lambda _: True, knows_worker=lambda _: True))
        assert got["moongate_pool_events_followed", ()] == followed
        assert got["moongate_pool_event_gaps_total", ()] == 9
        kinds = ("stored", "removed", "cleared", "foreign", "unknown")
        assert [got["moongate_pool_events_total", (kind,)] for kind in kinds] == [5, 4, 3, 2, 1]


def test_b072_every_worker_has_a_health_series_from_the_start(metrics: Metrics) -> None:
    got = samples(metrics)
    assert (got["moongate_worker_up", ("w1",)], got["moongate_worker_up", ("w2",)]) == (1, 0)


def test_b072_series_of_a_removed_worker_disappear(metrics: Metrics, fleet: Fleet) -> None:
    metrics.kv_events("w1", "stored")
    metrics.upstream_error("w1", "reset")
    metrics.upstream_error("w1@1", "reset")
    assert any("w1" in labels for _, labels in samples(metrics))
    del fleet.workers["w1"]
    metrics.upstream_error("w1", "reset")
    got = samples(metrics)
    assert not [key for key in got if "w1" in key[1] or "w1@1" in key[1]]
    assert got["moongate_upstream_errors_total", ("reset", "other")] == 1


def test_labels_never_come_from_clients(metrics: Metrics) -> None:
    for i in range(1000):
        metrics.request("chat", f"guess-{i}", "error")
        metrics.upstream_error(f"10.0.0.{i}", "connect")
        metrics.decision("p", "local", f"reason {i}", 0.0)
    got = samples(metrics)
    assert got["moongate_requests_total", ("chat", "other", "error")] == 1000
    assert got["moongate_upstream_errors_total", ("connect", "other")] == 1000
    assert len([key for key in got if key[0] == "moongate_decisions_total"]) == 65


def test_words_of_an_installed_policy_cost_others_none_of_theirs_and_break_no_scrape(
    metrics: Metrics,
) -> None:
    for i in range(1000):
        metrics.decision("installed", "local", f"reason {i}", 0.0)
    for odd in (12345, None, "two\r\nlines", "\ud800"):
        metrics.decision("odd", "local", odd, 0.0)  # type: ignore[arg-type]
    metrics.decision("least_loaded", "local", "least loaded", 0.0)
    got = samples(metrics)
    assert got["moongate_decisions_total", ("local", "least_loaded", "least loaded")] == 1
    assert got["moongate_decisions_total", ("local", "odd", "other")] == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.cached_tokens("w", "m", "none", predicted=0, actual=-5),
        lambda m: m.cached_tokens("w", "m", "none", predicted=0, actual=None),
        lambda m: m.prompt_tokens(local=-1, pool=-2, computed=None),
        lambda m: m.kv_events("w1", "stored", -3),
        lambda m: m.request("chat", "m", "ok", "soon"),
        lambda m: m.request("chat", ["m"], "ok"),
    ],
)
def test_b072_a_metric_call_never_raises(call: Callable[[Metrics], None], metrics: Metrics) -> None:
    call(metrics)
    assert samples(metrics)["moongate_worker_up", ("w1",)] == 1


def test_gaps_only_grow_and_a_worker_that_comes_back_counts_from_zero(metrics: Metrics, fleet: Fleet) -> None:
    fleet.gaps = {"w1": 2}
    assert samples(metrics)["moongate_kv_event_gaps_total", ()] == 2
    fleet.gaps = {"w1": 3, "w2": 1}
    assert samples(metrics)["moongate_kv_event_gaps_total", ()] == 4
    fleet.gaps = {}
    samples(metrics)
    fleet.gaps = {"w1": 1}
    assert samples(metrics)["moongate_kv_event_gaps_total", ()] == 5
    fleet.gaps = {"w1": 0}
    samples(metrics)
    fleet.gaps = {"w1": 2}
    assert samples(metrics)["moongate_kv_event_gaps_total", ()] == 7
    fleet.gaps = {"w1": 1}
    assert samples(metrics)["moongate_kv_event_gaps_total", ()] == 8


def test_a_state_that_cannot_be_read_leaves_the_counters(fleet: Fleet) -> None:
    def broken() -> Snapshot:
        raise RuntimeError

    metrics = Metrics(broken, serves=lambda _: True, knows_worker=lambda _: True)
    metrics.request("chat", "m", "ok", 1)
    got = samples(metrics)
    assert got["moongate_ttft_seconds_count", ()] == 1
    assert ("moongate_pool_degraded", ()) not in got


def test_openmetrics_when_asked(metrics: Metrics) -> None:
    page, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
