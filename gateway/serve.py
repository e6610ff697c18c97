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

from gateway.auth import is_loopback
from gateway.protocol import Room, speaking
from gateway.seldom import Seldom
from gateway.settings import Settings
from workers.connecting import in_url

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
    """A listening TCP socket; `::` takes IPv4 as well, where the machine can. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        # Resolver errors have negative numbers; the socket module's own text repeats the address.
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        raise CannotListen(f"cannot listen on {host} port {port}: {reason}") from None


def base_url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{in_url(host)}:{port}"


def configure_logging(level: str) -> None:
    """One line a record on standard error. HTTP clients' requests and the server's own steps stay out."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)


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


def warn_if_open(sock: socket.socket, keys_file: str) -> None:
    """Say so where turns are taken from other machines, and from anybody."""
    address = sock.getsockname()[0]
    if not keys_file and not is_loopback(address):
        logger.warning(
            "listens on %s without client keys: whoever reaches it may use the workers (auth.api_keys_file)",
            address,
        )


def room_for_clients(descriptors: int) -> int:
    """Of so many that are allowed: connections that leave as many for those to workers. 0: no limit."""
    if descriptors == resource.RLIM_INFINITY:
        return 0
    return max(descriptors // 4, (descriptors - _OWN_DESCRIPTORS) // 2)


class _Descriptors:
    """Looks whether there are any left: else the event loop ends each new connection, and says nothing."""

    def __init__(self, room: Room, on_none: Callable[[], None]) -> None:
        self._room = room
        self._on_none = on_none
        self._seldom = Seldom()

    def look(self, sock: socket.socket) -> None:
        refused, self._room.refused = self._room.refused, 0
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            os.close(os.dup(sock.fileno()))
        except OSError:
            self._on_none()
            if self._seldom.due("none left"):
                logger.warning("all of the %d open files allowed are in use: clients are turned away", limit)
            return
        if refused:
            self._on_none()
            if self._seldom.due("no room"):
                logger.warning(
                    "%d open files allowed leave room for %d clients' connections, which are all busy: "
                    "others are turned away",
                    *(limit, self._room.most),
                )


class _Server(uvicorn.Server):
    """Ends in three steps: told (`on_end`), still accepting for `delay_s`, then finishing what is under way.

    SIGINT skips the second: a person waits, no load balancer. A second signal, of either kind, ends it
    without waiting for anything.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_end: Callable[[], None],
        delay_s: float,
        drain_s: float,
        descriptors: _Descriptors,
    ) -> None:
        super().__init__(config)
        self._on_end = on_end
        self._delay_s, self._drain_s = delay_s, drain_s
        self._descriptors = descriptors
        self._signal = ""
        self._cut = 0

    async def on_tick(self, counter: int) -> bool:
        # Every tenth of a second.
        if counter % 10 == 0:
            self._descriptors.look(self.servers[0].sockets[0])
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            self._on_end()
            self._signal = signal.Signals(sig).name
            if sig == signal.SIGINT:
                self._delay_s = 0.0
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        await super().main_loop()
        # Not where the signal is handled, which may be in the middle of another line.
        logger.info(
            "told to end by %s (turns under way: %d): takes more for %g s, "
            "then waits up to %g s for their end",
            *(self._signal, len(self.server_state.tasks), self._delay_s, self._drain_s),
        )
        loop = asyncio.get_running_loop()
        until = loop.time() + self._delay_s
        while loop.time() < until and not self.force_exit:
            await asyncio.sleep(min(0.1, until - loop.time()))
            await self.on_tick(0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        under_way = len(self.server_state.tasks)
        await super().shutdown(sockets)
        level = logging.WARNING if self._cut else logging.INFO
        ended = max(0, under_way - self._cut)
        logger.log(level, "the end (turns under way: %d ended, %d cut)", ended, self._cut)

    async def _wait_tasks_to_complete(self) -> None:
        """Ended by its caller when the time is up; those that are left are cut then."""
        try:
            await super()._wait_tasks_to_complete()
        finally:
            self._cut = len(self.server_state.tasks)


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
    on_full: Callable[[], None] = lambda: None,
) -> None:
    """Serve on `sockets` until SIGINT or SIGTERM; `on_end` is called at the first of them, at once.

    on_full: is called each second in which a client was turned away for want of descriptors.
    """
    room = Room()
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=speaking(settings, room),
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
    # Nobody can be told where the output goes to a full disk; turns can be answered.
    with suppress(OSError):
        print(
            f"moongate listens on {base_url(sockets[0])}, admin on {base_url(sockets[-1])}/admin/v1",
            flush=True,
        )
    warn_if_open(sockets[0], settings.auth.api_keys_file)
    room.most = room_for_clients(claim_descriptors(settings.limits.requests))
    timeouts = settings.timeouts
    descriptors = _Descriptors(room, on_full)
    server = _Server(config, on_end, timeouts.drain_delay_s, timeouts.drain_s, descriptors)

    def end(*_: object) -> None:
        server.should_exit = True

    # The server raises the signal that ended it once more when it is done, for whoever had handled it before:
    # with the default handlers an orderly end would look like a crash.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run(sockets)
    if not server.started:
        raise CannotStart
