"""`moongate worker`: one vLLM server in the foreground, in a gateway's list as long as it runs."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import ConfigOption, TokenOption, UrlOption, fail, running

if TYPE_CHECKING:
    from gateway.cli.remote import RunningGateway
    from workers.launch.vllm import VllmWorkerSpec

# vLLM ends within a second or two of SIGTERM, the pool's client of it a little later.
_GRACE_S = 30.0


def worker(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model directory or name; empty: a tiny one is made.")] = "",
    host: Annotated[str, typer.Option(help="Address the worker listens on and is registered with.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="HTTP port; the three above it are used too.")] = 8101,
    mooncake: Annotated[str | None, typer.Option(help="HOST:PORT of the Mooncake master.")] = None,
    segment_gib: Annotated[
        float, typer.Option(min=0.0, help="This worker's share of the pool, GiB; the tiny model's is small.")
    ] = 4.0,
    python: Annotated[Path | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact command and end.")] = False,
    url: UrlOption = None,
    admin_token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Run one vLLM worker as Moongate needs it.

    It is registered while it runs. Words after -- go to vLLM.
    """
    from workers.launch.vllm import command

    spec = _worker_spec(model, host, port, mooncake, python, tuple(context.args), elsewhere=dry_run)
    if model:
        segment_bytes = int(segment_gib * (1 << 30))
        spec = replace(spec, demonstration=False, segment_bytes=segment_bytes, buffer_bytes=1 << 30)
    argv, variables = command(spec)
    if dry_run:
        _print_command(spec, argv, variables)
        return
    with running(url, admin_token, config) as gateway:
        raise typer.Exit(_run(spec, argv, variables, gateway))


def _run(
    spec: "VllmWorkerSpec", argv: list[str], variables: dict[str, str], gateway: "RunningGateway"
) -> int:
    """The engine's exit code, once it has ended; `gateway` has it in its list until then."""
    import asyncio
    import json

    from gateway.cli.remote import RemoteError
    from workers.launch.attended import attended
    from workers.launch.vllm import MOONCAKE_CONFIG, UNSET, mooncake_config

    added = False

    def join() -> None:
        """The gateway probes it from now on and uses it once it is up."""
        nonlocal added
        added = gateway.add_worker(spec.url, spec.segment)

    def leave(how: str) -> None:
        """No new turns from here on. What others registered stays: they may start it again."""
        why = f"its engine ended with {how}" if how else "it ends"
        if how:
            print(f"moongate: the engine ended with {how}", file=sys.stderr, flush=True)
        try:
            if added:
                gateway.remove_worker(spec.name, f"moongate worker: {why}")
        except RemoteError as error:
            print(f"moongate: cannot end the worker's registration: {error}", file=sys.stderr)

    spec.directory.mkdir(parents=True, exist_ok=True)
    if spec.mooncake is not None:
        spec.directory.joinpath(MOONCAKE_CONFIG).write_text(json.dumps(mooncake_config(spec)), "utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in UNSET} | variables
    try:
        return asyncio.run(attended(argv, environment, spec.directory, _GRACE_S, joining=join, leaving=leave))
    except RemoteError as error:
        fail(f"cannot register the worker: {error}", 1)
    except OSError as error:
        fail(f"{argv[0]}: {error.strerror}")


def _worker_spec(
    model: str,
    host: str,
    port: int,
    mooncake: str | None,
    python: Path | None,
    extra: tuple[str, ...],
    *,
    elsewhere: bool,
) -> "VllmWorkerSpec":
    """elsewhere: the command may be meant for another machine, so nothing needs to be here."""
    from workers.launch.model import local_model
    from workers.launch.vllm import MAX_POSITIONS, VllmWorkerSpec

    if host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        fail("--host must be the address at which the gateway and other workers reach this worker")
    here = Path(".moongate").resolve()
    interpreter = python or Path(".venv-vllm/bin/python")
    if not elsewhere and not interpreter.exists():
        fail(f"no interpreter with vLLM at {interpreter}; give it with --python, or run `make setup-vllm`")
    try:
        found = local_model(model, here / "models", elsewhere=elsewhere)
    except FileNotFoundError as error:
        fail(str(error))
    return VllmWorkerSpec(
        python=interpreter.absolute(),
        model=found.path,
        served_model_name=found.name,
        directory=here / f"worker-{port}",
        cache=here / "cache" / "vllm",
        host=host,
        port=port,
        events_port=port + 1,
        replay_port=port + 2,
        segment_port=port + 3,
        mooncake=mooncake,
        max_positions=found.max_positions or MAX_POSITIONS,
        load_format=found.load_format,
        offline=found.offline,
        extra_args=extra,
    )


def _print_command(spec: "VllmWorkerSpec", argv: list[str], variables: dict[str, str]) -> None:
    import json
    import shlex

    from workers.launch.vllm import MOONCAKE_CONFIG, UNSET, mooncake_config

    if spec.mooncake is not None:
        content = json.dumps(mooncake_config(spec))
        file = spec.directory / MOONCAKE_CONFIG
        print(f"mkdir -p {spec.directory} && echo {shlex.quote(content)} > {shlex.quote(str(file))}")
    without = [f"-u {name}" for name in UNSET]
    assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    print(" \\\n  ".join(["env", *without, *assigned, *(shlex.quote(word) for word in argv)]))
