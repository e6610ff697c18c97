"""What the gateway answers itself on the public side: liveness, readiness, metrics and the list of models."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from gateway import errors
from gateway.api.aliases import Aliases
from gateway.health import Readiness
from gateway.metrics import Metrics
from workers.fleet import Fleet

# Load balancers look with HEAD.
_READ = ["GET", "HEAD"]


def build_public(
    fleet: Fleet, metrics: Metrics, readiness: Callable[[], Readiness], aliases: Aliases
) -> FastAPI:
    """The ASGI app for every path that neither admin nor a worker answers."""
    app = FastAPI(title="Moongate", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(app)

    @app.api_route("/health", methods=_READ)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=_READ)
    async def ready(response: Response) -> dict[str, Any]:
        now = readiness()
        response.status_code = 200 if now.ready else 503
        return {"ready": now.ready, "reasons": now.reasons}

    @app.api_route("/metrics", methods=_READ)
    async def page(request: Request) -> Response:
        content, kind = metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": kind})

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(model_entries(fleet, aliases).values())}

    @app.api_route("/v1/models/{model:path}", methods=_READ)
    async def model(model: str) -> dict[str, Any]:
        entries = model_entries(fleet, aliases)
        if model not in entries:
            raise errors.ModelNotFound.among(model, entries)
        return entries[model]

    _ = health, ready, page, models, model
    return app


def model_entries(fleet: Fleet, aliases: Aliases) -> dict[str, dict[str, Any]]:
    """The union of what workers that can take turns serve, each entry as its worker wrote it, and aliases."""
    entries: dict[str, dict[str, Any]] = {}
    for worker in fleet.workers():
        if worker.may_answer:
            for card in worker.models:
                entries.setdefault(card.id, dict(card.entry))
    return entries | dict(aliases.entries(entries))
