"""Several simulations at a time, each in a process of its own: they share nothing but what they read."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from traceback import extract_tb
from typing import Any, Final

import msgspec

from replay.measure import Measures

# Told of how many turns have ended.
Ended = Callable[[int], None]
Simulation = Callable[[Ended], Measures]


class SimulationFailed(RuntimeError):
    """What one of them raised, and where; or that its process ended without a word."""


class _Told(msgspec.Struct, frozen=True):
    """What a process says: how far it is, or how it ended."""

    ended: int = 0
    measures: Measures | None = None
    error: str = ""


_DECODER: Final = msgspec.msgpack.Decoder(_Told)


def processors() -> int:
    """How many may be used here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate(
    simulations: Mapping[str, Simulation], jobs: int, progress: Callable[[str, int], None]
) -> dict[str, Measures]:
    """Results by name, in the order given, whatever `jobs` is: how many run at a time.

    Processes are forked, so that traces need not be read again; where that cannot be, one runs after another.
    """
    if jobs == 1 or len(simulations) == 1 or "fork" not in get_all_start_methods():
        return {name: _alone(name, each, progress) for name, each in simulations.items()}
    context = get_context("fork")
    # Nothing is ever sent: it is closed when this process is gone, however it went.
    alive, lifeline = Pipe(duplex=False)
    found: dict[str, Measures] = {}
    waiting = list(simulations.items())
    running: dict[Any, str] = {}
    processes: list[BaseProcess] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, simulation = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(simulation, there, alive, lifeline), daemon=True)
                with _uninterrupted():
                    process.start()
                there.close()
                processes.append(process)
                running[here] = name
            ready: list[Any] = wait(list(running))
            for connection in ready:
                name = running[connection]
                try:
                    told = _DECODER.decode(connection.recv_bytes())
                except EOFError:
                    raise SimulationFailed(f"{name}: its process has ended") from None
                if told.error:
                    raise SimulationFailed(f"{name}: {told.error}")
                if told.measures is None:
                    progress(name, told.ended)
                    continue
                found[name] = told.measures
                connection.close()
                del running[connection]
    finally:
        for process in processes:
            process.terminate()
            process.join()
        alive.close()
        lifeline.close()
    return {name: found[name] for name in simulations}


def _alone(name: str, simulation: Simulation, progress: Callable[[str, int], None]) -> Measures:
    try:
        return simulation(lambda ended: progress(name, ended))
    except Exception as error:
        raise SimulationFailed(f"{name}: {_said(error)}") from error


@contextmanager
def _uninterrupted() -> Generator[None]:
    """What is started here is not interrupted before it has said what an interrupt does to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(simulation: Simulation, connection: Connection, alive: Connection, lifeline: Connection) -> None:
    # An interrupt is for who started this, and that ends it; so does that one's end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lifeline.close()
    Thread(target=_end_with, args=(alive,), daemon=True).start()

    def tell(told: _Told) -> None:
        connection.send_bytes(msgspec.msgpack.encode(told))

    try:
        tell(_Told(measures=simulation(lambda ended: tell(_Told(ended)))))
    except Exception as error:
        tell(_Told(error=_said(error)))


def _end_with(alive: Connection) -> None:
    try:
        alive.recv_bytes()
    except EOFError:
        os._exit(1)


def _said(error: Exception) -> str:
    """In one line, with where it came from: nobody else will say it."""
    last = extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"
