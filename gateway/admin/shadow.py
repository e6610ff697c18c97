"""The admin API's routes of the shadow: a second policy that decides on every turn and never acts."""

import asyncio
import logging
import time
from typing import Any, Protocol

from fastapi import APIRouter, Response
from pydantic import Field

from gateway import errors
from gateway.admin.policy import Author, Comment, CompareView, Given, IfMatch, PolicyAnswer
from gateway.admin.views import Answer
from gateway.routing.policy_versions import PolicyVersions, digest_of, plan_of
from policies.shadow import Measured, Shadow

logger = logging.getLogger(__name__)


class Shadowed(Protocol):
    """Where turns are placed: the router."""

    shadow: Shadow | None


class MeasuredView(Answer):
    """Streamed turns whose worker reported cached tokens: what happened against what the shadow expects."""

    same_turns: int = Field(description="Turns that both send to the same target.")
    off: float | None = Field(
        description="How many times longer than expected their first tokens took; null below 10 of them."
    )
    moved_turns: int = Field(description="Turns that the shadow would have sent elsewhere.")
    ttft_ms: float | None = Field(description="Their mean time to first token, measured where they went.")
    expected_ttft_ms_before: float | None = Field(description="What was expected there.")
    expected_ttft_ms_after: float | None = Field(description="What is expected where the shadow sends them.")
    difference_ms: float | None = Field(
        description="expected_ttft_ms_after times off, less ttft_ms: below 0 the shadow is sooner."
    )
    uncached_tokens: int = Field(description="What they computed, as their workers reported.")
    uncached_tokens_after: int = Field(description="What they would have to, where the shadow sends them.")

    @classmethod
    def of(cls, found: Measured) -> "MeasuredView":
        def mean(seconds: float) -> float | None:
            return round(seconds / found.moved * 1e3, 3) if found.moved else None

        off, difference = found.off, found.difference_s
        return cls(
            same_turns=found.same,
            off=None if off is None else round(off, 3),
            moved_turns=found.moved,
            ttft_ms=mean(found.ttft),
            expected_ttft_ms_before=mean(found.expected_before),
            expected_ttft_ms_after=mean(found.expected_after),
            difference_ms=None if difference is None else round(difference * 1e3, 3),
            uncached_tokens=found.uncached,
            uncached_tokens_after=found.uncached_after,
        )


class ShadowPart(CompareView):
    model: str
    prompt: str = Field(description="Prompts of up to so many tokens: 2k, 16k, 64k, more, or unknown.")
    measured: MeasuredView


class ShadowAnswer(Answer):
    document: dict[str, Any]
    total: CompareView = Field(description="before: the policy in force. after: the shadow.")
    measured: MeasuredView
    by_model_and_prompt: list[ShadowPart]
    overhead_us: float | None = Field(description="Mean time that a turn's shadow decision takes.")

    @classmethod
    def of(cls, shadow: Shadow) -> "ShadowAnswer":
        return cls(
            document=shadow.plan.as_plain,
            total=CompareView.of(shadow.total),
            measured=MeasuredView.of(shadow.measured),
            by_model_and_prompt=[
                ShadowPart(
                    model=model,
                    prompt=size,
                    measured=MeasuredView.of(measured),
                    **CompareView.of(part).model_dump(),
                )
                for (model, size), (part, measured) in sorted(shadow.parts.items(), key=lambda each: each[0])
            ],
            overhead_us=round(shadow.seconds / shadow.seen * 1e6, 1) if shadow.seen else None,
        )


def shadow_routes(router: Shadowed, versions: PolicyVersions) -> APIRouter:
    routes = APIRouter(tags=["policy"], prefix="/shadow")
    # One change after the other: what is promoted is what was in the shadow, and goes from there once.
    changing = asyncio.Lock()

    def present() -> Shadow:
        if router.shadow is None:
            raise errors.NotFound("no policy decides in the shadow")
        return router.shadow

    @routes.get("", summary="How the shadow compares with the policy in force")
    async def get_shadow() -> ShadowAnswer:
        return ShadowAnswer.of(present())

    @routes.put("", summary="Let a document decide in the shadow until the gateway ends; counts begin anew")
    async def put_shadow(given: Given) -> ShadowAnswer:
        shadow = Shadow(plan_of(given), time.perf_counter)
        async with changing:
            router.shadow = shadow
        document = shadow.plan.as_plain
        logger.info("shadow set: %s, document %s", document["policy"], digest_of(document))
        return ShadowAnswer.of(shadow)

    @routes.delete("", status_code=204, summary="End the shadow")
    async def delete_shadow() -> None:
        async with changing:
            had, router.shadow = router.shadow, None
        if had is not None:
            logger.info("shadow ended")

    @routes.post("/promote", summary="Bring the shadow's document into force")
    async def promote(
        response: Response, author: Author = "", comment: Comment = "", if_match: IfMatch = None
    ) -> PolicyAnswer:
        async with changing:
            document = present().plan.as_plain
            version = await versions.put(
                document, author=author, comment=comment or "promoted from the shadow", if_match=if_match
            )
            router.shadow = None
        logger.info("shadow promoted, and ended")
        response.headers["etag"] = version.etag
        return PolicyAnswer.of(version)

    _ = get_shadow, put_shadow, delete_shadow, promote
    return routes
