"""Everything wired together: the one place where long-lived objects are made, started and ended."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from gateway.admin.explain import Explainer
from gateway.admin.index import IndexAnswer, SnapshotView, index_entries
from gateway.admin.prompts import PromptsAnswer, made_elsewhere, prompts_answer
from gateway.admin.routes import AdminParts, build_admin
from gateway.admin.views import PoolAnswer
from gateway.api.aliases import Aliases
from gateway.api.bodies import Bodies
from gateway.asgi import CLIENT, Client, Receive, Scope, Send
from gateway.auth import AdminToken, ClientKeys, Guard
from gateway.health import Readiness, readiness
from gateway.knowledge.audit import Audit
from gateway.knowledge.drains import Drains
from gateway.knowledge.resync import Resync
from gateway.knowledge.snapshots import Snapshots
from gateway.knowledge.trust import Trusts
from gateway.metrics import OTHER, Metrics, Snapshot, WorkerSample
from gateway.prompts.layouts import Layouts
from gateway.prompts.prompts import ModelPrompts
from gateway.prompts.rendering import WorkerRenderer
from gateway.proxy.accounts import Accounts
from gateway.proxy.answers import Answers
from gateway.proxy.patience import Patience
from gateway.proxy.stored import StoredResponses
from gateway.proxy.turns import TurnApp
from gateway.public import build_public
from gateway.routing.breaks import PrefixBreaks
from gateway.routing.decision_file import DecisionFile
from gateway.routing.decisions import DecisionLog
from gateway.routing.eligibility import Room
from gateway.routing.holders import Holders
from gateway.routing.learning import Learning
from gateway.routing.links import CountedKnowledge, Links
from gateway.routing.policy_versions import PolicyVersions
from gateway.routing.router import Router
from gateway.routing.watch import AnswerWatch, RefusalWatch, say_broken
from gateway.seldom import Gathered
from gateway.settings import Settings
from gateway.upstream.authorities import AuthorityWatch
from gateway.upstream.connections import Connections
from policies.document import Document
from policies.ledger import Ledger
from policies.rates import InUnits
from store.knowledge import Knowledge
from store.pool import PoolView
from store.streams import EventStreams, StreamStatus
from workers.breaker import BreakerOptions
from workers.connecting import Authorities
from workers.fleet import Fleet, roles
from workers.probe import Probe
from workers.worker import Worker

logger = logging.getLogger(__name__)

# A start waits no longer for workers that do not answer.
_FIRST_PROBES_S = 2.0
# Nor for tokenizers: most take 1 to 2 s, in threads that would else take them from the first turns.
_FIRST_TOKENIZERS_S = 5.0
# Of a tokenizer's cache, for bodies of conversations seen before.
_BODIES_SHARE = 4
_BREAKER = {"closed": 0.0, "half-open": 0.5, "open": 1.0}
_TURN_PREFIXES = ("/v1/", "/inference/", "/pooling")
# The second is of a client whose base URL says /v1 though it adds that itself.
_NO_TURNS = ("/v1/models", "/v1/v1/")
_TURN_PATHS = frozenset("/tokenize /detokenize /classify /score /rerank /v2/rerank /v2/embed".split())


def is_turn(path: str) -> bool:
    """Whether a worker answers `path`; the rest is the gateway's own."""
    return (path.startswith(_TURN_PREFIXES) and not path.startswith(_NO_TURNS)) or path in _TURN_PATHS


class Gateway:
    """The ASGI application. Nothing runs and no socket is open before its lifespan starts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ending = False
        mooncake, timeouts = settings.mooncake, settings.timeouts
        authorities = Authorities(settings.workers.ca_file)
        self._authorities = AuthorityWatch(authorities)
        tls = authorities.context
        self.fleet = Fleet(
            settings.workers.segments,
            breaker=BreakerOptions(
                settings.workers.breaker_failures,
                settings.workers.breaker_share,
                settings.workers.breaker_open_s,
            ),
            ramp_s=settings.workers.ramp_s,
            roles=roles(settings.workers.prefill, settings.workers.decode),
        )
        self.pool = (
            PoolView(
                mooncake.master,
                http_port=mooncake.http_port,
                budget_s=mooncake.budget_ms / 1e3,
                lookup=mooncake.lookup,
                remove_dead=mooncake.remove_dead,
                events=mooncake.events,
            )
            if mooncake.master
            else None
        )
        self.metrics = Metrics(self._snapshot, serves=self.fleet.serves, knows_worker=self.fleet.knows)
        self.decision_file = DecisionFile(
            settings.routing.decision_log_path,
            settings.routing.decision_log_bytes,
            self.metrics.decisions_not_written,
        )
        self.refusals = RefusalWatch(self.metrics.overloaded)
        self._broken_answers = AnswerWatch(Gathered(say_broken))
        self.decisions = DecisionLog(self.decision_file.add, self._broken_answers.ended)
        self.knowledge = Knowledge(
            on_pool_stored=self._announced if self.pool else None,
            max_bytes=settings.index.memory_bytes or None,
        )
        self.layouts = Layouts(self.fleet, settings.models, self.knowledge.groups)
        self.streams = EventStreams(CountedKnowledge(self.knowledge, self.metrics))
        self.audit = Audit()
        self.trusts = Trusts(
            self.streams, self.knowledge, self.audit, doubtful_share=settings.index.doubtful_share
        )
        self.prompts = ModelPrompts(
            self.fleet,
            settings.models,
            settings.prompt,
            WorkerRenderer(settings.workers.api_key, tls),
            self.metrics.parity_check,
            self.knowledge.hashes.scheme,
            self.layouts if self.pool is not None else None,
        )
        self.breaks = PrefixBreaks(
            self.prompts, self.metrics.prefix_break, self.metrics.prefix_report_dropped
        )
        self.probe = Probe(
            self.fleet,
            interval_s=settings.workers.health_interval_s,
            timeout_s=settings.workers.health_timeout_s,
            tls=tls,
            api_key=settings.workers.api_key,
            kv_events=settings.workers.kv_events,
        )
        self.fleet.listen(self.probe.follow)
        self.snapshots = Snapshots(
            settings.index.snapshot_path,
            settings.index.snapshot_interval_s,
            self.knowledge,
            self.streams,
        )
        rates = InUnits(**settings.routing.rates.masked()).rates()
        self.ledger = Ledger(rates, since=time.monotonic())
        self.transport = Connections(
            tls=tls, connect_s=timeouts.connect_s, between_chunks_s=timeouts.between_chunks_s
        )
        self.resync = Resync(
            fleet=self.fleet,
            knowledge=self.knowledge,
            streams=self.streams,
            ledger=self.ledger,
            transport=self.transport,
            counted=self.metrics.index_probe,
            api_key=settings.workers.api_key,
            per_s=settings.index.probes_per_s,
        )
        self.fleet.listen(self.resync.follow)
        limits = settings.limits
        holders = Holders(self.knowledge, self.pool, self.metrics.knowledge_failure)
        self.router = router = Router(
            room=Room(limits.requests, limits.tokens),
            room_each=Room(limits.worker_requests, limits.worker_tokens),
            fleet=self.fleet,
            prompts=self.prompts,
            holders=holders,
            knowledge=self.knowledge,
            trusts=self.trusts,
            ledger=self.ledger,
            failed=self.metrics.knowledge_failure,
            slow=self.metrics.slow_decision,
            refused=self.refusals.full,
        )
        links = Links(
            self.streams,
            self.knowledge,
            self.prompts,
            self.snapshots,
            self.ledger,
            self.pool,
            self.audit,
            router.sessions,
        )
        self.fleet.listen(links.follow)
        routing = settings.routing
        self.policy = PolicyVersions(
            Document(policy=routing.policy, options=routing.options),
            Path(routing.policy_path) if routing.policy_path else None,
            router.use,
        )
        aliases = Aliases(settings.models, self.fleet.first_models)
        self.responses = StoredResponses(
            self.fleet,
            self.transport,
            most=settings.limits.stored_responses,
            ttl_s=settings.limits.stored_responses_s,
            api_key=settings.workers.api_key,
        )
        learning = Learning(self.audit, self.knowledge, self.streams, self.metrics, self.pool)
        patience = Patience()
        keys = ClientKeys.load(settings.auth.api_keys_file)
        guard = Guard(self._dispatch, AdminToken(settings.admin.token), keys, settings.admin.port)
        self._turns = TurnApp(
            admit=guard.admit,
            router=router,
            transport=self.transport,
            fleet=self.fleet,
            metrics=self.metrics,
            limits=settings.limits,
            timeouts=timeouts,
            worker_key=settings.workers.api_key,
            debug_headers=settings.routing.headers == "debug",
            parity=self.prompts.parity,
            forward_tokens=settings.prompt.forward_tokens,
            breaks=self.breaks,
            aliases=aliases,
            responses=self.responses,
            bodies=Bodies(settings.prompt.cache_bytes // _BODIES_SHARE),
            learning=learning,
            patience=patience,
            answers=Answers(
                holders=holders,
                fleet=self.fleet,
                patience=patience,
                responses=self.responses,
                hot=self.resync.chains,
                keep_alive_s=timeouts.keep_alive_s,
            ),
            accounts=Accounts(self.metrics, self.decisions, learning, self.refusals.unplaced),
        )
        self.fleet.listen(patience.follow)
        self._drains = Drains(self.pool)
        self.fleet.listen(self._drains.follow)
        self._admin = build_admin(
            AdminParts(
                settings=settings,
                fleet=self.fleet,
                loads=self.ledger,
                drains=self._drains,
                explainer=Explainer(router, self.breaks, aliases, self.responses, keys),
                decisions=self.decisions,
                audit=self.audit,
                index=self._index_report,
                pool=self._pool_report,
                prompts=self._prompts_report,
                policy=self.policy,
                router=router,
                refusals=self.refusals.lately,
            )
        )
        self._public = build_public(self.fleet, self.metrics, self._readiness, aliases)
        self._own = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self._ending:
            _ask_for_another(scope)
        if scope["type"] == "http" and is_turn(scope["path"]):
            await self._turns(scope, receive, send)
        else:
            await self._own(scope, receive, send)

    def end(self) -> None:
        """Not ready from now on: turns should go elsewhere. Those that come all the same are served."""
        self._ending = True

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/admin"):
            await self._admin(scope, receive, send)
        else:
            await self._public(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as running:
            try:
                await self._start(running)
            except Exception:
                logger.exception("the gateway could not start")
                await send({"type": "lifespan.startup.failed", "message": "see the log"})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, running: AsyncExitStack) -> None:
        """Bring everything up; `running` ends it in reverse order, probes before what they feed."""
        # Takes most of a second: now, or while the first turn waits.
        await asyncio.to_thread(import_module, "store.prompt.local")
        running.callback(self.refusals.close)
        running.callback(self._broken_answers.close)
        await self.decision_file.start()
        running.push_async_callback(self.decision_file.close)
        self._authorities.start()
        running.push_async_callback(self._authorities.close)
        await self.transport.start()
        running.push_async_callback(self.transport.close)
        running.push_async_callback(self.prompts.close)
        running.push_async_callback(self.breaks.close)
        if self.pool is not None:
            await self.pool.start()
            running.push_async_callback(self.pool.close)
            running.push_async_callback(self._drains.close)
        await self.snapshots.start()
        running.push_async_callback(self.snapshots.close)
        await self.streams.start()
        running.push_async_callback(self.streams.close)
        self.resync.start()
        running.push_async_callback(self.resync.close)
        running.push_async_callback(self.probe.close)
        for url in self._settings.workers.urls:
            self.fleet.add(url)
        # The port takes connections already: their turns would find no worker that is known to be up.
        await self.probe.asked_all(_FIRST_PROBES_S)
        await self.prompts.settled(_FIRST_TOKENIZERS_S)

    def _announced(self, target: str, keys: Sequence[int], group: int) -> None:
        layout = self.layouts.of_target(target)
        if self.pool is not None and layout is not None:
            self.pool.announced(keys, layout, group)

    def _snapshot(self) -> Snapshot:
        now = time.monotonic()
        streams = self.streams.status()
        file = self.snapshots.status()
        return Snapshot(
            workers=[
                WorkerSample(
                    worker.name,
                    worker.state == "up",
                    sum(self.ledger.load(t.name, now).inflight for t in worker.targets),
                    min(self.trusts.of(t.name).believed for t in worker.targets),
                    _BREAKER[self.fleet.breaker_state(worker)],
                    max(ages) if (ages := self._proof_ages(worker, streams)) else None,
                )
                for worker in self.fleet.workers()
            ],
            index_blocks=self._index_blocks(),
            kv_event_gaps={name: status.gaps for name, status in streams.items()},
            shadow_agreement=self.router.shadow.total.agreement if self.router.shadow else None,
            pool_degraded=self.pool is not None and self.pool.degraded,
            pool_removed=0 if self.pool is None else self.pool.removed,
            pool_events=None if self.pool is None else self.pool.events,
            index_bytes=self.knowledge.memory,
            index_evicted=self.knowledge.index.evicted + self.knowledge.certain.evicted,
            index_file_age_s=file.age_s,
            index_file_failures=file.failures,
        )

    def _index_report(self) -> IndexAnswer:
        names = [target.name for target in self.fleet.targets()]
        mismatches = self.knowledge.hashes.mismatches
        return IndexAnswer(
            targets=index_entries(
                names,
                self.streams.status(),
                self._index_sizes(),
                mismatches,
                self.trusts.of,
                self.knowledge.groups,
            ),
            memory_bytes=self.knowledge.memory,
            memory_limit_bytes=self._settings.index.memory_bytes,
            evicted_blocks=self.knowledge.index.evicted + self.knowledge.certain.evicted,
            snapshot=SnapshotView(**asdict(self.snapshots.status())),
        )

    @staticmethod
    def _proof_ages(worker: Worker, streams: Mapping[str, StreamStatus]) -> list[float]:
        statuses = [streams[target.name] for target in worker.targets if target.name in streams]
        return [status.last_proof_age_s for status in statuses if status.last_proof_age_s is not None]

    def _index_sizes(self) -> dict[tuple[str, str], int]:
        """By target and tier, without what was restored of targets that did not come back."""
        sizes = self.knowledge.index.sizes().items()
        return {(t, tier): count for (t, tier), count in sizes if not self.snapshots.waits_for(t)}

    def _index_blocks(self) -> dict[tuple[str, str], int]:
        """All there are, for the metric, whose labels are names of the fleet's."""
        blocks: dict[tuple[str, str], int] = {}
        for (target, tier), count in self.knowledge.index.sizes().items():
            name = target if self.fleet.knows(target) else OTHER, tier
            blocks[name] = blocks.get(name, 0) + count
        return blocks

    def _pool_report(self) -> PoolAnswer:
        if self.pool is None:
            return PoolAnswer(configured=False, master="", degraded=False, details={})
        return PoolAnswer(
            configured=True,
            master=self._settings.mooncake.master,
            degraded=self.pool.degraded,
            details=asdict(self.pool.status()),
        )

    def _prompts_report(self) -> PromptsAnswer:
        return prompts_answer(self.prompts, self._settings.prompt.source)

    def _readiness(self) -> Readiness:
        doubts = [
            *(f"hashes of {target}: {why}" for target, why in self.knowledge.hashes.mismatches.items()),
            *(f"index of {target}: {why}" for target, why in self.knowledge.doubts.items()),
            *(f"index of {target}: {why}" for target, why in self.audit.all_demoted().items()),
            *self.prompts.disagreements(),
            *(self.layouts.disagreements() if self.pool else ()),
            *map(str, self.prompts.parity.differences()),
            *made_elsewhere(self._prompts_report()),
        ]
        return readiness(
            self.fleet,
            self.pool,
            doubts,
            drains=self._drains.running(),
            refusals=self.refusals.lately(),
            ending=self._ending,
        )


def _ask_for_another(scope: Scope) -> None:
    """The client should take another connection next time."""
    client: Client | None = scope.get("extensions", {}).get(CLIENT)
    if client is not None:
        client.last()


def build(settings: Settings) -> Gateway:
    """The gateway for `settings`. Raises what a setting that can't be used raises: policy, keys file."""
    return Gateway(settings)
