"""The command `moongate`. Each command imports what it needs, so that --help is quick."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from gateway.cli.policy import policy
from gateway.cli.worker import worker

if TYPE_CHECKING:
    from gateway.settings import Settings

app = typer.Typer(
    name="moongate",
    help="A gateway for AI agents in front of vLLM workers that share a Mooncake KV-cache pool.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(policy)
app.command(context_settings={"allow_extra_args": True})(worker)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
TokenOption = Annotated[str | None, typer.Option("--admin-token", help="Token of the admin API.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Base URL of the running gateway. Default: from the settings.")
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"moongate {version('moongate')}")
        raise typer.Exit


@app.callback()
def moongate(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """A gateway for AI agents in front of vLLM workers that share a Mooncake KV-cache pool."""


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"moongate: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _settings(config: Path | None, flags: dict[str, Any]) -> "Settings":
    from gateway.settings import SettingsError, load

    try:
        return load(config, os.environ, flags)
    except SettingsError as error:
        _fail(str(error))


@app.command()
def serve(
    config: ConfigOption = None,
    worker: Annotated[list[str] | None, typer.Option(help="Base URL of a worker; repeatable.")] = None,
    mooncake_master: Annotated[str | None, typer.Option(help="HOST:PORT of the Mooncake master.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name of the routing policy.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8000 if nothing else is set.")] = None,
    admin_token: TokenOption = None,
    api_keys: Annotated[str | None, typer.Option(help="File with one client key a line.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective settings and end.")
    ] = False,
) -> None:
    """Run the gateway. Flags win over the environment, the environment over the file."""
    from gateway.settings import render

    flags = {
        "workers.urls": worker or None,
        "mooncake.master": mooncake_master,
        "routing.policy": policy,
        "server.host": host,
        "server.port": port,
        "admin.token": admin_token,
        "auth.api_keys_file": api_keys,
    }
    settings = _settings(config, flags)
    from gateway.app import build
    from gateway.auth import BadKeysFile, ClientKeys
    from gateway.own_url import leads_here
    from gateway.serve import CannotListen, CannotStart, configure_logging, listening, run
    from policies.document import Document
    from policies.plan import Plan
    from policies.registry import BadPolicyOptions, BrokenPolicy, UnknownPolicy
    from workers.fleet import BadWorker, DuplicateWorker, Fleet

    if not print_config:
        configure_logging(settings.server.log_level)
    try:
        rehearsal = Fleet(settings.workers.segments)
        for url in settings.workers.urls:
            rehearsal.add(url)
        Plan(Document(policy=settings.routing.policy, options=settings.routing.options))
        if print_config:
            ClientKeys.load(settings.auth.api_keys_file)
            print(render(settings), end="")
            return
        with listening(settings) as sockets:
            ours = {sock.getsockname()[1] for sock in sockets}
            if own := [url for url in settings.workers.urls if leads_here(url, settings.server.host, ours)]:
                raise BadWorker(f"{own[0]} is the gateway's own URL")
            gateway = build(settings)
            run(gateway, settings, sockets, gateway.end)
    except (UnknownPolicy, BadPolicyOptions, BrokenPolicy) as error:
        _fail(f"routing: {error}")
    except (BadWorker, DuplicateWorker) as error:
        _fail(f"workers.urls: {error}")
    except BadKeysFile as error:
        _fail(f"auth.api_keys_file: {error}")
    except ImportError as error:
        if error.name not in ("mooncake", "mooncake.store"):
            raise
        _fail('mooncake.lookup: "rpc" needs the Mooncake store client, the `mooncake` extra')
    except CannotListen as error:
        _fail(str(error), 1)
    except CannotStart:
        _fail("the gateway did not start; its log says why", 1)


@app.command(context_settings={"allow_extra_args": True})
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
    """A whole fleet on this machine; Ctrl-C ends all of it, a second one at once.

    Words after -- go to `moongate serve`.
    """
    from workers.launch.fleet import LocalFleet
    from workers.launch.fleet import up as run_fleet

    settings = _settings(None, {"admin.token": admin_token})
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


@app.command()
def explain(
    file: Annotated[str, typer.Argument(help="File with a request body, or - for standard input.")],
    api: Annotated[
        str, typer.Option(help="chat, completions, messages, responses or a path; guessed from the body.")
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
    url: UrlOption = None,
    admin_token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Where a running gateway would send this body, and why. Nothing is sent anywhere.

    Ends with 1 if no worker can take it.
    """
    import json

    from gateway.cli.explanation import as_text, refusal
    from gateway.cli.remote import RemoteError

    try:
        body = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        _fail(f"{file}: {error.strerror}")
    try:
        with running(url, admin_token, config) as gateway:
            view = gateway.explain(body, api)
    except RemoteError as error:
        _fail(str(error), 1)
    print(json.dumps(view, indent=2) if json_output else as_text(view))
    if why := refusal(view):
        _fail(why, 1)


@app.command()
def doctor(url: UrlOption = None, admin_token: TokenOption = None, config: ConfigOption = None) -> None:
    """Check every hop of a running gateway. Ends with 1 if anything fails."""
    from gateway.cli.doctor import examine
    from gateway.cli.remote import RemoteError

    settings = _settings(config, {})
    failed = 0
    try:
        with running(url, admin_token, config) as gateway:
            for finding in examine(gateway, settings.workers.api_key):
                print(finding, flush=True)
                failed += finding.result == "fail"
    except RemoteError as error:
        _fail(str(error), 1)
    if failed:
        raise typer.Exit(1)


@app.command()
def replay(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(help="Trace (JSON lines, also gzipped), or the word: scaling.", show_default=False),
    ] = "",
    decisions: Annotated[
        Path | None,
        typer.Option(help="Recorded decision log instead of a trace; with --policy and --option only."),
    ] = None,
    trace_format: Annotated[
        Literal["claude_code", "codex_like", "mooncake", "aiperf"],
        typer.Option("--format", help="What the file is; of no account for scaling."),
    ] = "claude_code",
    profile: Annotated[str, typer.Option(help="Name of a profile, or a .toml file.")] = "kimi-k2.5-gb200",
    instances: Annotated[int, typer.Option(help="How many instances of it.")] = 5,
    pool: Annotated[Literal["on", "off"], typer.Option(help="With or without the pool.")] = "on",
    placement: Annotated[
        Literal["random", "owner"], typer.Option(help="Where workers put blocks into the pool.")
    ] = "random",
    policy: Annotated[list[str] | None, typer.Option(help="Name of a policy; repeatable.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="POLICY.OPTION=VALUE; repeatable.")] = None,
    figures: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=NUMBER for the profile; repeatable.")
    ] = None,
    active: Annotated[
        int | None, typer.Option(help="Sessions under way at a time; 50 for each instance.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(help="Sessions in all; those that the file has not are copies.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="Tokens at the start that sessions share at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="Sessions a second at random times instead.")] = None,
    ramp: Annotated[float, typer.Option(help="Seconds in which the first sessions begin.")] = 30.0,
    think: Annotated[float, typer.Option(help="Share of the trace's thinking time that passes.")] = 1.0,
    warmup: Annotated[float, typer.Option(help="Share of turns left out at the start.")] = 0.1,
    unlike: Annotated[
        list[str] | None,
        typer.Option(
            help="COUNT:PROFILE or COUNT:KEY=NUMBER,...: so many of the instances are others; repeatable."
        ),
    ] = None,
    fail: Annotated[
        list[float] | None, typer.Option(help="Second at which an instance dies; repeatable.")
    ] = None,
    down: Annotated[float, typer.Option(help="Seconds until it is back, empty.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Simulations at a time; one on each processor.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (.png or .svg) to this file; needs moongate[plots].")
    ] = None,
) -> None:
    """Play a trace against simulated instances, policies side by side, or decide a decision log again.

    With --decisions it ends with 1 if anything comes out otherwise than it was recorded.
    """
    from replay.command import ReplayError, replay_decisions
    from replay.command import replay as run_replay
    from replay.experiment import Experiment

    if decisions is not None:
        taken = {"decisions", "policy", "option"}
        given = [
            p.opts[0] for p in context.command.params if p.name not in taken and _is_given(context, p.name)
        ]
        if given:
            _fail(f"--decisions can't go with {', '.join(given)}")
        try:
            equal = replay_decisions(decisions, policies=policy or (), options=option or ())
        except ReplayError as error:
            _fail(str(error))
        raise typer.Exit(0 if equal else 1)
    if not file:
        _fail("replay needs a trace, or --decisions with a decision log")
    experiment = Experiment(
        file=file,
        format=trace_format,
        profile=profile,
        instances=instances,
        pool=pool == "on",
        placement=placement,
        policies=policy or ["round_robin", "longest_prefix", "expected_ttft"],
        seed=seed,
        active=active,
        sessions=sessions,
        head=head,
        rate=rate,
        ramp_s=ramp,
        think=think,
        warmup=warmup,
        failures=fail or (),
        down_s=down,
    )
    try:
        run_replay(
            experiment,
            figures=figures or (),
            options=option or (),
            unlike=unlike or (),
            json=json,
            page=html,
            plot=plot,
            jobs=jobs,
        )
    except ReplayError as error:
        _fail(str(error))


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def running(url: str | None, admin_token: str | None, config: Path | None) -> Any:
    """The running gateway that the options or, failing those, the settings point at."""
    from gateway.cli.remote import RunningGateway

    settings = _settings(config, {"admin.token": admin_token})
    host = settings.server.host.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - not bound, asked
    port = settings.admin.port or settings.server.port
    return RunningGateway(url or f"http://{host}:{port}", settings.admin.token)


def main() -> None:
    """Entry point: errors of usage are one line, and end with 2."""
    from typer.exceptions import Abort, TyperException

    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except TyperException as error:
        print(f"moongate: {error.format_message()}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
