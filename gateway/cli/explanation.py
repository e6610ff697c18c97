"""A decision as a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any


def as_text(view: Mapping[str, Any]) -> str:
    """`view`: a decision as the admin API shows it."""
    candidates: Sequence[Mapping[str, Any]] = view["candidates"]
    names = dict.fromkeys(term for candidate in candidates for term in candidate["terms"])
    weighed = [name for name in names if any(candidate["terms"].get(name) for candidate in candidates)]
    # Milliseconds have a table of their own.
    terms = [] if _in_seconds(view) else weighed
    unit, scale = ("cost ms", 1e3) if view["unit"] == "s" else ("cost", 1)
    header = ["", "target", "local", "pool", "own", "queued tokens", "in flight", *terms, unit, "excluded"]
    rows = [
        [
            "->" if candidate["target"] == view["target"] else "",
            candidate["target"],
            *(
                _number(candidate[key])
                for key in ("local_tokens", "pool_tokens", "own_segment_tokens", "queued_tokens", "inflight")
            ),
            *(_number(candidate["terms"].get(term, 0) * scale) for term in terms),
            _number(candidate["cost"] * scale),
            candidate["excluded"],
        ]
        for candidate in candidates
    ]
    lines = [_headline(view), _prompt_line(view), *_choice(view), "", *_table(header, rows)]
    if candidates and candidates[0]["expected_ms"]:
        lines += [
            "",
            "expected, in milliseconds, and how far by measured rates:",
            *_expected(candidates, weighed=_in_seconds(view)),
        ]
    if view["divergence"]:
        lines += ["", *_divergence(view["divergence"])]
    return "\n".join(lines)


def _in_seconds(view: Mapping[str, Any]) -> bool:
    """Whether what was weighed are the expected seconds themselves."""
    return view["unit"] == "s" and any(
        c["terms"].keys() == c["expected_ms"].keys() for c in view["candidates"]
    )


def refusal(view: Mapping[str, Any]) -> str:
    """Why no worker can take the turn; "" if one can."""
    if view["target"] is not None:
        return ""
    excluded = {candidate["excluded"] for candidate in view["candidates"]}
    if not excluded:
        return "no worker is registered"
    if excluded == {"model"}:
        return f"no worker serves the model {view['model']!r}"
    return str(view["reason"])


def _headline(view: Mapping[str, Any]) -> str:
    if view["target"] is None:
        return f"nowhere: {refusal(view)} (policy {view['policy']})"
    return f"{view['action']} on {view['target']}: {view['reason']} (policy {view['policy']})"


def _choice(view: Mapping[str, Any]) -> list[str]:
    """Whose turn it is, what narrowed the choice, and how close it was."""
    lines: list[str] = []
    session = view["session"]
    if session["name"]:
        known = "recognised by its prompts" if session["inferred"] else "as its client calls it"
        turn = "new" if session["new"] else "a branch" if session["branch"] else "goes on"
        lines.append(f"session {session['name']} ({known}): {turn}")
    if view["decode"]:
        lines.append(f"to be decoded on {view['decode']}")
    if view["rule"]:
        lines.append(f"by the rule {view['rule']}")
    if view["guards"]:
        lines.append(f"guards that kept targets out: {', '.join(view['guards'])}")
    if view["runner_up"]:
        margin = view["margin"] * (1e3 if view["unit"] == "s" else 1)
        unit = "ms" if view["unit"] == "s" else view["unit"]
        words = (_number(abs(margin)), unit, "more" if margin >= 0 else "less")
        lines.append(f"next: {view['runner_up']}, {' '.join(filter(None, words))}")
    return lines


def _expected(candidates: Sequence[Mapping[str, Any]], *, weighed: bool) -> list[str]:
    """Terms that anybody has; as the policy weighed them, if it did."""
    costs = [
        {term: seconds * 1e3 for term, seconds in c["terms"].items()} if weighed else c["expected_ms"]
        for c in candidates
    ]
    terms = [term for term in candidates[0]["expected_ms"] if any(round(cost[term], 1) for cost in costs)]
    rows = [
        [
            "",
            candidate["target"],
            *(_number(cost[term]) for term in terms),
            _number(candidate["expected_ttft_ms"]),
            f"{max(rate['confidence'] for rate in candidate['rates'].values()):.0%}",
        ]
        for candidate, cost in zip(candidates, costs, strict=True)
    ]
    return _table(["", "target", *terms, "ttft", "measured"], rows)


def _prompt_line(view: Mapping[str, Any]) -> str:
    model = f"{view['model'] or 'no model named'} ({view['api']})"
    if view["unrenderable"]:
        placed = ", placed by load" if view["target"] is not None else ""
        return f"{model}: prompt not known ({view['unrenderable']}){placed}"
    tokens, cached = view["prompt_tokens"], view["predicted_cached_tokens"]
    local = next((c["local_tokens"] for c in view["candidates"] if c["target"] == view["target"]), 0)
    here, pulled = min(local, cached), max(0, cached - local)
    places = [f"{here} of them cached there"] if here or not pulled else []
    if pulled:
        places.append(f"{pulled} of them in the pool")
    return (
        f"{model}: {tokens} prompt tokens in {view['blocks']} full blocks of {view['block_size']}, "
        f"{', '.join(places)}, {tokens - cached} to compute"
    )


def _divergence(found: Mapping[str, Any]) -> list[str]:
    session = "a session that looks the same" if found["inferred"] else "its session"
    return [
        f"prefix breaks at token {found['token']} (block {found['block']}): {found['cause']}, "
        f"{found['lost_tokens']} tokens lost",
        f"  the last prompt of {session}: {found['previous_request_id']}",
        f"  after  {found['before']!r}",
        f"  before {found['previously']!r}",
        f"  now    {found['now']!r}",
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    left = {0, 1, len(header) - 1}
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
