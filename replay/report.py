"""Results of an experiment: a table to read, JSON to keep, a page to show."""

from __future__ import annotations

import html
from collections.abc import Sequence
from math import floor, log10
from typing import Any, Final

import msgspec

from replay.experiment import CLAIRVOYANT, Outcome
from replay.measure import Measures
from replay.repeat import command_line
from replay.spent import held_up_by, said

BOUND: Final = "lower bound"
_COLUMNS: Final = (
    "policy",
    "hit %",
    "local %",
    "TTFT p50",
    "p90",
    "p99 s",
    "E2E p50",
    "p99 s",
    "tok/s",
    "network TB",
    "moved %",
    "max/mean",
)
_LEGEND: Final = (
    "hit: prompt tokens found cached; local: of these, in the instance's own HBM, private DRAM or segment;",
    "network: pulled and put; moved: later turns that went elsewhere than the turn before;",
    "max/mean: time that turns spent on the fullest instance over the mean.",
)


def table(outcome: Outcome) -> str:
    """For a terminal, with what its columns mean."""
    rows = [
        _COLUMNS,
        *(_row(name, each) for name, each in everybody(outcome)),
        _bound_row(outcome),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    again = f"Again: {command_line(outcome)}"
    return "\n".join([*_heading(outcome), "", *lines, "", *_LEGEND, "", again])


def document(outcome: Outcome) -> dict[str, Any]:
    """The JSON of a run: `policies` by name, `clairvoyant` with the same keys, and what was run."""
    experiment, profile = outcome.experiment, outcome.profile
    return {
        "run": {
            "command": command_line(outcome),
            "file": experiment.file,
            "format": experiment.format,
            "profile": experiment.profile,
            "instances": experiment.instances,
            "gpus": int(profile.gpus.value) * experiment.instances,
            "pool": experiment.pool,
            "placement": experiment.placement if experiment.pool else None,
            "seed": experiment.seed,
            "sessions": outcome.sessions,
            "copied_sessions": outcome.copies,
            "active": outcome.active,
            "truncated_sessions": outcome.truncated,
            "dropped_sessions": outcome.dropped,
            "ramp_s": outcome.ramp_s,
            "rate": experiment.rate,
            "head": experiment.head,
            "think": experiment.think,
            "warmup": experiment.warmup,
            "clairvoyant_schedule": outcome.schedule,
            "failures_at_s": list(experiment.failures),
            "down_s": experiment.down_s,
            "unlike": [
                {"instances": count, "profile": name or experiment.profile, "figures": dict(figures)}
                for count, name, figures in experiment.unlike
            ],
            "options": {name: dict(each) for name, each in experiment.options.items()},
            "figures": msgspec.to_builtins(profile),
        },
        "policies": {name: _measured(each) for name, each in outcome.measures.items()},
        CLAIRVOYANT: _measured(outcome.clairvoyant),
    }


def _measured(each: Measures) -> dict[str, Any]:
    return {**msgspec.to_builtins(each), "held_up_by": held_up_by(each.spent)}


def encoded(outcome: Outcome) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document(outcome)), indent=1) + b"\n"


def page(outcome: Outcome) -> str:
    """One HTML file that needs nothing else: the table, and curves of TTFT and end-to-end time."""
    named = everybody(outcome)
    head = "".join(f"<th>{html.escape(each)}</th>" for each in _COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(name, each)) + "</tr>"
        for name, each in named
    )
    bound_cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _bound_row(outcome))
    body += f"<tr>{bound_cells}</tr>"
    intro = "".join(f"<p>{html.escape(line)}</p>" for line in _heading(outcome))
    legend = html.escape(" ".join(_LEGEND))
    again = html.escape(command_line(outcome))
    figures = "".join(
        f"<figure><figcaption>{title}, by share of turns (logarithmic)</figcaption>{_curve(lines)}</figure>"
        for title, lines in curves(outcome)
    )
    sources = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{value:g}</td><td>{html.escape(source)}</td></tr>"
        for key, value, source in _figures(outcome)
    )
    return (
        "<!doctype html><meta charset=utf-8><title>moongate replay</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}"
        "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .6rem;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child,.sources td{text-align:left}"
        "figure{display:inline-block;margin:0 1rem 1rem 0}svg{background:#fafafa}</style>"
        f"<h1>moongate replay</h1>{intro}<table><tr>{head}</tr>{body}</table><p>{legend}</p>"
        f"<p>Again: <code>{again}</code></p>{figures}"
        f"<h2>Profile</h2><table class=sources>{sources}</table>\n"
    )


def curves(outcome: Outcome) -> list[tuple[str, list[tuple[str, Sequence[float]]]]]:
    """Percentiles 1 to 100 of both times, by policy, and what nobody can be below."""
    named, least = everybody(outcome), outcome.clairvoyant
    return [
        (
            "Time to first token, seconds",
            [*((name, each.ttft_s) for name, each in named), (BOUND, least.bound_ttft_s)],
        ),
        (
            "End to end, seconds",
            [*((name, each.e2e_s) for name, each in named), (BOUND, least.bound_e2e_s)],
        ),
    ]


def everybody(outcome: Outcome) -> list[tuple[str, Measures]]:
    return [*outcome.measures.items(), (CLAIRVOYANT, outcome.clairvoyant)]


def _heading(outcome: Outcome) -> list[str]:
    experiment, profile = outcome.experiment, outcome.profile
    pool = f"pool with {experiment.placement} placement" if experiment.pool else "no pool"
    ideal = 100 * outcome.clairvoyant.ideal_hit_rate
    deaths = [
        f"{name} {each.failures} dead instances, {each.retried_turns} turns sent again,"
        f" {each.failed_turns} broken off, {each.failed_pulls} pulls failed"
        for name, each in everybody(outcome)
        if experiment.failures
    ]
    copies = f", {outcome.copies} of them copies" if outcome.copies else ""
    cut = f", {outcome.truncated} of them cut off at the model's limit or HBM" if outcome.truncated else ""
    cut += f" ({outcome.dropped} more left out whole)" if outcome.dropped else ""
    return [
        f"{profile.description}: {experiment.instances} instances"
        f" ({experiment.instances * int(profile.gpus.value)} GPUs), {pool}",
        f"{experiment.file}: {outcome.sessions} sessions{copies}{cut};"
        f" {outcome.clairvoyant.turns} turns measured, ideal hit rate {ideal:.1f} %",
        *(f"{name} is held up by {said(each.spent)}" for name, each in outcome.measures.items()),
        *(
            f"{name} failed for {each.policy_failures} turns, for which least_loaded, the fallback, decided;"
            f" at first: {each.policy_fault}"
            for name, each in outcome.measures.items()
            if each.policy_failures
        ),
        *(["Failures: " + "; ".join(deaths)] if deaths else []),
    ]


def _row(name: str, each: Measures) -> tuple[str, ...]:
    return (
        name,
        f"{100 * each.hit_rate:.2f}",
        f"{100 * each.local_share:.1f}",
        f"{each.ttft_p50_s:.3f}",
        f"{each.ttft_p90_s:.3f}",
        f"{each.ttft_p99_s:.3f}",
        f"{each.e2e_p50_s:.2f}",
        f"{each.e2e_p99_s:.2f}",
        f"{each.throughput_tok_s:,.0f}",
        f"{each.pool_network_bytes / 1e12:.2f}",
        f"{100 * each.moved_share:.0f}",
        f"{each.imbalance:.2f}",
    )


def _bound_row(outcome: Outcome) -> tuple[str, ...]:
    """What nobody can be below. Each run's bound is of the turns that it measured, which differ a little from
    run to run: the table has the lowest of them, so that it holds for every row."""
    runs = [*outcome.measures.values(), outcome.clairvoyant]
    return (
        BOUND,
        f"{100 * max(each.ideal_hit_rate for each in runs):.2f}",
        "",
        f"{min(each.bound_ttft_p50_s for each in runs):.3f}",
        f"{min(each.bound_ttft_p90_s for each in runs):.3f}",
        f"{min(each.bound_ttft_p99_s for each in runs):.3f}",
        f"{min(each.bound_e2e_p50_s for each in runs):.2f}",
        f"{min(each.bound_e2e_p99_s for each in runs):.2f}",
        f"{max(each.bound_throughput_tok_s for each in runs):,.0f}",
        "",
        "",
        "",
    )


def _figures(outcome: Outcome) -> list[tuple[str, float, str]]:
    found: list[tuple[str, float, str]] = []
    tree: dict[str, Any] = msgspec.to_builtins(outcome.profile)
    for prefix, figures in (("", tree), ("decode.", tree["decode"] or {})):
        found += [
            (prefix + key, each["value"], each["source"])
            for key, each in figures.items()
            if isinstance(each, dict) and "source" in each
        ]
    return found


_COLOURS: Final = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#e09f3e", "#5f6b6d", "#00798c", "#7a4b2a")
_WIDTH: Final = 520
_HEIGHT: Final = 300


def _curve(lines: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Percentiles 1 to 100 as an SVG, values on a logarithmic axis."""
    every = [max(value, 1e-4) for _, values in lines for value in values]
    low, high = floor(log10(min(every))), log10(max(every)) + 0.05

    def x(place: int, count: int) -> float:
        return 50 + (_WIDTH - 60) * (place + 1) / count

    def y(value: float) -> float:
        return _HEIGHT - 30 - (_HEIGHT - 40) * (log10(max(value, 1e-4)) - low) / (high - low)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">']
    for power in range(low, int(high) + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M50 {at:.1f}H{_WIDTH - 10}" stroke="#ddd"/>')
        parts.append(f'<text x="45" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts += [
        f'<text x="{x(each - 1, 100):.0f}" y="{_HEIGHT - 12}" text-anchor="middle">p{each}</text>'
        for each in (10, 50, 90, 99)
    ]
    for place, (name, values) in enumerate(lines):
        colour = _COLOURS[place % len(_COLOURS)]
        path = "L".join(f"{x(at, len(values)):.1f} {y(value):.1f}" for at, value in enumerate(values))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="60" y="{20 + 15 * place}" fill="{colour}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
