"""`moongate serve`: the gateway in the foreground."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import ConfigOption, TokenOption, fail, settings_from

if TYPE_CHECKING:
    from gateway.settings import Settings


def serve(
    config: ConfigOption = None,
    worker: Annotated[list[str] | None, typer.Option(help="Base URL of a worker; repeatable.")] = None,
    mooncake_master: Annotated[str | None, typer.Option(help="HOST:PORT of the Mooncake master.")] = None,
    mooncake_http_port: Annotated[
        int | None, typer.Option(help="Port of its admin HTTP; 9003 if nothing else is set.")
    ] = None,
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
    flags = {
        "workers.urls": worker or None,
        "mooncake.master": mooncake_master,
        "mooncake.http_port": mooncake_http_port,
        "routing.policy": policy,
        "server.host": host,
        "server.port": port,
        "admin.token": admin_token,
        "auth.api_keys_file": api_keys,
    }
    settings = settings_from(config, flags)
    with _naming_the_setting():
        if print_config:
            _print(settings)
        else:
            _run(settings)


@contextmanager
def _naming_the_setting() -> Generator[None]:
    """Fails with the setting, or the want, that keeps a gateway from being made or from starting."""
    from gateway.auth import BadKeysFile
    from gateway.serve import CannotListen, CannotStart
    from policies.registry import BadPolicyOptions, BrokenPolicy, UnknownPolicy
    from workers.connecting import BadAuthorities
    from workers.fleet import BadWorker, DuplicateWorker

    try:
        yield
    except (UnknownPolicy, BadPolicyOptions, BrokenPolicy) as error:
        fail(f"routing: {error}")
    except (BadWorker, DuplicateWorker) as error:
        fail(f"workers.urls: {error}")
    except BadKeysFile as error:
        fail(f"auth.api_keys_file: {error}")
    except BadAuthorities as error:
        fail(f"workers.ca_file: {error}")
    except ImportError as error:
        if error.name not in ("mooncake", "mooncake.store"):
            raise
        fail('mooncake.lookup: "rpc" needs the Mooncake store client, the `mooncake` extra')
    except CannotListen as error:
        fail(str(error), 1)
    except CannotStart:
        fail("the gateway did not start; its log says why", 1)


def _rehearse(settings: "Settings") -> None:
    """Raises what the gateway would for workers and policy, before a port is taken."""
    from policies.document import Document
    from policies.plan import Plan
    from workers.fleet import Fleet

    fleet = Fleet(settings.workers.segments)
    for url in settings.workers.urls:
        fleet.add(url)
    Plan(Document(policy=settings.routing.policy, options=settings.routing.options))


def _print(settings: "Settings") -> None:
    from gateway.auth import ClientKeys
    from gateway.settings import render
    from workers.connecting import trusting

    _rehearse(settings)
    ClientKeys.load(settings.auth.api_keys_file)
    trusting(settings.workers.ca_file)
    print(render(settings), end="")


def _run(settings: "Settings") -> None:
    from gateway.app import build
    from gateway.own_url import leads_here
    from gateway.serve import configure_logging, listening, run
    from workers.fleet import BadWorker

    configure_logging(settings.server.log_level)
    _rehearse(settings)
    with listening(settings) as sockets:
        ours = {sock.getsockname()[1] for sock in sockets}
        if own := [url for url in settings.workers.urls if leads_here(url, settings.server.host, ours)]:
            raise BadWorker(f"{own[0]} is the gateway's own URL")
        gateway = build(settings)
        run(gateway, settings, sockets, gateway.end, gateway.metrics.out_of_descriptors)
