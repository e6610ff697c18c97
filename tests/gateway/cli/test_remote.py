"""How the commands find a gateway, and tell it from something else."""

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from gateway.auth import AdminToken, ClientKeys, Guard
from gateway.cli.options import running
from gateway.cli.remote import RemoteError, RunningGateway, base_url
from tests.gateway.cli.site import serving


def test_nobody_at_the_url_is_told_with_how_to_start_a_gateway() -> None:
    with socket.socket() as held:  # bound, so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        with (
            RunningGateway(f"127.0.0.1:{held.getsockname()[1]}", "") as gateway,
            pytest.raises(RemoteError, match=r"no gateway answers at .* \(connection refused\)") as told,
        ):
            gateway.get("/admin/v1/workers")
    assert "moongate serve" in told.value.fix


async def test_something_else_at_the_url_is_no_gateway() -> None:
    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    async with serving(page) as url:
        with RunningGateway(url, "") as gateway, pytest.raises(RemoteError, match="is no gateway"):
            await asyncio.to_thread(gateway.get, "/admin/v1/workers")


async def test_the_public_port_of_a_gateway_whose_admin_has_its_own_is_told_as_such() -> None:
    async def admin(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing gets there by the wrong port")

    async with serving(Guard(admin, AdminToken("right"), ClientKeys(), admin_port=1)) as url:
        with RunningGateway(url, "right") as gateway, pytest.raises(RemoteError) as told:
            await asyncio.to_thread(gateway.get, "/admin/v1/workers")
    assert told.value.why == "/admin/v1/workers answered 404: not served on this port"
    assert "admin.port" in told.value.fix


@pytest.mark.parametrize(
    "given", ["gate:8000", "http://gate:8000", "http://gate:8000/", "gate:8000/v1", "http://gate:8000/v1/"]
)
def test_a_url_may_be_written_as_clients_have_it(given: str) -> None:
    assert base_url(given) == "http://gate:8000"
    assert base_url("https://gate/prefix/v1") == "https://gate/prefix"


@pytest.mark.parametrize(
    ("host", "asked"),
    [("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("10.0.0.1", "10.0.0.1")],  # noqa: S104
)
def test_a_gateway_is_asked_where_its_settings_say_that_it_listens(
    host: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONGATE_SERVER__HOST", host)
    with running(None, "t", None) as gateway:
        assert gateway.url == f"http://{asked}:8000"
