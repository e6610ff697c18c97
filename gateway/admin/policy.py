"""The admin API's routes of the policy: read, changed by version, tried on what was decided, rolled back."""

import asyncio
from collections.abc import Sequence, Set
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Body, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field, RootModel

from gateway.admin.views import Answer
from gateway.routing.decisions import DecisionLog
from gateway.routing.policy_versions import PolicyVersions, Version, plan_of
from policies import registry
from policies.compare import Comparison, Placed, compare
from policies.document import schema
from workers.worker import Worker

Author = Annotated[str, Query(max_length=200, description="Who changes it, for the history.")]
Comment = Annotated[str, Query(max_length=2000, description="Why, for the history.")]
IfMatch = Annotated[
    str | None,
    Header(description="The ETag of the version this change is made to; 412 if it is another by now."),
]
Given = Annotated[Any, Body(description="A policy document; see /admin/v1/policy/schema.")]


class PolicyAnswer(Answer):
    version: int
    time: float = Field(description="Unix seconds.")
    author: str
    comment: str
    document: dict[str, Any]
    available: list[str] = Field(description="Names of policies there are.")

    @classmethod
    def of(cls, version: Version) -> "PolicyAnswer":
        return cls(
            version=version.number,
            time=version.time,
            author=version.author,
            comment=version.comment,
            document=version.document,
            available=registry.names(),
        )


class HistoryEntry(Answer):
    version: int
    time: float = Field(description="Unix seconds.")
    author: str
    comment: str
    diff: str = Field(description="Against the version before it.")
    document: dict[str, Any]


class HistoryAnswer(Answer):
    versions: list[HistoryEntry] = Field(description="The newest first; at most 100.")


class CompareView(Answer):
    turns: int = Field(description="Turns that both could place.")
    changed: int = Field(description="Those that go to another target.")
    agreement: float | None
    predicted_ttft_ms_before: float | None = Field(description="Mean of the expected times to first token.")
    predicted_ttft_ms_after: float | None
    uncached_tokens_before: int
    uncached_tokens_after: int
    unplaced: int = Field(description="Turns that were placed, and would have been turned away: nobody may.")
    failed: int = Field(description="Turns for which the policy failed, so that the fallback decided.")
    fault: str = Field(description="How it failed the last time.")

    @classmethod
    def of(cls, found: Comparison) -> "CompareView":
        def mean(seconds: float) -> float | None:
            return round(seconds / found.turns * 1e3, 3) if found.turns else None

        return cls(
            turns=found.turns,
            changed=found.changed,
            agreement=found.agreement,
            predicted_ttft_ms_before=mean(found.ttft_before),
            predicted_ttft_ms_after=mean(found.ttft_after),
            uncached_tokens_before=found.uncached_before,
            uncached_tokens_after=found.uncached_after,
            unplaced=found.unplaced,
            failed=found.failed,
            fault=found.fault,
        )


class ValidateAnswer(Answer):
    document: dict[str, Any] = Field(description="As it would be in force.")
    warnings: list[str] = Field(description="What is valid and hardly meant: rules for workers nobody knows.")
    recent: CompareView = Field(description="What it would have changed of the last decisions.")
    not_judged: int = Field(
        description="Of these, turns left out of recent: headers that its rules go by were not kept then."
    )


class SchemaAnswer(RootModel[dict[str, Any]]):
    """A JSON Schema."""


class Rollback(BaseModel):
    """version: the one whose document is to be in force again; the one before the present if not given."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: int | None = None


class Workers(Protocol):
    """The registry of workers."""

    def workers(self) -> Sequence[Worker]: ...


def policy_routes(versions: PolicyVersions, decisions: DecisionLog, fleet: Workers) -> APIRouter:
    router = APIRouter(tags=["policy"], prefix="/policy")

    def shown(version: Version, response: Response) -> PolicyAnswer:
        response.headers["etag"] = version.etag
        return PolicyAnswer.of(version)

    @router.get("", summary="The policy in force")
    async def get_policy(response: Response) -> PolicyAnswer:
        return shown(versions.current, response)

    @router.put("", summary="Bring a policy document into force")
    async def put_policy(
        given: Given, response: Response, author: Author = "", comment: Comment = "", if_match: IfMatch = None
    ) -> PolicyAnswer:
        version = await versions.put(given, author=author, comment=comment, if_match=if_match)
        return shown(version, response)

    @router.get("/schema", summary="The JSON Schema of policy documents")
    async def get_schema() -> SchemaAnswer:
        return SchemaAnswer(schema())

    @router.post("/validate", summary="Check a document, and try it on the last decisions")
    async def validate_policy(
        given: Given, last: Annotated[int, Query(ge=0, le=1000)] = 200
    ) -> ValidateAnswer:
        plan = plan_of(given)
        placed = placed_lately(decisions, last, plan.headers)
        found = await asyncio.to_thread(compare, placed, plan)
        known = [target.name for worker in fleet.workers() for target in worker.targets]
        return ValidateAnswer(
            document=plan.as_plain,
            warnings=plan.for_nobody(known),
            recent=CompareView.of(found),
            not_judged=len(placed_lately(decisions, last)) - len(placed),
        )

    @router.get("/history", summary="The policy's versions")
    async def get_history() -> HistoryAnswer:
        return HistoryAnswer(
            versions=[
                HistoryEntry(
                    version=v.number,
                    time=v.time,
                    author=v.author,
                    comment=v.comment,
                    diff=versions.diff(v),
                    document=v.document,
                )
                for v in versions.history
            ]
        )

    @router.post("/rollback", summary="Bring an earlier version's document into force again")
    async def roll_back(
        response: Response,
        to: Rollback | None = None,
        author: Author = "",
        comment: Comment = "",
        if_match: IfMatch = None,
    ) -> PolicyAnswer:
        number = to.version if to else None
        return shown(
            await versions.rollback(number, author=author, comment=comment, if_match=if_match), response
        )

    _ = get_policy, put_policy, get_schema, validate_policy, get_history, roll_back
    return router


def placed_lately(decisions: DecisionLog, last: int, headers: Set[str] = frozenset()) -> Sequence[Placed]:
    """The last decisions, the newest first; without those of which any of `headers` is not known.

    Of a turn those headers are kept that a rule in force went by.
    """
    return [
        Placed(r.turn, r.facts, r.decision)
        for r in decisions.recent(last)
        if r.turn is not None and (not headers or (r.plan is not None and headers <= r.plan.headers))
    ]
