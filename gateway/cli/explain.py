"""`moongate explain`: where a running gateway would send a body."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import ConfigOption, TokenOption, UrlOption, fail, running


def explain(
    file: Annotated[str, typer.Argument(help="File with a request body, or - for standard input.")],
    api: Annotated[
        str, typer.Option(help="chat, completions, messages, responses or a path; guessed from the body.")
    ] = "",
    key: Annotated[
        str, typer.Option(help="Name of the client's key; rules of the policy may go by it or its tenant.")
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(help="A header that it comes with, as 'NAME: VALUE'; repeatable."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
    url: UrlOption = None,
    admin_token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Say where a body would go, and why.

    A running gateway is asked; nothing is sent anywhere. Ends with 1 if no worker can take it.
    """
    import json

    from gateway.cli.explanation import as_text, refusal
    from gateway.cli.remote import RemoteError

    try:
        body = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    try:
        with running(url, admin_token, config) as gateway:
            view = gateway.explain(body, api, key, header or ())
    except RemoteError as error:
        fail(str(error), 1)
    print(json.dumps(view, indent=2) if json_output else as_text(view))
    if why := refusal(view):
        fail(why, 1)
