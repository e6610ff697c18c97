"""Other names for a model: only the bytes of its name change, and every API knows them."""

import asyncio
import json
from pathlib import Path

import pytest
from conftest import QUICK, serving
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.aliases import Aliases
from gateway.api.forms import field_span
from gateway.api.parse import parse
from gateway.errors import InvalidRequest
from gateway.settings import ModelSettings, SettingsError, load
from peer import ADMIN, Connection, Received

FORM = b"multipart/form-data; boundary=XX"


def form(*parts: tuple[str, bytes]) -> bytes:
    lines = [
        b"--XX\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (name.encode(), value)
        for name, value in parts
    ]
    return b"".join(lines) + b"--XX--\r\n"


def sent(body: bytes, alias: str = "gpt", model: str = "a/b", path: str = "/v1/chat/completions") -> bytes:
    aliases = Aliases({model: ModelSettings(aliases=[alias])}, set)
    parsed, changed = aliases.resolved(parse("POST", path, body), body, b"")
    assert parsed.model == model
    return changed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":"gpt","messages":[]}', b'{"model":"a/b","messages":[]}'),
        (b'{ "messages" : [ ], "model"\t:\n"gpt" }', b'{ "messages" : [ ], "model"\t:\n"a/b" }'),
        (
            b'{"metadata":{"model":"gpt"},"model":"gpt","messages":[{"role":"user","content":"\\"model\\":\\"gpt\\""}],'
            b'"tools":[{"model":"gpt"}]}',
            b'{"metadata":{"model":"gpt"},"model":"a/b","messages":[{"role":"user","content":"\\"model\\":\\"gpt\\""}],'
            b'"tools":[{"model":"gpt"}]}',
        ),
        (b'{"model":"x","model":"gpt","messages":[]}', b'{"model":"x","model":"a/b","messages":[]}'),
        (b'{"model":"g\\u0070t","messages":[]}', b'{"model":"a/b","messages":[]}'),
        (b'{"model":"gpt","messages":[],"x":NaN}', b'{"model":"a/b","messages":[],"x":NaN}'),
        (b'{"mod\\u0065l":"gpt","messages":[]}', b'{"mod\\u0065l":"a/b","messages":[]}'),
        (
            b'{"model":"gpt","messages":[],"x":[' + b'{"model":"gpt"},' * 100_000 + b"1]}",
            b'{"model":"a/b","messages":[],"x":[' + b'{"model":"gpt"},' * 100_000 + b"1]}",
        ),
    ],
)
def test_only_the_models_name_changes(before: bytes, after: bytes) -> None:
    assert sent(before) == after


def test_a_name_that_cannot_be_found_is_said_so() -> None:
    with pytest.raises(InvalidRequest, match="plain UTF-8"):
        sent('{"model":"gpt","messages":[]}'.encode("utf-16"))
    with pytest.raises(InvalidRequest):
        sent(b'{"mod\\u0065l":"gpt","messages":[],"x":{"model":NaN}}')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just("gpt"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("model"), inner),
    max_leaves=20,
)


@given(
    before=st.dictionaries(st.text(), JSON),
    after=st.dictionaries(st.text(), JSON),
    alias=st.text(min_size=1),
    ascii_only=st.booleans(),
)
def test_b028_whatever_else_is_in_the_body_stays_as_it_is(
    before: dict[str, object], after: dict[str, object], alias: str, ascii_only: bool
) -> None:
    for part in (before, after):
        part.pop("model", None)
    whole = {**before, "model": alias, **after}
    body = json.dumps(whole, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    changed = sent(body, alias, "größer/Modell-7b", "/v1/embeddings")
    assert json.loads(changed.decode("utf-8", "surrogatepass")) == {**whole, "model": "größer/Modell-7b"}
    # One stretch of bytes was exchanged for another.
    name = '"größer/Modell-7b"'.encode()
    at = next(i for i in range(len(changed)) if changed[i:].startswith(name) and body.startswith(changed[:i]))
    assert body.endswith(changed[at + len(name) :])


def test_a_field_of_a_form_is_found_among_files() -> None:
    body = form(
        ('name="file"; filename="name=model"', b'\r\n--X\r\nname="model"\r\n\r\nno\x00\xff'),
        ('name="model"', b"gpt"),
        ('name="language"', b"en"),
    )
    assert body[slice(*(field_span(body, FORM, b"model") or (0, 0)))] == b"gpt"
    assert body[slice(*(field_span(body, FORM, b"language") or (0, 0)))] == b"en"
    assert field_span(body, FORM, b"prompt") is None
    assert field_span(body, b"application/json", b"model") is None
    assert field_span(b"no form at all", FORM, b"model") is None
    assert field_span(body[:40], FORM, b"model") is None
    quoted = b'multipart/form-data; charset=utf-8; boundary="XX"'
    assert field_span(body, quoted, b"model") == field_span(body, FORM, b"model")


@given(st.binary(max_size=300), st.binary(max_size=80))
def test_no_form_breaks_the_reader(body: bytes, content_type: bytes) -> None:
    field_span(body, content_type, b"model")
    field_span(b"--XX" + body, FORM, b"model")


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}')


CONFIG = '[models."m"]\naliases = ["gpt-4", "größtes"]\n'


async def test_b028_b080_every_api_takes_an_alias_and_the_list_shows_it(peers, tmp_path: Path) -> None:
    peer = await peers(say_ok)
    file = tmp_path / "moongate.toml"
    file.write_text(CONFIG, "utf-8")
    flags = {"workers.urls": [peer.url], "admin.token": "admin-token"}
    async with serving(load(file, QUICK, flags)) as gate:
        await gate.until(lambda: all(w.state == "up" for w in gate.gateway.fleet.workers()))
        audio = form(('name="file"; filename="a.wav"', b"RIFF\x00\xff" * 9), ('name="model"', b"gpt-4"))
        for path, body, kind in (
            ("/v1/chat/completions", '{"model":"größtes","messages":[]}'.encode(), b"application/json"),
            ("/v1/messages", b'{"model":"gpt-4","messages":[],"max_tokens":1}', b"application/json"),
            ("/v1/responses", b'{"input":"x","model":"gpt-4"}', b"application/json"),
            ("/v1/embeddings", b'{"model":"gpt-4","input":"x"}', b"application/json"),
            ("/v1/audio/transcriptions", audio, FORM),
        ):
            headers = {"content-type": kind.decode()}
            async with gate.client.post(gate.url + path, data=body, headers=headers) as answer:
                assert answer.status == 200
            got = peer.received[-1]
            assert got.body == body.replace(b'"gpt-4"', b'"m"').replace('"größtes"'.encode(), b'"m"').replace(
                b"\r\n\r\ngpt-4\r\n", b"\r\n\r\nm\r\n"
            )
            assert got.header("content-length") == [str(len(got.body))]
            assert got.header("content-type") == [kind.decode()]
        async with gate.client.get(f"{gate.url}/v1/models") as answer:
            entries = {entry["id"]: entry for entry in (await answer.json())["data"]}
        assert set(entries) == {"m", "gpt-4", "größtes"}
        assert entries["gpt-4"] == entries["m"] | {"id": "gpt-4"}
        async with gate.client.get(f"{gate.url}/v1/models/gpt-4") as answer:
            assert (await answer.json())["root"] == "/nowhere"
        body = b'{"model":"gpt-4","messages":[]}'
        async with gate.client.post(
            f"{gate.url}/admin/v1/explain", data=body, headers=ADMIN | {"content-type": "application/json"}
        ) as answer:
            assert (await answer.json())["model"] == "m"
        async with gate.client.get(f"{gate.url}/metrics") as answer:
            assert 'moongate_requests_total{api="chat",model="m",outcome="ok"} 1.0' in await answer.text()


async def test_b028_lengths_on_the_wire_are_those_of_what_is_sent(peers, tmp_path: Path) -> None:
    async def answer(request: Received, connection: Connection) -> None:
        kind = json.loads(request.body)["kind"]
        if kind == "stream":
            await connection.start_stream()
            await connection.chunk("data: größer\n\ndata: [DONE]\n\n".encode())
            await connection.end_stream()
        else:
            await connection.answer(int(kind), '{"said":"größer"}'.encode(), "content-type: application/json")

    peer = await peers(answer, "größer/Modell-7b")
    file = tmp_path / "moongate.toml"
    file.write_text('[models."größer/Modell-7b"]\naliases = ["g", "ein viel längerer Name als der eigene"]\n')
    flags = {"workers.urls": [peer.url], "admin.token": "admin-token"}
    async with serving(load(file, QUICK, flags)) as gate:
        await gate.until(lambda: all(w.state == "up" for w in gate.gateway.fleet.workers()))
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        for alias in ("g", "ein viel längerer Name als der eigene"):
            for kind in ("200", "400", "stream"):
                ask = json.dumps({"model": alias, "kind": kind, "messages": []}, ensure_ascii=False).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(ask)}\r\n\r\n"
                writer.write(head.encode() + ask)
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                framing = [line for line in lines if line.startswith(("content-length", "transfer-encoding"))]
                if kind == "stream":
                    assert framing == ["transfer-encoding: chunked"]
                    assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                else:
                    assert framing == ["content-length: 19"]
                    assert await reader.readexactly(19) == '{"said":"größer"}'.encode()
                got = peer.received[-1]  # the worker read as many bytes as its length line said
                assert json.loads(got.body) == {**json.loads(ask), "model": "größer/Modell-7b"}
        writer.close()
        assert len(peer.received) == 6


def test_a_name_means_one_model(tmp_path: Path) -> None:
    file = tmp_path / "moongate.toml"
    for text in (
        '[models.a]\naliases = ["x"]\n[models.b]\naliases = ["x"]\n',
        '[models.a]\naliases = ["b"]\n[models.b]\n',
    ):
        file.write_text(text, "utf-8")
        with pytest.raises(SettingsError, match="is a name of"):
            load(file, {}, {})
