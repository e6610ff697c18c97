"""Pictures of an experiment, PNG or SVG, by matplotlib (`pip install 'moongate[plots]'`)."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# matplotlib's own types leave most of its arguments open.

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final

from replay.experiment import CLAIRVOYANT, Outcome
from replay.report import BOUND, curves, everybody

SUFFIXES: Final = (".png", ".svg")
# Where the hit tokens of a prompt came from, and what was computed, as fields of Measures.
_SOURCES: Final = (
    ("local", "own HBM", "#2e8b57"),
    ("dram", "private DRAM", "#5aa9a3"),
    ("own_segment", "own segment", "#8fce9f"),
    ("remote_pool", "others' segments", "#e09f3e"),
    ("computed", "computed", "#d1495b"),
)
_STYLES: Final[dict[str, dict[str, Any]]] = {
    BOUND: {"color": "black", "linestyle": ":"},
    CLAIRVOYANT: {"linestyle": (0, (4, 4))},
}


def available() -> bool:
    return find_spec("matplotlib") is not None


def drawn(outcome: Outcome, suffix: str) -> bytes:
    """Both times by percentile, where prompts' tokens came from, and traffic. Same outcome, same picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Identifiers in an SVG are random otherwise, and letters as outlines make it three times as large.
    with rc_context({"svg.hashsalt": "moongate", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(12, 8), layout="constrained")
        (ttft, e2e), (sources, traffic) = figure.subplots(2, 2)
        for axes, (title, lines) in zip((ttft, e2e), curves(outcome), strict=True):
            _times(axes, title, lines)
        _sources(sources, outcome)
        _traffic(traffic, outcome)
        picture = BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(picture, format=suffix.removeprefix("."), dpi=130, metadata=metadata)
    return picture.getvalue()


def _times(axes: Any, title: str, lines: list[tuple[str, Any]]) -> None:
    for name, values in lines:
        # The clairvoyant's run is a policy's where that found the best schedule: both show.
        style = _STYLES.get(name, {})
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set(title=title, xlabel="percent of turns", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()


def _sources(axes: Any, outcome: Outcome) -> None:
    named = everybody(outcome)[::-1]
    left = [0.0] * len(named)
    for field, label, colour in _SOURCES:
        widths = [100 * float(getattr(each, field)) for _, each in named]
        axes.barh([name for name, _ in named], widths, left=left, label=label, color=colour)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set(title="Where prompt tokens came from, percent", xlim=(0, 100))
    _legend(axes)


def _traffic(axes: Any, outcome: Outcome) -> None:
    named = everybody(outcome)[::-1]
    put = [each.pool_put_bytes / 1e12 for _, each in named]
    pulled = [each.pool_network_bytes / 1e12 - way for (_, each), way in zip(named, put, strict=True)]
    names = [name for name, _ in named]
    axes.barh(names, pulled, label="pulled", color="#1b6ca8")
    axes.barh(names, put, left=pulled, label="put", color="#8e5ea2")
    axes.set(title="Over the network, TB")
    _legend(axes)


def _legend(axes: Any) -> None:
    """Below the bars, which may reach anywhere."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False)
