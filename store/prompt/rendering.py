"""A chat body through the model's chat template, to the text that is tokenized."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

import jinja2
import msgspec
from jinja2.ext import LoopControlExtension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerFast

from store.prompt import media, normalise
from store.prompt.environment import make_environment
from store.prompt.messages import DisabledEffort, MessagesFacts
from store.prompt.request import ChatPrompt, Unrenderable
from store.prompt.resuming import PROGRESS, LoopFacts, Past, Progress, Shown, keys_of, mark_loop
from store.prompt.template import TemplateFacts, lists_of_messages, read_template

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
# Keywords transformers acts on itself, and those that say how to tokenize: the template sees none of them.
_SPECIAL_CALL: Final = frozenset(
    ("self", "conversation", "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs")
)
_UNSEEN: Final = frozenset(
    ("padding", "truncation", "max_length", "return_tensors", "return_dict", *_SPECIAL_CALL)
)


_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


class Text(NamedTuple):
    """A prompt's text, and what another one of the conversation may take from it."""

    utf8: bytes
    shown: Shown | None = None


class Renderer:
    """The chat templates of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer: Final = tokenizer
        self._environment: Final = make_environment()
        self._names: Final[dict[str, Any]] = {
            **cast(dict[str, Any], self._environment.globals),
            **cast(dict[str, Any], tokenizer.special_tokens_map),
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        self._messages_facts: MessagesFacts | None = None
        self._templates: Final[dict[str, tuple[jinja2.Template, TemplateFacts, LoopFacts | None]]] = {}

    def render(self, request: ChatPrompt, past: Past | None = None) -> Text:
        """The prompt's text, special tokens of the template included. Raises Unrenderable.

        past: an earlier text of the conversation: messages it shows already may be taken from it.
        """
        if request.chat_template is not None:
            raise Unrenderable("request_template")
        source = self._source(request.tools)
        template, facts, loop = self._template(source)
        messages = normalise.conversation(request.messages, facts)
        keywords = normalise.template_keywords(request, facts)
        try:
            if not messages or any(map(keywords.get, _SPECIAL_CALL.intersection(keywords))):
                return Text(self._by_transformers(source, messages, keywords).encode())
            for each in _UNSEEN.intersection(keywords):
                del keywords[each]
            if request.chat_template_kwargs or request.documents:
                _check_objects(keywords)
            names = self._names | keywords
            names["messages"] = messages
            # Jinja's own way would find its global names anew for each text.
            context = Context(self._environment, names, template.name, template.blocks)
            keys = keys_of(request.messages, messages) if loop is not None else ()
            if loop is None or not keys:
                return Text("".join(template.root_render_func(context)).encode())
            progress = names[PROGRESS] = Progress(source, loop, past, keys)
            return Text(progress.text(template.root_render_func(context)), progress.shown)
        except UnicodeEncodeError as wrong:
            raise Unrenderable("invalid", "text with lone surrogates") from wrong
        except Exception as wrong:  # a template is a program: any exception can come out of it
            raise Unrenderable("template_error", str(wrong)) from wrong

    def before_media(self, request: ChatPrompt) -> str:
        """The text that comes before the first image (or the like) of `request`, whatever stands for it.

        Raises Unrenderable.
        """
        _, facts, _ = self._template(self._source(request.tools))
        shown, bare = (
            self.render(msgspec.structs.replace(request, messages=messages)).utf8.decode()
            for messages in media.variants(request.messages, facts.content_format)
        )
        return media.known_text(shown, bare)

    def messages_facts(self) -> MessagesFacts:
        """What vLLM finds out about the template when it serves /v1/messages. Costs a few ms once."""
        if self._messages_facts is None:
            self._messages_facts = MessagesFacts(self._merges_system(), self._disabled_effort())
        return self._messages_facts

    def _merges_system(self) -> bool:
        """Whether a system message after the first makes the template (with or without tools) raise."""
        # vLLM tries in a bare environment: a template that calls raise_exception or needs anything else of
        # transformers' fails there, too, and that counts.
        bare = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension]
        )
        roles = ("system", "user", "system", "user")
        messages = [{"role": role, "content": "t"} for role in roles]
        try:
            for source in {self._source(None), self._source([])}:
                bare.from_string(source).render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        return False

    def _disabled_effort(self) -> DisabledEffort:
        """The effort "none", unless the template refuses it or makes nothing of it."""

        def rendered(effort: str) -> bytes | None:
            try:
                return self.render(
                    ChatPrompt(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
                ).utf8
            except Unrenderable:
                return None

        none = rendered("none")
        if none is None or any(rendered(effort) == none for effort in _EFFORTS):
            return "low"
        return "none"

    def samples(self) -> list[str]:
        """Prompts of sample conversations; those the template refuses are missing."""
        found: list[str] = []
        for messages in _SAMPLE_CHATS:
            try:
                found.append(self.render(ChatPrompt(messages=messages)).utf8.decode())
            except Unrenderable:
                continue
        return found

    def _by_transformers(self, source: str, messages: list[dict[str, Any]], keywords: dict[str, Any]) -> str:
        """Continuing the last message, and what else transformers does around the template itself."""
        text = self._tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
            messages, chat_template=source, tokenize=False, **keywords
        )
        return cast(str, text)

    def _source(self, tools: list[Any] | None) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=tools)  # pyright: ignore[reportUnknownMemberType]
        except ValueError as wrong:
            raise Unrenderable("no_template", str(wrong)) from wrong

    def _template(self, source: str) -> tuple[jinja2.Template, TemplateFacts, LoopFacts | None]:
        known = self._templates.get(source)
        if known is None:
            try:
                facts = read_template(source, self._environment)
                tree = self._environment.parse(source)
                loop = mark_loop(tree, lists_of_messages(tree))
                known = self._templates[source] = (self._environment.from_string(tree), facts, loop)
            except jinja2.TemplateError as wrong:
                raise Unrenderable("template_error", str(wrong)) from wrong
        return known


def _check_objects(keywords: dict[str, Any]) -> None:
    """Of keywords of its template a request can have any; transformers wants objects, and messages once."""
    if "messages" in keywords:
        raise TypeError("messages come by name already")
    for key in ("tools", "documents"):
        if not all(isinstance(each, dict) for each in keywords.get(key) or ()):
            raise TypeError(f"{key} must be a list of objects")
