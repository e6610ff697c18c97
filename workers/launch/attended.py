"""One process in the foreground, from its start to its end, whoever ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from workers.launch.interrupts import interrupted
from workers.launch.process import Process

# A shell's way to say that a signal ended a process.
_SIGNALLED = 128


async def attended(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    grace_s: float,
    *,
    joining: Callable[[], None],
    leaving: Callable[[str], None],
) -> int:
    """Run `argv`, with this process's output, until it ends or SIGINT, SIGTERM or SIGHUP comes.

    `env` is the whole environment. `joining` is called before it starts. `leaving` is called once, however
    this ends: at a signal before the process gets its SIGTERM (and SIGKILL `grace_s` later), with "", else
    when it has ended, with how it did in words. Returns its exit code. Raises what `joining` raises, and
    OSError where `argv` can't be run.
    """
    signalled = asyncio.create_task(interrupted())
    await asyncio.sleep(0)  # from here on a signal ends nothing by itself
    process = Process(argv, log=None, env=env, cwd=cwd)
    how = ""
    try:
        await asyncio.to_thread(joining)
        process.start()
        ended = asyncio.create_task(process.wait())
        await asyncio.wait({ended, signalled}, return_when=asyncio.FIRST_COMPLETED)
        how = _how(ended.result()) if ended.done() and not signalled.done() else ""
    finally:
        await asyncio.to_thread(leaving, how)
        signalled.cancel()
    await process.stop(grace_s)
    code = await ended
    return code if code >= 0 else _SIGNALLED - code


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
