"""One real vLLM worker: the exact command line and environment Moongate needs.

`command` is pure, so the same words serve to start a worker, to print it (`--dry-run`) and to test it.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.connecting import in_url

MOONCAKE_CONFIG = "mooncake.json"
# One request of the tiny model's full context, and some room.
BLOCKS = 4224
MAX_POSITIONS = 131_072


@dataclass(frozen=True, slots=True)
class VllmWorkerSpec:
    """What is particular to one worker. Ports must be free; every path absolute.

    `directory` is the worker's own: its working directory (unix sockets land there) and the place of its
    Mooncake configuration. `cache` outlives the worker and may be shared: what vLLM learned about the model
    (saves about 5 s at the next start). `mooncake` is the master's RPC address, None = no pool.
    `max_model_len` 0 = as long as the cache and the model's positions allow. `demonstration`: several share
    one machine's CPUs, with small caches; without it sizes are vLLM's to choose, and tools a matter of the
    model (`extra_args`).
    """

    python: Path
    model: str
    directory: Path
    cache: Path
    port: int
    events_port: int
    replay_port: int
    segment_port: int
    host: str = "127.0.0.1"
    mooncake: str | None = None
    served_model_name: str = ""
    block_size: int = 32
    blocks: int = BLOCKS
    max_model_len: int = 0
    max_positions: int = MAX_POSITIONS
    max_num_seqs: int = 16
    segment_bytes: int = 64 << 20
    buffer_bytes: int = 32 << 20
    hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256_cbor"
    hash_seed: str | None = None
    load_format: str = "dummy"
    offline: bool = True
    demonstration: bool = True
    extra_args: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    @property
    def name(self) -> str:
        """As a gateway calls a worker that is registered by its URL."""
        return f"{in_url(self.host)}:{self.port}"

    @property
    def segment(self) -> str:
        """Name of the worker's own segment in the pool; fixed, so that it can be mapped to the worker."""
        return f"{self.host}:{self.segment_port}"


def command(spec: VllmWorkerSpec) -> tuple[list[str], dict[str, str]]:
    """The argument vector, and the variables to lay over the environment (`UNSET` must be taken out of it).

    Does not write the Mooncake configuration: that is `mooncake_config`, in `directory / MOONCAKE_CONFIG`.
    """
    argv = [
        str(spec.python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={spec.model}",
        f"--served-model-name={spec.served_model_name or Path(spec.model).name}",
        f"--host={spec.host}",
        f"--port={spec.port}",
        f"--load-format={spec.load_format}",
        f"--block-size={spec.block_size}",
        *(_small(spec) if spec.demonstration else ()),
        "--enable-prefix-caching",
        f"--prefix-caching-hash-algo={spec.hash_algo}",
        "--enable-prompt-tokens-details",
        "--enable-server-load-tracking",
        "--enable-scale-out",
        "--enable-request-id-headers",
        "--disable-uvicorn-access-log",
        f"--kv-events-config={_compact(_events_config(spec))}",
    ]
    if spec.mooncake is not None:
        argv.append(f"--kv-transfer-config={_compact(_transfer_config(spec))}")
    return [*argv, *spec.extra_args], _environment(spec)


UNSET = ("PYTHONHASHSEED", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables a worker must not inherit: a hash seed only one of them sees splits the pool in two."""


def mooncake_config(spec: VllmWorkerSpec) -> dict[str, Any]:
    """Content of the file that MOONCAKE_CONFIG_PATH names."""
    return {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": spec.mooncake,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": spec.segment_bytes,
        "local_buffer_size": spec.buffer_bytes,
    }


def _small(spec: VllmWorkerSpec) -> list[str]:
    """Flags of a demonstration with the tiny model, or one that fits beside others."""
    return [
        "--enforce-eager",
        f"--num-gpu-blocks-override={spec.blocks}",
        f"--max-model-len={_max_model_len(spec)}",
        f"--max-num-seqs={spec.max_num_seqs}",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
    ]


def _max_model_len(spec: VllmWorkerSpec) -> int:
    # vLLM refuses to start when one request of the maximum length would not fit the cache; it keeps block 0.
    return spec.max_model_len or min(spec.max_positions, (spec.blocks - 1) * spec.block_size)


def _events_config(spec: VllmWorkerSpec) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{_bound(spec.host)}:{spec.events_port}",
        "replay_endpoint": f"tcp://{_bound(spec.host)}:{spec.replay_port}",
    }


def _bound(host: str) -> str:
    """`host` so that vLLM binds to it.

    It binds the publisher only to an endpoint with "*" or "::" in it, and connects out to any other. Events
    carry the token ids of every prompt, so an address is not widened to all addresses: an IPv4 one is written
    in its IPv4-mapped form, which ZeroMQ binds (and connects to) as that very address.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "*"
    if address.is_unspecified:
        return "*"
    written = f"[::ffff:{address}]" if address.version == 4 else f"[{address}]"
    return written if "::" in written else "*"


def _transfer_config(spec: VllmWorkerSpec) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        # With the default, "fail", every block of a dead worker's segment is an HTTP 500 for about 10 s.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "load_async": True,
            # Names a unix socket; two workers with the same one on a host take over each other's lookups.
            "lookup_rpc_port": spec.port,
            # The master's default spreads the blocks of one prompt over all segments at random.
            "preferred_segment": spec.segment,
        },
    }


def _environment(spec: VllmWorkerSpec) -> dict[str, str]:
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Relative on purpose: a unix socket's path may have 107 bytes, and the working directory can be deep.
        "VLLM_RPC_BASE_PATH": ".",
        # vLLM leaves its process-group rendezvous file (vllm_dist_*) behind; here it goes with the directory.
        "TMPDIR": str(spec.directory),
        "VLLM_CACHE_ROOT": str(spec.cache),
    }
    if spec.demonstration:
        env |= {
            # Engine core in the server process: 1.0 instead of 1.4 GB, up in 16 instead of 22 s (2 cores).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    if spec.mooncake is not None:
        env["MOONCAKE_CONFIG_PATH"] = str(spec.directory / MOONCAKE_CONFIG)
        env["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = spec.segment
    if spec.offline:
        env["HF_HUB_OFFLINE"] = "1"
    if spec.hash_seed is not None:
        env["PYTHONHASHSEED"] = spec.hash_seed
    return env


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
