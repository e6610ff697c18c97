"""The same sessions on live workers and in the replay: the same hits, and the same order of policies?

    .venv/bin/python bench/replay.py [--quick] [--engine vllm]

Three workers with and without a Mooncake pool, simulated ones or real vLLM on the CPU. Each session goes
from one to the next; on simulated workers then by three policies, through a gateway in a process of its own.
Prompts are token ids, so that all know their lengths exactly; live hit rates are the engines' own counts,
live times those of the client. Simulated workers are slow, so that what a busy machine adds is little beside
it. Real vLLM is asked one turn at a time: how fast the CPU is would decide else what is in use at once, and
so what is evicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from policies.registry import make, reads
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
from workers.launch.server import Server
from workers.launch.supervisor import Supervised

WORKERS, SIZE, OBJECT = 3, 32, 4 << 10
HEAD, FIRST, NEW, ANSWER = 640, 1_000, 400, 8
# Of simulated workers and of the replay.
PREFILL_TOK_S, PULL_TOK_S, STEP_S, DECODE_SEQ_S = 6_000, 40_000, 0.02, 0.002
# In the replay, what HTTP and the gateway take until a turn is in the engine.
OVERHEAD_S = 0.01
# In the replay of turns that are asked one at a time: each is over long before the next.
SERIAL_S = 600.0
# Where turns meet, chance decides who comes first, and everything after: so there are this many replays, with
# thinking times that differ by such a share.
REPLAYS, UNSTEADY = 9, 0.01
ROTATION, POLICIES = "rotation", ("round_robin", "longest_prefix", "expected_ttft")
# Hit rates so near are equal, and so are figures of two policies that are apart by such a share.
SAME_HITS, SAME_SHARE = 0.02, 0.05
Engine = Literal["sim", "vllm"]


@dataclass(frozen=True, slots=True)
class Size:
    """blocks: KV cache of each worker. think_s: from an answer to the session's next turn; 0: all sessions
    take turns, one at a time."""

    name: str
    sessions: int
    turns: int
    blocks: int
    think_s: float = 0.0


# Without a pool round_robin comes back to a worker that has since held too many others, while most fit where
# they stay. The next session's turn comes when most are over, so that chance has no part in who comes next.
CALM = Size("calm", 8, 10, 300, 3.0)
# Turns meet on workers, and holders are busy.
CROWDED = Size("crowded", 14, 10, 900, 1.0)
FULL = {"sim": (CALM, CROWDED), "vllm": (Size("one at a time", 20, 10, 400),)}
QUICK = {"sim": (CALM,), "vllm": (Size("one at a time", 14, 6, 400),)}


@dataclass(frozen=True, slots=True)
class Figures:
    """hit_rate: share of prompt tokens; ttft_p50_s: median over turns."""

    hit_rate: float
    ttft_p50_s: float


def ids(first: int, session: int, turns: int) -> list[int]:
    """A prompt after so many turns: `HEAD` tokens that all with that first one have, then its own."""
    own = FIRST - HEAD + NEW * (turns - 1)
    head = [first, *range(101, 100 + HEAD)]
    return head + [(session * 7919 + place * 31) % 800 + 100 for place in range(own)]


def as_trace(sessions: int, turns: int, think_s: float, seed: int) -> Trace:
    """The same for the replay. Answers are not part of later prompts."""
    found: list[Session] = []
    draws = Random(seed)
    for number in range(sessions):
        asked: list[Asked] = []
        for turn in range(turns):
            tokens, own = FIRST + NEW * turn, (number + 1) * KEY_SPACE
            unseen = own + KEY_SPACE // 2 + 1000 * turn
            blocks = tokens // SIZE
            head = range(1, 1 + HEAD // SIZE)
            chain = Pieces([head, range(own, own + blocks - len(head)), range(unseen, unseen + 2)])
            thinks_s = think_s * (1 + UNSTEADY * draws.uniform(-1, 1))
            asked.append(Asked(chain, tokens, ANSWER, thinks_s))
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


def replays(by: str, size: Size, *, pool: bool) -> list[Figures]:
    return [replay(by, size, seed, pool=pool) for seed in range(REPLAYS)]


def middle(runs: Sequence[Figures]) -> Figures:
    return Figures(median(each.hit_rate for each in runs), median(each.ttft_p50_s for each in runs))


def replay(by: str, size: Size, seed: int, *, pool: bool) -> Figures:
    figures = {
        "block_size": SIZE,
        "block_bytes": OBJECT,
        "hbm_tokens": (size.blocks - 1) * SIZE,
        "segment_bytes": 64 << 20,
        "prefill_tok_s": PREFILL_TOK_S,
        "step_s": STEP_S,
        "decode_seq_s": DECODE_SEQ_S,
        "network_bytes_s": PULL_TOK_S * OBJECT // SIZE,
        "host_bytes_s": PULL_TOK_S * OBJECT // SIZE,
        "overhead_s": OVERHEAD_S,
    }
    profile = profiles.load("qwen3-32b-2xh100", figures)
    think_s = size.think_s or SERIAL_S
    trace = as_trace(size.sessions, size.turns, think_s, seed)
    fleet = Fleet(profile, WORKERS, "owner" if pool else None)
    load = Load(size.sessions, ramp_s=think_s)
    policy, goes_by = (Rotation(), "all") if by == ROTATION else (make(by), reads(by))
    run = Run(trace, fleet, load, policy, 0, [0.0] * size.sessions, reads=goes_by).run()
    least = bounds(trace, fleet.profiles, size.sessions)
    found = measure(run, ideal_hits(trace), least, trace.block_size, WORKERS, 0.0)
    return Figures(found.hit_rate, found.ttft_p50_s)


def plan_of(engine: Engine, size: Size, logs: Path, directory: Path, *, pool: bool) -> Plan:
    slow = (
        f"--prefill-tok-s={PREFILL_TOK_S}",
        f"--step-ms={1e3 * STEP_S}",
        f"--decode-seq-ms={1e3 * DECODE_SEQ_S}",
        f"--kv-bytes-per-token={OBJECT // SIZE}",
        f"--pull-gb-s={PULL_TOK_S * OBJECT / SIZE / 1e9}",
        f"--block-bytes={OBJECT}",
    )
    fleet = LocalFleet(
        engine=engine,
        workers=WORKERS,
        mooncake=None if pool else "off",
        port=next(free_ports(above=28_000)),
        directory=logs,
        blocks=size.blocks,
        worker_args=slow if engine == "sim" else (),
    )
    model = local_model("", ROOT / ".moongate" / "models")
    return Plan.make(fleet, model, directory, logs=logs, cache=ROOT / ".moongate" / "cache")


def gateway_of(plan: Plan, policy: str) -> tuple[str, Server]:
    """Its URL, too. It believes the workers' rates from the start, as the replay's does."""
    rates = {
        "PREFILL_TOKENS_PER_S": PREFILL_TOK_S,
        "GROWTH_PER_1K": 0,
        "OWN_TOKENS_PER_S": PULL_TOK_S,
        "REMOTE_TOKENS_PER_S": PULL_TOK_S,
        "FIRST_STEP_MS": 1e3 * (STEP_S + OVERHEAD_S),
        "DECODE_MS": 1e3 * DECODE_SEQ_S,
    }
    env = {f"MOONGATE_ROUTING__RATES__{key}": str(value) for key, value in rates.items()}
    # Another program may have taken the last one's port.
    fleet = replace(plan.fleet, port=next(free_ports(above=28_000)), gateway_args=("--policy", policy))
    server = replace(plan, fleet=fleet).gateway("bench")
    return fleet.url, replace(server, env={**server.env, **env})


async def live(
    engine: Engine, logs: Path, size: Size, *, pool: bool
) -> AsyncGenerator[tuple[str, Figures], None]:
    """By whom turns were placed, and what came of it, one after the other on one fleet."""
    with TemporaryDirectory(dir=logs) as directory:
        plan = plan_of(engine, size, logs, Path(directory), pool=pool)
        running: list[Supervised] = []
        try:
            for process in [*([plan.master()] if pool else []), *plan.workers()]:
                running.append(process)
                await process.start()
            urls = [f"http://127.0.0.1:{ports.http}" for ports in plan.worker_ports]
            # A server may close a connection just when it is used again.
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
                # Each has prompts that begin with another token: nobody finds in the pool what others left.
                model = plan.model.name
                rotation = Client(http, model, 90, lambda session, turn: urls[_worker(session, turn)])
                yield ROTATION, await _measured(rotation, urls, size)
                for number, policy in enumerate(POLICIES if engine == "sim" else (), start=91):
                    await _empty(http, urls)
                    url, gateway = gateway_of(plan, policy)
                    running.append(gateway)
                    await gateway.start()
                    client = Client(http, model, number, lambda _session, _turn, url=url: url)
                    yield policy, await _measured(client, urls, size)
                    await gateway.stop(10.0)
                    running.pop()
        finally:
            for process in reversed(running):
                await process.stop(10.0)


@dataclass(slots=True)
class Client:
    """Asks turns of sessions, by `where` each, and keeps their times to the first token."""

    http: aiohttp.ClientSession
    model: str
    first: int
    where: Callable[[int, int], str]
    ttft_s: list[float] = field(default_factory=list[float])

    async def ask(self, session: int, turn: int) -> None:
        body = {
            "model": self.model,
            "prompt": ids(self.first, session, turn + 1),
            "max_tokens": ANSWER,
            "ignore_eos": True,
            "stream": True,
        }
        url, headers = f"{self.where(session, turn)}/v1/completions", {"x-session-id": f"s{session}"}
        asked = time.perf_counter()
        async with self.http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.content.readuntil(b"\n\n")
            self.ttft_s.append(time.perf_counter() - asked)
            rest = await answer.read()
            assert rest.endswith(b"data: [DONE]\n\n"), rest


async def _measured(client: Client, urls: Sequence[str], size: Size) -> Figures:
    before = [await _counts(client.http, url) for url in urls]
    await _drive(client, size)
    after = [await _counts(client.http, url) for url in urls]
    queries, hits = (
        sum(now[place] - then[place] for now, then in zip(after, before, strict=True)) for place in (0, 1)
    )
    return Figures(hits / queries, median(client.ttft_s))


async def _drive(client: Client, size: Size) -> None:
    async def one(number: int) -> None:
        await asyncio.sleep(size.think_s * number / size.sessions)
        for turn in range(size.turns):
            await client.ask(number, turn)
            await asyncio.sleep(size.think_s)

    if size.think_s:
        await asyncio.gather(*(one(number) for number in range(size.sessions)))
        return
    for turn in range(size.turns):
        for number in range(size.sessions):
            await client.ask(number, turn)


async def _empty(http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    for url in urls:
        async with http.post(f"{url}/reset_prefix_cache") as answer:
            assert answer.status == 200, await answer.text()


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


def otherwise(live: Mapping[str, float], replay: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs of names of which live another one has more than in the replay. Figures that are apart by
    less than `SAME_SHARE` on both sides count as equal."""

    def apart(figures: Mapping[str, float], pair: tuple[str, str]) -> float:
        one, other = (figures[name] for name in pair)
        return (one - other) / (max(one, other) or 1.0)

    found: list[tuple[str, str]] = []
    for pair in combinations(live, 2):
        here, there = apart(live, pair), apart(replay, pair)
        if max(abs(here), abs(there)) >= SAME_SHARE and here * there <= 0:
            found.append(pair)
    return found


def verdict(live: Mapping[str, Figures], replay: Mapping[str, Figures]) -> dict[str, bool]:
    placed = [name for name in live if name != ROTATION]
    same = {
        "hits_within_2_points": all(abs(live[n].hit_rate - replay[n].hit_rate) <= SAME_HITS for n in live)
    }
    for what in ("hit_rate", "ttft_p50_s") if placed else ():
        here, there = ({name: getattr(side[name], what) for name in placed} for side in (live, replay))
        same[f"same_order_by_{what}"] = not otherwise(here, there)
    return same


def span(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def row(by: str, live: Figures, runs: Sequence[Figures]) -> str:
    hits = span([100 * each.hit_rate for each in runs], ".1f")
    times = span([each.ttft_p50_s for each in runs], ".3f")
    near = "yes" if abs(live.hit_rate - middle(runs).hit_rate) <= SAME_HITS else "NO"
    return f"{by:15} {100 * live.hit_rate:6.1f}  {hits:21} {near:17} {live.ttft_p50_s:10.3f}  {times}"


async def compare(engine: Engine, logs: Path, size: Size, *, pool: bool) -> dict[str, Any]:
    """Prints a table; returns its figures."""
    with_pool = "with" if pool else "without"
    print(f"{size.name}, {with_pool} a pool: {size.sessions} sessions, {size.turns} turns")
    print(f"{'placed by':15} hits %  {'replay':21} {'within 2 points':17} TTFT p50 s  replay")
    found: dict[str, Figures] = {}
    predicted: dict[str, Figures] = {}
    async with aclosing(live(engine, logs, size, pool=pool)) as measured:
        async for by, figures in measured:
            runs = replays(by, size, pool=pool)
            found[by], predicted[by] = figures, middle(runs)
            print(row(by, figures, runs), flush=True)
    same = verdict(found, predicted)
    print(", ".join(f"{what.replace('_', ' ')}: {'yes' if is_so else 'NO'}" for what, is_so in same.items()))
    return {
        "live": {by: asdict(each) for by, each in found.items()},
        "replay": {by: asdict(each) for by, each in predicted.items()},
        **same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sessions, about 60 s of CPU")
    parser.add_argument(
        "--engine",
        choices=("sim", "vllm"),
        default="sim",
        help="real vLLM takes minutes, and make setup-vllm",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sizes = (QUICK if args.quick else FULL)[args.engine]
    logs = ROOT / ".moongate" / "bench-replay"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for size, pool in product(sizes, (False, True)):
        try:
            compared = asyncio.run(compare(args.engine, logs, size, pool=pool))
        except FileNotFoundError as missing:
            sys.exit(str(missing))
        found[f"{size.name}, {'pool' if pool else 'no pool'}"] = compared
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
