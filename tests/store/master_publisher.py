"""A Mooncake master with a KV-event publisher, as in its source: the wheel's is compiled without one."""

import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
from aiohttp import web


def event(kind: str, key: str | None, medium: str | None = "cpu", **more: Any) -> dict[str, Any]:
    """A map as the publisher packs it, with `kv_events_emit_legacy_compat`."""
    legacy = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
    fields = {
        "event_id": 1,
        "timestamp": 1_790_000_000_000,
        "event_type": kind,
        "type": legacy.get(kind, kind),
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "pool-a",
        "medium": medium,
        "dp_rank": 0,
    }
    if kind != "cleared":
        fields |= {"group_id": None, "seq_hashes": [], "block_hashes": [], "base_block_idx": None}
    if kind == "stored":
        fields |= {"parent_hash": None, "token_ids": None, "parent_block_hash": None}
    if key is not None:
        fields["object_key"] = key
    return fields | more


def payload(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1_790_000_000_000, events, 0])


class PublishingMaster:
    """One life: objects by key, the admin HTTP as far as it is asked, and the stream of what changes.

    The publisher numbers its batches from 1; `lost`: numbered and not sent.
    """

    def __init__(self) -> None:
        self.objects: set[str] = set()
        self.batches = self.dropped = self.evicted = 0
        self.enabled = True
        self._seq = 1
        self._pings = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set(zmq.LINGER, 0)
        self.http_port = 0

    def bind(self, port: int = 0) -> str:
        if not port:
            port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        else:
            self._pub.bind(f"tcp://127.0.0.1:{port}")
        return f"tcp://127.0.0.1:{port}"

    def put(self, *keys: str, lost: bool = False) -> None:
        self.objects |= {*keys}
        self.publish(*(event("stored", key) for key in keys), lost=lost)

    def evict(self, *keys: str, lost: bool = False) -> None:
        self.objects -= {*keys}
        self.evicted += len(keys)
        self.publish(*(event("removed", key) for key in keys), lost=lost)

    def clear(self) -> None:
        self.evicted += len(self.objects)
        self.objects.clear()
        self.publish(event("cleared", None, None))

    def publish(self, *events: dict[str, Any], lost: bool = False, raw: bytes | None = None) -> None:
        seq, self._seq = self._seq, self._seq + 1
        self.batches += 1
        if not lost:
            self._pub.send_multipart([b"", struct.pack(">Q", seq), raw or payload(*events)])

    def drop(self) -> None:
        """The queue overflows: an event is gone, and a number with it."""
        self.dropped += 1
        self._seq += 1

    def close(self) -> None:
        self._pub.close()
        self._context.destroy(linger=0)

    async def answer(self, request: web.Request) -> web.Response:
        self._pings += 1
        if request.path == "/health":
            return web.json_response({"role": "leader", "service_ready": True})
        if request.path == "/metrics":
            text = (
                f"master_key_count {len(self.objects)}\nmaster_ping_requests_total {self._pings}\n"
                f"master_evicted_key_count {self.evicted}\n"
            )
            return web.Response(text=text)
        if request.path == "/kv_events/status":
            return web.json_response(
                {
                    "enabled": self.enabled,
                    "published_batches": self.batches,
                    "published_events": self.batches,
                    "dropped_events": self.dropped,
                    "skipped_keyless_events": 0,
                }
            )
        if request.path == "/get_segments_detail":
            segment = {
                "segment_name": "127.0.0.1:7001",
                "te_endpoint": "127.0.0.1:7002",
                "client_id": "1-1",
                "status": "OK",
                "size_bytes": 1 << 24,
                "allocator_used_bytes": 0,
            }
            return web.json_response({"segments": [segment]})
        assert request.path == "/batch_query_keys"
        keys = [key for key in request.query["keys"].split(",") if key != "moongate"]
        there = {"ok": True, "values": [{"transport_endpoint_": "127.0.0.1:7002"}]}
        found = {key: there if key in self.objects else {"ok": False} for key in keys}
        return web.json_response({"success": True, "data": found})


@asynccontextmanager
async def publishing_master() -> AsyncGenerator[PublishingMaster]:
    master = PublishingMaster()
    application = web.Application(handler_args={"max_line_size": 1 << 20})

    async def answer(request: web.Request) -> web.Response:
        return await master.answer(request)

    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, max_line_size=1 << 20, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    master.http_port = runner.addresses[0][1]
    try:
        yield master
    finally:
        await runner.cleanup()
        master.close()
