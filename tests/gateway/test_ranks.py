"""Data-parallel ranks behind one URL: who is asked, by which number, and what is left of ranks that go."""

import json
from collections import Counter

from peer import Connection, Peer, Received


def publishes(peer: Peer, *ranks: int) -> None:
    """As that many engines behind one server do; nobody listens at these ports."""
    source = {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:1"}
    peer.pages["/kv_event_sources"] = json.dumps({str(rank): source for rank in ranks}).encode()


async def good(request: Received, connection: Connection) -> None:
    """Like vLLM: of two ranks it refuses the third."""
    asked = request.header("x-data-parallel-rank")
    status = 200 if asked in ([], ["0"], ["1"]) else 400
    await connection.answer(status, b"{}", "content-type: application/json")


async def test_turns_go_to_the_ranks_by_the_numbers_that_their_server_knows(peers, front) -> None:
    first, second = await peers(good), await peers(good)
    publishes(first, 0, 1)
    publishes(second, 2, 3)
    gate = await front(first, second)
    targets: Counter[str] = Counter()
    # Of equals chance takes one: that one of four is left out of 64 happens once in 25 million runs.
    for _ in range(64):
        # A client has no say in it.
        headers = {"x-data-parallel-rank": "9"}
        async with gate.client.post(f"{gate.url}/v1/x", data=b"{}", headers=headers) as answer:
            assert answer.status == 200
    for record in gate.gateway.decisions.recent(64):
        targets[str(record.decision.target)] += 1
    ranks = ((first, 0), (first, 1), (second, 2), (second, 3))
    assert sorted(targets) == sorted(f"127.0.0.1:{peer.port}@{rank}" for peer, rank in ranks)
    for peer in (first, second):
        assert {rank for r in peer.received for rank in r.header("x-data-parallel-rank")} == {"0", "1"}


async def test_of_ranks_that_go_while_their_server_stays_nothing_is_left(peers, front) -> None:
    peer = await peers(good)
    publishes(peer, 0, 1, 2)
    gate = await front(peer)
    fleet, streams, name = gate.gateway.fleet, gate.gateway.streams, f"127.0.0.1:{peer.port}"
    gate.gateway.knowledge.index.stored(f"{name}@2", [1, 2, 3], None)
    publishes(peer, 0, 1)
    await gate.until(lambda: len(fleet.targets()) == 2)
    assert streams.status().keys() == {f"{name}@0", f"{name}@1"}
    assert gate.gateway.knowledge.index.sizes() == {}
    publishes(peer)
    await gate.until(lambda: len(fleet.targets()) == 1)
    assert streams.status().keys() == set()
    async with gate.client.post(f"{gate.url}/v1/x", data=b"{}") as answer:
        assert answer.status == 200
    assert peer.received[-1].header("x-data-parallel-rank") == []
