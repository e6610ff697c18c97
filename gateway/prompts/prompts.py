"""The prompt of a turn as its engine will see it, or why that can't be known."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast, get_args

import msgspec
import numpy as np

from gateway.api.parse import ParsedTurn
from gateway.deadline import Deadline
from gateway.prompts.layouts import Layouts
from gateway.prompts.parity import Parity, Result
from gateway.prompts.rendering import Ids, NotRendered, WorkerRenderer
from gateway.sessions.divergence import Texts
from gateway.settings import ModelSettings, PromptSettings
from store.hashing import HashAlgo, HashScheme, chain
from store.keys import KeyLayout
from store.prompt.request import Prompt, PromptRequest, Unrenderable
from store.prompt.source import PromptSource, PromptStatus
from workers.fleet import Fleet
from workers.worker import ModelCard, Worker

logger = logging.getLogger(__name__)

_DEFAULTS = ModelSettings()
_ALGOS = frozenset(get_args(HashAlgo))
# A turn whose prompt is not known by then is placed by load: knowledge may cost cache hits, never a request.
_BUDGET_S = 5.0


# Reasons that hold wherever the prompt is rendered.
_MALFORMED = (TypeError, AttributeError, LookupError, ValueError, OverflowError, RecursionError)
_FINAL = frozenset(("invalid", "hash_seed_unknown", "too_long"))
# Text rarely has more characters a token (source code 3 to 5, long runs of one sign more): a prompt beyond
# that for every token the model takes would be refused, after seconds and gigabytes of tokenizing.
_CHARACTERS_A_TOKEN = 32


class Understood(msgspec.Struct, frozen=True):
    """A turn's prompt under its model's hash scheme and pool keys.

    unknown: why there is none, or only its beginning; "" for a whole prompt.
    """

    prompt: Prompt | None = None
    scheme: HashScheme | None = None
    layout: KeyLayout | None = None
    unknown: str = ""


class ModelPrompts:
    """One prompt source per tokenizer path, shared by all models and workers that use it."""

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, ModelSettings],
        settings: PromptSettings,
        renderer: WorkerRenderer,
        counted: Callable[[str, str, Result], None],
        shown: Callable[[str], HashScheme | None],
        layouts: Layouts | None,
    ) -> None:
        """looked_at: false where settings say that turns are placed without their prompts.

        `counted` gets every parity check's model, API and result; `shown`: how a target's events hash;
        `layouts`: of blocks in the pool, None without one.
        """
        self._fleet = fleet
        self._models = models
        self._shown = shown
        self._layouts = layouts
        self._settings = settings
        self.looked_at = settings.source != "off"
        self._sources: dict[str, PromptSource] = {}
        self._serving: dict[str, tuple[Worker, ModelCard]] = {}
        self._served_at = -1
        self.renderer = renderer
        self.parity = Parity(
            renderer, self.local_tokens, self._text_of, counted, sample=settings.audit_fraction
        )

    def scheme(self, worker: Worker, model: str) -> HashScheme | None:
        """How `worker` hashes the prompts of `model`; None as long as nobody has said."""
        scheme = self.reported(worker, model)
        if scheme is None or self.seed_is_set(model):
            return scheme
        shown = self._shown(worker.targets[0].name)
        return shown if shown is not None and shown.algo == scheme.algo else scheme

    def reported(self, worker: Worker, model: str) -> HashScheme | None:
        """As settings and the worker's metrics have it; the seed is an assumption unless it is set."""
        settings = self._models.get(model) or _DEFAULTS
        block_size = settings.block_size or worker.report.block_size
        algo = worker.report.hash_algo if settings.hash_algo == "auto" else settings.hash_algo
        if not block_size or algo not in _ALGOS:
            return None
        seed = None if settings.hash_seed == "auto" else settings.hash_seed
        return HashScheme(cast(HashAlgo, algo), block_size, seed)

    def seed_is_set(self, model: str) -> bool:
        settings = self._models.get(model)
        return settings is not None and settings.hash_seed != "auto"

    def disagreements(self) -> list[str]:
        """Models whose workers hash in different ways: only those that hash as the first get local credit."""
        ways: dict[str, dict[HashScheme, str]] = {}
        for worker in self._fleet.workers():
            for card in worker.models:
                scheme = self.scheme(worker, card.id)
                if scheme is not None:
                    ways.setdefault(card.id, {}).setdefault(scheme, worker.name)
        return [
            f"workers of {model} hash blocks in {len(found)} ways, see {', '.join(found.values())}"
            for model, found in ways.items()
            if len(found) > 1
        ]

    def source(self, worker: Worker, card: ModelCard) -> PromptSource:
        """The source for `card`'s tokenizer; it starts loading when first asked for."""
        settings = self._models.get(card.id) or _DEFAULTS
        base = worker.card(card.parent) or card
        path = settings.tokenizer or base.root
        source = self._sources.get(path)
        if source is None:
            source = self._sources[path] = PromptSource(
                path, threads=self._settings.threads, cache_bytes=self._settings.cache_bytes
            )
        return source

    def prepare(self, worker: Worker) -> None:
        """A worker came up: have its tokenizers before a turn needs them; are prompts made here its own?."""
        if self._settings.source not in ("auto", "local"):
            return
        for card in worker.models:
            self.source(worker, card).prepare()
            if self._settings.source == "auto":
                self.parity.examine(worker, card.id)

    async def settled(self, budget_s: float) -> None:
        """Wait for tokenizers that are being loaded, but no longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                for source in list(self._sources.values()):
                    await source.settled()

    async def understand(self, parsed: ParsedTurn, path: str, body: bytes) -> Understood:
        """Tokens and chain of a turn, made here or by a worker. Never raises."""
        if not self.looked_at:
            return Understood(unknown="off")
        if parsed.prompt is None:
            return Understood(unknown=parsed.unknown)
        served = self._served(parsed.model)
        if served is None:
            return Understood(unknown="no_worker")
        worker, card = served
        scheme = self.scheme(worker, parsed.model)
        if scheme is None:
            return Understood(unknown="no_hash_scheme")
        try:
            with Deadline.after(_BUDGET_S):
                prompt = await self._prompt(worker, card, scheme, parsed, parsed.prompt, path, body)
        except Unrenderable as why:
            return Understood(unknown=why.reason)
        except NotRendered as why:
            return Understood(unknown=f"worker_{why.reason}")
        except TimeoutError:
            return Understood(unknown="too_slow")
        except Exception:
            logger.exception("prompt of a turn for model %s failed", parsed.model)
            return Understood(unknown="failed")
        unknown = "multimodal" if prompt.partial else ""
        layout = None if self._layouts is None else self._layouts.of(worker, card)
        return Understood(prompt, scheme, layout, unknown)

    async def local_tokens(self, worker: Worker, parsed: ParsedTurn) -> Ids | None:
        """The ids made here for `parsed`, None if they can't be."""
        card = worker.card(parsed.model)
        scheme = self.scheme(worker, parsed.model)
        if card is None or scheme is None or parsed.prompt is None:
            return None
        try:
            return (await self.source(worker, card).prompt(parsed.prompt, scheme)).tokens
        except Unrenderable:
            return None

    async def texts(self, model: str) -> Texts | None:
        """Prompts of `model` as text, None where they can't be made here."""
        served = self._served(model)
        try:
            return None if served is None else await self.source(*served).loaded()
        except (Unrenderable, *_MALFORMED):
            return None

    async def _text_of(self, model: str, token: int) -> str:
        texts = await self.texts(model)
        return "" if texts is None or token < 0 else texts.decode(np.array([token], dtype=np.uint32))

    def sources(self) -> list[tuple[str, PromptStatus]]:
        """The models that are served and what became of loading their tokenizers."""
        served = {card.id: (w, card) for w in self._fleet.workers() for card in w.models}
        return [(model, self.source(*pair).status()) for model, pair in sorted(served.items())]

    async def _prompt(
        self,
        worker: Worker,
        card: ModelCard,
        scheme: HashScheme,
        parsed: ParsedTurn,
        request: PromptRequest,
        path: str,
        body: bytes,
    ) -> Prompt:
        """Made here where that is allowed and possible, else by the worker."""
        kind, lora = self._settings.source, _adapter(card)
        has_media = False
        if kind == "local" or (kind == "auto" and not self.parity.differs(card.id, parsed.api)):
            source = self.source(worker, card)
            try:
                limit = card.max_model_len * _CHARACTERS_A_TOKEN
                return await source.prompt(request, scheme, lora=lora, most=len(body), limit=limit)
            except Unrenderable as why:
                has_media = why.reason == "multimodal"
                if not has_media and (kind == "local" or why.reason in _FINAL):
                    raise
            except _MALFORMED as wrong:
                # An odd value in an odd place: whether vLLM takes it, and as what, a worker knows.
                logger.debug("a prompt can't be made here", exc_info=True)
                if kind == "local":
                    raise Unrenderable("invalid", type(wrong).__name__) from wrong
            if has_media and kind == "local":
                return await source.prefix(request, scheme, lora=lora)
        try:
            rendered = await self.renderer.rendered(worker.url, path, body)
        except NotRendered:
            if not has_media:
                raise
            return await self.source(worker, card).prefix(request, scheme, lora=lora)
        blocks = chain(
            rendered.tokens, scheme, cache_salt=request.cache_salt, lora=lora, media=rendered.media
        )
        return Prompt(rendered.tokens, blocks, "remote")

    async def close(self) -> None:
        await self.parity.close()
        await self.renderer.close()
        for source in self._sources.values():
            await source.close()

    def _served(self, model: str) -> tuple[Worker, ModelCard] | None:
        """A worker that serves `model` now, else one that did."""
        if self._served_at != self._fleet.version:
            self._served_at, self._serving = self._fleet.version, {}
            for worker in sorted(self._fleet.workers(), key=lambda each: each.state != "up"):
                for card in worker.models:
                    self._serving.setdefault(card.id, (worker, card))
        return self._serving.get(model)


def _adapter(card: ModelCard) -> tuple[str, str] | None:
    """Name and literal path of a LoRA adapter: both are part of every block's hash."""
    return (card.id, card.root) if card.parent else None
