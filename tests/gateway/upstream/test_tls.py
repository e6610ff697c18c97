"""https:// workers: who is believed, what a stranger gets to see, and whose end of an answer counts."""

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from gateway.upstream.authorities import AuthorityWatch
from gateway.upstream.connections import Connections
from gateway.upstream.http1 import UpstreamError
from peer import ADMIN, Connection, Peer, Received
from workers.connecting import Authorities, BadAuthorities, trusting
from workers.fleet import Fleet
from workers.probe import Probe


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with key.pem and cert.pem, of a worker at 127.0.0.1."""
    return signed(tmp_path_factory.mktemp("tls"))


def signed(where: Path) -> Path:
    ask = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=worker"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*ask.split(), *names], cwd=where, check=True, capture_output=True)
    return where


@pytest.fixture
def shown(certificate: Path) -> ssl.SSLContext:
    """What a worker shows."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return tls


async def answering(request: Received, connection: Connection) -> None:
    await connection.answer(200, request.body)


def connections(certificate: Path | None, connect_s: float = 20.0) -> Connections:
    tls = trusting(str(certificate / "cert.pem")) if certificate else trusting()
    return Connections(tls=tls, connect_s=connect_s, between_chunks_s=20.0)


async def error_of(connections: Connections, url: str) -> UpstreamError:
    with pytest.raises(UpstreamError) as raised:
        await connections.open("POST", url, b"/v1/x", [(b"authorization", b"Bearer secret")], b"prompt")
    await connections.close()
    return raised.value


async def test_a_worker_whose_authority_is_named_gets_large_bodies_over_one_connection(
    certificate: Path, shown: ssl.SSLContext
) -> None:
    peer = await Peer(answering).start(tls=shown)
    transport = connections(certificate)
    for _ in range(2):
        response = await transport.open("POST", peer.url, b"/v1/x", [], b"x" * 1_000_000)
        got = b""
        while part := await response.read():
            got += part
        assert got == b"x" * 1_000_000
    assert [r.header("host") for r in peer.received] == [[f"127.0.0.1:{peer.port}"]] * 2
    await transport.close()
    await peer.stop()


async def test_authorities_that_are_renewed_on_disk_are_believed_without_a_restart(
    certificate: Path, shown: ssl.SSLContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ca.pem"
    (tmp_path / "before").mkdir()
    file.write_bytes((signed(tmp_path / "before") / "cert.pem").read_bytes())
    authorities = Authorities(str(file))
    assert not authorities.renew()
    peer = await Peer(answering).start(tls=shown)
    transport = Connections(tls=authorities.context, connect_s=20.0, between_chunks_s=20.0)
    with pytest.raises(UpstreamError) as raised:
        await transport.open("POST", peer.url, b"/v1/x", [], b"")
    assert raised.value.kind == "tls"
    watch = AuthorityWatch(authorities, every_s=0.01)
    with caplog.at_level("INFO"):
        watch.start()
        for content, says in ((b"not yet", "holds no certificate"), (None, "has changed and is read")):
            part = tmp_path / "part"
            part.write_bytes(content or (certificate / "cert.pem").read_bytes())
            part.replace(file)
            async with asyncio.timeout(20.0):
                while says not in caplog.text:
                    await asyncio.sleep(0.01)
    response = await transport.open("POST", peer.url, b"/v1/x", [], b"prompt")
    assert await response.read() == b"prompt"
    # Each change is said once.
    assert len(caplog.records) == 2
    await watch.close()
    await transport.close()
    await peer.stop()


@pytest.mark.parametrize(
    ("whom", "why"),
    [
        ("stranger", "its certificate is not trusted: self-signed certificate"),
        ("another", "its certificate is not trusted: IP address mismatch"),
    ],
)
async def test_nothing_is_sent_to_whom_it_is_not_for(
    certificate: Path, shown: ssl.SSLContext, whom: str, why: str
) -> None:
    peer = await Peer(answering).start(tls=shown)
    url = f"https://127.0.0.{2 if whom == 'another' else 1}:{peer.port}"
    if whom == "another":
        forward = await asyncio.start_server(_to(peer.port), "127.0.0.2", peer.port)
    error = await error_of(connections(None if whom == "stranger" else certificate), url)
    if whom == "another":
        forward.close()
    assert (error.kind, error.why[: len(why)]) == ("tls", why)
    assert peer.received == []
    await peer.stop()


async def test_a_worker_without_tls_is_told_from_one_that_nobody_believes() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    error = await error_of(connections(None), url)
    assert (error.kind, error.why) == ("tls", "it speaks no TLS there, and its URL is https")
    fleet = Fleet()
    worker, probe = fleet.add(url), Probe(fleet, timeout_s=20, tls=trusting())
    await probe.probe(worker)
    await probe.close()
    assert (worker.state, worker.reason) == ("down", error.why)
    server.close()


def _to(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A relay to that port of 127.0.0.1: the same server under another address."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, outer), copy(inner, writer), return_exceptions=True)

    return relay


async def test_a_handshake_that_hangs_costs_what_connecting_may_take_and_leaves_nothing() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert (await error_of(connections(None, 0.1), f"https://127.0.0.1:{port}")).kind == "connect_timeout"
    await asyncio.wait_for(gone.wait(), 20)
    server.close()


@contextmanager
def _ending(shown: ssl.SSLContext, *, signed: bool) -> Iterator[int]:
    """The port of a worker whose answer lasts until it closes, with TLS's own word for that or without."""

    def serve() -> None:
        accepted, _ = listener.accept()
        with shown.wrap_socket(accepted, server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")
            if signed:
                with suppress(ssl.SSLError):  # the other side only closes
                    connection.unwrap()
            else:
                socket.socket(fileno=connection.detach()).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(20)


@pytest.mark.parametrize("signed", [True, False])
def test_an_answer_that_lasts_until_its_end_is_whole_only_where_the_worker_signed_that(
    certificate: Path, shown: ssl.SSLContext, signed: bool
) -> None:
    """On the server's own loop: asyncio's tells nobody which of the two it was."""

    async def read(port: int) -> bytes:
        transport = connections(certificate)
        response = await transport.open("POST", f"https://127.0.0.1:{port}", b"/v1/x", [], b"{}")
        got = b""
        while part := await response.read():
            got += part
        await transport.close()
        return got

    with _ending(shown, signed=signed) as port, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if signed:
            assert runner.run(read(port)) == b"half of it"
        else:
            with pytest.raises(UpstreamError, match="reset"):
                runner.run(read(port))


async def test_turns_and_probes_believe_the_same_authorities(
    front, certificate: Path, shown: ssl.SSLContext
) -> None:
    peer = await Peer(answering).start(tls=shown)
    trusted = await front(
        peer,
        env={
            "MOONGATE_WORKERS__CA_FILE": str(certificate / "cert.pem"),
            "MOONGATE_WORKERS__API_KEY": "worker-key",
        },
    )
    async with trusted.client.post(f"{trusted.url}/v1/x", data=b"{}") as answer:
        assert (answer.status, await answer.read()) == (200, b"{}")
    assert peer.received[0].header("authorization") == ["Bearer worker-key"]
    await peer.stop()


async def test_a_worker_that_is_not_believed_is_down_and_says_why(
    front, shown: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    peer, other = await Peer(answering).start(tls=shown), await Peer(answering).start()
    gate = await front(other, env={"MOONGATE_WORKERS__API_KEY": "worker-key"})
    worker = gate.gateway.fleet.add(peer.url, "stranger")
    await gate.until(lambda: bool(worker.misses))
    async with gate.client.get(f"{gate.url}/admin/v1/workers/stranger", headers=ADMIN) as answer:
        said = await answer.json()
    assert (said["state"], said["reason"]) == (
        "down",
        "its certificate is not trusted: self-signed certificate",
    )
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "worker stranger is down: its certificate is not trusted: self-signed certificate" in warned
    assert peer.received == []
    await peer.stop()
    await other.stop()


def test_a_file_of_authorities_that_can_not_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate")
    for file, why in ((empty, "holds no certificate in PEM form"), (tmp_path / "none", "No such file")):
        with pytest.raises(BadAuthorities, match=why):
            trusting(str(file))
