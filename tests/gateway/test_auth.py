"""The guard: nothing of admin without its token, under any spelling; client keys alike in both headers."""

import hashlib
import logging
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway.auth import AdminToken, BadKeysFile, ClientKey, ClientKeys, Guard, credentials, is_admin_path


class Behind:
    """What the guard protects: notes who reached it."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append((scope["path"], scope["state"]["caller"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


async def ask(
    guard: Guard,
    method: str,
    path: str,
    headers: list[tuple[str, str]] | None = None,
    peer: str = "127.0.0.1",
    port: int = 8000,
) -> httpx.Response:
    transport = httpx.ASGITransport(app=guard, client=(peer, 5))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://gateway:{port}") as http:
        return await http.request(method, path, headers=headers or [])


SPELLINGS = [
    "/admin",
    "/admin/",
    "/admin/v1/workers",
    "/admin/v1/workers/",
    "//admin/v1/workers",
    "/admin//v1/workers",
    "/%61dmin/v1/workers",
    "/%2561dmin/v1/workers",
    "/admin%2Fv1%2Fworkers",
    "/v1/../admin/v1/workers",
    "/v1/%2e%2e/admin/v1/workers",
    "/./admin/v1/workers",
    "/ADMIN/v1/workers",
    "/\\admin/v1/workers",
    "/admin;x=1/v1/workers",
]


@pytest.mark.parametrize("path", SPELLINGS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "BREW"])
@pytest.mark.parametrize(
    "headers", [[], [("authorization", "Bearer wrong")], [("x-api-key", "client-key")]], ids=str
)
async def test_b073_admin_is_closed_without_its_token(
    path: str, method: str, headers: list[tuple[str, str]]
) -> None:
    behind = Behind()
    guard = Guard(behind, AdminToken("right"), ClientKeys(["client-key"]))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "client": ("10.0.0.9", 5),
        "server": ("gateway", 8000),
    }
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    await guard(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == (403 if headers and headers[0][0] == "x-api-key" else 401)
    assert behind.reached == []


def test_other_paths_are_not_taken_for_admin() -> None:
    for path in (
        "/v1/admin",
        "/administrator",
        "/v1/models/admin",
        "/",
        "",
        "/admin-x",
        "/admin/../v1/models",
    ):
        assert not is_admin_path(path), path


async def test_the_token_opens_admin_in_both_headers() -> None:
    behind = Behind()
    guard = Guard(behind, AdminToken("right"), ClientKeys())
    for headers in ([("Authorization", "bearer  right")], [("X-Api-Key", "right")]):
        assert (await ask(guard, "GET", "/admin/v1/workers", headers, "10.0.0.9")).status_code == 200
    assert [caller for _, caller in behind.reached] == ["admin", "admin"]


async def test_the_token_is_taken_where_a_clients_key_is() -> None:
    behind = Behind()
    guard = Guard(behind, AdminToken("right"), ClientKeys(["client-key"]))
    path, token = "/v1/chat/completions", [("authorization", "Bearer right")]
    assert (await ask(guard, "POST", path, token, "10.0.0.9")).status_code == 200
    assert (await ask(guard, "POST", path, [*token, ("x-api-key", "client-key")])).status_code == 200
    assert [caller for _, caller in behind.reached] == ["admin", "admin"]


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("OPTIONS", "/v1/chat/completions", [], 200),
        ("OPTIONS", "/v1/chat/completions", [("content-length", "0")], 200),
        ("OPTIONS", "/v1/chat/completions", [("content-length", "9")], 401),
        ("OPTIONS", "/v1/chat/completions", [("transfer-encoding", "chunked")], 401),
        ("POST", "/v1/chat/completions", [], 401),
        ("OPTIONS", "/admin/v1/workers", [], 401),
    ],
)
async def test_a_browser_needs_no_key_to_ask_whether_a_page_may_send_one(
    method: str, path: str, more: list[tuple[str, str]], status: int
) -> None:
    guard = Guard(Behind(), AdminToken("right"), ClientKeys(["client-key"]))
    asked = [("origin", "https://page.example"), ("access-control-request-method", "POST"), *more]
    assert (await ask(guard, method, path, asked)).status_code == status


async def test_a_generated_token_is_announced_once_and_works_from_this_machine_only() -> None:
    said: list[str] = []
    token = AdminToken("", said.append)
    assert len(said) == 1
    shown = said[0].rsplit(" ", 1)[1]
    assert len(shown) >= 32
    guard = Guard(Behind(), token, ClientKeys())
    headers = [("authorization", f"Bearer {shown}")]
    for peer, status in (("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("10.0.0.9", 403)):
        assert (await ask(guard, "GET", "/admin/v1/workers", headers, peer)).status_code == status, peer
    forwarded = [*headers, ("x-forwarded-for", "127.0.0.1")]
    assert (await ask(guard, "GET", "/admin/v1/workers", forwarded)).status_code == 403
    assert AdminToken("given", said.append).generated is False
    assert len(said) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("authorization", "Bearer k2")], 200),
        ([("x-api-key", "k2")], 200),
        ([("authorization", "Bearer nope"), ("x-api-key", "k1")], 200),
        ([("authorization", "Bearer nope")], 401),
        ([("authorization", "Basic k1")], 401),
        ([("authorization", "Bearer ")], 401),
        ([("authorization", "Bearer right")], 200),
    ],
)
async def test_client_keys_in_both_headers(headers: list[tuple[str, str]], status: int) -> None:
    guard = Guard(Behind(), AdminToken("right"), ClientKeys(["k1", "k2"]))
    answer = await ask(guard, "POST", "/v1/chat/completions", headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/metrics"):
        assert (await ask(guard, "GET", path)).status_code == 200


async def test_anthropic_paths_get_their_shape() -> None:
    guard = Guard(Behind(), AdminToken("right"), ClientKeys(["k1"]))
    answer = await ask(guard, "POST", "/v1/messages")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["type"] == "error"


async def test_without_keys_everybody_may_ask_and_admin_is_recognised() -> None:
    behind = Behind()
    guard = Guard(behind, AdminToken("right"), ClientKeys())
    await ask(guard, "GET", "/v1/models")
    await ask(guard, "GET", "/v1/models", [("authorization", "Bearer right")])
    assert behind.reached == [("/v1/models", "anonymous"), ("/v1/models", "admin")]


async def test_admin_on_a_port_of_its_own() -> None:
    guard = Guard(Behind(), AdminToken("right"), ClientKeys(), admin_port=9000)
    right = [("authorization", "Bearer right")]
    table = [
        ("/admin/v1/workers", 8000, 404),
        ("/admin/v1/workers", 9000, 200),
        ("/v1/models", 8000, 200),
        ("/v1/models", 9000, 404),
        ("/health", 8000, 200),
        ("/metrics", 9000, 200),
    ]
    for path, port, status in table:
        assert (await ask(guard, "GET", path, right, port=port)).status_code == status, (path, port)


async def test_b105_no_credential_in_logs_or_answers(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(Behind(), AdminToken("right"), ClientKeys(["k1"]))
    with caplog.at_level(logging.DEBUG):
        for path in ("/admin/v1/workers", "/v1/models"):
            answer = await ask(guard, "GET", path, [("authorization", "Bearer SENTINEL")])
            assert "SENTINEL" not in answer.text
    assert "SENTINEL" not in caplog.text


def test_the_keys_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\n  k1  \n\nk2 name=ci tenant=team-a\nk3\ttenant=b\n", "utf-8")
    keys = ClientKeys.load(str(file))
    assert keys.find(b"k1") == ClientKey("sha256:" + hashlib.sha256(b"k1").hexdigest()[:12])
    assert keys.find(b"k2") == ClientKey("ci", "team-a")
    assert keys.find(b"k3") == ClientKey("sha256:" + hashlib.sha256(b"k3").hexdigest()[:12], "b")
    assert keys.find(b"# team a") is None
    assert keys.find(b"") is None
    assert not ClientKeys.load("").required
    file.write_text("# nothing\n", "utf-8")
    with pytest.raises(BadKeysFile, match="holds no key"):
        ClientKeys.load(str(file))
    file.write_text("k1 SECRET\n", "utf-8")
    with pytest.raises(BadKeysFile, match="only name=NAME and tenant=TENANT may follow a key") as caught:
        ClientKeys.load(str(file))
    assert "SECRET" not in str(caught.value)
    with pytest.raises(BadKeysFile, match="cannot be read"):
        ClientKeys.load(str(tmp_path / "gone"))


def test_repeated_headers_are_all_seen() -> None:
    headers = [(b"X-API-Key", b"a"), (b"authorization", b"BEARER b"), (b"x-api-key", b" c "), (b"x", b"d")]
    assert credentials(headers) == [b"a", b"b", b"c"]
