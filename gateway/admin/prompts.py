"""What the admin API says of prompts: where each model's are made, and whether workers agree with them."""

from collections.abc import Sequence

from pydantic import Field

from gateway.admin.views import Answer
from gateway.prompts.parity import Difference
from gateway.prompts.prompts import ModelPrompts


class DifferenceView(Answer):
    """The first token on which the gateway and a worker disagree; -1 stands for the end of a prompt."""

    worker: str
    api: str
    position: int
    ours: int
    our_text: str
    theirs: int
    their_text: str


class ModelPromptsView(Answer):
    model: str
    made: str = Field(description="here, by workers, nowhere, or loading: the tokenizer is not there yet.")
    why: str = Field(description="Why they are not made here.")
    cached_tokens: int
    cached_bytes: int
    agreed: dict[str, list[str]] = Field(description="By API, the workers that make the same tokens.")
    differences: list[DifferenceView] = Field(description="APIs whose prompts workers make instead, and why.")


class PromptsAnswer(Answer):
    source: str = Field(description="The setting prompt.source.")
    models: list[ModelPromptsView]


def prompts_answer(prompts: ModelPrompts, setting: str) -> PromptsAnswer:
    """The state of every model that is served now."""
    differences = prompts.parity.differences()
    views: list[ModelPromptsView] = []
    for model, status in prompts.sources() if setting in ("auto", "local") else ():
        made = {"ready": "here", "loading": "loading"}.get(status.state) or (
            "by workers" if setting == "auto" else "nowhere"
        )
        views.append(
            ModelPromptsView(
                model=model,
                made=made,
                why=status.detail,
                cached_tokens=status.cached_tokens,
                cached_bytes=status.cached_bytes,
                agreed=prompts.parity.proofs(model),
                differences=_differences(model, differences),
            )
        )
    return PromptsAnswer(source=setting, models=views)


def made_elsewhere(answer: PromptsAnswer) -> list[str]:
    """In words, the models whose tokenizer can't be loaded here."""
    return [
        f"prompts of {view.model} are made {view.made}: {view.why}"
        for view in answer.models
        if view.made in ("by workers", "nowhere")
    ]


def _differences(model: str, found: Sequence[Difference]) -> list[DifferenceView]:
    return [
        DifferenceView(
            worker=each.worker,
            api=each.api,
            position=each.position,
            ours=each.ours,
            our_text=each.our_text,
            theirs=each.theirs,
            their_text=each.their_text,
        )
        for each in found
        if each.model == model
    ]
