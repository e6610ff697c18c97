"""Every error the gateway itself answers with: one table, two shapes, no framework default bodies.

    class              status  openai type            code
    InvalidRequest     400     invalid_request_error  invalid_request
    Unauthorized       401     authentication_error   invalid_api_key
    Forbidden          403     permission_error       forbidden
    NotFound           404     not_found_error        not_found
    ModelNotFound      404     invalid_request_error  model_not_found
    WorkerNotFound     404     not_found_error        worker_not_found
    MethodNotAllowed   405     invalid_request_error  method_not_allowed
    RequestTimeout     408     timeout_error          request_timeout
    Conflict           409     conflict_error         conflict
    PreconditionFailed 412     conflict_error         precondition_failed
    PayloadTooLarge    413     invalid_request_error  request_too_large
    UnsupportedMedia   415     invalid_request_error  unsupported_media_type
    NoWebSocket        426     invalid_request_error  websocket_not_supported
    Overloaded         429     rate_limit_error       rate_limit_exceeded
    HeadTooLarge       431     invalid_request_error  request_head_too_large
    InternalError      500     server_error           internal_error
    UpstreamFailed     502     server_error           upstream_failed
    NoWorker           503     server_error           no_worker
    UpstreamTimeout    504     timeout_error          upstream_timeout

Workers' own errors are no business of this file: they pass unchanged.
"""

import logging
import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope, Send

logger = logging.getLogger(__name__)

Shape = Literal["openai", "anthropic"]
# Of the models that an answer names; a fleet with adapters may have thousands.
_MODELS_NAMED = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table. `anthropic` is the type in Anthropic's shape, which has no code."""

    status: int
    type: str
    code: str
    anthropic: str


class ApiError(Exception):
    """An answer in the form of an exception.

    message: for the client; never a prompt, a secret or a worker's URL.
    param: the field of the request that is to blame. retry_after_s: sent as Retry-After, at least 1.
    headers: further response headers.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind = TABLE[type(self)]
        self.message = message
        self.status = kind.status
        self.type = kind.type
        self.anthropic_type = kind.anthropic
        self.code = code or kind.code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))


class InvalidRequest(ApiError):
    """The request can't be understood."""


class Unauthorized(ApiError):
    """No credential, or one that is not known."""


class Forbidden(ApiError):
    """A known credential, or a place, that may not do this."""


class NotFound(ApiError):
    """No such route or thing."""


class ModelNotFound(ApiError):
    """No worker serves that model."""

    @classmethod
    def among(cls, model: str, known: Iterable[str]) -> "ModelNotFound":
        """The answer to a turn for `model`; it names a few of those that there are."""
        names = sorted(known)
        listed = ", ".join(repr(name[:200]) for name in names[:_MODELS_NAMED])
        listed += f" and {len(names) - _MODELS_NAMED} more" if len(names) > _MODELS_NAMED else ""
        there = f"there is {listed}" if len(names) == 1 else f"there are {listed}"
        there = f"{there}; " if names else ""
        return cls(
            f"the model {model[:200]!r} does not exist; {there}GET /v1/models lists all", param="model"
        )


class WorkerNotFound(ApiError):
    """No worker has that name."""


class MethodNotAllowed(ApiError):
    """The route exists, not for this method."""


class RequestTimeout(ApiError):
    """The client was too slow in sending its request."""


class Conflict(ApiError):
    """The thing exists already, or has changed meanwhile."""


class PreconditionFailed(ApiError):
    """It was changed meanwhile: what If-Match names is no longer in force."""


class PayloadTooLarge(ApiError):
    """The body is larger than `limits.max_body_bytes`."""


class UnsupportedMedia(ApiError):
    """A content type or encoding that can't be read."""


class NoWebSocket(ApiError):
    """A WebSocket was asked for; the same can be had by HTTP requests."""


class Overloaded(ApiError):
    """Too much under way; try again later."""


class HeadTooLarge(ApiError):
    """The request's header lines are larger than any that make sense."""


class InternalError(ApiError):
    """A fault of the gateway itself."""


class UpstreamFailed(ApiError):
    """The workers that were tried broke off before they answered."""


class NoWorker(ApiError):
    """No worker can take the turn now."""


class UpstreamTimeout(ApiError):
    """The worker did not answer within a budget of `timeouts`."""


TABLE: Mapping[type[ApiError], Kind] = {
    InvalidRequest: Kind(400, "invalid_request_error", "invalid_request", "invalid_request_error"),
    Unauthorized: Kind(401, "authentication_error", "invalid_api_key", "authentication_error"),
    Forbidden: Kind(403, "permission_error", "forbidden", "permission_error"),
    NotFound: Kind(404, "not_found_error", "not_found", "not_found_error"),
    ModelNotFound: Kind(404, "invalid_request_error", "model_not_found", "not_found_error"),
    WorkerNotFound: Kind(404, "not_found_error", "worker_not_found", "not_found_error"),
    MethodNotAllowed: Kind(405, "invalid_request_error", "method_not_allowed", "invalid_request_error"),
    RequestTimeout: Kind(408, "timeout_error", "request_timeout", "timeout_error"),
    Conflict: Kind(409, "conflict_error", "conflict", "invalid_request_error"),
    PreconditionFailed: Kind(412, "conflict_error", "precondition_failed", "invalid_request_error"),
    PayloadTooLarge: Kind(413, "invalid_request_error", "request_too_large", "request_too_large"),
    UnsupportedMedia: Kind(415, "invalid_request_error", "unsupported_media_type", "invalid_request_error"),
    NoWebSocket: Kind(426, "invalid_request_error", "websocket_not_supported", "invalid_request_error"),
    Overloaded: Kind(429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    HeadTooLarge: Kind(431, "invalid_request_error", "request_head_too_large", "invalid_request_error"),
    InternalError: Kind(500, "server_error", "internal_error", "api_error"),
    UpstreamFailed: Kind(502, "server_error", "upstream_failed", "api_error"),
    NoWorker: Kind(503, "server_error", "no_worker", "overloaded_error"),
    UpstreamTimeout: Kind(504, "timeout_error", "upstream_timeout", "timeout_error"),
}

_BY_STATUS: Mapping[int, type[ApiError]] = {kind.status: error for error, kind in reversed(TABLE.items())}


def shape_of(path: str) -> Shape:
    """The error shape that clients of `path` expect."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def body(error: ApiError, shape: Shape, request_id: str = "") -> bytes:
    """The JSON body of `error`."""
    content: dict[str, Any]
    if shape == "anthropic":
        detail = {"type": error.anthropic_type, "message": error.message}
        content = {"type": "error", "error": detail, "request_id": request_id or None}
    else:
        detail = {"message": error.message, "type": error.type, "code": error.code, "param": error.param}
        content = {"error": detail}
    return msgspec.json.encode(content)


def head(error: ApiError, content: bytes, request_id: str = "") -> list[tuple[bytes, bytes]]:
    """The raw response headers that go with `content`."""
    headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers}
    if request_id:
        headers["x-request-id"] = request_id
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def send_error(error: ApiError, scope: Scope, send: Send, request_id: str = "") -> None:
    """Answer `error` on a bare ASGI connection whose response has not begun."""
    content = body(error, shape_of(scope["path"]), request_id)
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": head(error, content, request_id),
        }
    )
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def install(app: FastAPI) -> None:
    """Make every error that the framework raises in `app` answer in our shapes."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _response(request, error)

    async def http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _response(request, _from_http(error, request))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(request, _from_validation(error))

    async def unexpected(request: Request, error: Exception) -> Response:
        return _response(request, fault())

    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(RequestValidationError, validation)


def _response(request: Request, error: ApiError) -> Response:
    content = body(error, shape_of(request.url.path))
    return Response(content, error.status, error.headers, media_type="application/json")


def _from_http(error: HTTPException, request: Request) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        # Clients are given a base URL, and those of some APIs take it with /v1, of others without.
        hint = "" if request.url.path.startswith("/admin") else "; the APIs are at /v1/..."
        return NotFound(f"no such route: {request.method} {request.url.path}{hint}", headers=headers)
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.method} is not allowed here", headers=headers)
    kind = _BY_STATUS.get(error.status_code) or (InvalidRequest if error.status_code < 500 else InternalError)
    # FastAPI raises 400 "There was an error parsing the body" with the cause, never with the input itself.
    return kind(str(error.detail), headers=headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first fault by place and reason; never the input, which may be a secret."""
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return InvalidRequest("the body is not valid JSON")
    place = ".".join(str(part) for part in first["loc"][1:])
    return InvalidRequest(f"{place or 'body'}: {first['msg']}", param=place or None)


def log_fault(error: Exception, method: str) -> None:
    """Type and stack of what should not have been raised; its message may quote a prompt or a secret."""
    stack = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s while answering %s\n%s", type(error).__name__, method, stack)


def fault() -> InternalError:
    """What a client is told of what should not have been raised."""
    return InternalError("the gateway failed; its log says more")


class ResponseCut(Exception):
    """Raised so that the server closes a connection whose response can't be finished."""
