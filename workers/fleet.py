"""The registry of workers: who is there, who may be chosen, and who must be told when that changes."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal
from urllib.parse import urlsplit

from workers.breaker import Breaker, BreakerOptions, BreakerState
from workers.connecting import in_url
from workers.worker import EngineReport, KvEndpoint, ModelCard, Role, Target, Worker

logger = logging.getLogger(__name__)

# One missed probe may be a hiccup of a busy process; turns that wait there are only sent on after another.
_SILENT_AFTER = 2
# Names of this machine as itself.
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
_URL = re.compile(r"[!-~]*")
_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,99}")


class DuplicateWorker(ValueError):
    """A worker with that name or URL is registered already."""


class UnknownWorker(KeyError):
    """No worker has that name."""


class BadWorker(ValueError):
    """The URL or the name cannot be a worker's."""


FleetEvent = Literal["added", "up", "restarted", "back", "lost", "silent", "removed"]
"""What can happen to a worker.

added, removed: it is registered, or no longer.
up: probed and ready; again when its endpoints or models changed.
restarted: the same address, a new process: whatever was known of its cache is void.
back: it may get turns, and got none for a while: it came up, was uncordoned, or no longer fails turns.
silent: a second probe in a row failed: what it has not begun to answer it may never answer.
lost: it was up and is down, or was removed: its cache can't be reached.
"""

FleetListener = Callable[[FleetEvent, Worker], None]
"""Told of every event in order, on the event loop; must return at once."""


def roles(prefill: Iterable[str], decode: Iterable[str]) -> dict[str, Role]:
    """By name or URL what workers are for; whoever is in both lists is for both."""
    computing, decoding = set(prefill), set(decode)
    found: dict[str, Role] = {}
    found.update(dict.fromkeys(computing - decoding, "prefill"))
    found.update(dict.fromkeys(decoding - computing, "decode"))
    return found


def _place(url: str) -> tuple[str, str, int, str]:
    """Equal for URLs that mean the same server beyond doubt; two names of one address may be two servers."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, "localhost" if host in _LOOPBACK else host, port, parts.path


class Fleet:
    """All registered workers."""

    def __init__(
        self,
        segments: Mapping[str, str] | None = None,
        *,
        roles: Mapping[str, Role] | None = None,
        breaker: BreakerOptions | None = None,
        ramp_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`segments`: the pool segment (`IP:PORT`, or `IP`) of workers, by their URL or name; `roles` alike.

        breaker: when a worker that fails turns gets none. ramp_s: how long one that came back gets more and
        more. clock: steady seconds.
        """
        self._breaker = breaker or BreakerOptions()
        self._ramp_s = ramp_s
        self._clock = clock
        self._configured = {worker.rstrip("/"): place for worker, place in (segments or {}).items()}
        self._roles: dict[str, Role] = {worker.rstrip("/"): role for worker, role in (roles or {}).items()}
        self._segments: dict[str, str] = {}
        self._listeners: list[FleetListener] = []
        self._workers: dict[str, Worker] = {}
        # Another one whenever who may be chosen, or what for, has changed; but for what goes by the time.
        self.version = 0
        # When any of them last came back.
        self._last_back = clock()
        # Asked for several times a turn, and changed by probes and admin only.
        self._targets: Mapping[str, Target] = {}
        self._models: frozenset[str] = frozenset()

    def listen(self, listener: FleetListener) -> None:
        self._listeners.append(listener)

    def _tell(self, event: FleetEvent, worker: Worker) -> None:
        for listener in self._listeners:
            listener(event, worker)

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def get(self, name: str) -> Worker:
        """Raises UnknownWorker."""
        worker = self._workers.get(name)
        if worker is None:
            raise UnknownWorker(name)
        return worker

    def add(self, url: str, name: str | None = None, segment: str = "", role: Role | None = None) -> Worker:
        """Register `url` (http or https, no path needed). Raises BadWorker, DuplicateWorker.

        segment: its share of the pool, `IP:PORT` or `IP`; without one all segments of its host are taken to
        be its own, as long as no other worker is on that host. role: None as configured, else for both.
        """
        url = url.rstrip("/")
        if not _URL.fullmatch(url):
            raise BadWorker("a worker's URL is plain ASCII without spaces")
        try:
            parts = urlsplit(url)
        except ValueError:
            raise BadWorker("a worker's URL is http://HOST:PORT, an IPv6 address in brackets") from None
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise BadWorker("the port of a worker's URL must be a number from 1 to 65535")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadWorker("a worker's URL is http://HOST:PORT or https://HOST:PORT")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise BadWorker("a worker's URL carries no credentials, query or fragment")
        if parts.path.endswith("/v1"):
            raise BadWorker("a worker's URL ends before the /v1 of its API")
        host = in_url(parts.hostname)
        name = name or (f"{host}:{port}" if port else host)
        if not _NAME.fullmatch(name):
            raise BadWorker("a worker's name is 1 to 100 of letters, digits and . _ : - [ ]")
        if name in self._workers:
            raise DuplicateWorker(f"worker {name} is registered already")
        for other in self._workers.values():
            if _place(other.url) == _place(url):
                raise DuplicateWorker(f"{url} is registered already, as worker {other.name}")
        segment = segment or self._configured.get(url, "") or self._configured.get(name, "")
        if segment and not _NAME.fullmatch(segment):
            raise BadWorker("a worker's segment is IP:PORT as its store connector has it, or an IP")
        configured = self._roles.get(url) or self._roles.get(name)
        worker = self._workers[name] = Worker(
            name, url, breaker=Breaker(self._breaker), role=role or configured or "both"
        )
        self._segments[name] = segment
        self._map_segments()
        self._registered()
        self._tell("added", worker)
        return worker

    def _registered(self) -> None:
        """Who is registered, or what they serve, is another than before."""
        self.version += 1
        workers = self._workers.values()
        self._targets = {target.name: target for worker in workers for target in worker.targets}
        self._models = frozenset(card.id for worker in workers for card in worker.models)

    def _map_segments(self) -> None:
        on_host = Counter(worker.host for worker in self._workers.values())
        for worker in self._workers.values():
            alone = on_host[worker.host] == 1
            worker.segment = self._segments[worker.name] or (worker.host if alone else "")

    def remove(self, name: str) -> Worker:
        """Take the worker out; turns already sent there end undisturbed. Raises UnknownWorker."""
        worker = self.get(name)
        del self._workers[name], self._segments[name]
        self._map_segments()
        self._registered()
        if worker.state == "up":
            self._tell("lost", worker)
        self._tell("removed", worker)
        return worker

    def cordon(self, name: str, cordoned: bool) -> Worker:
        """While cordoned a worker gets no new turns. Raises UnknownWorker."""
        worker = self.get(name)
        if worker.cordoned and not cordoned:
            self._is_back(worker)
        worker.cordoned = cordoned
        self.version += 1
        return worker

    def breaker_state(self, worker: Worker) -> BreakerState:
        return "closed" if worker.breaker.closed else worker.breaker.state(self._clock())

    def failing(self, worker: Worker) -> str:
        """In words for operators how a worker fails turns, and until when it gets none; "" if it does not."""
        breaker, now = worker.breaker, self._clock()
        said = breaker.said(now)
        if breaker.closed:
            return said
        rest_s = breaker.rest_s(now)
        return f"{said}: " + (f"gets none for {rest_s:.0f} s" if rest_s else "the next one is its trial")

    @property
    def ramping(self) -> bool:
        """Whether anybody came back lately."""
        return self._clock() - self._last_back < self._ramp_s

    def ramps(self, workers: Iterable[Worker]) -> list[float]:
        """The share of an ordinary load that each may have, below 1 where it came back lately. None: all."""
        now = self._clock()
        if not self.ramping:
            return []
        return [min(1.0, (now - worker.since) / self._ramp_s) for worker in workers]

    def _is_back(self, worker: Worker) -> None:
        worker.since = self._last_back = self._clock()
        self._tell("back", worker)

    def sent(self, worker: Worker) -> None:
        """A turn goes there."""
        if not worker.breaker.closed:
            worker.breaker.sent(self._clock())

    def failed(self, worker: Worker, kind: str) -> None:
        """It failed a turn by its own fault: a 5xx, a broken connection, silence. `kind` is for the log."""
        # Once when it opens and once for each trial, of which the next waits twice as long; before it opens
        # once a minute.
        if worker.breaker.failed(self._clock(), kind):
            self.version += 1
            logger.warning("worker %s %s", worker.name, self.failing(worker))

    def answered(self, worker: Worker) -> None:
        """Its answer to a turn has begun well."""
        if worker.breaker.answered():
            self._is_back(worker)
            logger.info("worker %s answers again", worker.name)

    def weigh(self, name: str, weight: float) -> Worker:
        """Its share of the load compared with others', above 0. Raises UnknownWorker."""
        worker = self.get(name)
        worker.weight = weight
        self.version += 1
        return worker

    def give_role(self, name: str, role: Role) -> Worker:
        """What it is for, from the next turn on. Raises UnknownWorker."""
        worker = self.get(name)
        worker.role = role
        self.version += 1
        return worker

    def targets(self) -> Collection[Target]:
        return self._targets.values()

    def target(self, name: str) -> Target:
        """Raises KeyError."""
        return self._targets[name]

    def serves(self, model: str) -> bool:
        """Whether any registered worker, up or not, is known to serve `model`."""
        return model in self._models

    def knows(self, name: str) -> bool:
        """Whether a worker, or a target of one, has that name."""
        return name in self._workers or name in self._targets

    def knows_models(self) -> bool:
        """Whether any worker has said yet what it serves."""
        return bool(self._models)

    def served(self) -> Collection[str]:
        """All models that registered workers, up or not, are known to serve."""
        return self._models

    def first_models(self) -> set[str]:
        """What workers answer with where no model is named: the first that each serves."""
        return {worker.models[0].id for worker in self._workers.values() if worker.models}

    def mark_up(
        self,
        worker: Worker,
        report: EngineReport,
        models: tuple[ModelCard, ...],
        kv_endpoints: tuple[KvEndpoint, ...],
    ) -> None:
        """A successful probe. Tells listeners of a restart before anything of the new process counts."""
        if self._workers.get(worker.name) is not worker:
            return
        restarted = 0 < worker.report.started != report.started > 0
        changed = worker.state != "up" or models != worker.models or kv_endpoints != worker.kv_endpoints
        worker.report, worker.models, worker.kv_endpoints = report, models, kv_endpoints
        if changed:
            self._registered()
        came = worker.state != "up"
        if came:
            logger.info("worker %s is up", worker.name)
        if worker.misses:
            self.version += 1
        worker.state, worker.reason, worker.misses, worker.missed = "up", "", 0, False
        if restarted:
            worker.breaker.renewed(self._clock())
            self._tell("restarted", worker)
        if changed:
            self._tell("up", worker)
        if came:
            self._is_back(worker)

    def mark_down(self, worker: Worker, reason: str, *, sure: bool = True, lasting: bool = False) -> None:
        """A failed probe or a refused connection.

        sure: no turn could be answered there now. lasting: waiting does not mend it, so that it is down even
        if it never was up.
        """
        if self._workers.get(worker.name) is not worker:
            return
        before = worker.state
        was_up = before == "up"
        worker.state = "starting" if before == "starting" and not lasting else "down"
        # Once for each change of state: what answers by turns in two wrong ways is not twice news.
        if worker.state != before:
            logger.warning("worker %s is down: %s", worker.name, reason)
        elif not worker.misses and before == "starting":
            logger.info("worker %s is starting: %s", worker.name, reason)
        worker.reason = reason
        worker.misses += 1
        self.version += 1
        worker.missed = was_up and not sure
        worker.report = replace(worker.report, running=0.0, waiting=0.0)
        if was_up:
            self._tell("lost", worker)
        if worker.misses == _SILENT_AFTER:
            self._tell("silent", worker)
