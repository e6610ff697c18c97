"""Several simulations at a time, each in a process of its own: they share nothing but what they read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from traceback import format_exc
from typing import Any, Final

import msgspec

from replay.measure import Measures

# Told of how many turns have ended.
Ended = Callable[[int], None]
Simulation = Callable[[Ended], Measures]


class SimulationFailed(RuntimeError):
    """What one of them raised, as text; or that its process ended without a word."""


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
        return {
            name: each(lambda ended, name=name: progress(name, ended)) for name, each in simulations.items()
        }
    context = get_context("fork")
    found: dict[str, Measures] = {}
    waiting = list(simulations.items())
    running: dict[Any, str] = {}
    processes: list[BaseProcess] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, simulation = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(simulation, there), daemon=True)
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
    return {name: found[name] for name in simulations}


def _run(simulation: Simulation, connection: Any) -> None:
    def tell(told: _Told) -> None:
        connection.send_bytes(msgspec.msgpack.encode(told))

    try:
        tell(_Told(measures=simulation(lambda ended: tell(_Told(ended)))))
    except Exception:
        tell(_Told(error=format_exc()))
