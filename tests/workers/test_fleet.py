"""The registry, its leases and its probe, against real HTTP servers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from workers.connecting import trusting
from workers.fleet import BadWorker, DuplicateWorker, Fleet, FleetEvent, UnknownWorker
from workers.probe import Probe, parse_kv_sources, parse_metrics
from workers.worker import EngineReport, KvEndpoint, ModelCard, Worker

CARDS = (ModelCard("m", "/models/m"),)


class Told:
    """A listener that remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._looked_at = 0

    def since(self) -> list[str]:
        """Kinds of events since this was asked last."""
        begin, self._looked_at = self._looked_at, len(self.events)
        return [kind for kind, _ in self.events[begin:]]

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        self.events.append((event, worker.name))


def told_fleet() -> tuple[Fleet, Told]:
    fleet, told = Fleet(), Told()
    fleet.listen(told.follow)
    return fleet, told


def report(started: float = 100.0) -> EngineReport:
    return EngineReport(started=started, block_size=32, hash_algo="sha256")


def test_listeners_hear_of_changes_once_and_of_restarts_before_the_new_life_counts() -> None:
    fleet, told = told_fleet()
    worker = fleet.add("http://127.0.0.1:8101")
    fleet.mark_up(worker, report(), CARDS, ())
    fleet.mark_up(worker, report(), CARDS, ())
    assert told.since() == ["added", "up", "back"]
    fleet.mark_up(worker, report(started=200.0), CARDS, ())
    assert told.since() == ["restarted"]
    fleet.mark_down(worker, "refused")
    fleet.mark_down(worker, "refused")
    assert told.since() == ["lost", "silent"]
    fleet.mark_up(worker, report(started=300.0), CARDS, ())
    assert told.since() == ["restarted", "up", "back"]
    assert {name for _, name in told.events} == {"127.0.0.1:8101"}


def test_listeners_hear_of_who_may_get_turns_again_without_having_been_down() -> None:
    now = 0.0
    fleet, told = Fleet(clock=lambda: now), Told()
    fleet.listen(told.follow)
    worker = fleet.add("http://127.0.0.1:8101")
    fleet.mark_up(worker, report(), CARDS, ())
    told.since()
    fleet.cordon(worker.name, True)
    fleet.cordon(worker.name, False)
    fleet.cordon(worker.name, False)
    assert told.since() == ["back"]
    while worker.breaker.closed:
        fleet.failed(worker, "a 500")
    now += 3600.0
    fleet.sent(worker)
    fleet.answered(worker)
    fleet.answered(worker)
    assert told.since() == ["back"]


def test_a_worker_that_never_came_up_is_starting_not_down() -> None:
    fleet = Fleet()
    worker = fleet.add("http://127.0.0.1:8101")
    fleet.mark_down(worker, "refused")
    assert worker.state == "starting"
    fleet.mark_up(worker, report(), CARDS, ())
    fleet.mark_down(worker, "refused")
    assert worker.state == "down"


def test_each_change_of_a_workers_state_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet()
    worker = fleet.add("http://127.0.0.1:8101", "w1")
    for _ in range(2):
        fleet.mark_down(worker, "connection refused")
        fleet.mark_down(worker, "/health: no HTTP")
    fleet.mark_up(worker, report(), CARDS, ())
    for _ in range(2):
        fleet.mark_down(worker, "/health timed out")
        fleet.mark_down(worker, "connection refused")
    fleet.mark_up(worker, report(), CARDS, ())
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "worker w1 is starting: connection refused"),
        ("INFO", "worker w1 is up"),
        ("WARNING", "worker w1 is down: /health timed out"),
        ("INFO", "worker w1 is up"),
    ]


def test_what_waiting_does_not_mend_is_no_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet()
    worker = fleet.add("http://127.0.0.1:8101", "w1")
    fleet.mark_down(worker, "connection refused")
    for _ in range(2):
        fleet.mark_down(worker, "its certificate is not trusted", lasting=True)
    fleet.mark_down(worker, "connection refused")
    assert worker.state == "down"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "worker w1 is starting: connection refused"),
        ("WARNING", "worker w1 is down: its certificate is not trusted"),
    ]


def test_a_late_probe_of_a_removed_worker_changes_nothing() -> None:
    fleet, told = told_fleet()
    worker = fleet.add("http://127.0.0.1:8101")
    fleet.remove(worker.name)
    assert told.events == [("added", worker.name), ("removed", worker.name)]
    told.events.clear()
    fleet.mark_up(worker, report(), CARDS, ())
    fleet.mark_down(worker, "refused")
    assert told.events == []
    assert fleet.workers() == []


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://h:1", "h:8000", "http://", "http://u:p@h:1", "http://h:99999", "http://h:1?x=1"),
        # None of these could be asked anything, or not what was meant.
        *("http://[::1", "http://[h]:1", "http://h:0", "http://h:1/ä", "http://h:1/a b", "http://h\n:1"),
        # What clients are told: nothing answers at its /health.
        *("http://h:1/v1", "http://h:1/a/v1/"),
    ],
)
def test_bad_worker_urls_are_refused(url: str) -> None:
    fleet = Fleet()
    with pytest.raises(BadWorker):
        fleet.add(url)
    assert fleet.workers() == []


def test_names_and_urls_are_unique_and_unknown_names_say_so() -> None:
    fleet = Fleet()
    fleet.add("http://h:1", "a")
    with pytest.raises(DuplicateWorker):
        fleet.add("http://h:2", "a")
    with pytest.raises(DuplicateWorker):
        fleet.add("http://h:1/", "b")
    with pytest.raises(BadWorker):
        fleet.add("http://h:3", "no spaces")
    with pytest.raises(UnknownWorker):
        fleet.remove("z")


@pytest.mark.parametrize("again", ["http://127.0.0.1", "http://[::1]:80/", "http://LOCALHOST:80"])
def test_this_machine_by_another_of_its_own_names_is_the_same_worker(again: str) -> None:
    fleet = Fleet()
    fleet.add("http://localhost:80")
    with pytest.raises(DuplicateWorker, match="registered already"):
        fleet.add(again)
    for other in ("http://127.0.0.2:80", "http://localhost:81", "http://127.0.0.1:80/behind", "http://h:80"):
        fleet.add(other)


def test_b050_ranks_become_targets() -> None:
    fleet = Fleet()
    worker = fleet.add("http://h:1", "w")
    fleet.mark_up(worker, report(), CARDS, tuple(KvEndpoint(r, f"tcp://h:{r + 1}", None) for r in range(4)))
    assert [(t.name, t.place) for t in worker.targets] == [("w@0", 0), ("w@1", 1), ("w@2", 2), ("w@3", 3)]
    assert worker.target_of(2) == "w@2"


def test_a_server_with_the_later_ranks_of_a_deployment_calls_them_by_their_place() -> None:
    """As vLLM with --data-parallel-hybrid-lb: it publishes as ranks 4 and 5 of all, and has two."""
    fleet = Fleet()
    worker = fleet.add("http://h:1", "w")
    fleet.mark_up(worker, report(), CARDS, tuple(KvEndpoint(r, f"tcp://h:{r}", None) for r in (4, 5)))
    assert [(t.name, t.place) for t in worker.targets] == [("w@4", 0), ("w@5", 1)]


def test_metrics_are_summed_over_engines_and_unknown_lines_do_no_harm() -> None:
    page = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        'vllm:cache_config_info{block_size="32",engine="0",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
        "process_start_time_seconds 1.76e+09\n"
        "garbage {{{\n"
    )
    assert parse_metrics(page) == EngineReport(5.0, 1.0, 0.5, 1.76e9, 32, "sha256_cbor")
    odd = "".join(
        f'vllm:num_requests_waiting{{engine="{n}"}} {n}\n' for n in ("NaN", "+Inf", "-Inf", "1e400")
    )
    assert parse_metrics(odd + page) == parse_metrics(page)
    assert parse_metrics("") == EngineReport()


@pytest.mark.parametrize(("given", "known"), [("0", 0), ("64", 64), ("None", None)])
def test_the_retention_interval_is_read(given: str, known: int | None) -> None:
    page = f'vllm:cache_config_info{{block_size="32",prefix_cache_retention_interval="{given}"}} 1.0\n'
    assert parse_metrics(page).retention == known


def test_kv_endpoints_get_a_host_that_can_be_reached_and_silent_ranks_are_left_out() -> None:
    body = (
        b'{"1":{"endpoint":"tcp://*:5558","replay_endpoint":"tcp://0.0.0.0:5658","topic":"kv","publisher":"zmq",'
        b'"enable_kv_cache_events":true,"new":1},"0":{"endpoint":"tcp://10.0.0.7:5557","replay_endpoint":null},'
        b'"2":{"endpoint":"tcp://*:5559","enable_kv_cache_events":false,"publisher":"null"}}'
    )
    assert parse_kv_sources(body, "gpu1") == (
        KvEndpoint(0, "tcp://10.0.0.7:5557", None),
        KvEndpoint(1, "tcp://gpu1:5558", "tcp://gpu1:5658", "kv"),
    )


HANGS = 0


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[dict[str, tuple[int, str]]], "asyncio.Future[str]"]]:
    runners: list[web.AppRunner] = []

    async def start(pages: dict[str, tuple[int, str]]) -> str:
        async def answer(request: web.Request) -> web.Response:
            if request.headers.get("authorization") != "Bearer wkey":
                return web.Response(status=401)
            status, text = pages.get(request.path, (404, ""))
            if status == HANGS:
                await asyncio.sleep(60)
            return web.Response(status=status, text=text)

        app = web.Application()
        app.router.add_route("GET", "/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield lambda pages: asyncio.ensure_future(start(pages))
    for runner in runners:
        await runner.cleanup()


async def test_b078_probes_carry_the_worker_key_and_b082_missing_pages_have_a_fallback(serve) -> None:
    url = await serve({"/health": (200, ""), "/v1/models": (200, '{"data":[{"id":"m","root":"/m","x":1}]}')})
    fleet = Fleet()
    worker = fleet.add(url)
    probe = Probe(fleet, tls=trusting(), api_key="wkey")
    await probe.probe(worker)
    assert (worker.state, worker.models, worker.report.block_size) == ("up", (ModelCard("m", "/m"),), 0)
    await probe.close()

    keyless = Probe(fleet, tls=trusting())
    await keyless.probe(worker)
    assert worker.state == "down"
    assert "401" in worker.reason
    await keyless.close()


async def test_what_a_busy_worker_does_not_say_once_is_as_it_was(serve) -> None:
    sources = '{"0":{"endpoint":"tcp://h:1"},"1":{"endpoint":"tcp://h:2"}}'
    pages = {
        "/health": (200, ""),
        "/v1/models": (200, '{"data":[{"id":"m"}]}'),
        "/kv_event_sources": (200, sources),
        "/metrics": (200, "vllm:num_requests_running 3\nprocess_start_time_seconds 7\n"),
    }
    fleet, told = told_fleet()
    probe = Probe(fleet, tls=trusting(), api_key="wkey", timeout_s=0.3)
    worker = fleet.add(await serve(pages))
    await probe.probe(worker)
    before = worker.targets, worker.report
    pages["/kv_event_sources"] = pages["/metrics"] = (HANGS, "")
    await probe.probe(worker)
    assert (worker.state, len(worker.targets)) == ("up", 2)
    assert (worker.targets, worker.report) == before
    # That it has no such page is another thing.
    pages["/kv_event_sources"] = pages["/metrics"] = (404, "")
    await probe.probe(worker)
    assert ([t.name for t in worker.targets], worker.report) == ([worker.name], EngineReport())
    assert [kind for kind, _ in told.events] == ["added", "up", "back", "up"]
    await probe.close()


async def test_a_watched_worker_goes_down_and_comes_back(serve) -> None:
    pages = {"/health": (200, ""), "/v1/models": (200, '{"data":[{"id":"m"}]}')}
    url = await serve(pages)
    changed = asyncio.Event()

    fleet, told = told_fleet()
    fleet.listen(lambda event, _: changed.set() if event in ("up", "lost") else None)
    probe = Probe(fleet, tls=trusting(), interval_s=0.02, api_key="wkey")
    fleet.listen(probe.follow)
    worker = fleet.add(url)
    for state, page in (("up", None), ("down", (503, "")), ("up", (200, ""))):
        if page:
            pages["/health"] = page
        await asyncio.wait_for(changed.wait(), 30)
        changed.clear()
        assert worker.state == state
    fleet.remove(worker.name)
    await probe.close()
    assert [kind for kind, _ in told.events] == ["added", *("up", "back", "lost") * 2, "removed"]


def test_a_worker_has_the_segment_it_was_given_or_those_of_a_host_that_it_has_to_itself() -> None:
    fleet = Fleet({"http://10.0.0.1:8000/": "10.0.0.1:17000", "named": "10.0.0.9"})
    one, two = fleet.add("http://10.0.0.1:8000"), fleet.add("http://10.0.0.1:8001")
    named = fleet.add("http://10.0.0.1:8002", "named")
    alone = fleet.add("http://10.0.0.2:8000")
    told = fleet.add("http://10.0.0.1:8003", segment="10.0.0.1:17003")
    places = [one.segment, two.segment, named.segment, alone.segment, told.segment]
    assert places == ["10.0.0.1:17000", "", "10.0.0.9", "10.0.0.2", "10.0.0.1:17003"]
    neighbour = fleet.add("http://10.0.0.2:8001")
    assert (alone.segment, neighbour.segment) == ("", "")
    fleet.remove(alone.name)
    assert neighbour.segment == "10.0.0.2"
    with pytest.raises(BadWorker, match="segment"):
        fleet.add("http://10.0.0.3:8000", segment="10.0.0.3, 10.0.0.4")
