"""One simulated worker: the command line of `python -m workers.sim`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.connecting import in_url


@dataclass(frozen=True, slots=True)
class SimWorkerSpec:
    """What is particular to one simulated worker. Ports must be free.

    `model` is a model directory (its tokenizer and template are used for real), `mooncake` the master's RPC
    address, None = no pool. `blocks` 0 leaves the cache size to the engine's own default.
    """

    python: Path
    model: str
    port: int
    events_port: int
    replay_port: int
    segment_port: int
    host: str = "127.0.0.1"
    mooncake: str | None = None
    served_model_name: str = ""
    block_size: int = 32
    blocks: int = 0
    extra_args: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{in_url(self.host)}:{self.port}"

    @property
    def segment(self) -> str:
        """Name of the worker's own segment in the pool."""
        return f"{self.host}:{self.segment_port}"


def command(spec: SimWorkerSpec) -> tuple[list[str], dict[str, str]]:
    """The argument vector and the variables to lay over the environment."""
    argv = [
        str(spec.python),
        "-m",
        "workers.sim",
        f"--model={spec.model}",
        f"--served-model-name={spec.served_model_name or Path(spec.model).name}",
        f"--host={spec.host}",
        f"--port={spec.port}",
        f"--events-port={spec.events_port}",
        f"--replay-port={spec.replay_port}",
        f"--block-size={spec.block_size}",
    ]
    if spec.blocks:
        argv.append(f"--blocks={spec.blocks}")
    if spec.mooncake is not None:
        argv += [f"--mooncake-master={spec.mooncake}", f"--segment={spec.segment}"]
    return [*argv, *spec.extra_args], {}
