"""The command line that repeats a run, for whoever finds its results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from replay.experiment import Outcome


def command_line(outcome: Outcome) -> str:
    """With what was left to its default, so that it stays the same run when a default changes."""
    made = outcome.experiment
    flags: list[tuple[str, object]] = [
        ("--format", made.format),
        ("--profile", made.profile),
        *(("--set", each) for each in _figures(made.figures)),
        ("--instances", made.instances),
        *(("--unlike", f"{n}:{name or ','.join(_figures(changes))}") for n, name, changes in made.unlike),
        ("--pool", "on" if made.pool else "off"),
        ("--placement", made.placement if made.pool else None),
        *(("--policy", each) for each in made.policies),
        *(
            ("--option", f"{policy}.{key}={value}")
            for policy, given in made.options.items()
            for key, value in given.items()
        ),
        ("--active", outcome.active),
        ("--ramp", outcome.ramp_s),
        ("--rate", made.rate),
        ("--sessions", made.sessions),
        ("--head", made.head),
        ("--think", made.think),
        ("--warmup", made.warmup),
        *(("--fail", each) for each in made.failures),
        ("--down", made.down_s if made.failures else None),
        ("--seed", made.seed),
    ]
    words = ["moongate", "replay", made.file]
    for flag, value in flags:
        if value is not None:
            words += [flag, _number(value) if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _figures(changes: Mapping[str, float]) -> list[str]:
    return [f"{key}={_number(value)}" for key, value in changes.items()]


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")
