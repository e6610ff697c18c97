"""`moongate replay`: a trace through simulated instances, or a decision log once more."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from gateway.cli.options import fail


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
    ramp: Annotated[
        float | None, typer.Option(help="Seconds in which the first sessions begin; 30.", show_default=False)
    ] = None,
    think: Annotated[float, typer.Option(help="Share of the trace's thinking time that passes.")] = 1.0,
    warmup: Annotated[float, typer.Option(help="Share of turns left out at the start.")] = 0.1,
    unlike: Annotated[
        list[str] | None,
        typer.Option(
            help="COUNT:PROFILE or COUNT:KEY=NUMBER,...: so many of the instances are others; repeatable."
        ),
    ] = None,
    deaths: Annotated[
        list[float] | None, typer.Option("--fail", help="Second at which an instance dies; repeatable.")
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
    """Compare policies on a trace, simulated.

    Or decide a recorded decision log again: with --decisions it ends with 1 if anything comes out otherwise
    than it was recorded.
    """
    from replay.command import ReplayError, ReplayFailed, replay_decisions
    from replay.command import replay as run_replay
    from replay.experiment import Experiment

    if decisions is not None:
        taken = {"decisions", "policy", "option"}
        given = [
            p.opts[0] for p in context.command.params if p.name not in taken and _is_given(context, p.name)
        ]
        if given:
            fail(f"--decisions can't go with {', '.join(given)}")
        try:
            equal = replay_decisions(decisions, policies=policy or (), options=option or ())
        except ReplayError as error:
            fail(str(error))
        raise typer.Exit(0 if equal else 1)
    if not file:
        fail("replay needs a trace, or --decisions with a decision log")
    if pool == "off" and _is_given(context, "placement"):
        fail("without a pool --placement would have no effect")
    if not deaths and _is_given(context, "down"):
        fail("without --fail --down would have no effect")
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
        failures=deaths or (),
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
        fail(str(error))
    except ReplayFailed as error:
        fail(str(error), 1)


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"
