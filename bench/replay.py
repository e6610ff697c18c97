"""The same sessions on live simulated workers and in the replay: do they find the same cached?

    .venv/bin/python bench/replay.py [--quick]

Three simulated workers, each session from one to the next, with and without a Mooncake pool. Prompts are
token ids, so that both know their lengths exactly; the live fleet's hit rates are the engines' own counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from wire.targets import Target, Targets, await_ready

from policies.types import Candidate, Decision, Turn, action_of
from replay import profile as profiles
from replay.bounds import bounds
from replay.chains import Pieces
from replay.driver import Fleet, Load, Run
from replay.measure import ideal_hits, measure
from replay.traces.types import KEY_SPACE, Asked, Session, Trace
from workers.launch.mooncake import MooncakeMaster
from workers.launch.ports import free_ports
from workers.launch.sim import SimWorkerSpec, command
from workers.launch.tiny_model import make_tiny_model

WORKERS, SIZE, BLOCKS, OBJECT = 3, 32, 400, 16 << 10
HEAD, FIRST, NEW, ANSWER, THINK_S = 640, 1_000, 400, 8, 0.2
MODEL = "replayed"


def ids(session: int, turns: int) -> list[int]:
    """A prompt after so many turns: `HEAD` tokens that all have, then its own."""
    own = FIRST - HEAD + NEW * (turns - 1)
    return [*range(100, 100 + HEAD), *((session * 7919 + place * 31) % 800 + 100 for place in range(own))]


def as_trace(sessions: int, turns: int) -> Trace:
    """The same for the replay. Answers are not part of later prompts."""
    found: list[Session] = []
    for number in range(sessions):
        asked: list[Asked] = []
        for turn in range(turns):
            tokens, own = FIRST + NEW * turn, (number + 1) * KEY_SPACE
            unseen = own + KEY_SPACE // 2 + 1000 * turn
            blocks = tokens // SIZE
            head = range(1, 1 + HEAD // SIZE)
            chain = Pieces([head, range(own, own + blocks - len(head)), range(unseen, unseen + 2)])
            asked.append(Asked(chain, tokens, ANSWER, THINK_S))
        found.append(Session(f"s{number}", asked))
    return Trace(SIZE, found)


class Rotation:
    """A policy that sends each session from one target to the next, whoever comes first."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def __call__(self, turn: Turn, candidates: Sequence[Candidate]) -> Decision:
        place = self._turns[turn.session] = self._turns.get(turn.session, -1) + 1
        chosen = candidates[_worker(int(turn.session[1:]), place)]
        return Decision(chosen.target, action_of(chosen), "", "rotation", tuple(candidates))


def _worker(session: int, turn: int) -> int:
    # Two turns on each, so that there is something to be found in its own cache.
    return (session + turn // 2) % WORKERS


def replayed(sessions: int, turns: int, *, pool: bool) -> float:
    figures = {
        "block_size": SIZE,
        "block_bytes": OBJECT,
        "hbm_tokens": (BLOCKS - 1) * SIZE,
        "segment_bytes": 64 << 20,
        "step_s": 0.007,
        "decode_seq_s": 0.0007,
        "overhead_s": 0.0,
    }
    profile = profiles.load("qwen3-32b-2xh100", figures)
    trace = as_trace(sessions, turns)
    fleet = Fleet(profile, WORKERS, "owner" if pool else None)
    load = Load(sessions, ramp_s=THINK_S)
    run = Run(trace, fleet, load, Rotation(), 0, [0.0] * sessions).run()
    return measure(run, ideal_hits(trace), bounds(trace, fleet.profiles, sessions), WORKERS, 0.0).hit_rate


async def live(targets: Targets, ports: Any, logs: Path, sessions: int, turns: int, *, pool: bool) -> float:
    master = MooncakeMaster(rpc_port=next(ports), http_port=next(ports), log=logs / "master.log")
    if pool:
        await master.start()
    try:
        model = str(make_tiny_model(ROOT / ".moongate" / "models" / "tiny"))
        specs = [
            SimWorkerSpec(
                python=Path(sys.executable),
                model=model,
                port=next(ports),
                events_port=next(ports),
                replay_port=next(ports),
                segment_port=next(ports),
                mooncake=master.address if pool else None,
                served_model_name=MODEL,
                block_size=SIZE,
                blocks=BLOCKS,
            )
            for _ in range(WORKERS)
        ]
        for spec in specs:
            argv, env = command(spec)
            targets.run(f"worker-{spec.port}", argv[1:], **env)
        probe = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]})
        for spec in specs:
            await asyncio.to_thread(await_ready, Target(spec.url, spec.port), probe.encode())
        async with aiohttp.ClientSession() as http:
            before = [await _counts(http, spec.url) for spec in specs]
            await _drive(http, specs, sessions, turns)
            after = [await _counts(http, spec.url) for spec in specs]
    finally:
        await master.stop()
    queries, hits = (
        sum(now[place] - then[place] for now, then in zip(after, before, strict=True)) for place in (0, 1)
    )
    return hits / queries


async def _drive(http: aiohttp.ClientSession, specs: list[SimWorkerSpec], sessions: int, turns: int) -> None:
    async def one(number: int) -> None:
        await asyncio.sleep(THINK_S * number / sessions)
        for turn in range(turns):
            body = {"model": MODEL, "prompt": ids(number, turn + 1), "max_tokens": ANSWER, "ignore_eos": True}
            url = specs[_worker(number, turn)].url
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            await asyncio.sleep(THINK_S)

    await asyncio.gather(*(one(number) for number in range(sessions)))


async def _counts(http: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    queries = hits = 0.0
    async with http.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            value = float(line.rpartition(" ")[2]) if line.startswith("vllm:") else 0.0
            if line.startswith("vllm:prefix_cache_queries_total"):
                queries += value
            elif line.startswith(("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")):
                hits += value
    return queries, hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sessions, under 60 s")
    sessions, turns = (14, 6) if parser.parse_args().quick else (20, 10)
    logs = ROOT / ".moongate" / "logs" / "bench-replay"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, float] = {}
    for pool in (False, True):
        name = "pool" if pool else "no_pool"
        with Targets(logs) as targets:
            measured = asyncio.run(live(targets, free_ports(above=28_000), logs, sessions, turns, pool=pool))
        began = time.perf_counter()
        predicted = replayed(sessions, turns, pool=pool)
        found |= {f"{name}_live_hit_rate": measured, f"{name}_replay_hit_rate": predicted}
        print(
            f"{name:8} live {100 * measured:5.1f} %   replay {100 * predicted:5.1f} %"
            f"   ({time.perf_counter() - began:.2f} s)"
        )
    print("RESULT " + json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
