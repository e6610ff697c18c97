"""Kill -9 of a real gateway process under load: what it knew is back at once, and none of it is false."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from store.hashing import HashScheme
from tests.ports import ports
from workers.sim.engine import Rates
from workers.sim.life import Spec
from workers.sim.live import PullRates
from workers.sim.server import Worker

PROJECT = Path(__file__).parents[3]
PORTS = ports(above=22_800)
BLOCK = 32
# Batches a worker can replay: more than happen while the gateway is away, fewer than happened before.
REPLAYED = 130
TOKEN = {"authorization": "Bearer admin-token"}


@dataclass
class Sim:
    name: str
    worker: Worker
    http: httpx.AsyncClient
    control: str

    async def turn(self, tokens: list[int], output: int = 1) -> int:
        """Cached tokens of a prompt sent past the gateway."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": output, "ignore_eos": True}
        answer = (await self.http.post("/v1/completions", json=body)).raise_for_status().json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def published(self) -> int:
        return self.worker._life.publisher.published


@asynccontextmanager
async def simulated(model: Path, blocks: int) -> AsyncIterator[Sim]:
    port, control = next(PORTS), next(PORTS)
    spec = Spec(
        model=model,
        names=("tiny",),
        host="127.0.0.1",
        port=port,
        events_port=next(PORTS),
        replay_port=next(PORTS),
        scheme=HashScheme("sha256_cbor", BLOCK, "1234"),
        blocks=blocks,
        max_model_len=4096,
        rates=Rates(prefill_tok_s=2e6, step_s=0.0005, decode_seq_s=0.0),
        pull=PullRates(),
        control_port=control,
        buffer_steps=REPLAYED,
    )
    worker = Worker(spec, None)
    await worker.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        yield Sim(f"127.0.0.1:{port}", worker, http, f"http://127.0.0.1:{control}")
    await worker.close()


class Life:
    """A gateway process."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
        self.process = process
        self.http = http

    async def credit(self, tokens: list[int]) -> dict[str, int]:
        """Local tokens that each worker is credited with for this prompt."""
        body = {"model": "tiny", "prompt": tokens}
        answer = await self.http.post("/admin/v1/explain?api=/v1/completions", json=body)
        return {c["target"]: c["local_tokens"] for c in answer.raise_for_status().json()["candidates"]}

    async def credits(self, prompts: list[list[int]]) -> dict[str, int]:
        summed: dict[str, int] = {}
        for prompt in prompts:
            for name, tokens in (await self.credit(prompt)).items():
                summed[name] = summed.get(name, 0) + tokens
        return summed

    async def index(self) -> dict[str, Any]:
        return (await self.http.get("/admin/v1/index")).raise_for_status().json()

    async def heard(self, *sims: Sim) -> None:
        """Everything that these workers published is applied."""
        async with asyncio.timeout(30):
            while not await self._has_heard(sims):
                await asyncio.sleep(0.02)

    async def _has_heard(self, sims: tuple[Sim, ...]) -> bool:
        last = {
            entry["target"]: -1 if entry["last_seq"] is None else entry["last_seq"]
            for entry in (await self.index())["targets"]
            if entry["stream"] == "exact"
        }
        return all(last.get(sim.name) == sim.published - 1 for sim in sims)


@asynccontextmanager
async def gateway(sims: list[Sim], snapshot: Path) -> AsyncIterator[Life]:
    env = {
        **os.environ,
        "MOONGATE_INDEX__SNAPSHOT_PATH": str(snapshot),
        "MOONGATE_INDEX__SNAPSHOT_INTERVAL_S": "0.2",
        "MOONGATE_INDEX__PROBES_PER_S": "0",
    }
    workers = [word for sim in sims for word in ("--worker", f"http://{sim.name}")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--admin-token", "admin-token"),
        *workers,
        cwd=PROJECT,
        env=env,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        url = line.split()[3].rstrip(",")
        async with httpx.AsyncClient(base_url=url, headers=TOKEN, timeout=30) as http:
            yield Life(process, http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def prompts(number: int, seed: int) -> list[list[int]]:
    draws = Random(seed)
    return [[draws.randrange(5, 900) for _ in range(draws.randrange(160, 500))] for _ in range(number)]


async def test_b009_b010_after_kill_9_local_credit_is_back_and_no_ghost_with_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    snapshot = tmp_path / "state" / "index"
    async with AsyncExitStack() as stack:
        roomy, other = [await stack.enter_async_context(simulated(tiny_model, 4000)) for _ in range(2)]
        small = await stack.enter_async_context(simulated(tiny_model, 400))
        sims = [roomy, other, small]
        known = prompts(40, seed=1)
        busy = True

        fronts: list[Life] = []

        async def load(draws: Random) -> None:
            """New and old turns, through the gateway while there is one, past it as well."""
            while busy:
                fresh = draws.random() < 0.7
                tokens = prompts(1, draws.randrange(1 << 30))[0] if fresh else draws.choice(known)
                with suppress(httpx.HTTPError):
                    if fronts and draws.random() < 0.5:
                        body = {"model": "tiny", "prompt": tokens, "max_tokens": 40, "ignore_eos": True}
                        await fronts[0].http.post("/v1/completions", json=body)
                    else:
                        await draws.choice(sims).turn(tokens, 40)
                await asyncio.sleep(0.15)

        async with gateway(sims, snapshot) as life:
            await life.heard(*sims)
            # A replay alone must not do. How many batches a turn is depends on how fast the machine is.
            for sim in sims:
                for tokens in [*known, *known, *known]:
                    await sim.turn(tokens, 120)
                    if sim.published > REPLAYED and tokens is known[-1]:
                        break
            await life.heard(*sims)
            assert all(sim.published > REPLAYED for sim in sims)
            fronts.append(life)
            running = asyncio.create_task(load(Random(2)))
            async with asyncio.timeout(30):
                while (await life.index())["snapshot"]["age_s"] is None:
                    await asyncio.sleep(0.05)
            before = await life.credits(known)
            fronts.clear()
            life.process.send_signal(signal.SIGKILL)
            await life.process.wait()
        assert before[roomy.name] == sum((len(tokens) - 1) // BLOCK * BLOCK for tokens in known)

        # While nobody listens one worker is replaced and all of them go on.
        async with httpx.AsyncClient() as http:
            await http.post(other.control + "/sim/faults", json={"restart": {"down_s": 0.1}})

        async with gateway(sims, snapshot) as life:
            await life.index()
            fronts.append(life)
            # The small worker's cache changes all the time, so only of this one it is known what it must be.
            # Neither a replay nor the turns of half a minute would bring that back.
            async with asyncio.timeout(30):
                while (await life.credits(known)).get(roomy.name, 0) < 0.95 * before[roomy.name]:
                    await asyncio.sleep(0.02)
            busy = False
            await running
            await life.heard(*sims)
            entries = {entry["target"]: entry for entry in (await life.index())["targets"]}
            assert entries[other.name]["last_seq"] < REPLAYED
            for sim in (other, small, roomy):
                for tokens in known:
                    await life.heard(sim)
                    credited = (await life.credit(tokens))[sim.name]
                    assert credited == await sim.turn(tokens), sim.name
