"""`moongate up`: a whole fleet on this machine, in the foreground."""

import sys
from typing import Annotated, Literal

import typer

from gateway.cli.options import TokenOption, settings_from


def up(
    context: typer.Context,
    engine: Annotated[Literal["sim", "vllm"], typer.Option(help="Simulated or real workers.")] = "sim",
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    model: Annotated[str, typer.Option(help="Model directory or name; empty: a tiny one is made.")] = "",
    mooncake: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a running master, or off; an own one is started if not given."),
    ] = None,
    mooncake_http_port: Annotated[int, typer.Option(help="Admin port of that master.")] = 9003,
    host: Annotated[str, typer.Option(help="Address the gateway listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the gateway; the workers take those above.")
    ] = 8000,
    worker_arg: Annotated[
        list[str] | None, typer.Option(help="Further word for the workers; repeatable.")
    ] = None,
    admin_token: TokenOption = None,
) -> None:
    """Run a whole fleet on this machine.

    Ctrl-C ends all of it, a second one at once. Words after -- go to `moongate serve`.
    """
    from workers.launch.fleet import LocalFleet
    from workers.launch.fleet import up as run_fleet

    master = None if mooncake == "off" else mooncake
    settings = settings_from(None, {"admin.token": admin_token, "mooncake.master": master})
    fleet = LocalFleet(
        engine=engine,
        workers=workers,
        model=model,
        mooncake=mooncake,
        mooncake_http_port=mooncake_http_port,
        host=host,
        port=port,
        gateway_args=tuple(context.args),
        worker_args=tuple(worker_arg or ()),
        admin_token=settings.admin.token,
        drain_s=settings.timeouts.drain_s,
    )
    raise typer.Exit(
        run_fleet(
            fleet,
            say=lambda line: print(line, flush=True),
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
