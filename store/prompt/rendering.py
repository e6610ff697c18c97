"""A chat body through the model's chat template, to the text that is tokenized."""

from __future__ import annotations

from typing import Any, Final, cast

import jinja2
from transformers import PreTrainedTokenizerFast

from store.prompt import normalise
from store.prompt.request import ChatPrompt, Unrenderable
from store.prompt.template import TemplateFacts, read_template

# Conversations whose prompts show which added tokens a template writes around its messages.
_SAMPLE_CHATS: Final[tuple[list[Any], ...]] = (
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First?\n"},
        {"role": "assistant", "content": "Yes, it's 1.\n\nAnd so on. "},
        {"role": "user", "content": "Second?"},
    ],
    [
        {"role": "user", "content": "你好 👍🏽  naïve"},
        {"role": "assistant", "content": "好"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "  x"},
        {"role": "user", "content": "\n\nlast"},
    ],
)


class Renderer:
    """The chat templates of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer: Final = tokenizer
        self._facts: Final[dict[str, TemplateFacts]] = {}

    def render(self, request: ChatPrompt) -> str:
        """The prompt's text, special tokens of the template included. Raises Unrenderable."""
        if request.chat_template is not None:
            raise Unrenderable("request_template")
        template, facts = self._template(request.tools)
        messages = normalise.conversation(request.messages, facts)
        keywords = normalise.template_keywords(request, facts)
        try:
            text = self._tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                messages, chat_template=template, tokenize=False, **keywords
            )
        except Exception as wrong:  # a template is a program: any exception can come out of it
            raise Unrenderable("template_error", str(wrong)) from wrong
        return cast(str, text)

    def samples(self) -> list[str]:
        """Prompts of sample conversations; those the template refuses are missing."""
        found: list[str] = []
        for messages in _SAMPLE_CHATS:
            try:
                found.append(self.render(ChatPrompt(messages=messages)))
            except Unrenderable:
                continue
        return found

    def _template(self, tools: list[Any] | None) -> tuple[str, TemplateFacts]:
        try:
            template = self._tokenizer.get_chat_template(tools=tools)  # pyright: ignore[reportUnknownMemberType]
        except ValueError as wrong:
            raise Unrenderable("no_template", str(wrong)) from wrong
        facts = self._facts.get(template)
        if facts is None:
            try:
                facts = read_template(template)
            except jinja2.TemplateError as wrong:
                raise Unrenderable("template_error", str(wrong)) from wrong
            self._facts[template] = facts
        return template, facts
