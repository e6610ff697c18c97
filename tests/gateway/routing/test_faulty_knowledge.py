"""A fault in a source of knowledge costs turns that knowledge, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import Front

from peer import Connection, Peer, Received
from policies.sessions import Sessions
from pool_rig import PoolRig, pool_rig
from store.knowledge import Knowledge
from store.pool import PoolView


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[PoolRig]:
    with pool_rig(tmp_path_factory.mktemp("pool"), tiny_model) as rig:
        yield rig


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


@pytest.mark.parametrize(
    ("source", "owner", "question"),
    [("pool", PoolView, "prefix"), ("index", Knowledge, "match"), ("sessions", Sessions, "find")],
)
async def test_a_turn_is_placed_without_what_raises(
    rig: PoolRig, peers, front, monkeypatch: pytest.MonkeyPatch, source: str, owner: type, question: str
) -> None:
    worker: Peer = await peers(say_ok)
    rig.serve(worker)
    gate: Front = await front(worker, env=rig.env(worker))

    def broken(*_: Any, **__: Any) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(owner, question, broken)
    async with gate.client.post(f"{gate.url}/v1/chat/completions", json=rig.body(source)) as answer:
        assert answer.status == 200
        assert await answer.read() == b'{"ok":true}'
    async with gate.client.get(f"{gate.url}/metrics") as page:
        metrics = await page.text()
    assert f'moongate_knowledge_failures_total{{source="{source}"}} 1.0' in metrics
