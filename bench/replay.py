"""The same sessions on live workers and in the replay: do they find the same cached?

    .venv/bin/python bench/replay.py [--quick] [--engine vllm]

Three workers, simulated ones or real vLLM on the CPU, each session from one to the next, with and without a
Mooncake pool. Prompts are token ids, so that both know their lengths exactly; the live fleet's hit rates are
the engines' own counts. Real vLLM is asked one turn at a time: how fast the CPU is would decide else what
is in use at once, and so what is evicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from policies.types import Candidate, Decision, Turn, action_of
from replay import profile as profiles
from replay.bounds import bounds
from replay.chains import Pieces
from replay.driver import Fleet, Load, Run
from replay.measure import ideal_hits, measure
from replay.traces.types import KEY_SPACE, Asked, Session, Trace
from workers.launch.model import local_model
from workers.launch.plan import LocalFleet, Plan
from workers.launch.ports import free_ports
from workers.launch.supervisor import Supervised

WORKERS, SIZE, BLOCKS, OBJECT = 3, 32, 400, 16 << 10
HEAD, FIRST, NEW, ANSWER, THINK_S = 640, 1_000, 400, 8, 0.2
# In the replay of turns that are asked one at a time: each is over long before the next.
SERIAL_S = 60.0
Engine = Literal["sim", "vllm"]


def ids(session: int, turns: int) -> list[int]:
    """A prompt after so many turns: `HEAD` tokens that all have, then its own."""
    own = FIRST - HEAD + NEW * (turns - 1)
    return [*range(100, 100 + HEAD), *((session * 7919 + place * 31) % 800 + 100 for place in range(own))]


def as_trace(sessions: int, turns: int, think_s: float) -> Trace:
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
            asked.append(Asked(chain, tokens, ANSWER, think_s))
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


def replayed(sessions: int, turns: int, *, pool: bool, serial: bool) -> float:
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
    think_s = SERIAL_S if serial else THINK_S
    trace = as_trace(sessions, turns, think_s)
    fleet = Fleet(profile, WORKERS, "owner" if pool else None)
    load = Load(sessions, ramp_s=think_s)
    run = Run(trace, fleet, load, Rotation(), 0, [0.0] * sessions).run()
    least = bounds(trace, fleet.profiles, sessions)
    return measure(run, ideal_hits(trace), least, trace.block_size, WORKERS, 0.0).hit_rate


async def live(engine: Engine, logs: Path, sessions: int, turns: int, *, pool: bool) -> float:
    fleet = LocalFleet(
        engine=engine,
        workers=WORKERS,
        mooncake=None if pool else "off",
        port=next(free_ports(above=28_000)),
        directory=logs,
        blocks=BLOCKS,
    )
    with TemporaryDirectory(dir=logs) as directory:
        model = local_model("", ROOT / ".moongate" / "models")
        plan = Plan.make(fleet, model, Path(directory), logs=logs, cache=ROOT / ".moongate" / "cache")
        running: list[Supervised] = []
        try:
            for process in [*([plan.master()] if pool else []), *plan.workers()]:
                running.append(process)
                await process.start()
            urls = [f"http://127.0.0.1:{ports.http}" for ports in plan.worker_ports]
            async with aiohttp.ClientSession() as http:
                before = [await _counts(http, url) for url in urls]
                await _drive(http, urls, model.name, sessions, turns, serial=engine == "vllm")
                after = [await _counts(http, url) for url in urls]
        finally:
            for process in reversed(running):
                await process.stop(10.0)
    queries, hits = (
        sum(now[place] - then[place] for now, then in zip(after, before, strict=True)) for place in (0, 1)
    )
    return hits / queries


async def _drive(
    http: aiohttp.ClientSession, urls: Sequence[str], model: str, sessions: int, turns: int, *, serial: bool
) -> None:
    async def ask(number: int, turn: int) -> None:
        body = {"model": model, "prompt": ids(number, turn + 1), "max_tokens": ANSWER, "ignore_eos": True}
        url = urls[_worker(number, turn)]
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    async def one(number: int) -> None:
        await asyncio.sleep(THINK_S * number / sessions)
        for turn in range(turns):
            await ask(number, turn)
            await asyncio.sleep(THINK_S)

    if not serial:
        await asyncio.gather(*(one(number) for number in range(sessions)))
        return
    for turn in range(turns):
        for number in range(sessions):
            await ask(number, turn)


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
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim", help="real vLLM takes minutes")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sessions, turns = (14, 6) if args.quick else (20, 10)
    logs = ROOT / ".moongate" / "bench-replay"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, float] = {}
    for pool in (False, True):
        name = "pool" if pool else "no_pool"
        measured = asyncio.run(live(args.engine, logs, sessions, turns, pool=pool))
        began = time.perf_counter()
        predicted = replayed(sessions, turns, pool=pool, serial=args.engine == "vllm")
        found |= {f"{name}_live_hit_rate": measured, f"{name}_replay_hit_rate": predicted}
        print(
            f"{name:8} live {100 * measured:5.1f} %   replay {100 * predicted:5.1f} %"
            f"   ({time.perf_counter() - began:.2f} s)",
            flush=True,
        )
    print("RESULT " + json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
