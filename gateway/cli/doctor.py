"""`moongate doctor`: every hop of a running gateway, checked."""

import typer

from gateway.cli.options import ConfigOption, TokenOption, UrlOption, fail, running, settings_from


def doctor(url: UrlOption = None, admin_token: TokenOption = None, config: ConfigOption = None) -> None:
    """Check every hop of a running gateway.

    Ends with 1 if anything fails.
    """
    from gateway.cli.examination import examine
    from gateway.cli.remote import RemoteError
    from workers.connecting import BadAuthorities, trusting

    settings = settings_from(config, {})
    failed = 0
    try:
        with running(url, admin_token, config) as gateway:
            for finding in examine(gateway, settings.workers.api_key, trusting(settings.workers.ca_file)):
                print(finding, flush=True)
                failed += finding.result == "fail"
    except RemoteError as error:
        fail(str(error), 1)
    except BadAuthorities as error:
        fail(f"workers.ca_file: {error}")
    if failed:
        raise typer.Exit(1)
