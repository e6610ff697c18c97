"""Requests and answers that two parsers could read in two ways get no further than the gateway."""

import asyncio
import json

from peer import Connection, Received

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
PATH = "/v1/chat/completions"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
SECOND = b"GET /v1/files/stolen HTTP/1.1\r\nhost: x\r\n\r\n"
FRAMED = b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)

AMBIGUOUS = {
    "length and chunks": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 0\r\n" + FRAMED,
    "a length twice": POST + b"content-length: %d\r\n" % len(CHAT) + FRAMED,
    "lengths in one line": POST + b"content-length: 2, 2\r\n\r\n{}",
    "signed length": POST + b"content-length: +2\r\n\r\n{}",
    "length in hex": POST + b"content-length: 0x2\r\n\r\n{}",
    "another coding": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunks inside a coding": POST + b"transfer-encoding: chunked, gzip\r\n\r\n" + CHUNKS,
    "blank before the colon": POST + b"transfer-encoding : chunked\r\n\r\n" + CHUNKS,
    "folded coding": POST + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "lone CR in a value": POST + b"a: b\rtransfer-encoding: chunked\r\n" + FRAMED,
    "lone LF": POST + b"a: b\ntransfer-encoding: chunked\r\n" + FRAMED,
    "zero in a value": POST + b"a: \0\r\n" + FRAMED,
    "zero in a name": POST + b"a\0: b\r\n" + FRAMED,
    "no name": POST + b": b\r\n" + FRAMED,
    "chunk size without CR": POST + b"transfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n",
    "chunk size with a sign": POST + b"transfer-encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
    "chunk longer than it says": POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "blank in the path": b"POST /v1/chat/completions x HTTP/1.1\r\nhost: x\r\n" + FRAMED,
}


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b"{}", "content-type: application/json")


async def test_an_ambiguous_request_is_a_400_and_neither_it_nor_what_follows_is_forwarded(
    peers, front
) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    for name, sent in AMBIGUOUS.items():
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        writer.write(sent + SECOND)
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.startswith(b"HTTP/1.1 400 "), name
        assert answer.count(b"HTTP/1.1") == 1, name
        assert b'"invalid_request_error"' in answer, name
        assert peer.received == [], name
        writer.close()


async def test_a_body_that_looks_like_a_request_is_a_body(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(f"{gate.url}/v1/files", data=SECOND * 3) as answer:
        assert answer.status == 200
    assert [received.body for received in peer.received] == [SECOND * 3]


GARBLED = {
    "no HTTP": b"garbage\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    "lone LF": b"HTTP/1.1 200 OK\r\na: b\nset-cookie: x\r\ncontent-length: 2\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 OK\r\ncontent-length: 2\r\n\r\n{}",
    "switches protocols": b"HTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
}


async def test_a_garbled_answer_is_a_502_that_says_so_and_another_worker_may_do_better(peers, front) -> None:
    answer = b""

    async def garble(_: Received, connection: Connection) -> None:
        await connection.send(answer)
        await connection.gone.wait()

    bad = await peers(garble)
    alone, both = await front(bad), await front(bad, await peers(say_ok))
    for name, garbled in GARBLED.items():
        answer = garbled
        async with alone.client.post(alone.url + PATH, data=CHAT) as got:
            error = (await got.json())["error"]
            assert (got.status, error["code"]) == (502, "upstream_failed"), name
            assert "HTTP" in error["message"], name
        async with both.client.post(both.url + PATH, data=CHAT) as got:
            assert (got.status, await got.read()) == (200, b"{}"), name


async def test_what_follows_an_answer_is_no_answer_to_the_next_turn(peers, front) -> None:
    async def twice(_: Received, connection: Connection) -> None:
        await connection.answer(200, b'{"n":1}')
        await connection.answer(200, b'{"stolen":1}')

    peer = await peers(twice)
    gate = await front(peer)
    for _ in range(3):
        async with gate.client.post(gate.url + PATH, data=CHAT) as got:
            assert (got.status, await got.read()) == (200, b'{"n":1}')
