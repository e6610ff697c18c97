"""Prompts made in this process, with the model's own tokenizer and chat template, paid once.

A prompt costs the rendering of its new messages where the template allows that (else of all, 1 ms per 80K
tokens), a look at what is known of its text, and the tokenizing and hashing of the rest only: `plan` does the
first two, `finish` the last.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec
import numpy as np
from msgspec.structs import replace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from store.hashing import Chain, Digests, HashScheme, chain, digest_width, none_hash
from store.prompt.cutting import cut, find_cut_token
from store.prompt.encoder import Encoder, truncate, truncated
from store.prompt.messages import chat_of_messages
from store.prompt.recent import Recent, RecentRequests
from store.prompt.rendering import Renderer, Text
from store.prompt.request import (
    ChatPrompt,
    Ids,
    MessagesPrompt,
    Prompt,
    PromptRequest,
    ResponsesPrompt,
    TextPrompt,
    TokensPrompt,
    Unrenderable,
)
from store.prompt.responses import chat_of_responses
from store.prompt.resuming import Past
from store.prompt.segments import Segment, SegmentCache, chain_keys

Lora: TypeAlias = tuple[str, str] | None
_ids, _digests = attrgetter("ids"), attrgetter("digests")

# Architectures whose prompts vLLM 0.32 writes in code of its own instead of the tokenizer's template.
_OWN_RENDERING: Final = frozenset(
    (
        *("GptOssForCausalLM", "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration"),
        *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
        *("DeepseekV41ForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration"),
    )
)
# Those whose images vLLM puts at the start of the prompt, wherever they are in the conversation.
_MEDIA_FIRST: Final = frozenset(
    (
        *("MolmoForCausalLM", "PaliGemmaForConditionalGeneration", "Blip2ForConditionalGeneration"),
        "OpenVLAForActionPrediction",
    )
)
# Share of the cache's bytes for the text of whole prompts, which is a short cut only.
_RECENT_SHARE: Final = 8
# A last piece below this many characters is not worth an entry.
_SHORT: Final = 256
# Ids of a prompt that came as ids are kept as digests only, for runs of this many.
_RUN_IDS: Final = 4096


class Rendered(msgspec.Struct, frozen=True):
    """The text of `request` as it was given, with where its pieces end."""

    request: PromptRequest
    conversation: Hashable
    text: Text
    ends: Sequence[int]


class Plan(msgspec.Struct, frozen=True):
    """A prompt as far as it is known: `known` segments for the leading `keys`, `pieces` of text beyond.

    `missing` is the number of characters (ids, for a prompt that came as ids) `finish` has to work on.
    """

    request: ChatPrompt | TextPrompt | TokensPrompt
    scheme: HashScheme
    lora: Lora
    keys: Sequence[bytes]
    known: Sequence[Segment]
    pieces: Sequence[str]
    ids: Ids | None = None
    rendered: Rendered | None = None

    @property
    def missing(self) -> int:
        if self.ids is not None:
            return len(self.ids) - _RUN_IDS * len(self.known)
        return sum(map(len, self.pieces))


class LocalPrompts:
    """One model's prompts; at most `cache_bytes` of them kept, least recently used first out. Thread-safe."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, cache_bytes: int, *, media_first: bool = False
    ) -> None:
        self._media_first: Final = media_first
        self._renderer: Final = Renderer(tokenizer)
        self._encoder: Final = Encoder(tokenizer.backend_tokenizer)
        self._cut_token: Final = find_cut_token(tokenizer.backend_tokenizer, self._renderer.samples())
        self._cut_bytes: Final = None if self._cut_token is None else self._cut_token.encode()
        self._recent: Final = RecentRequests(cache_bytes // _RECENT_SHARE)
        self._segments: Final = SegmentCache(cache_bytes - cache_bytes // _RECENT_SHARE)

    @classmethod
    def load(cls, tokenizer: str, *, cache_bytes: int = 256 << 20) -> LocalPrompts:
        """Load the tokenizer at a path (or hub name). Blocks for 1 to 2 s. Raises Unrenderable."""
        architectures = _architectures(Path(tokenizer))
        _refuse_own_rendering(Path(tokenizer), architectures)
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
        return cls(loaded, cache_bytes, media_first=not _MEDIA_FIRST.isdisjoint(architectures))

    @property
    def cut_token(self) -> str | None:
        """The added token prompts are cut at; None if cutting is not proven to keep the tokens."""
        return self._cut_token

    @property
    def cached_tokens(self) -> int:
        return self._segments.tokens

    @property
    def cached_bytes(self) -> int:
        return self._segments.bytes + self._recent.bytes

    def prompt(self, request: PromptRequest, scheme: HashScheme, *, lora: Lora = None) -> Prompt:
        """Tokens and chain of `request`. Pure CPU. Raises Unrenderable."""
        return self.finish(self.plan(request, scheme, lora=lora))

    def prefix(self, request: PromptRequest, scheme: HashScheme, *, lora: Lora = None) -> Prompt:
        """The beginning of a prompt with media, up to a cut before the first item. Pure CPU: two renderings.

        Raises Unrenderable: also where nothing is known.
        """
        request = self._as_rendered(request)
        if (
            not isinstance(request, ChatPrompt)
            or request.truncate_prompt_tokens is not None
            or self._cut_bytes is None
            or self._media_first
            or self._encoder.around(add_special_tokens=request.add_special_tokens)[1]
        ):
            raise Unrenderable("multimodal")
        try:
            text = self._renderer.before_media(request).encode()
        except UnicodeEncodeError as wrong:
            raise Unrenderable("invalid", "text with lone surrogates") from wrong
        # Tokens beyond the last cut depend on what comes after the text.
        end = text.rfind(self._cut_bytes)
        if end <= 0:
            raise Unrenderable("multimodal")
        known = TextPrompt(
            text=text[:end].decode(),
            add_special_tokens=request.add_special_tokens,
            cache_salt=request.cache_salt,
        )
        return replace(self.prompt(known, scheme, lora=lora), partial=True)

    def plan(self, request: PromptRequest, scheme: HashScheme, *, lora: Lora = None) -> Plan:
        """Render `request` and find what is known of it: about 5 us a kilobyte. Raises Unrenderable."""
        try:
            none_hash(scheme.algo, scheme.seed)
        except ValueError as wrong:
            raise Unrenderable("hash_seed_unknown", str(wrong)) from wrong
        given, request = request, self._as_rendered(request)
        if (request.truncate_prompt_tokens or 0) < 0:
            raise Unrenderable("truncate_to_model_length")
        root = _root(request, scheme, lora)
        if isinstance(request, TokensPrompt):
            return self._plan_ids(request, scheme, lora, root)
        if request.truncate_prompt_tokens is not None:
            return Plan(request, scheme, lora, (), (), (self._text(request).utf8.decode(),))
        try:
            conversation = (root, _beginning(request))
            recent = self._recent.get(conversation)
            if recent is not None and recent.request() is given:
                known = self._segments.longest(recent.keys)
                if len(known) == len(recent.keys):
                    pieces = (recent.tail,) if recent.tail else ()
                    return Plan(request, scheme, lora, recent.keys, known, pieces)
            rendered = self._text(request, recent.past if recent is not None else None)
        except UnicodeEncodeError as wrong:
            raise Unrenderable("invalid", "text with lone surrogates") from wrong
        text = rendered.utf8
        common = recent.common(text, self._cut_bytes) if recent is not None and self._cut_bytes else 0
        ends, keys, start = [], [], 0
        if recent is not None and common:
            ends, keys = list(recent.ends[:common]), list(recent.keys[:common])
            root, start = keys[-1], ends[-1]
        new = cut(text, self._cut_bytes, start)
        keys += chain_keys(root, text, start, new)
        ends += new
        known = self._segments.longest(keys)
        starts = [0, *ends]
        pieces = [text[starts[i] : starts[i + 1]].decode() for i in range(len(known), len(ends))]
        whole = Rendered(given, conversation, rendered, ends)
        return Plan(request, scheme, lora, keys, known, pieces, None, whole)

    def render(self, request: PromptRequest) -> str:
        """The text of `request`, special tokens included; none for ids. Raises Unrenderable."""
        request = self._as_rendered(request)
        if isinstance(request, TokensPrompt):
            return ""
        return self._text(request).utf8.decode()

    def decode(self, ids: Ids) -> str:
        """The text of a few tokens, special ones included."""
        return self._encoder.decode(ids)

    def character(self, request: PromptRequest, scheme: HashScheme, token: int) -> int:
        """Where in the rendered text the prompt's token `token` begins. Raises Unrenderable.

        Remembers nothing. Tokenizes what comes before and is not known: tens of milliseconds, if the prompt
        was not made lately.
        """
        request = self._as_rendered(request)
        if isinstance(request, TokensPrompt) or request.truncate_prompt_tokens is not None:
            raise Unrenderable("invalid", "tokens without a text of their own")
        text = self.render(request).encode()
        ends = cut(text, self._cut_bytes)
        known = self._segments.longest(chain_keys(_root(request, scheme, None), text, 0, ends))
        left = token - len(self._encoder.around(add_special_tokens=request.add_special_tokens)[0]) // 4
        start = 0
        for place, end in enumerate(ends):
            piece = text[start:end].decode()
            ids = known[place].ids if place < len(known) else self._encoder.encode_pieces([piece])[0]
            if left < len(ids) // 4:
                return len(text[:start].decode()) + self._encoder.starts(piece)[max(0, left)]
            left -= len(ids) // 4
            start = end
        return len(text.decode())

    def _text(self, request: ChatPrompt | TextPrompt, past: Past | None = None) -> Text:
        if isinstance(request, ChatPrompt):
            return self._renderer.render(request, past)
        try:
            return Text(request.text.encode())
        except UnicodeEncodeError as wrong:
            raise Unrenderable("invalid", "text with lone surrogates") from wrong

    def _as_rendered(self, request: PromptRequest) -> ChatPrompt | TextPrompt | TokensPrompt:
        """Bodies of other APIs as the chat that vLLM makes of them."""
        if isinstance(request, MessagesPrompt):
            return chat_of_messages(request, self._renderer.messages_facts())
        if isinstance(request, ResponsesPrompt):
            return chat_of_responses(request)
        return request

    def finish(self, plan: Plan) -> Prompt:
        """Tokenize and hash what `plan` did not find, and remember it. Raises Unrenderable."""
        request = plan.request
        if isinstance(request, TokensPrompt):
            return self._finish_ids(plan)
        if request.truncate_prompt_tokens is not None:
            tokens = truncated(
                self._encoder,
                plan.pieces[0],
                request.truncate_prompt_tokens,
                request.truncation_side,
                add_special_tokens=request.add_special_tokens,
            )
            return Prompt(tokens, _chain(tokens, plan, None), "local")
        before, after = self._encoder.around(add_special_tokens=request.add_special_tokens)
        fresh = self._encoder.encode_pieces(plan.pieces)
        parts = [before, *map(_ids, plan.known), *fresh, after]
        tokens = np.frombuffer(b"".join(parts), dtype=np.uint32)
        known = b"".join(map(_digests, plan.known))
        blocks = _chain(tokens, plan, known)
        self._remember(plan, fresh, blocks, start=len(before) // 4)
        return Prompt(tokens, blocks, "local")

    def _remember(self, plan: Plan, fresh: Sequence[bytes], blocks: Chain, start: int) -> None:
        """Keep the request and the new pieces, but for a short last one: the next turn will not repeat it.

        A text of one piece is known again by that: to keep it, too, takes longer than to render it.
        """
        keys = plan.keys[len(plan.known) :]
        kept = len(keys)
        tail = ""
        if plan.pieces and len(plan.pieces[-1]) < _SHORT:
            kept, tail = min(kept, len(plan.pieces) - 1), plan.pieces[-1]
        size = plan.scheme.block_size
        packed = cast(Digests, blocks.digests).packed
        width = digest_width(plan.scheme.algo)
        end = start + sum(map(len, map(_ids, plan.known))) // 4
        done = end // size if plan.known else 0
        segments: list[Segment] = []
        for ids in fresh[:kept]:
            end += len(ids) // 4
            segments.append(Segment(ids, packed[done * width : end // size * width]))
            done = end // size
        self._segments.put(keys[:kept], segments)
        # The last piece ends where the text ends, which is no place to cut a longer one.
        if plan.rendered is not None and (ends := plan.rendered.ends[:-1]):
            text, shown = plan.rendered.text
            stored = plan.keys[: len(plan.known) + kept]
            recent = Recent(weakref.ref(plan.rendered.request), text, ends, stored, tail, shown)
            self._recent.put(plan.rendered.conversation, recent)

    def _plan_ids(self, request: TokensPrompt, scheme: HashScheme, lora: Lora, root: bytes) -> Plan:
        try:
            ids = np.array(request.ids, dtype=np.uint32)
        except (OverflowError, ValueError, TypeError) as wrong:
            raise Unrenderable("invalid", str(wrong)) from wrong
        if request.truncate_prompt_tokens is not None:
            ids = truncate(ids, request.truncate_prompt_tokens, request.truncation_side)
        keys: list[bytes] = []
        for start in range(0, len(ids) - _RUN_IDS + 1, _RUN_IDS):
            root = hashlib.sha256(root + ids[start : start + _RUN_IDS].tobytes()).digest()
            keys.append(root)
        return Plan(request, scheme, lora, keys, self._segments.longest(keys), (), ids)

    def _finish_ids(self, plan: Plan) -> Prompt:
        assert plan.ids is not None
        blocks = _chain(plan.ids, plan, b"".join(segment.digests for segment in plan.known))
        packed = cast(Digests, blocks.digests).packed
        width = digest_width(plan.scheme.algo)
        ends = [run * _RUN_IDS // plan.scheme.block_size * width for run in range(len(plan.keys) + 1)]
        new = range(len(plan.known), len(plan.keys))
        self._segments.put(
            plan.keys[len(plan.known) :], [Segment(b"", packed[ends[i] : ends[i + 1]]) for i in new]
        )
        return Prompt(plan.ids, blocks, "ids")


def _chain(tokens: Ids, plan: Plan, known: bytes | None) -> Chain:
    width = digest_width(plan.scheme.algo)
    resume = Digests(known, width) if known else None
    salt = plan.request.cache_salt
    try:
        return chain(tokens, plan.scheme, cache_salt=salt, lora=plan.lora, resume=resume)
    except ValueError as wrong:
        raise Unrenderable("invalid", str(wrong)) from wrong


def _root(request: ChatPrompt | TextPrompt | TokensPrompt, scheme: HashScheme, lora: Lora) -> bytes:
    """What digests depend on besides the text before them."""
    if isinstance(request, TokensPrompt):
        root = _root_of("ids", False, scheme, lora)
    else:
        root = _root_of("text", request.add_special_tokens, scheme, lora)
    return root if request.cache_salt is None else hashlib.sha256(root + request.cache_salt.encode()).digest()


@lru_cache(maxsize=256)
def _root_of(kind: str, special: bool, scheme: HashScheme, lora: Lora) -> bytes:
    facts = (kind, special, scheme.algo, scheme.block_size, scheme.seed, lora)
    return hashlib.sha256(msgspec.msgpack.encode(facts)).digest()


def _beginning(request: ChatPrompt | TextPrompt) -> int:
    """Tells conversations apart, mostly: a wrong guess only costs the other one its shortcut."""
    if isinstance(request, TextPrompt):
        return hash(request.text[:256])
    return hash(tuple(map(_hash, request.messages[:2])))


def _hash(message: Any) -> int:
    content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
    # A text keeps its hash.
    return hash(content if isinstance(content, str) else msgspec.msgpack.encode(content))


def _architectures(directory: Path) -> Sequence[str]:
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return config.get("architectures") or ()


def _refuse_own_rendering(directory: Path, architectures: Sequence[str]) -> None:
    """Raise for models whose prompts vLLM does not make with tokenizer and template."""
    for architecture in architectures:
        if architecture in _OWN_RENDERING:
            raise Unrenderable("tokenizer_unsupported", f"vLLM renders {architecture} in its own way")
    if any(directory.glob("consolidated*.safetensors")) and (
        (directory / "tekken.json").exists() or any(directory.glob("tokenizer.model.v*"))
    ):
        raise Unrenderable("tokenizer_unsupported", "vLLM uses mistral_common for this model")
