"""A lean mock of a vLLM worker: one protocol class, answers prepared beforehand, bodies only counted.

    python bench/wire/worker.py PORT MODEL_DIRECTORY EVENTS_PORT REPLAY_PORT

What the answer is, the request's `user` field says, which every router passes on: `whole` (default),
`burst-N` (N chunks back to back) or `paced-N-MS`, whose chunks say when they were sent: `created` is the
machine's monotonic clock in nanoseconds.
"""

import asyncio
import json
import re
import sys
import time

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_USER = re.compile(rb'"user" ?: ?"(burst|paced)-(\d+)(?:-(\d+))?"')
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":%017d,"model":"m","choices":['
    b'{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT % 0), _EVENT)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 10, "total_tokens": 14, "completion_tokens": 4},
    }
).encode()


class Mock(asyncio.Protocol):
    """Pages are answered by path; a POST for them is read and then answered too."""

    def __init__(self, pages: dict[bytes, bytes]) -> None:
        self.pages = pages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.parts: list[bytes] = []
        self.have = 0
        self.want = -1

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.have += len(data)
        while True:
            if self.want < 0:
                head = b"".join(self.parts)
                end = head.find(b"\r\n\r\n")
                if end < 0:
                    self.parts = [head]
                    return
                length = _LENGTH.search(head, 0, end)
                if b"100-continue" in head[:end]:
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self.want = end + 4 + (int(length[1]) if length else 0)
                self.path = head[: head.find(b"\r\n")].split(b" ")[1]
            if self.have < self.want:
                return
            request = b"".join(self.parts)
            self.parts, self.have = [request[self.want :]], self.have - self.want
            body, self.want = request[: self.want], -1
            self.answer(body)
            if not self.have:
                self.parts = []
                return

    def answer(self, request: bytes) -> None:
        page = self.pages.get(self.path)
        if self.path.endswith(b"/render"):
            # 4.2 characters a token, and the same ids in front of every prompt.
            page = b'{"token_ids":[%b0]}' % (b"17," * (len(request) // 4))
        if page is not None or not self.path.startswith(b"/v1/"):
            found = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(_JSON % (len(page), page) if page is not None else found)
            return
        user = _USER.search(request)
        if user is None:
            self.transport.write(_JSON % (len(_ANSWER), _ANSWER))
        elif user[1] == b"burst":
            self.transport.write(_STREAM)
            for _ in range(int(user[2])):
                self.transport.write(_CHUNK % 0)
            self.transport.write(_END)
        else:
            self.transport.write(_STREAM)
            self.later(int(user[2]), int(user[3]) / 1e3)

    def later(self, left: int, pause_s: float) -> None:
        if self.transport.is_closing():
            return
        if left == 0:
            self.transport.write(_END)
            return
        self.transport.write(_CHUNK % time.monotonic_ns())
        asyncio.get_running_loop().call_later(pause_s, self.later, left - 1, pause_s)


def pages(model: str, events_port: int, replay_port: int) -> dict[bytes, bytes]:
    card = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm", "root": model, "parent": None}
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{events_port}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        "topic": "",
    }
    metrics = (
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",'
        'prefix_caching_hash_algo="sha256_cbor"} 1.0\nvllm:num_requests_running{engine="0"} 0.0\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\nprocess_start_time_seconds 1.7e+09\n'
    )
    return {
        b"/health": b"",
        b"/v1/models": json.dumps({"object": "list", "data": [card | {"max_model_len": 1 << 20}]}).encode(),
        b"/metrics": metrics.encode(),
        b"/kv_event_sources": json.dumps({"0": source}).encode(),
        b"/is_sleeping": b'{"is_sleeping":false}',
        b"/load": b'{"server_load":0}',
        b"/version": b'{"version":"0.32.0"}',
        b"/get_model_info": json.dumps({"model_path": model, "is_generation": True}).encode(),
        b"/get_server_info": json.dumps({"model_path": model, "served_model_name": "m"}).encode(),
        b"/server_info": json.dumps({"model_path": model, "served_model_name": "m"}).encode(),
        b"/model_info": json.dumps({"model_path": model, "is_generation": True}).encode(),
    }


async def serve(port: int, model: str, events_port: int, replay_port: int) -> None:
    known = pages(model, events_port, replay_port)
    server = await asyncio.get_running_loop().create_server(
        lambda: Mock(known), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
