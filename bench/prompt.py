"""What a turn's prompt costs the gateway: parse, render, tokenize, hash; cold, next turn, identical repeat.

    .venv/bin/python bench/prompt.py [--quick]

The vocabulary (120,000 tokens) is a byte-level BPE trained once on Python sources at hand, with the word
split and the ChatML template of the local model; it is kept in .moongate/bench. Conversations are made of
such sources: a 12 KB system prompt, 14 tools, turns of a tool call (2 KB) and its result (6 KB). Times are
medians; CPU is that of all threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import numpy as np
from tokenizers import Tokenizer

from gateway.api.bodies import Bodies
from gateway.api.parse import parse
from store.hashing import HashAlgo, HashScheme, chain
from store.prompt.fast import FastEncoder
from store.prompt.local import LocalPrompts
from store.prompt.request import PromptRequest
from workers.launch.byte_level import special, train_byte_level
from workers.launch.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, WORDS

VOCABULARY = 120_000
CORPUS_CHARACTERS = 25_000_000
MODEL = Path(__file__).resolve().parent.parent / ".moongate" / "bench" / f"prompt-{VOCABULARY}"
SCHEME = HashScheme("sha256_cbor", 16)
SYSTEM_CHARACTERS = 12_000
TURN_CHARACTERS = 8_000
SIZES = {"8k": 8_000, "80k": 80_000, "160k": 160_000}
STAGES = ("parse", "render", "rest", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under 60 s")
    quick: bool = parser.parse_args().quick
    make_model(MODEL)
    began = time.perf_counter()
    prompts = LocalPrompts.load(str(MODEL), cache_bytes=512 << 20)
    loaded = time.perf_counter()
    FastEncoder.prove(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    proven = time.perf_counter()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"load {loaded - began:.1f} s, of that fast encoder found and proven in {proven - loaded:.1f} s\n")
    rounds = 5 if quick else 15
    bodies = Bodies(128 << 20)
    rows = {name: measure(prompts, bodies, tokens, rounds) for name, tokens in SIZES.items()}
    hash_us = {algo: hashing(algo, rounds) for algo in get_args(HashAlgo)}
    per_token = memory()
    report(rows)
    shown = ", ".join(f"{us:.2f} ({algo})" for algo, us in hash_us.items())
    print(f"\nhashing, us per block of 16: {shown}; cache: {per_token:.1f} bytes per cached token")
    result = {
        "warm_80k_cpu_ms": rows["80k"]["warm"]["total"],
        "repeat_80k_cpu_ms": rows["80k"]["repeat"]["total"],
        "cold_80k_ms": rows["80k"]["cold"]["wall"],
        "cache_bytes_per_token": per_token,
        "hash_us_per_block16": hash_us[SCHEME.algo],
        "warm_8k_cpu_ms": rows["8k"]["warm"]["total"],
        "warm_160k_cpu_ms": rows["160k"]["warm"]["total"],
        **{f"hash_us_per_block16_{algo}": us for algo, us in hash_us.items()},
        "vocabulary": VOCABULARY,
    }
    print("RESULT " + json.dumps({key: round(value, 3) for key, value in result.items()}))


def measure(prompts: LocalPrompts, bodies: Bodies, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in ms: `cold` (a conversation never seen), `warm` (its next turn), `repeat` (that again)."""
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        conversation = Conversation(tokens)
        first, following = conversation.body(), conversation.next_turn()
        for kind, body in (("cold", first), ("warm", following), ("repeat", following)):
            for stage, value in timed(prompts, bodies, body).items():
                samples.setdefault(kind, {}).setdefault(stage, []).append(value)
    return {kind: {k: statistics.median(v) for k, v in stages.items()} for kind, stages in samples.items()}


def timed(prompts: LocalPrompts, bodies: Bodies, body: bytes) -> dict[str, float]:
    """CPU ms of each stage, and the wall time of all."""
    wall, start = time.perf_counter(), time.process_time()
    request = read(body, bodies)
    parsed = time.process_time()
    plan = prompts.plan(request, SCHEME)
    planned = time.process_time()
    prompt = prompts.finish(plan)
    end = time.process_time()
    assert len(prompt.tokens) // SCHEME.block_size == len(prompt.chain)
    seconds = {
        "parse": parsed - start,
        "render": planned - parsed,
        "rest": end - planned,
        "total": end - start,
        "wall": time.perf_counter() - wall,
        "tokens": len(prompt.tokens) / 1e3,
    }
    return {stage: value * 1e3 for stage, value in seconds.items()}


def read(body: bytes, bodies: Bodies) -> PromptRequest:
    request = parse("POST", "/v1/chat/completions", body, bodies=bodies).prompt
    assert request is not None
    return request


def hashing(algo: HashAlgo, rounds: int) -> float:
    """Microseconds per block of 16 tokens, 80,000 tokens at once, one thread."""
    scheme = HashScheme(algo, 16, "0")
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 80_000).astype(np.uint32)
    seconds = median_cpu(lambda: chain(ids, scheme), rounds * 3)
    return seconds / (len(ids) // scheme.block_size) * 1e6


def memory() -> float:
    """Bytes per token of a full cache, of 40 sessions that each grow to 20K tokens."""
    prompts, bodies = LocalPrompts.load(str(MODEL), cache_bytes=4 << 20), Bodies(1 << 20)
    for _ in range(40):
        conversation = Conversation(10_000)
        for _ in range(4):
            prompts.prompt(read(conversation.next_turn(), bodies), SCHEME)
    return (prompts.cached_bytes + bodies.bytes) / prompts.cached_tokens


def median_cpu(work: Callable[[], object], rounds: int) -> float:
    found: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found)


def report(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'':>6} {'':>7} {'tokens':>8} {'parse':>8} {'render':>8} {'rest':>8} {'total':>8}  {'wall':>8}")
    for name, kinds in rows.items():
        for kind, stages in kinds.items():
            cells = " ".join(f"{stages[stage]:8.2f}" for stage in STAGES)
            print(f"{name:>6} {kind:>7} {stages['tokens']:8.0f} {cells}  {stages['wall']:8.2f}")
    print("ms of CPU; rest: tokenizing and hashing what is new")


class Conversation:
    """One session of about `tokens` tokens that nobody has seen before."""

    numbers = itertools.count()

    def __init__(self, tokens: int) -> None:
        self.number = next(self.numbers)
        self.text = source_text(self.number)
        # 4.2 characters a token of this vocabulary on this text.
        size = int(tokens * 4.2) - SYSTEM_CHARACTERS
        system = f"Session {self.number}.\n" + self.take(SYSTEM_CHARACTERS)
        task = {"role": "user", "content": "Find out why the tests fail."}
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}, task]
        while size > 0:
            size -= self.add_turn()

    def add_turn(self) -> int:
        """A tool call and its result."""
        quarter = TURN_CHARACTERS // 4
        arguments = json.dumps({"path": f"file{len(self.messages)}.py", "text": self.take(quarter)})
        function = {"name": "tool_3", "arguments": arguments}
        call = {"id": "call_1", "type": "function", "function": function}
        self.messages += (
            {"role": "assistant", "content": "I look at that.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": self.take(3 * quarter)},
        )
        return TURN_CHARACTERS

    def body(self) -> bytes:
        body = {"model": "m", "messages": self.messages, "tools": tools(), "stream": True}
        return json.dumps(body, ensure_ascii=False).encode()

    def next_turn(self) -> bytes:
        self.add_turn()
        return self.body()

    def take(self, characters: int) -> str:
        return "".join(itertools.islice(self.text, characters))


def source_text(start: int) -> Iterator[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in itertools.islice(itertools.cycle(files), start * 7 % len(files), None):
        yield from path.read_text(encoding="utf-8", errors="ignore")


def tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": "Does one thing to a file of the project and says what came of it. " * 3,
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": "string", "description": key * 5} for key in ("path", "text")
                    },
                    "required": ["path"],
                },
            },
        }
        for number in range(14)
    ]


def make_model(directory: Path) -> None:
    """Train the tokenizer unless it is there: 10 to 20 s, once."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_byte_level(training_text(), WORDS, VOCABULARY, special(*SPECIAL_TOKENS))
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": "olmo2"}), encoding="utf-8")


def training_text() -> Iterator[str]:
    left = CORPUS_CHARACTERS
    for place in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(place)).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")[:100_000]
            yield text
            left -= len(text)
            if left <= 0:
                return


if __name__ == "__main__":
    main()
