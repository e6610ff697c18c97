"""What the admin API says of predictions: how often right, how far off and where, and who is demoted."""

from pydantic import Field

from gateway.admin.views import Answer
from gateway.knowledge.audit import BUCKETS, Audit, Series


class MismatchView(Answer):
    request_id: str
    target: str
    predicted: int
    actual: int
    excused: str = Field(
        description="Why it does not count as wrong: pool_unknown, events_missing, in_doubt or "
        "events_on_their_way; empty: it counts."
    )


class AuditedView(Answer):
    """Predictions of one kind."""

    target: str
    model: str
    tier: str = Field(description="local, pool, or none: nothing was predicted to be cached.")
    turns: int
    exact: int
    predicted_tokens: int
    actual_tokens: int
    over_tokens: int = Field(description="Predicted, and not cached.")
    under_tokens: int = Field(description="Cached, and not predicted.")
    excused: int = Field(description="Turns of which not all was known; in no other count.")
    errors: dict[str, int] = Field(description="Turns by the size of their error in tokens, at most so many.")


class AuditAnswer(Answer):
    turns: int = Field(description="Turns whose worker reported cached tokens, and of which all was known.")
    exact: int = Field(description="Those where the prediction was exactly right.")
    exact_ratio: float | None
    predicted_tokens: int
    actual_tokens: int
    error_tokens: int = Field(description="Sum of the absolute differences.")
    excused: int = Field(
        description="Turns of which not all was known: the pool did not answer, events were missing or on "
        "their way. In no other count."
    )
    series: list[AuditedView]
    demoted: dict[str, str] = Field(description="Targets whose index is believed less for their errors: why.")
    mismatches: list[MismatchView] = Field(description="The last 50, those that are excused among them.")

    @classmethod
    def of(cls, audit: Audit) -> "AuditAnswer":
        total = audit.total
        return cls(
            turns=total.turns,
            exact=total.exact,
            exact_ratio=total.exact / total.turns if total.turns else None,
            predicted_tokens=total.predicted_tokens,
            actual_tokens=total.actual_tokens,
            error_tokens=total.over_tokens + total.under_tokens,
            excused=total.excused,
            series=[_audited(*key, series) for key, series in audit.series.items()],
            demoted=audit.all_demoted(),
            mismatches=[
                MismatchView(
                    request_id=m.request_id,
                    target=m.target,
                    predicted=m.predicted,
                    actual=m.actual,
                    excused=m.excused,
                )
                for m in audit.mismatches
            ],
        )


def _audited(target: str, model: str, tier: str, series: Series) -> AuditedView:
    bounds = [*map(str, BUCKETS), "more"]
    return AuditedView(
        target=target,
        model=model,
        tier=tier,
        turns=series.turns,
        exact=series.exact,
        predicted_tokens=series.predicted_tokens,
        actual_tokens=series.actual_tokens,
        over_tokens=series.over_tokens,
        under_tokens=series.under_tokens,
        excused=series.excused,
        errors=dict(zip(bounds, series.errors, strict=True)),
    )
