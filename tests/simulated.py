"""A simulated worker in the test's own process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from store.hashing import HashScheme
from workers.sim.engine import Rates
from workers.sim.life import Spec
from workers.sim.live import PullRates
from workers.sim.server import Worker

SCHEME = HashScheme("sha256_cbor", 32)
QUICK = Rates(prefill_tok_s=200_000.0, step_s=0.002, decode_seq_s=0.0001)


def spec_of(model: Path, ports: Iterator[int], **more: Any) -> Spec:
    """Of a quick worker called "tiny" with 64 blocks. more: fields of `Spec` that differ."""
    spec = Spec(
        model=model,
        names=("tiny",),
        host="127.0.0.1",
        port=next(ports),
        events_port=next(ports),
        replay_port=next(ports),
        scheme=SCHEME,
        blocks=64,
        max_model_len=2000,
        rates=QUICK,
        pull=PullRates(),
    )
    return replace(spec, **more)


@asynccontextmanager
async def served(spec: Spec, pool: Any = None) -> AsyncIterator[str]:
    """The URL of that worker, which runs meanwhile."""
    worker = Worker(spec, pool)
    await worker.start()
    try:
        yield f"http://127.0.0.1:{spec.port}"
    finally:
        await worker.close()


@asynccontextmanager
async def simulated(
    model: Path, ports: Iterator[int], *, blocks: int, max_model_len: int, **rates: float
) -> AsyncIterator[str]:
    """The URL of a worker without a pool. rates: where they differ from quick ones."""
    more = {"blocks": blocks, "max_model_len": max_model_len, "rates": replace(QUICK, **rates)}
    async with served(spec_of(model, ports, **more)) as url:
        yield url
