"""A child process that never outlives its parent and takes its own children along."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_TAIL_BYTES: Final = 64 << 10


class ProcessNotReady(Exception):
    """The process ended before it was ready (`returncode` set) or was not ready in time (None)."""

    def __init__(self, message: str, returncode: int | None) -> None:
        super().__init__(message)
        self.returncode = returncode


class Process:
    """One command, in a session and process group of its own, its output appended to `log` (None: ours).

    The kernel sends it SIGTERM when the parent dies, however that happens, SIGKILL included. This is bound to
    the thread that calls `start`: call it from one that lives as long as the child should (the main thread).
    Can be started again after it ended. `env` is the whole environment, None = the parent's.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path | None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._argv = list(argv)
        self._env = dict(env) if env is not None else None
        self._cwd = cwd
        self._child: subprocess.Popen[bytes] | None = None
        self.log: Final = log

    def start(self) -> None:
        """Raises OSError when the command cannot be run, RuntimeError when it is running already."""
        if self.alive:
            raise RuntimeError(f"{self._argv[0]} is running already")
        parent = os.getpid()

        def tie_to_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before the call above: no signal will come any more
                os._exit(1)

        with self._output() as output:
            self._child = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                preexec_fn=tie_to_parent,  # nothing but system calls: safe between fork and exec
            )

    def _output(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        if self.log is None:
            return contextlib.nullcontext()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self.log.open("ab")

    @property
    def pid(self) -> int | None:
        """Also the number of its process group. None before the first start."""
        return self._child.pid if self._child is not None else None

    @property
    def returncode(self) -> int | None:
        """None while it runs or before the first start; negative: the signal that killed it."""
        if self._child is None:
            return None
        if self._child.returncode is None and _has_ended(self._child.pid):
            # Before the leader is reaped, while its pid cannot be given to another group.
            _signal_group(self._child.pid, signal.SIGKILL)
            self._child.wait()
        return self._child.returncode

    @property
    def alive(self) -> bool:
        return self._child is not None and self.returncode is None

    async def wait(self) -> int:
        """Returns the exit code once it has ended; what is left of its group is killed then."""
        if self._child is None:
            raise RuntimeError(f"{self._argv[0]} was never started")
        while (code := self.returncode) is None:
            await _ended(self._child.pid)
        return code

    async def wait_ready(
        self, check: Callable[[], Awaitable[bool]], *, budget_s: float, interval_s: float = 0.05
    ) -> None:
        """Returns when `check` says True. An OSError of the check counts as not yet.

        Raises ProcessNotReady, with the end of the log, when the process ends first or the budget is spent.
        The process is left as it is.
        """
        ended = asyncio.create_task(self.wait())
        try:
            async with asyncio.timeout(budget_s):
                while not await _holds(check):
                    await asyncio.wait({ended}, timeout=interval_s)
                    if ended.done():
                        message = f"{self._argv[0]} ended with code {ended.result()}"
                        raise ProcessNotReady(self._with_log(message), ended.result())
        except TimeoutError:
            message = f"{self._argv[0]} is not ready after {budget_s:g} s"
            raise ProcessNotReady(self._with_log(message), None) from None
        finally:
            ended.cancel()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the group, SIGKILL to what is left after `grace_s`; reaped on return. Never fails."""
        if self._child is None or not self.alive:
            return
        _signal_group(self._child.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            pass
        finally:  # also when cancelled
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the group, at once; reaped on return."""
        if self._child is not None and self.alive:
            _signal_group(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def last_lines(self, lines: int) -> str:
        """The end of the log, "" when there is none."""
        if self.log is None:
            return ""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return b"\n".join(log.read().splitlines()[-lines:]).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _with_log(self, message: str) -> str:
        tail = self.last_lines(10)
        return f"{message}; the end of {self.log}:\n{tail}" if tail else message


async def _holds(check: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await check()
    except OSError:
        return False


async def _ended(pid: int) -> None:
    """Returns when the child has ended (it stays unreaped)."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
