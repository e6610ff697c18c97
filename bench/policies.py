"""What a decision costs: each policy at 8, 64 and 512 targets, candidates and all, and a shadow on top.

And what it is worth: times to first token of a replay, small enough for seconds; docs/evaluation.md has more.

python bench/policies.py [--quick]
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# The folder of this file, in which `policies` would be this file.
sys.path.pop(0)

from policies import registry
from policies.candidates import Standing, candidate
from policies.document import Document, read
from policies.ledger import Ledger
from policies.plan import NO_FACTS, Plan
from policies.shadow import Shadow
from policies.types import Candidate, Turn
from replay.experiment import Experiment
from replay.experiment import run as replay
from replay.measure import Measures

SIZES = (8, 64, 512)


def fleet(size: int, seed: int) -> list[Candidate]:
    """Targets in the middle of a day: some hold a prefix, some have a queue, all have a past."""
    draw = random.Random(seed)
    prefix = [draw.randrange(1000, 80_000) if draw.random() < 0.3 else 0 for _ in range(size)]
    queue = [draw.randrange(20_000) if draw.random() < 0.5 else 0 for _ in range(size)]
    recent = [draw.random() * 1e5 for _ in range(size)]
    return [
        Candidate(
            f"10.0.{i // 256}.{i % 256}:8000",
            local_tokens=prefix[i],
            pool_tokens=60_000,
            own_segment_tokens=draw.randrange(1000),
            queued_tokens=queue[i],
            queued_turns=int(queue[i] > 0),
            ahead_s=queue[i] / 20_480,
            inflight=draw.randrange(8),
            recent_tokens=recent[i],
            recent_s=recent[i] / 20_480,
        )
        for i in range(size)
    ]


def median_us(call: Callable[[int], object], rounds: int) -> float:
    times: list[float] = []
    for i in range(rounds):
        begun = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def shown(size: int, name: str, rounds: int) -> float:
    policy, fleets = registry.make(name), [fleet(size, seed) for seed in range(16)]
    turns = [Turn(80_000, i / 97 % 1, i, 32, f"s{i}", i + 1) for i in range(97)]
    return median_us(lambda i: policy(turns[i % 97], fleets[i % 16]), rounds)


def filled(size: int, rounds: int) -> float:
    """Candidates made of the ledger's load and rates, as the gateway does for each decision."""
    ledger, names = Ledger(), [f"w{i}" for i in range(size)]
    for name in names[::2]:
        for i in range(3):
            ledger.sent(Turn(5000, 0.0), Candidate(name), 0.3 * i).first_token(0.3 * i + 0.25)
        ledger.sent(Turn(5000, 0.0), Candidate(name), 1.0)

    def make(i: int) -> list[Candidate]:
        now = 1.0 + i * 1e-3
        return [
            candidate(name, ledger.load(name, now), ledger.rates(name, now), Standing()) for name in names
        ]

    return median_us(make, rounds)


def overhead(size: int, rounds: int) -> float:
    """A shadow of the cost model on every turn, its comparison included."""
    shadow = Shadow(Plan(read({"policy": "expected_ttft"})), time.perf_counter)
    plan, given = Plan(Document()), fleet(size, 1)
    turn = Turn(80_000, 0.3, 1, 32)
    decision = plan.decide(turn, given)
    return median_us(lambda _: shadow.observe(turn, given, NO_FACTS, decision), rounds)


def worth(policies: Sequence[str]) -> dict[str, Measures]:
    """48 Codex-like sessions at a time on 6 instances, with a pool whose blocks lie where they were made."""
    trace = Path(__file__).parent / "traces" / "codex_like_sessions.jsonl.gz"
    settings = Experiment(
        str(trace),
        "codex_like",
        "qwen3-32b-2xh100",
        6,
        pool=True,
        policies=policies,
        placement="owner",
        active=48,
        sessions=72,
    )
    return dict(replay(settings).measures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 300 if parser.parse_args().quick else 3000
    names = [*registry.names()]
    table = {name: [shown(size, name, max(50, rounds * 8 // size)) for size in SIZES] for name in names}
    print(f"{'median us a decision':24}" + "".join(f"{size:>10}" for size in SIZES))
    for name, row in table.items():
        print(f"{name:24}" + "".join(f"{value:10.1f}" for value in row))
    print(f"{'(load and rates read)':24}" + "".join(f"{filled(size, rounds // 3):10.1f}" for size in SIZES))
    shadow = [overhead(size, max(50, rounds * 8 // size)) for size in SIZES]
    print(f"{'(shadow)':24}" + "".join(f"{value:10.1f}" for value in shadow))
    print(f"\n{'replayed':24}" + "".join(f"{head:>10}" for head in ("p50 s", "p90 s", "p99 s", "max/mean")))
    measured = worth(["round_robin", "longest_prefix", "expected_ttft"])
    for name, m in measured.items():
        row = (m.ttft_p50_s, m.ttft_p90_s, m.ttft_p99_s, m.imbalance)
        print(f"{name:24}" + "".join(f"{value:10.3f}" for value in row))
    result = {
        "decide_64_us": round(table["expected_ttft"][1], 1),
        "shadow_overhead_us": round(shadow[1], 1),
        **{f"{name}_64_us": round(row[1], 1) for name, row in table.items()},
        **{f"{name}_ttft_p50_s": round(m.ttft_p50_s, 4) for name, m in measured.items()},
        **{f"{name}_ttft_p99_s": round(m.ttft_p99_s, 4) for name, m in measured.items()},
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
