"""When a person or a script asks the fleet to end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

_SIGINT_BIT = 1 << (signal.SIGINT - 1)
_LOOK_EVERY_S = 0.5


async def interrupted() -> None:
    """Returns at the first SIGINT, SIGTERM or SIGHUP, also when it is our parent `make` that got the SIGINT.

    GNU make hands a SIGTERM on to its recipe but not a SIGINT: it takes its handler away and waits for the
    recipe to end. A terminal's Ctrl-C reaches both; a script's `kill -INT` of make would wait for ever.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    make = _parent_make()
    while not stopping.is_set():
        if make is not None and os.getppid() == make and not _catches_sigint(make):
            return
        try:
            async with asyncio.timeout(None if make is None else _LOOK_EVERY_S):
                await stopping.wait()
        except TimeoutError:
            continue


def _parent_make() -> int | None:
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return parent if name in {"make", "gmake"} and _catches_sigint(parent) else None


def _catches_sigint(pid: int) -> bool:
    """Of a process that is gone: True, there is nothing to conclude from it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & _SIGINT_BIT)
