"""Watching workers: health, models, KV event endpoints and load, one task per worker."""

import asyncio
import logging
import math
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from workers.connecting import in_url, lasts, why_not
from workers.fleet import Fleet, FleetEvent
from workers.pages import read_page
from workers.worker import EngineReport, KvEndpoint, ModelCard, Worker

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SAMPLE = re.compile(r"^(vllm:[a-z_]+|process_start_time_seconds)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Of one answer; an engine's metrics have some 100 KB.
_PAGE_BYTES = 16 << 20
_ANY_HOST = ("*", "0.0.0.0", "[::]")  # noqa: S104 - names to recognise, not to bind


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _ModelPage(msgspec.Struct):
    data: list[dict[str, Any]]


class _Sleep(msgspec.Struct):
    is_sleeping: bool


class _KvSource(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"


def parse_metrics(text: str) -> EngineReport:
    """The few series routing needs out of a Prometheus page; unknown lines are passed over."""
    sums: dict[str, float] = {}
    config: dict[str, str] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name == "vllm:cache_config_info":
            config = dict(_LABEL.findall(labels))
        elif not math.isfinite(float(value)):
            # As good as no sample; a load that is no number would compare with none.
            continue
        elif name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "process_start_time_seconds"):
            sums[name] = sums.get(name, 0.0) + float(value)
        elif name == "vllm:kv_cache_usage_perc":
            sums[name] = max(sums.get(name, 0.0), float(value))
    block_size, blocks = config.get("block_size", ""), config.get("num_gpu_blocks", "")
    retention = config.get("prefix_cache_retention_interval", "")
    return EngineReport(
        running=sums.get("vllm:num_requests_running", 0.0),
        waiting=sums.get("vllm:num_requests_waiting", 0.0),
        kv_usage=sums.get("vllm:kv_cache_usage_perc", 0.0),
        started=sums.get("process_start_time_seconds", 0.0),
        block_size=int(block_size) if block_size.isdigit() else 0,
        hash_algo=config.get("prefix_caching_hash_algo", ""),
        blocks=int(blocks) if blocks.isdigit() else 0,
        retention=int(retention) if retention.isdigit() else None,
    )


def reachable(endpoint: str, host: str) -> str:
    """A published endpoint with its wildcard host replaced by the worker's own."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or parts.netloc.rsplit(":", 1)[0] not in _ANY_HOST:
        return endpoint
    return f"tcp://{in_url(host)}:{endpoint.rsplit(':', 1)[1]}"


def parse_kv_sources(body: bytes, host: str) -> tuple[KvEndpoint, ...]:
    """Endpoints per data-parallel rank from /kv_event_sources; ranks that publish nothing are left out."""
    sources = msgspec.json.decode(body, type=dict[str, _KvSource])
    return tuple(
        KvEndpoint(
            int(rank),
            reachable(source.endpoint, host),
            reachable(source.replay_endpoint, host) if source.replay_endpoint else None,
            source.topic,
        )
        for rank, source in sorted(sources.items(), key=lambda item: int(item[0]))
        if source.enable_kv_cache_events and source.publisher == "zmq"
    )


def parse_sleeping(body: bytes) -> bool:
    """Whether /is_sleeping says that the engine gave up its memory: it would fail every request."""
    return msgspec.json.decode(body, type=_Sleep).is_sleeping


def parse_models(body: bytes) -> tuple[ModelCard, ...]:
    """The entries of /v1/models, each with all its fields. Raises ProbeFailed."""
    try:
        page = msgspec.json.decode(body, type=_ModelPage)
        cards = msgspec.convert(page.data, list[_Card])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProbeFailed(f"/v1/models is no list of models: {error}") from None
    return tuple(
        ModelCard(c.id, c.root or "", c.parent or "", c.max_model_len or 0, entry)
        for c, entry in zip(cards, page.data, strict=True)
    )


class ProbeFailed(Exception):
    """A worker that can't be used now; the message says why, in words for operators.

    sure: it said so, or nobody is there; otherwise no answer came, as from one that is very busy.
    lasting: waiting does not mend it.
    """

    def __init__(self, message: str, *, sure: bool = True, lasting: bool = False) -> None:
        super().__init__(message)
        self.sure = sure
        self.lasting = lasting


class Probe:
    """Keeps every registered worker's state current. `start` and `close` own all tasks and the client."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        tls: ssl.SSLContext,
        api_key: str = "",
        kv_events: bool = True,
    ) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self._kv_events = kv_events
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers, verify=tls, trust_env=False)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}
        self._asked: dict[str, asyncio.Event] = {}

    def follow(self, event: FleetEvent, worker: Worker) -> None:
        """A fleet listener: a registered worker is probed from that instant on."""
        if event == "added":
            self._start(worker)
        elif event == "removed":
            self._stop(worker)

    def _start(self, worker: Worker) -> None:
        self._wakes[worker.name] = asyncio.Event()
        self._asked[worker.name] = asyncio.Event()
        self._tasks[worker.name] = asyncio.create_task(self._watch(worker), name=f"probe {worker.name}")

    def _stop(self, worker: Worker) -> None:
        self._wakes.pop(worker.name, None)
        if asked := self._asked.pop(worker.name, None):
            asked.set()
        task = self._tasks.pop(worker.name, None)
        if task:
            task.cancel()

    def wake(self, worker: Worker) -> None:
        """Probe `worker` now instead of at the next interval."""
        wake = self._wakes.get(worker.name)
        if wake:
            wake.set()

    async def asked_all(self, budget_s: float) -> None:
        """Wait until every worker of now was probed once, whatever came of it, but no longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                for asked in list(self._asked.values()):
                    await asked.wait()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _watch(self, worker: Worker) -> None:
        wake, asked = self._wakes[worker.name], self._asked[worker.name]
        while True:
            wake.clear()
            await self.probe(worker)
            asked.set()
            try:
                await asyncio.wait_for(wake.wait(), self._interval_s)
            except TimeoutError:
                continue

    async def probe(self, worker: Worker) -> None:
        """Ask `worker` everything once and record the result. Never raises."""
        try:
            await self._get(worker, "/health")
            # Served in vLLM's development mode only, without which nobody can put an engine to sleep.
            if await self._optional(worker, "/is_sleeping", parse_sleeping):
                raise ProbeFailed("asleep")
            report = await self._optional(
                worker, "/metrics", lambda body: parse_metrics(body.decode()), worker.report
            )
            models = parse_models(await self._get(worker, "/v1/models"))
            endpoints = await self._optional(
                worker,
                "/kv_event_sources",
                lambda body: parse_kv_sources(body, worker.host),
                worker.kv_endpoints,
            )
        except ProbeFailed as failure:
            self._fleet.mark_down(worker, str(failure), sure=failure.sure, lasting=failure.lasting)
        except Exception as error:
            logger.exception("probing worker %s failed", worker.name)
            self._fleet.mark_down(worker, f"probe failed: {type(error).__name__}")
        else:
            self._fleet.mark_up(
                worker, report or EngineReport(), models, (endpoints or ()) if self._kv_events else ()
            )

    async def _optional(
        self, worker: Worker, path: str, parse: Callable[[bytes], T], known: T | None = None
    ) -> T | None:
        """`path` parsed, None where this worker does not have it, or as `known` where no answer came."""
        try:
            return parse(await self._get(worker, path))
        except (ProbeFailed, ValueError, msgspec.MsgspecError) as error:
            logger.debug("worker %s: %s unusable: %s", worker.name, path, error)
            return known if isinstance(error, ProbeFailed) and not error.sure else None

    async def _get(self, worker: Worker, path: str) -> bytes:
        try:
            status, page = await read_page(
                self._client, "GET", worker.url + path, timeout_s=self._timeout_s, limit=_PAGE_BYTES
            )
        except TimeoutError:
            raise ProbeFailed(f"{path} timed out", sure=False) from None
        except httpx.RemoteProtocolError:
            why = f"{path}: what answers there is not HTTP; it may be https"
            raise ProbeFailed(why, lasting=True) from None
        except httpx.HTTPError as error:
            why = why_not(error) or f"{path}: {type(error).__name__}"
            raise ProbeFailed(why, lasting=lasts(error)) from None
        if status in (401, 403):
            raise ProbeFailed(f"{path} answered {status}: worker API key missing or wrong", lasting=True)
        if not httpx.codes.is_success(status):
            raise ProbeFailed(f"{path} answered {status}")
        return page
