"""Prompts made in this process, with the model's own tokenizer and chat template."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final, cast

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from store.hashing import HashScheme, chain
from store.prompt import normalise
from store.prompt.encoder import Encoder, cut
from store.prompt.request import ChatPrompt, Ids, Prompt, PromptRequest, TextPrompt, Unrenderable
from store.prompt.template import TemplateFacts, read_template

logger = logging.getLogger(__name__)

# Architectures whose prompts vLLM 0.32 writes in code of its own instead of the tokenizer's template.
_OWN_RENDERING: Final = frozenset(
    (
        *("GptOssForCausalLM", "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration"),
        *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
        *("DeepseekV41ForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration"),
    )
)
# About 5 ms of tokenizing at 1.2 us a token and 3.6 characters a token.
_HEAVY_CHARACTERS: Final = 15_000


class LocalPrompts:
    """Prompts of one model. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer: Final = tokenizer
        self._encoder: Final = Encoder(tokenizer.backend_tokenizer)
        self._templates: Final[dict[str, TemplateFacts]] = {}

    @classmethod
    def load(cls, tokenizer: str) -> LocalPrompts:
        """Load the tokenizer at a path (or hub name). Blocks for 1 to 2 s. Raises Unrenderable."""
        _refuse_own_rendering(Path(tokenizer))
        try:
            loaded = cast(Any, AutoTokenizer.from_pretrained(tokenizer))  # pyright: ignore[reportUnknownMemberType]
        except Exception as wrong:  # anything at all, from a missing file to a broken one
            raise Unrenderable("tokenizer_unavailable", str(wrong)) from wrong
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise Unrenderable("tokenizer_unsupported", "not a fast tokenizer")
        backend = loaded.backend_tokenizer
        if getattr(backend.model, "dropout", None):
            raise Unrenderable("tokenizer_unsupported", "BPE dropout makes tokens random")
        backend.encode_special_tokens = bool(getattr(loaded, "split_special_tokens", False))
        return cls(loaded)

    def prompt(
        self, request: PromptRequest, scheme: HashScheme, *, lora: tuple[str, str] | None = None
    ) -> Prompt:
        """Tokens and chain of `request`. Pure CPU: see `heavy`. Raises Unrenderable."""
        tokens = self._tokens(request)
        try:
            blocks = chain(tokens, scheme, cache_salt=request.cache_salt, lora=lora)
        except ValueError as wrong:
            raise Unrenderable("hash_seed_unknown", str(wrong)) from wrong
        source = "local" if isinstance(request, ChatPrompt | TextPrompt) else "ids"
        return Prompt(tokens, blocks, source)

    def heavy(self, request: PromptRequest) -> bool:
        """Whether `prompt` may take more than about 5 ms of CPU. Costs microseconds."""
        if isinstance(request, ChatPrompt):
            return _characters(request.messages) + _characters(request.tools) > _HEAVY_CHARACTERS
        if isinstance(request, TextPrompt):
            return len(request.text) > _HEAVY_CHARACTERS
        return False

    def _tokens(self, request: PromptRequest) -> Ids:
        keep = request.truncate_prompt_tokens
        if keep is not None and keep < 0:
            raise Unrenderable("truncate_to_model_length")
        if isinstance(request, ChatPrompt | TextPrompt):
            text = self._render(request) if isinstance(request, ChatPrompt) else request.text
            special = request.add_special_tokens
            if keep is None:
                return self._encoder.encode(text, add_special_tokens=special)
            return self._encoder.truncated(text, keep, request.truncation_side, add_special_tokens=special)
        try:
            ids = np.array(request.ids, dtype=np.uint32)
        except (OverflowError, ValueError, TypeError) as wrong:
            raise Unrenderable("invalid", str(wrong)) from wrong
        return ids if keep is None else cut(ids, keep, request.truncation_side)

    def _render(self, request: ChatPrompt) -> str:
        if request.chat_template is not None:
            raise Unrenderable("request_template")
        try:
            template = self._tokenizer.get_chat_template(tools=request.tools)  # pyright: ignore[reportUnknownMemberType]
        except ValueError as wrong:
            raise Unrenderable("no_template", str(wrong)) from wrong
        try:
            facts = self._templates.get(template) or read_template(template)
        except jinja2.TemplateError as wrong:
            raise Unrenderable("template_error", str(wrong)) from wrong
        self._templates[template] = facts
        messages = normalise.conversation(request.messages, facts)
        keywords = normalise.template_keywords(request, facts)
        try:
            text = self._tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                messages, chat_template=template, tokenize=False, **keywords
            )
        except Exception as wrong:  # a template is a program: any exception can come out of it
            raise Unrenderable("template_error", str(wrong)) from wrong
        return cast(str, text)


def _characters(value: Any) -> int:
    """Characters of text in decoded JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, cast(dict[str, Any], value).values()))
    if isinstance(value, list):
        return sum(map(_characters, cast(list[Any], value)))
    return 0


def _refuse_own_rendering(directory: Path) -> None:
    """Raise for models whose prompts vLLM does not make with tokenizer and template."""
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    for architecture in config.get("architectures") or ():
        if architecture in _OWN_RENDERING:
            raise Unrenderable("tokenizer_unsupported", f"vLLM renders {architecture} in its own way")
    if any(directory.glob("consolidated*.safetensors")) and (
        (directory / "tekken.json").exists() or any(directory.glob("tokenizer.model.v*"))
    ):
        raise Unrenderable("tokenizer_unsupported", "vLLM uses mistral_common for this model")
