"""The admin API under /admin/v1: the fleet, what was decided and why, and what the gateway knows."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway import errors
from gateway.admin.audit import AuditAnswer
from gateway.admin.body_api import api_path
from gateway.admin.bounded import Bounded
from gateway.admin.index import IndexAnswer
from gateway.admin.policy import policy_routes
from gateway.admin.prompts import PromptsAnswer
from gateway.admin.shadow import Shadowed, shadow_routes
from gateway.admin.views import (
    ConfigAnswer,
    DecisionsAnswer,
    DecisionView,
    ErrorAnswer,
    Loads,
    PoolAnswer,
    WorkersAnswer,
    WorkerView,
)
from gateway.knowledge.audit import Audit
from gateway.knowledge.drains import Drains
from gateway.own_url import leads_here
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.policy_versions import PolicyVersions
from gateway.settings import Settings
from workers.fleet import BadWorker, DuplicateWorker, UnknownWorker
from workers.worker import Role, Worker

PREFIX = "/admin/v1"
_LOOK_UP_S = 5.0

logger = logging.getLogger(__name__)


class FleetAdmin(Protocol):
    """The registry of workers. Adding also starts to probe, removing also stops. Raises as workers.fleet."""

    def workers(self) -> Sequence[Worker]: ...
    def get(self, name: str) -> Worker: ...
    def add(
        self, url: str, name: str | None = None, segment: str = "", role: Role | None = None
    ) -> Worker: ...
    def cordon(self, name: str, cordoned: bool) -> Worker: ...
    def weigh(self, name: str, weight: float) -> Worker: ...
    def give_role(self, name: str, role: Role) -> Worker: ...
    def failing(self, worker: Worker) -> str: ...
    def remove(self, name: str) -> Worker: ...


class Explainer(Protocol):
    """Decides without acting: no lease, no metric, nothing on record."""

    async def explain(
        self, path: str, body: bytes, key: str = "", headers: Sequence[str] = ()
    ) -> DecisionRecord:
        """path: the API's path the body would be posted to. key: what the client's key is called.

        headers: those it comes with, as `NAME: VALUE`. Raises errors.ApiError.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdminParts:
    """What the admin API reads and changes."""

    settings: Settings
    fleet: FleetAdmin
    loads: Loads
    drains: Drains
    explainer: Explainer
    decisions: DecisionLog
    audit: Audit
    index: Callable[[], IndexAnswer]
    pool: Callable[[], PoolAnswer]
    prompts: Callable[[], PromptsAnswer]
    policy: PolicyVersions
    router: Shadowed
    refusals: Callable[[], list[str]]


Comment = Annotated[str, Query(max_length=200, description="Why, for the log.")]


class NewWorker(BaseModel):
    """url: http(s)://HOST:PORT. name: made of host and port if not given.

    segment: its share of the Mooncake pool, IP:PORT or IP, where that does not follow from the host.
    role: both, prefill or decode; as configured if not given.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    url: str
    name: str | None = None
    segment: str = ""
    role: Role | None = None


class WorkerChange(BaseModel):
    """cordoned: true takes the worker out of the choice for new turns, false puts it back.

    drain: true cordons it and moves its share of the pool into the others'; false stops that and uncordons.
    weight: its share of the load compared with others', above 0. role: both, prefill or decode. What is not
    given stays as it is.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    cordoned: bool | None = None
    drain: bool | None = None
    weight: Annotated[float, Field(gt=0, le=1000, strict=False)] | None = None
    role: Role | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "WorkerChange":
        if all(each is None for each in (self.cordoned, self.drain, self.weight, self.role)):
            raise ValueError("give cordoned, drain, weight or role")
        if self.cordoned is not None and self.drain is not None and self.cordoned != self.drain:
            raise ValueError("a worker that drains is cordoned, one that does not is not")
        return self


def _only_admin(request: Request) -> None:
    """Closed by default: the guard in front must have recognised the admin token."""
    if request.scope.get("state", {}).get("caller") != "admin":
        raise errors.Forbidden("admin only")


def _only_json(request: Request) -> None:
    """What curl sends by itself is a form, which is not read."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"not {kind[:100]!r}" if kind else "there is no content-type"
        raise errors.UnsupportedMedia(f"send the body as JSON with content-type: application/json ({said})")


def build_admin(parts: AdminParts) -> FastAPI:
    """The ASGI app that answers everything below /admin; to be put behind `auth.Guard`."""
    app = FastAPI(
        title="Moongate admin API",
        version="1",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(_only_admin)],
    )
    errors.install(app)
    app.add_middleware(Bounded, limit=parts.settings.limits.max_body_bytes)
    faults: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}}
    policy = policy_routes(parts.policy, parts.decisions, parts.fleet)
    shadow = shadow_routes(parts.router, parts.policy)
    for router in (_workers(parts), policy, shadow):
        app.include_router(router, prefix=PREFIX, responses=faults, dependencies=[Depends(_only_json)])
    for router in (_decisions(parts), _knowledge(parts)):
        app.include_router(router, prefix=PREFIX, responses=faults)
    return app


def _workers(parts: AdminParts) -> APIRouter:
    router = APIRouter(tags=["workers"])
    fleet = parts.fleet

    async def view(worker: Worker) -> WorkerView:
        drain = await parts.drains.progress(worker.name)
        return WorkerView.of(worker, parts.loads, drain, fleet.failing(worker))

    @router.get("/workers", summary="All workers")
    async def get_workers() -> WorkersAnswer:
        return WorkersAnswer(
            workers=await asyncio.gather(*map(view, fleet.workers())), refusals=parts.refusals()
        )

    @router.post("/workers", status_code=201, summary="Add a worker")
    async def add_worker(new: NewWorker, request: Request, response: Response) -> WorkerView:
        server, here = parts.settings.server, request.scope["server"] or ("", 0)
        ours = {server.port, parts.settings.admin.port, here[1]}
        # A name that no name server answers for in time is one that nobody could be asked at.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_UP_S):
                if await asyncio.to_thread(leads_here, new.url, server.host, ours):
                    raise errors.InvalidRequest("that URL is the gateway's own", param="url")
        try:
            worker = fleet.add(new.url, new.name, new.segment, new.role)
        except BadWorker as error:
            raise errors.InvalidRequest(str(error), param="url") from None
        except DuplicateWorker as error:
            raise errors.Conflict(str(error)) from None
        logger.info("worker %s added: %r, role %s", worker.name, worker.url, worker.role)
        response.headers["location"] = f"{PREFIX}/workers/{worker.name}"
        return await view(worker)

    @router.get("/workers/{name}", summary="One worker")
    async def get_worker(name: str) -> WorkerView:
        return await view(_known(lambda: fleet.get(name)))

    @router.patch("/workers/{name}", summary="Cordon, drain or uncordon a worker; change weight or role")
    async def change_worker(name: str, change: WorkerChange) -> WorkerView:
        worker = _known(lambda: fleet.get(name))
        if change.drain is not None:
            await (parts.drains.start if change.drain else parts.drains.stop)(worker)
        cordoned = change.cordoned if change.drain is None else change.drain
        if cordoned is not None:
            _known(lambda: fleet.cordon(name, cordoned))
            logger.info("worker %s %s", name, "cordoned" if cordoned else "uncordoned")
        if change.weight is not None:
            fleet.weigh(name, change.weight)
            logger.info("worker %s: weight %g", name, change.weight)
        if change.role is not None:
            fleet.give_role(name, change.role)
            logger.info("worker %s: role %s", name, change.role)
        return await view(worker)

    @router.delete("/workers/{name}", status_code=204, summary="Remove a worker; its turns end undisturbed")
    async def remove_worker(name: str, comment: Comment = "") -> None:
        _known(lambda: fleet.remove(name))
        logger.info("worker %s removed%s", name, f": {comment!r}" if comment else "")

    _ = get_workers, add_worker, get_worker, change_worker, remove_worker
    return router


def _known(act: Callable[[], Worker]) -> Worker:
    try:
        return act()
    except UnknownWorker:
        raise errors.WorkerNotFound("no worker has that name", param="name") from None


def _decisions(parts: AdminParts) -> APIRouter:
    router = APIRouter(tags=["decisions"])

    @router.post(
        "/explain",
        summary="Where would this body go, and why",
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "A request body as a client would send it.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            }
        },
    )
    async def explain(
        request: Request,
        api: Annotated[
            str, Query(description="API the body is for, path or name; guessed if not given.")
        ] = "",
        key: Annotated[
            str, Query(description="Name of the client's key, whose tenant counts too; none if not given.")
        ] = "",
        header: Annotated[
            tuple[str, ...], Query(description="Headers it comes with, each as `NAME: VALUE`.")
        ] = (),
    ) -> DecisionView:
        body = await request.body()
        return DecisionView.of(await parts.explainer.explain(api_path(api, body), body, key, header))

    @router.get("/decisions", summary="The last decisions")
    async def get_decisions(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> DecisionsAnswer:
        return DecisionsAnswer(decisions=[DecisionView.of(r) for r in parts.decisions.recent(limit)])

    @router.get("/decisions/{request_id:path}", summary="One decision and how it turned out")
    async def get_decision(request_id: str) -> DecisionView:
        record = parts.decisions.get(request_id)
        if record is None:
            raise errors.NotFound("no decision with that request id is remembered", param="request_id")
        return DecisionView.of(record)

    @router.get("/audit", summary="Predicted against reported cached tokens")
    async def get_audit() -> AuditAnswer:
        return AuditAnswer.of(parts.audit)

    _ = explain, get_decisions, get_decision, get_audit
    return router


def _knowledge(parts: AdminParts) -> APIRouter:
    router = APIRouter(tags=["knowledge"])

    @router.get("/index", summary="What is known of the workers' caches, and how far it is to be trusted")
    async def get_index() -> IndexAnswer:
        return parts.index()

    @router.get("/pool", summary="The Mooncake pool as the gateway sees it")
    async def get_pool() -> PoolAnswer:
        return parts.pool()

    @router.get("/prompts", summary="Where each model's prompts are made, and whether workers agree")
    async def get_prompts() -> PromptsAnswer:
        return parts.prompts()

    @router.get("/config", summary="The effective settings")
    async def get_config() -> ConfigAnswer:
        return ConfigAnswer(settings=parts.settings.masked())

    _ = get_index, get_pool, get_prompts, get_config
    return router
