"""The admin API's routes of the shadow: a second policy that decides on every turn and never acts."""

import time
from typing import Any, Protocol

from fastapi import APIRouter, Response
from pydantic import Field

from gateway import errors
from gateway.admin_policy import Author, Comment, CompareView, Given, IfMatch, PolicyAnswer
from gateway.admin_views import Answer
from gateway.policy_versions import PolicyVersions, plan_of
from policies.shadow import Shadow


class Shadowed(Protocol):
    """Where turns are placed: the router."""

    shadow: Shadow | None


class ShadowPart(CompareView):
    model: str
    prompt: str = Field(description="Prompts of up to so many tokens: 2k, 16k, 64k, more, or unknown.")


class ShadowAnswer(Answer):
    document: dict[str, Any]
    total: CompareView = Field(description="before: the policy in force. after: the shadow.")
    by_model_and_prompt: list[ShadowPart]
    overhead_us: float | None = Field(description="Mean time that a turn's shadow decision takes.")

    @classmethod
    def of(cls, shadow: Shadow) -> "ShadowAnswer":
        return cls(
            document=shadow.plan.as_plain,
            total=CompareView.of(shadow.total),
            by_model_and_prompt=[
                ShadowPart(model=model, prompt=size, **CompareView.of(part).model_dump())
                for (model, size), part in sorted(shadow.parts.items())
            ],
            overhead_us=round(shadow.seconds / shadow.seen * 1e6, 1) if shadow.seen else None,
        )


def shadow_routes(router: Shadowed, versions: PolicyVersions) -> APIRouter:
    routes = APIRouter(tags=["policy"], prefix="/shadow")

    def present() -> Shadow:
        if router.shadow is None:
            raise errors.NotFound("no policy decides in the shadow")
        return router.shadow

    @routes.get("", summary="How the shadow compares with the policy in force")
    async def get_shadow() -> ShadowAnswer:
        return ShadowAnswer.of(present())

    @routes.put("", summary="Let a document decide in the shadow; counts begin anew")
    async def put_shadow(given: Given) -> ShadowAnswer:
        router.shadow = Shadow(plan_of(given), time.perf_counter)
        return ShadowAnswer.of(router.shadow)

    @routes.delete("", status_code=204, summary="End the shadow")
    async def delete_shadow() -> None:
        router.shadow = None

    @routes.post("/promote", summary="Bring the shadow's document into force")
    async def promote(
        response: Response, author: Author = "", comment: Comment = "", if_match: IfMatch = ""
    ) -> PolicyAnswer:
        document = present().plan.as_plain
        version = await versions.put(
            document, author=author, comment=comment or "promoted from the shadow", if_match=if_match
        )
        router.shadow = None
        response.headers["etag"] = version.etag
        return PolicyAnswer.of(version)

    _ = get_shadow, put_shadow, delete_shadow, promote
    return routes
