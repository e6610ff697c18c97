"""A simulated worker in the test's own process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from store.hashing import HashScheme
from workers.sim.engine import Rates
from workers.sim.life import Spec
from workers.sim.live import PullRates
from workers.sim.server import Worker


@asynccontextmanager
async def simulated(
    model: Path, ports: Iterator[int], *, blocks: int, max_model_len: int, **rates: float
) -> AsyncIterator[str]:
    """The URL of a worker called "tiny", without a pool. rates: where they differ from quick ones."""
    spec = Spec(
        model=model,
        names=("tiny",),
        host="127.0.0.1",
        port=next(ports),
        events_port=next(ports),
        replay_port=next(ports),
        scheme=HashScheme("sha256_cbor", 32),
        blocks=blocks,
        max_model_len=max_model_len,
        rates=Rates(**{"prefill_tok_s": 200_000.0, "step_s": 0.002, "decode_seq_s": 0.0001, **rates}),
        pull=PullRates(),
    )
    worker = Worker(spec, None)
    await worker.start()
    try:
        yield f"http://127.0.0.1:{spec.port}"
    finally:
        await worker.close()
