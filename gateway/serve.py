"""Running the gateway: sockets, logging and the HTTP server around the ASGI app."""

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from gateway import errors
from gateway.protocol import speaking
from gateway.settings import Settings

# Clients keep an idle connection and use it for the next turn. Closing first would race with that use;
# the SDKs' own HTTP client gives up an idle connection after 5 s, load balancers mostly after 60 s.
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
# uvicorn takes whole seconds only, which infinity is not.
_LONGEST_DRAIN_S = 1e9
# Listening sockets, event streams, probes, the pool, logs.
_OWN_DESCRIPTORS = 64
_FEW_TURNS = 1000

logger = logging.getLogger(__name__)


class CannotListen(Exception):
    """An address can't be listened on; the message says which and why."""


class CannotStart(Exception):
    """The app refused to start; its log says why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        # Resolver errors have negative numbers; the socket module's own text repeats the address.
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        raise CannotListen(f"cannot listen on {host} port {port}: {reason}") from None


def base_url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def configure_logging(level: str) -> None:
    """One line a record on standard error. HTTP clients' own request lines stay out."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut)


def _is_no_cut(record: logging.LogRecord) -> bool:
    """A response cut on purpose was logged where that was decided; no stack of the server's is needed."""
    return not (record.exc_info and isinstance(record.exc_info[1], errors.ResponseCut))


@contextmanager
def listening(settings: Settings) -> Generator[list[socket.socket]]:
    """The gateway's socket and, where admin has a port of its own, that one. Raises CannotListen."""
    with ExitStack() as stack:
        ports = [settings.server.port, *([settings.admin.port] if settings.admin.port else [])]
        yield [stack.enter_context(listen(settings.server.host, port)) for port in ports]


def claim_descriptors(requests: int) -> int:
    """Raise the limit of open files as far as it may be; say what it means for turns. Returns the limit.

    requests: `limits.requests`, 0 if there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return soft
    turns = max(0, soft - _OWN_DESCRIPTORS) // 2
    logger.info("%d open files allowed: room for about %d turns at once, two connections each", soft, turns)
    if turns < max(requests, _FEW_TURNS):
        logger.warning(
            "%d open files are few%s: raise the limit (ulimit -n, LimitNOFILE=, --ulimit nofile=)",
            *(soft, f" for limits.requests = {requests}" if turns < requests else ""),
        )
    return soft


class _Server(uvicorn.Server):
    """Ends in three steps: told (`on_end`), still accepting for `delay_s`, then finishing what is under way.

    SIGINT skips the second: a person waits, no load balancer. A second signal, of either kind, ends it
    without waiting for anything.
    """

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None], delay_s: float) -> None:
        super().__init__(config)
        self._on_end = on_end
        self._delay_s = delay_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            self._on_end()
            if sig == signal.SIGINT:
                self._delay_s = 0.0
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        await super().main_loop()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._delay_s
        while loop.time() < until and not self.force_exit:
            await asyncio.sleep(min(0.1, until - loop.time()))
            await self.on_tick(0)


def _spare_the_collector() -> None:
    """Look for garbage in cycles less often, and never in what was there at the start.

    A body of 349 KB makes thousands of objects that die with its turn, without cycles: with Python's defaults
    the collector took a sixth of a turn's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def run(
    app: ASGIApp,
    settings: Settings,
    sockets: list[socket.socket],
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Serve on `sockets` until SIGINT or SIGTERM; `on_end` is called at the first of them, at once."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=speaking(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(min(settings.timeouts.drain_s, _LONGEST_DRAIN_S)),
    )
    _spare_the_collector()
    print(
        f"moongate listens on {base_url(sockets[0])}, admin on {base_url(sockets[-1])}/admin/v1", flush=True
    )
    claim_descriptors(settings.limits.requests)
    server = _Server(config, on_end, settings.timeouts.drain_delay_s)

    def end(*_: object) -> None:
        server.should_exit = True

    # The server raises the signal that ended it once more when it is done, for whoever had handled it before:
    # with the default handlers an orderly end would look like a crash.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run(sockets)
    if not server.started:
        raise CannotStart
