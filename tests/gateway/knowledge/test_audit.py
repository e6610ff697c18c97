"""Predictions against reports: how far off they are, and when a target is believed less."""

from typing import Any

import pytest

from gateway.knowledge.audit import Audit, Sample, Tier


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def sample(predicted: int, actual: int, target: str = "w", **more: Any) -> Sample:
    tier: Tier = "local" if predicted else "none"
    fields: dict[str, Any] = {"model": "m", "tier": tier, "block_size": 32, **more}
    return Sample(f"{target}-{predicted}-{actual}", target, predicted=predicted, actual=actual, **fields)


def told(audit: Audit, *samples: Sample, times: int = 1) -> Audit:
    for _ in range(times):
        for each in samples:
            audit.add(each)
    return audit


def test_errors_by_target_model_and_tier() -> None:
    audit = told(
        Audit(),
        sample(64, 64),
        sample(64, 32),
        sample(640, 0, tier="pool"),
        sample(0, 96, target="v"),
        sample(64, 0, model="n"),
        sample(64, 0, excused="in_doubt"),
    )
    total = audit.total
    assert (total.turns, total.exact, total.excused) == (5, 1, 1)
    assert (total.predicted_tokens, total.actual_tokens) == (832, 192)
    assert (total.over_tokens, total.under_tokens) == (32 + 640 + 64, 96)
    series = audit.series["w", "m", "local"]
    assert (series.turns, series.exact, series.over_tokens, series.excused) == (2, 1, 32, 1)
    assert series.errors == [1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert audit.series["w", "m", "pool"].errors == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert audit.series.keys() == {
        ("w", "m", "local"),
        ("w", "m", "pool"),
        ("v", "m", "none"),
        ("w", "n", "local"),
    }
    assert [(m.predicted, m.actual, m.excused) for m in audit.mismatches] == [
        (64, 32, ""),
        (640, 0, ""),
        (0, 96, ""),
        (64, 0, ""),
        (64, 0, "in_doubt"),
    ]
    audit.forget("w")
    assert audit.series.keys() == {("v", "m", "none")}
    assert audit.total.turns == 5


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        pytest.param([sample(640, 0)] * 8, "should have found cached", id="promises that are not kept"),
        pytest.param([sample(0, 640)] * 8, "not foreseen", id="hits that nothing foresaw"),
        pytest.param([sample(640, 640), sample(640, 64)] * 4, "should have", id="half of the promises"),
        pytest.param([sample(640, 0)] * 7, "", id="too few to judge"),
        pytest.param([sample(640, 640)] * 9 + [sample(640, 0)] * 2, "", id="a few evictions in between"),
        pytest.param([sample(640, 608)] * 16, "", id="a block at the boundary"),
        pytest.param([sample(640, 0, excused="in_doubt")] * 16, "", id="what could not be known"),
        pytest.param([sample(640, 0, tier="pool")] * 16, "", id="what the pool did not give"),
        pytest.param([sample(0, 0)] * 16, "", id="nothing promised, nothing found"),
    ],
)
def test_a_target_is_demoted_for_errors_that_are_its_own(samples: list[Sample], what: str) -> None:
    audit = told(Audit(), *samples)
    assert what in audit.demoted("w")
    assert bool(audit.demoted("w")) == bool(what)
    assert audit.all_demoted().keys() == ({"w"} if what else set())
    assert audit.demoted("v") == ""


def test_a_demoted_target_recovers_once_its_answers_agree() -> None:
    audit = told(Audit(), sample(640, 0), times=16)
    told(audit, sample(640, 640), times=7)
    assert audit.demoted("w")
    told(audit, sample(640, 640))
    assert audit.demoted("w") == ""


def test_errors_are_forgotten_with_time_and_with_the_process() -> None:
    clock = Clock()
    audit = told(Audit(clock), sample(640, 0), sample(640, 0, target="v"), times=8)
    audit.acquit("v")
    assert audit.all_demoted().keys() == {"w"}
    clock.now += 601
    assert audit.all_demoted() == {}
