"""What the commands share: their options, the settings these make, the running gateway, and how they fail."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from gateway.cli.remote import RunningGateway
    from gateway.settings import Settings

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
TokenOption = Annotated[str | None, typer.Option("--admin-token", help="Token of the admin API.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Base URL of the running gateway. Default: from the settings.")
]


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with one line: 2 for how it was called, 1 for what came of it."""
    print(f"moongate: {message}", file=sys.stderr)
    raise typer.Exit(code)


def settings_from(config: Path | None, flags: dict[str, Any]) -> "Settings":
    """The effective settings, `flags` by dotted keys. Fails where they can't be used."""
    from gateway.settings import SettingsError, load

    try:
        return load(config, os.environ, flags)
    except SettingsError as error:
        fail(str(error))


def running(url: str | None, admin_token: str | None, config: Path | None) -> "RunningGateway":
    """The running gateway that the options or, failing those, the settings point at."""
    from gateway.cli.remote import RunningGateway
    from workers.connecting import in_url

    settings = settings_from(config, {"admin.token": admin_token})
    # Where it listens everywhere it listens here.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)  # noqa: S104
    port = settings.admin.port or settings.server.port
    return RunningGateway(url or f"http://{in_url(host)}:{port}", settings.admin.token)
