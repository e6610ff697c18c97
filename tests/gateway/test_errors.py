"""Errors: one table, two shapes, and the official SDKs raising the class that fits."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import anthropic
import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import TABLE, ApiError, ModelNotFound, install, send_error


def client(app: Callable[..., object]) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def answering(error: ApiError) -> Callable[..., object]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(error, scope, send, "req-1")

    return app


@pytest.mark.parametrize("kind", list(TABLE))
async def test_b085_every_error_in_both_shapes(kind: type[ApiError]) -> None:
    error = kind("what was wrong", param="model")
    async with client(answering(error)) as http:
        plain = await http.post("/v1/chat/completions")
        messages = await http.post("/v1/messages?beta=true")
        head = await http.head("/v1/models")
    row = TABLE[kind]
    assert plain.status_code == messages.status_code == head.status_code == row.status
    assert plain.json() == {
        "error": {"message": "what was wrong", "type": row.type, "code": row.code, "param": "model"}
    }
    assert messages.json() == {
        "type": "error",
        "error": {"type": row.anthropic, "message": "what was wrong"},
        "request_id": "req-1",
    }
    assert plain.headers["content-type"] == "application/json"
    assert plain.headers["x-request-id"] == "req-1"
    assert head.content == b""


def test_the_table_of_the_docstring_is_the_real_one() -> None:
    for kind, row in TABLE.items():
        words = [kind.__name__, str(row.status), row.type, row.code]
        assert words in [line.split() for line in (errors.__doc__ or "").splitlines()]


@pytest.mark.parametrize(("delay", "sent"), [(0.0, "1"), (0.2, "1"), (2.1, "3"), (10, "10")])
def test_b086_retry_after_is_whole_seconds_and_at_least_one(delay: float, sent: str) -> None:
    assert errors.Overloaded("full", retry_after_s=delay).headers == {"retry-after": sent}


@pytest.fixture
async def served() -> AsyncIterator[str]:
    """A real server that fails as the path says: /KIND/... answers that error."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        _, name, path = scope["path"].split("/", 2)
        error = getattr(errors, name)("said by the gateway", retry_after_s=1)
        await send_error(error, {**scope, "path": "/" + path}, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    sock = server.config.bind_socket()

    task = asyncio.create_task(server.serve(sockets=[sock]))
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("InvalidRequest", openai.BadRequestError),
        ("Unauthorized", openai.AuthenticationError),
        ("Forbidden", openai.PermissionDeniedError),
        ("ModelNotFound", openai.NotFoundError),
        ("Overloaded", openai.RateLimitError),
        ("NoWorker", openai.InternalServerError),
        ("UpstreamTimeout", openai.InternalServerError),
    ],
)
async def test_b085_openai_sdk_raises_the_matching_class_with_the_message(
    served: str, name: str, raised: type[openai.APIStatusError]
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served}/{name}/v1", api_key="k", max_retries=0) as sdk:
        with pytest.raises(raised, match="said by the gateway") as caught:
            await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    row = TABLE[getattr(errors, name)]
    assert (caught.value.code, caught.value.type) == (row.code, row.type)


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("InvalidRequest", anthropic.BadRequestError),
        ("Unauthorized", anthropic.AuthenticationError),
        ("ModelNotFound", anthropic.NotFoundError),
        ("Overloaded", anthropic.RateLimitError),
        ("NoWorker", anthropic.InternalServerError),
    ],
)
async def test_b085_anthropic_sdk_raises_the_matching_class(
    served: str, name: str, raised: type[anthropic.APIStatusError]
) -> None:
    async with anthropic.AsyncAnthropic(base_url=f"{served}/{name}", api_key="k", max_retries=0) as sdk:
        with pytest.raises(raised, match="said by the gateway"):
            await sdk.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])


QUOTED = "SENTINEL2"


class Thing(BaseModel):
    size: int


def framework_app() -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    install(app)

    @app.post("/thing")
    async def thing(thing: Thing) -> int:
        return thing.size

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError(QUOTED)

    return app


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "param"),
    [
        ("POST", "/thing", b"{", 400, "invalid_request", None),
        ("POST", "/thing", b"[]", 400, "invalid_request", None),
        ("POST", "/thing", b'{"size": "SENTINEL2"}', 400, "invalid_request", "size"),
        ("POST", "/thing", b"{}", 400, "invalid_request", "size"),
        ("GET", "/thing", b"", 405, "method_not_allowed", None),
        ("GET", "/nothing", b"", 404, "not_found", None),
        ("GET", "/broken", b"", 500, "internal_error", None),
    ],
)
async def test_b085_no_framework_body_appears(
    method: str,
    path: str,
    content: bytes,
    status: int,
    code: str,
    param: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with client(framework_app()) as http:
            answer = await http.request(
                method, path, content=content, headers={"content-type": "application/json"}
            )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["code"], error["param"]) == (code, param)
    assert "SENTINEL2" not in answer.text + caplog.text
    if status == 405:
        assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ([], "the model 'x' does not exist; GET /v1/models lists all"),
        (["a"], "the model 'x' does not exist; there is 'a'; GET /v1/models lists all"),
        (["b", "a"], "the model 'x' does not exist; there are 'a', 'b'; GET /v1/models lists all"),
    ],
)
def test_an_unknown_model_is_answered_with_those_there_are(known: list[str], said: str) -> None:
    assert ModelNotFound.among("x", known).message == said


def test_the_models_named_are_bounded() -> None:
    message = ModelNotFound.among("y" * 9000, ["z" * 9000 + str(n) for n in range(2000)]).message
    assert "and 1995 more" in message
    assert len(message) < 2000
