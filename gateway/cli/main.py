"""The command `moongate`. Each command imports what it needs, so that --help is quick."""

import os
import sys
from typing import Annotated

import typer

from gateway.cli.doctor import doctor
from gateway.cli.explain import explain
from gateway.cli.policy import policy
from gateway.cli.replay import replay
from gateway.cli.serve import serve
from gateway.cli.up import up
from gateway.cli.worker import worker

_WORDS_AFTER = {"allow_extra_args": True}

app = typer.Typer(
    name="moongate",
    help="A gateway for AI agents in front of vLLM workers that share a Mooncake KV-cache pool.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(context_settings=_WORDS_AFTER)(up)
app.command()(serve)
app.command(context_settings=_WORDS_AFTER)(worker)
app.command()(explain)
app.command()(doctor)
app.add_typer(policy)
app.command()(replay)


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


def main() -> None:
    """Entry point: errors of usage are one line, and end with 2."""
    from typer.exceptions import Abort, TyperException

    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        print(end="", flush=True)
    except TyperException as error:
        print(f"moongate: {error.format_message()}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # Who read the output wants no more of it. As where a command itself hears of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
