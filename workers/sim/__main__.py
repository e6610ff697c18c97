"""`python -m workers.sim`: one simulated worker in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, get_args

import uvloop

from store.hashing import HashAlgo, HashScheme
from store.keys import KeyLayout
from workers.sim.engine import Rates
from workers.sim.kv_publisher import BUFFER_STEPS
from workers.sim.life import Spec
from workers.sim.live import PullRates
from workers.sim.server import Worker

# As the real local worker of this project: one request of the tiny model's full context, and some room.
_BLOCKS = 4224


def parser() -> argparse.ArgumentParser:
    rates, pull = Rates(), PullRates()
    parser = argparse.ArgumentParser(prog="python -m workers.sim", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model directory: its tokenizer and template are used")
    add("--served-model-name", nargs="+", default=[], help="default: the directory's name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--events-port", type=int, default=0, help="default: port + 1")
    add("--replay-port", type=int, default=0, help="default: port + 2")
    add("--buffer-steps", type=int, default=BUFFER_STEPS, help="batches of KV events kept for replay")
    add("--control-port", type=int, default=0, help="the same server on a port that no fault touches")
    add("--mooncake-master", default="off", help="HOST:PORT, or off: no pool")
    add("--segment", default="", help="own segment's name IP:PORT; default: host and port + 3")
    add("--segment-size", type=int, default=64 << 20, help="bytes given to the pool")
    add("--block-bytes", type=int, default=16 << 10, help="bytes of a block's object in the pool")
    add("--blocks", type=int, default=_BLOCKS, help="vLLM's num_gpu_blocks")
    add("--block-size", type=int, default=32)
    add("--max-model-len", type=int, default=0, help="default: what model and cache allow")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--hash-algo", choices=get_args(HashAlgo), default="sha256_cbor")
    add("--prefill-tok-s", type=float, default=rates.prefill_tok_s)
    add("--decode-tok-s", type=float, default=0.0, help="of one turn alone; sets --step-ms")
    add("--step-ms", type=float, default=rates.step_s * 1e3)
    add("--decode-seq-ms", type=float, default=rates.decode_seq_s * 1e3, help="added to a step by each turn")
    add("--pull-gb-s", type=float, default=pull.gb_s)
    add("--pull-floor-ms", type=float, default=pull.floor_s * 1e3)
    add("--kv-bytes-per-token", type=int, default=pull.kv_bytes_per_token)
    add("--seed", type=int, default=0, help="of the answers")
    add("--answer-tokens", type=int, default=256, help="mean length of an answer that ends by itself")
    add("--no-render", action="store_true", help="refuse /render, as vLLM without --enable-scale-out")
    return parser


def spec(args: argparse.Namespace) -> Spec:
    """Raises ValueError."""
    seq_s = args.decode_seq_ms / 1e3
    step_s = args.step_ms / 1e3
    if args.decode_tok_s:
        step_s = 1 / args.decode_tok_s - seq_s
        if step_s <= 0:
            raise ValueError("--decode-seq-ms alone takes longer than --decode-tok-s allows")
    most = (args.blocks - 1) * args.block_size
    model = args.model.resolve()
    return Spec(
        model=model,
        names=tuple(args.served_model_name) or (model.name,),
        host=args.host,
        port=args.port,
        events_port=args.events_port or args.port + 1,
        replay_port=args.replay_port or args.port + 2,
        control_port=args.control_port,
        buffer_steps=args.buffer_steps,
        scheme=HashScheme(args.hash_algo, args.block_size, os.environ.get("PYTHONHASHSEED")),
        blocks=args.blocks,
        max_model_len=args.max_model_len or min(most, _positions(model) or most),
        max_seqs=args.max_num_seqs,
        step_tokens=args.max_num_batched_tokens,
        rates=Rates(args.prefill_tok_s, step_s, seq_s),
        pull=PullRates(args.pull_floor_ms / 1e3, args.pull_gb_s, args.kv_bytes_per_token),
        seed=args.seed,
        answer_tokens=args.answer_tokens,
        renders=not args.no_render,
    )


def _positions(model: Path) -> int:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int((config.get("text_config") or config).get("max_position_embeddings") or 0)


async def _run(spec: Spec, args: argparse.Namespace) -> None:
    pool = None
    if args.mooncake_master != "off":
        from workers.sim.pool import SimPool  # the store client's libraries are not everywhere

        pool = SimPool(
            args.mooncake_master,
            args.segment or f"{spec.host}:{spec.port + 3}",
            KeyLayout(str(spec.model)),
            block_bytes=args.block_bytes,
            segment_bytes=args.segment_size,
        )
        await asyncio.to_thread(pool.connect)
    worker = Worker(spec, pool)
    await worker.start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await worker.close()
    if pool is not None:
        # Mounted segments of a client that goes without a word stay in the pool until the master misses it.
        await asyncio.to_thread(pool.close)


def main() -> None:
    args = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        wanted = spec(args)
    except ValueError as wrong:
        sys.exit(f"python -m workers.sim: {wrong}")
    uvloop.run(_run(wanted, args))


if __name__ == "__main__":
    main()
